// Copies from page-locked RAM on a stream of their own.

#include "../include/lema.h"
#include "driver.h"

#include <new>

struct lema_copier {
  CUdevice device;
  CUcontext context;
  CUstream stream;
};

using lema::driver;

#define ENTER(copier)                          \
  const lema::Inside inside((copier)->context); \
  TRY(inside.result())

extern "C" {

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
