/* The one C ABI of lema's native library. Nothing here knows Python or torch: callers pass raw pointers.

   Every function may be called from any thread at any time. None allocates memory beyond the threads it starts, none
   keeps a pointer after it returns, none throws. Functions that compute return 0, or one of enum lema_error.

   Legend: R rows of a weight block, K inputs (columns of the weight), N tokens. All matrices are row-major. */

#ifndef LEMA_H
#define LEMA_H

#include <stdint.h>

#if defined(__GNUC__)
#define LEMA_API __attribute__((visibility("default")))
#else
#define LEMA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one with every change that an older caller would misread. */
#define LEMA_ABI_VERSION 1

/* Storage formats of weights, little-endian. */
enum lema_dtype {
  LEMA_F32 = 0,
  LEMA_F16 = 1,  /* IEEE 754 binary16 */
  LEMA_BF16 = 2, /* the upper half of binary32 */
};

enum lema_error {
  LEMA_OK = 0,
  LEMA_BAD_ARGUMENT = 1,   /* an unknown dtype, a negative size, a row stride below the row, fewer than one thread */
  LEMA_SMALL_SCRATCH = 2,  /* less scratch than lema_linear_scratch_bytes() says */
  LEMA_MISSING_FEATURE = 3 /* lema_cpu_missing() is not empty */
};

LEMA_API int32_t lema_abi_version(void);

/* What this CPU lacks of what the kernels are compiled for, such as "AVX2, FMA"; "" when they can run. */
LEMA_API const char *lema_cpu_missing(void);

/* Scratch of one call, for a product that sums over `inner` (K forward, R backward) for `n` tokens. */
LEMA_API int64_t lema_linear_scratch_bytes(int64_t inner, int64_t n, int32_t threads);

/* out_RN = weight_RK x_KN: the weight is widened to fp32 as it is packed, products are summed in fp32.

   weight: `dtype`, contiguous, at any address. x: fp32, rows `x_stride` elements apart; out likewise, overwritten.
   scratch: at least lema_linear_scratch_bytes(k, n, threads), at any address. threads: at most so many compute.
   The order in which an element's products are summed depends on K and N alone: any number of threads gives the same
   bits. out overlaps nothing. */
LEMA_API int32_t lema_linear_forward(const void *weight, int32_t dtype, int64_t rows, int64_t k, const float *x,
                                     int64_t x_stride, int64_t n, float *out, int64_t out_stride, void *scratch,
                                     int64_t scratch_bytes, int32_t threads);

/* dx_KN = weight_RK^T dy_RN, or dx += when `accumulate` is not 0; scratch: lema_linear_scratch_bytes(rows, n, threads).
   Otherwise as lema_linear_forward; the order depends on R and N alone. */
LEMA_API int32_t lema_linear_input_gradient(const void *weight, int32_t dtype, int64_t rows, int64_t k, const float *dy,
                                            int64_t dy_stride, int64_t n, float *dx, int64_t dx_stride,
                                            int32_t accumulate, void *scratch, int64_t scratch_bytes, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
