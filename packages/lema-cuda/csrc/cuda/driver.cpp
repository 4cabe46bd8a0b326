// Opens the driver and says what it lacks.

#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

#include "../include/lema.h"

namespace lema {
namespace {

#define QUOTED(text) #text
#define VERSIONED(name) QUOTED(name)

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
  LEMA_DRIVER_FUNCTIONS(FIND)
#undef FIND
  if (const CUresult result = d.cuInit_(0)) {
    const char *text = nullptr;
    d.cuGetErrorString_(result, &text);
    snprintf(d.missing, sizeof d.missing, "the NVIDIA driver says: %s", text != nullptr ? text : "unknown error");
  }
  return d;
}

}  // namespace

const Driver &driver() {
  static const Driver opened = open_driver();
  return opened;
}

const char *text_of(CUresult code) {
  const char *text = nullptr;
  if (*driver().missing == '\0') driver().cuGetErrorString_(code, &text);
  return text != nullptr ? text : "unknown error";
}

}  // namespace lema

extern "C" {

int32_t lema_cuda_abi_version(void) { return LEMA_ABI_VERSION; }

const char *lema_cuda_missing(void) { return lema::driver().missing; }

const char *lema_cuda_error(int32_t code) { return lema::text_of(static_cast<CUresult>(code)); }

}  // extern "C"
