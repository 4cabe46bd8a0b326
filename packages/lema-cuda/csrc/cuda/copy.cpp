// Copies from page-locked RAM on a stream of their own, through the CUDA driver.
//
// The driver is opened when it is first needed, and only functions that it has had for years are called: the library loads
// without a driver, and serves with any that torch works with, whatever CUDA it was built with.

#include "../include/lema.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>

#include <new>

namespace lema {
namespace {

// As cuda.h spells them; its macros put the version behind a name.
#define FUNCTIONS(X)                                                                                    \
  X(cuInit) X(cuGetErrorString) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
  X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuStreamCreate)  \
  X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuEventCreate) X(cuEventDestroy)     \
  X(cuEventRecord) X(cuEventSynchronize) X(cuEventQuery) X(cuMemcpyHtoDAsync)
#define QUOTED(text) #text
#define VERSIONED(name) QUOTED(name)

struct Driver {
#define FIELD(name) decltype(&::name) name##_ = nullptr;
  FUNCTIONS(FIELD)
#undef FIELD
  char missing[256] = "";  // why it cannot serve
};

Driver open_driver() {
  Driver d;
  void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *const why = dlerror();
    snprintf(d.missing, sizeof d.missing, "no NVIDIA driver: %s", why != nullptr ? why : "libcuda.so.1 does not load");
    return d;
  }
#define FIND(name)                                                                                     \
  d.name##_ = reinterpret_cast<decltype(d.name##_)>(dlsym(library, VERSIONED(name)));                  \
  if (d.name##_ == nullptr) {                                                                          \
    snprintf(d.missing, sizeof d.missing, "the NVIDIA driver is too old: it has no " VERSIONED(name)); \
    return d;                                                                                          \
  }
  FUNCTIONS(FIND)
#undef FIND
  if (const CUresult result = d.cuInit_(0)) {
    const char *text = nullptr;
    d.cuGetErrorString_(result, &text);
    snprintf(d.missing, sizeof d.missing, "the NVIDIA driver says: %s", text != nullptr ? text : "unknown error");
  }
  return d;
}

const Driver &driver() {
  static const Driver opened = open_driver();
  return opened;
}

// Makes the device's primary context, which is torch's too, the calling thread's, and the one before it again.
class Inside {
 public:
  explicit Inside(CUcontext context) : result_(driver().cuCtxPushCurrent_(context)) {}
  ~Inside() {
    CUcontext before;
    if (result_ == CUDA_SUCCESS) driver().cuCtxPopCurrent_(&before);
  }
  CUresult result() const { return result_; }

 private:
  const CUresult result_;
};

}  // namespace
}  // namespace lema

struct lema_copier {
  CUdevice device;
  CUcontext context;
  CUstream stream;
};

using lema::driver;

// Returns with the code of the first of these calls that fails.
#define TRY(call)                                     \
  do {                                                \
    if (const CUresult failed = (call)) return failed; \
  } while (false)

#define ENTER(copier)                          \
  const lema::Inside inside((copier)->context); \
  TRY(inside.result())

extern "C" {

int32_t lema_cuda_abi_version(void) { return LEMA_ABI_VERSION; }

const char *lema_cuda_missing(void) { return driver().missing; }

const char *lema_cuda_error(int32_t code) {
  const char *text = nullptr;
  if (*driver().missing == '\0') driver().cuGetErrorString_(static_cast<CUresult>(code), &text);
  return text != nullptr ? text : "unknown error";
}

int32_t lema_copier_open(int32_t device, struct lema_copier **copier) {
  if (*driver().missing != '\0') return CUDA_ERROR_NOT_INITIALIZED;
  lema_copier made{};
  TRY(driver().cuDeviceGet_(&made.device, device));
  TRY(driver().cuDevicePrimaryCtxRetain_(&made.context, made.device));
  CUresult result;
  {
    const lema::Inside inside(made.context);
    result = inside.result();
    if (result == CUDA_SUCCESS) result = driver().cuStreamCreate_(&made.stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS && (*copier = new (std::nothrow) lema_copier(made)) == nullptr) {
      driver().cuStreamDestroy_(made.stream);
      result = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  if (result != CUDA_SUCCESS) driver().cuDevicePrimaryCtxRelease_(made.device);
  return result;
}

int32_t lema_copier_drain(struct lema_copier *copier) {
  ENTER(copier);
  return driver().cuStreamSynchronize_(copier->stream);
}

int32_t lema_copier_close(struct lema_copier *copier) {
  const lema_copier closed = *copier;
  delete copier;
  CUresult result;
  {
    const lema::Inside inside(closed.context);
    result = inside.result();
    if (result == CUDA_SUCCESS) {
      result = driver().cuStreamSynchronize_(closed.stream);
      const CUresult destroyed = driver().cuStreamDestroy_(closed.stream);
      if (result == CUDA_SUCCESS) result = destroyed;
    }
  }
  const CUresult released = driver().cuDevicePrimaryCtxRelease_(closed.device);
  return result != CUDA_SUCCESS ? result : released;
}

int32_t lema_copier_register(struct lema_copier *copier, void *memory, int64_t bytes) {
  ENTER(copier);
  return driver().cuMemHostRegister_(memory, bytes, 0);
}

int32_t lema_copier_unregister(struct lema_copier *copier, void *memory) {
  ENTER(copier);
  return driver().cuMemHostUnregister_(memory);
}

int32_t lema_copier_new_event(struct lema_copier *copier, void **event) {
  ENTER(copier);
  // Who waits for one sleeps.
  return driver().cuEventCreate_(reinterpret_cast<CUevent *>(event), CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
}

int32_t lema_copier_free_event(struct lema_copier *copier, void *event) {
  ENTER(copier);
  return driver().cuEventDestroy_(static_cast<CUevent>(event));
}

int32_t lema_copier_copy(struct lema_copier *copier, void *target, const void *source, int64_t bytes, void *after,
                         void *done) {
  ENTER(copier);
  if (after != nullptr) TRY(driver().cuStreamWaitEvent_(copier->stream, static_cast<CUevent>(after), 0));
  TRY(driver().cuMemcpyHtoDAsync_(reinterpret_cast<CUdeviceptr>(target), source, bytes, copier->stream));
  return driver().cuEventRecord_(static_cast<CUevent>(done), copier->stream);
}

int32_t lema_copier_record(struct lema_copier *copier, void *event, void *cuda_stream) {
  ENTER(copier);
  return driver().cuEventRecord_(static_cast<CUevent>(event), static_cast<CUstream>(cuda_stream));
}

int32_t lema_copier_stream_wait(struct lema_copier *copier, void *cuda_stream, void *event) {
  ENTER(copier);
  return driver().cuStreamWaitEvent_(static_cast<CUstream>(cuda_stream), static_cast<CUevent>(event), 0);
}

int32_t lema_copier_wait(struct lema_copier *copier, void *event) {
  ENTER(copier);
  return driver().cuEventSynchronize_(static_cast<CUevent>(event));
}

int32_t lema_copier_query(struct lema_copier *copier, void *event) {
  ENTER(copier);
  return driver().cuEventQuery_(static_cast<CUevent>(event));
}

}  // extern "C"
