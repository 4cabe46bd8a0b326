// Loads the kernels onto a device when the first is queued there, and queues them.

#include <stdio.h>

#include <mutex>

#include "../include/lema.h"
#include "device_code.h"  // the file that nvcc made of kernels.cu, as setup.py writes it down
#include "driver.h"
#include "kernels.h"

asm(R"(
  .pushsection .rodata
  .balign 16
lema_device_code:
  .incbin ")" LEMA_DEVICE_CODE R"("
  .popsection
)");
extern "C" __attribute__((visibility("hidden"))) const char lema_device_code[];

namespace lema {
namespace {

constexpr int MOST_DEVICES = 64;

const char *const NAMES[] = {
#define NAME(operation, format, dtype) "lema_" #operation "_" #format "_" #dtype,
    LEMA_KERNELS(NAME)
#undef NAME
};

// The kernels of one device, loaded once and kept as long as the process lives, its primary context with them.
struct Loaded {
  std::once_flag once;
  CUcontext context = nullptr;
  CUfunction functions[KERNEL_COUNT] = {};
  CUresult result = CUDA_SUCCESS;
  char missing[256] = "";  // why they do not run there
};

CUresult load(Loaded &loaded, int32_t ordinal) {
  CUdevice device;
  TRY(driver().cuDeviceGet_(&device, ordinal));
  TRY(driver().cuDevicePrimaryCtxRetain_(&loaded.context, device));
  const Inside inside(loaded.context);
  TRY(inside.result());
  CUmodule module;
  TRY(driver().cuModuleLoadData_(&module, lema_device_code));
  for (int i = 0; i < KERNEL_COUNT; ++i) TRY(driver().cuModuleGetFunction_(&loaded.functions[i], module, NAMES[i]));
  return CUDA_SUCCESS;
}

// `ordinal` is of a device that there may be.
Loaded &on_device(int32_t ordinal) {
  static Loaded devices[MOST_DEVICES];
  Loaded &loaded = devices[ordinal];
  std::call_once(loaded.once, [&] {
    if ((loaded.result = load(loaded, ordinal)) == CUDA_SUCCESS) return;
    snprintf(loaded.missing, sizeof loaded.missing, "the kernels do not load on CUDA device %d: %s", ordinal,
             text_of(loaded.result));
  });
  return loaded;
}

}  // namespace

int32_t launch(Kernel kernel, uint32_t blocks_x, uint32_t blocks_y, int threads, const void *arguments, int32_t device,
               void *cuda_stream) {
  if (*driver().missing != '\0') return CUDA_ERROR_NOT_INITIALIZED;
  if (device < 0 || device >= MOST_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
  const Loaded &loaded = on_device(device);
  if (loaded.result != CUDA_SUCCESS) return loaded.result;
  const Inside inside(loaded.context);
  TRY(inside.result());
  void *parameters[] = {const_cast<void *>(arguments)};
  return driver().cuLaunchKernel_(loaded.functions[kernel], blocks_x, blocks_y, 1, threads, 1, 1, 0,
                                  static_cast<CUstream>(cuda_stream), parameters, nullptr);
}

}  // namespace lema

extern "C" const char *lema_device_missing(int32_t device) {
  if (*lema::driver().missing != '\0') return lema::driver().missing;
  if (device < 0 || device >= lema::MOST_DEVICES) return "there is no such CUDA device";
  return lema::on_device(device).missing;
}
