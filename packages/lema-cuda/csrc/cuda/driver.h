// The CUDA driver, opened when it is first needed; only functions that it has had for years are called. So the library
// loads without a driver, and serves with any that torch works with.

#pragma once

#include <cuda.h>

namespace lema {

// As cuda.h spells them; its macros put the version behind a name.
#define LEMA_DRIVER_FUNCTIONS(X)                                                                        \
  X(cuInit) X(cuGetErrorString) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
  X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuStreamCreate)  \
  X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuEventCreate) X(cuEventDestroy)     \
  X(cuEventRecord) X(cuEventSynchronize) X(cuEventQuery) X(cuMemcpyHtoDAsync) X(cuModuleLoadData)       \
  X(cuModuleGetFunction) X(cuLaunchKernel)

struct Driver {
#define FIELD(name) decltype(&::name) name##_ = nullptr;
  LEMA_DRIVER_FUNCTIONS(FIELD)
#undef FIELD
  char missing[256] = "";  // why it cannot serve
};

const Driver &driver();

// The driver's text for a code.
const char *text_of(CUresult code);

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

}  // namespace lema

// Returns with the code of the first of these calls that fails.
#define TRY(call)                                     \
  do {                                                \
    if (const CUresult failed = (call)) return failed; \
  } while (false)
