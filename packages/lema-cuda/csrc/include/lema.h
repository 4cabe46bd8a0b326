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
#define LEMA_ABI_VERSION 2

/* Storage formats of weights, little-endian. */
enum lema_dtype {
  LEMA_F32 = 0,
  LEMA_F16 = 1,  /* IEEE 754 binary16 */
  LEMA_BF16 = 2, /* the upper half of binary32 */
};

enum lema_error {
  LEMA_OK = 0,
  LEMA_BAD_ARGUMENT = 1,   /* an unknown dtype, a negative size, a row stride below the row, fewer than one
                               thread, packed memory that is not aligned */
  LEMA_SMALL_SCRATCH = 2,  /* less scratch than lema_linear_scratch_bytes() says */
  LEMA_MISSING_FEATURE = 3 /* lema_cpu_missing() is not empty */
};

LEMA_API int32_t lema_abi_version(void);

/* What this CPU lacks of what the kernels are compiled for, such as "AVX2, FMA"; "" when they can run. */
LEMA_API const char *lema_cpu_missing(void);

/* One product with a block of rows of a weight, and a low-rank term that is part of it:

     out_RN  = weight_RK x_KN    + scale * factor_Rr inner_rN
     out_KN  = weight_RK^T dy_RN + scale * factor_rK^T inner_rN     where `transposed`

   The weight is widened to fp32 as it is packed; everything else is fp32, products are summed in fp32. An element's
   products are summed in an order that depends on the inner dimension (K, or R where transposed) and the rank alone,
   so any number of threads and any neighbouring rows give the same bits; forward, four columns or fewer are summed in
   an order of their own unless `apart`. out overlaps nothing. */
typedef struct lema_product {
  const void *weight; /* `dtype`, contiguous, at any address */
  int64_t rows, k, n;
  const float *right; /* x or dy ... */
  int64_t right_stride; /* ... whose rows are so many elements apart; 0: what lema_linear_pack() made of x */
  float *out;
  int64_t out_stride;
  const float *factor; /* element (i, j) is at i * factor_row + j * factor_column */
  int64_t factor_row, factor_column;
  const float *inner;
  int64_t inner_stride;
  int64_t rank; /* 0: no low-rank term */
  void *scratch; /* at any address */
  int64_t scratch_bytes; /* at least lema_linear_scratch_bytes() */
  float scale;
  int32_t dtype;
  int32_t transposed, accumulate; /* accumulate: add to `out` instead of overwriting it */
  int32_t apart; /* the bits of a column do not depend on the number of columns either */
  int32_t threads; /* at most so many compute */
} lema_product;

/* Scratch of one call. Reads sizes, `right_stride` and `threads` alone. */
LEMA_API int64_t lema_linear_scratch_bytes(const lema_product *product);

LEMA_API int32_t lema_linear(const lema_product *product);

/* x_KN as several products that are not transposed share it; `apart` as theirs. packed: lema_linear_packed_bytes(),
   aligned to 32 bytes. */
LEMA_API int64_t lema_linear_packed_bytes(int64_t k, int64_t n);
LEMA_API int32_t lema_linear_pack(const float *x, int64_t x_stride, int64_t k, int64_t n, float *packed, int32_t apart,
                                  int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
