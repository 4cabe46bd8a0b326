// What runs on the device. One file, so that it is compiled for each architecture once.

#include "dequantize.cuh"
#include "w8a8.cuh"

#define KERNEL(operation, format, dtype)                                        \
  extern "C" __global__ void __launch_bounds__(lema::operation##_THREADS)       \
      lema_##operation##_##format##_##dtype(                                    \
          const lema::operation##_arguments arguments) {                        \
    lema::operation<lema::Format_##format, lema::Dtype_##dtype>(arguments);     \
  }
LEMA_KERNELS(KERNEL)
