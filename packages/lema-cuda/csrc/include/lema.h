/* The one C ABI of lema's native libraries. Nothing here knows Python or torch: callers pass raw pointers.

   Every function may be called from any thread at any time. None allocates memory beyond the threads it starts (and a
   copier), none keeps a pointer after it returns, none throws. Functions that compute return 0, or one of enum lema_error.

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
#define LEMA_ABI_VERSION 5

/* Storage formats of weights, little-endian. */
enum lema_dtype {
  LEMA_F32 = 0,
  LEMA_F16 = 1,  /* IEEE 754 binary16 */
  LEMA_BF16 = 2, /* the upper half of binary32 */
};

/* Formats of quantized weights [R, K], which go where `dtype` is asked for: codes in rows, and scales in rows beside them.
   Four-bit rows end with a whole byte, of an odd row half used; the last group of a row may have fewer columns. */
enum lema_quantized {
  LEMA_INT8 = 3,     /* int8 codes in [-127, 127], one fp32 scale a row; code * scale */
  LEMA_INT4_32 = 4,  /* the even column's code in the lower half of a byte, one bf16 scale for 32 columns of a row; */
  LEMA_INT4_64 = 5,  /* ... for 64 */
  LEMA_INT4_128 = 6, /* ... for 128; (code - 8) * scale */
  LEMA_NF4 = 7       /* the even column's code in the upper half, one fp32 absmax for 64; value of NF4[code] * absmax */
};

/* What products with an int8 weight are summed in. */
enum lema_compute {
  LEMA_COMPUTE_F32 = 0,
  LEMA_COMPUTE_INT8 = 1 /* "W8A8": each column of x is rounded to int8 as well, see lema_linear() */
};

enum lema_error {
  LEMA_OK = 0,
  LEMA_BAD_ARGUMENT = 1,   /* an unknown dtype, a negative size, a row stride below the row, fewer than one
                               thread, packed memory that is not aligned */
  LEMA_SMALL_SCRATCH = 2,  /* less scratch than lema_linear_scratch_bytes() says */
  LEMA_MISSING_FEATURE = 3, /* lema_cpu_missing() is not empty */
  LEMA_NOT_FINITE = 4       /* a number that is infinite or NaN, where none can be kept */
};

LEMA_API int32_t lema_abi_version(void);

/* What this CPU lacks of what the kernels are compiled for, such as "AVX2, FMA"; "" when they can run. */
LEMA_API const char *lema_cpu_missing(void);

/* What kernels that have several variants compute with. */
enum lema_instructions {
  LEMA_AVX2 = 0,       /* AVX2, FMA and F16C */
  LEMA_AVX512 = 1,     /* AVX-512 F, DQ, BW and VL too */
  LEMA_AVX512_VNNI = 2, /* and its products of int8 */
  LEMA_AMX = 3          /* AMX's products of bf16 too: of fp32 numbers as sums of three, see lema_linear() */
};

/* Of enum lema_instructions: the newest that this CPU has, the library is compiled for and lema_cpu_limit() allows. */
LEMA_API int32_t lema_cpu_instructions(void);

/* Calls after this one use nothing newer, in the whole process, and nothing that lema_linear_pack() made before.
   LEMA_BAD_ARGUMENT for what is not in the enum. */
LEMA_API int32_t lema_cpu_limit(int32_t most);

/* One product with a block of rows of a weight, and a low-rank term that is part of it:

     out_RN  = weight_RK x_KN    + scale * factor_Rr inner_rN
     out_KN  = weight_RK^T dy_RN + scale * factor_rK^T inner_rN     where `transposed`

   The weight is widened to fp32, and multiplied by its scales, as it is packed; everything else is fp32, products are
   summed in fp32. An element's products are summed in an order that depends on the format, the inner dimension (K, or R
   where transposed) and the rank alone, so any number of threads and any neighbouring rows give the same bits; forward,
   and with AMX transposed too, four columns or fewer are summed in an order of their own unless `apart`. out overlaps
   nothing.

   AMX multiplies the terms of bf16 that a number of fp32 is the sum of, and leaves out what is smaller than fp32 rounds
   anyway. Terms below 2^-126 are taken for zero; what an infinity goes into is NaN.

   With LEMA_COMPUTE_INT8 (int8 weights, K up to 131072, neither transposed nor accumulated) a column n of x has the scale
   s_n = max |x_kn| / 127 and the codes q_kn = x_kn / s_n, rounded half to even, in [-127, 127]; zeros where s_n is 0.
   What is summed are the codes' products, exactly: out_rn = float(sum over k) * scale_r * s_n + the low-rank term, which
   x itself went into. Where a column holds an infinity or NaN its results are NaN. */
typedef struct lema_product {
  const void *weight; /* `dtype`, contiguous, at any address ... */
  const void *scales; /* ... and so are the scales of a quantized one */
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
  int32_t dtype;   /* of enum lema_dtype or lema_quantized */
  int32_t compute; /* of enum lema_compute */
  int32_t transposed, accumulate; /* accumulate: add to `out` instead of overwriting it */
  int32_t apart; /* the bits of a column do not depend on the number of columns either */
  int32_t threads; /* at most so many compute */
} lema_product;

/* Scratch of one call. Reads neither memory nor strides, but whether `right_stride` is 0. */
LEMA_API int64_t lema_linear_scratch_bytes(const lema_product *product);

LEMA_API int32_t lema_linear(const lema_product *product);

/* x_KN as several products that are not transposed share it; `apart` as theirs. packed: lema_linear_packed_bytes(),
   aligned to 32 bytes; where those are 0, as of few columns, products take x as it is. */
LEMA_API int64_t lema_linear_packed_bytes(int64_t k, int64_t n, int32_t apart);
LEMA_API int32_t lema_linear_pack(const float *x, int64_t x_stride, int64_t k, int64_t n, float *packed, int32_t apart,
                                  int32_t threads);

/* ---- Elementwise operations. All matrices are fp32 and contiguous, at any address; results overlap nothing, but what is
   updated. C features, N tokens, F elements. Every element follows from its own token alone, by the same operations
   wherever it lies and however many threads compute: they are those of plain torch, in its order. */

/* y_CN = x_CN * rstd_N * weight_C with rstd_N = 1 / sqrt(mean over C of x^2 + eps). */
LEMA_API int32_t lema_rms_norm(const float *x, const float *weight, int64_t features, int64_t n, float eps, float *y,
                               float *rstd, int32_t threads);

/* dx_CN for a frozen weight, from the rstd_N of the forward pass. */
LEMA_API int32_t lema_rms_norm_gradient(const float *dy, const float *x, const float *weight, const float *rstd,
                                        int64_t features, int64_t n, float *dx, int32_t threads);

/* out_F = silu(gate_F) * up_F. */
LEMA_API int32_t lema_silu_product(const float *gate, const float *up, int64_t count, float *out, int32_t threads);

LEMA_API int32_t lema_silu_product_gradient(const float *dy, const float *gate, const float *up, int64_t count,
                                            float *d_gate, float *d_up, int32_t threads);

/* x, y [heads, 2 * half, N]; cos, sin [half, N]: the halves (a, b) of each head become (a cos - b sin, b cos + a sin), or
   with the sine's sign turned when `inverse` is not 0. */
LEMA_API int32_t lema_rotate(const float *x, const float *cos, const float *sin, int64_t heads, int64_t half, int64_t n,
                             int32_t inverse, float *y, int32_t threads);

/* One AdamW update of `count` numbers in place, with g = grad_scale * grad:

     exp_avg += rate1 * (g - exp_avg)        exp_avg_sq = beta2 * exp_avg_sq + rate2 * g^2
     param = keep * param + step * exp_avg / (sqrt(exp_avg_sq) / correction + eps)

   One pass, 28 bytes a number. `threads` 1: by the calling thread alone, which neither waits nor wakes anybody. */
typedef struct lema_adamw_rates {
  float grad_scale, rate1, beta2, rate2, keep, correction, eps, step;
} lema_adamw_rates;

LEMA_API int32_t lema_adamw(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, int64_t count,
                            const lema_adamw_rates *rates, int32_t threads);

/* ---- Causal attention, inside each row of each segment of N tokens: a segment is `rows` times `tokens` columns from
   `start` on, row after row, and no column belongs to two. Head h reads key head h / (heads / groups). All matrices are
   fp32 with a head's D features below each other: q and out [heads * D, N], k and v [groups * D, N]. A token's bits
   depend on its row alone. D is a multiple of 16, at most 256. */
typedef struct lema_segment {
  int64_t start, rows, tokens;
} lema_segment;

typedef struct lema_attention {
  const float *q, *k, *v; /* at any address ... */
  int64_t q_stride, k_stride, v_stride; /* ... with rows so many elements apart */
  int64_t heads, groups, d, n;
  const lema_segment *segments;
  int64_t n_segments;
  float *out; /* contiguous, as everything below; read for the gradient */
  float *largest, *inverse; /* [heads, N]: what the gradient needs of the softmax */
  const float *d_out; /* null: compute out, largest, inverse; else dq, dk, dv */
  int64_t d_out_stride;
  float *dq, *dk, *dv;
  void *scratch; /* at any address */
  int64_t scratch_bytes; /* at least lema_attention_scratch_bytes() */
  float scale;
  int32_t threads;
} lema_attention;

/* Reads sizes, segments, threads and whether there is `d_out`. */
LEMA_API int64_t lema_attention_scratch_bytes(const lema_attention *attention);

LEMA_API int32_t lema_attend(const lema_attention *attention);

/* One contiguous piece of an open file. `direct`: the descriptor bypasses the page cache, which wants target, offset and
   bytes in multiples of 4096. Only the first `needed_bytes` of `bytes` have to be there. lema_read() sets `done_bytes`,
   of which the target holds the file's, and `error`, an errno; the file ends there where that is 0 and too little done. */
struct lema_range {
  void *target;
  int64_t offset;
  int64_t bytes;
  int64_t needed_bytes;
  int64_t done_bytes;
  int32_t file;
  int32_t direct;
  int32_t error;
};

/* Reads all ranges, with up to `depth` (1 to 16) requests of `request_bytes` (a multiple of 4096) in flight.

   Returns when nothing writes to a target any more: LEMA_OK, whatever the files said, or LEMA_BAD_ARGUMENT. Behind the
   first range that is not complete nothing is promised. EINTR: a signal came, read again once it is handled. What came
   through the page cache is dropped from it. Needs no CPU feature. */
LEMA_API int32_t lema_read(struct lema_range *ranges, int64_t count, int64_t request_bytes, int32_t depth);

/* out = source, widened to fp32. source: `dtype`, contiguous, at any address. */
LEMA_API int32_t lema_widen(const void *source, int32_t dtype, int64_t count, float *out);

/* Rows [R, K] of fp32, fp16 or bf16 numbers into a quantized `format`, each row by itself, in the calling thread; all
   arithmetic in fp32, divisions and roundings (half to even) as IEEE 754 has them:

     LEMA_INT8    scale = max |w| of the row / 127, code = round(w / scale) in [-127, 127]
     LEMA_INT4_*  for d of -8 and -8.625: scale = m / d as bf16, m the group's number of largest magnitude (of two the
                  negative one), code - 8 = round(w / scale) in [-8, 7]. Of the two the one with the smaller error is
                  taken, the first where they are equal: squares of w / scale - (code - 8), summed by adding halves of
                  the group (zeros where it is cut short), times (scale / m)^2
     LEMA_NF4     code = how many midpoints of neighbouring values are below w * (1 / absmax), absmax at least 1e-38

   Scales of zeros are 0; others are at least the smallest of their type, and so small that 127 or 8 of them are finite.
   K is a multiple of 64 for NF4. LEMA_NOT_FINITE: codes and scales hold anything. */
LEMA_API int32_t lema_quantize(const void *source, int32_t dtype, int64_t rows, int64_t k, int32_t format, void *codes,
                               void *scales);

/* Adds to `squares`, for each of K columns, the sum of the squares of w, and to `errors` that of decoded - w, a difference
   in fp32; sums in fp64. */
LEMA_API int32_t lema_quantize_errors(const void *source, int32_t dtype, int64_t rows, int64_t k, int32_t format,
                                      const void *codes, const void *scales, double *squares, double *errors);

/* ---- liblema_cuda, a library of its own: copies from page-locked RAM to a CUDA device.

   They run in the order they are queued, on a stream that the copier owns, in the device's primary context; the calling
   thread's context stays what it was. Streams and events are CUDA's handles. Functions return 0 or a code of the CUDA
   driver, which may be an earlier operation's; lema_cuda_error() has its text. The driver is opened when it is first
   needed. */
struct lema_copier;

enum { LEMA_NOT_READY = 600 };

LEMA_API int32_t lema_cuda_abi_version(void);

/* Why CUDA cannot serve here, such as "no NVIDIA driver: ..."; "" where it can. */
LEMA_API const char *lema_cuda_missing(void);

LEMA_API const char *lema_cuda_error(int32_t code);

LEMA_API int32_t lema_copier_open(int32_t device, struct lema_copier **copier);

/* Waits for the copies that are queued. */
LEMA_API int32_t lema_copier_drain(struct lema_copier *copier);

/* Drains; the copier is gone, whatever is returned. */
LEMA_API int32_t lema_copier_close(struct lema_copier *copier);

/* Page-locks exactly these bytes. Memory is unregistered before it is unmapped. */
LEMA_API int32_t lema_copier_register(struct lema_copier *copier, void *memory, int64_t bytes);
LEMA_API int32_t lema_copier_unregister(struct lema_copier *copier, void *memory);

/* An event is over until it is recorded, and can be recorded again: who waits waits for the latest record. */
LEMA_API int32_t lema_copier_new_event(struct lema_copier *copier, void **event);
LEMA_API int32_t lema_copier_free_event(struct lema_copier *copier, void *event);

/* Queues: wait for `after` (or null), copy to the device, record `done`. */
LEMA_API int32_t lema_copier_copy(struct lema_copier *copier, void *target, const void *source, int64_t bytes,
                                  void *after, void *done);

/* Of any stream of the device: record an event there, let it wait for one. */
LEMA_API int32_t lema_copier_record(struct lema_copier *copier, void *event, void *cuda_stream);
LEMA_API int32_t lema_copier_stream_wait(struct lema_copier *copier, void *cuda_stream, void *event);

/* Blocks the calling thread until the event is over; asks whether it is (0, or LEMA_NOT_READY). */
LEMA_API int32_t lema_copier_wait(struct lema_copier *copier, void *event);
LEMA_API int32_t lema_copier_query(struct lema_copier *copier, void *event);

/* ---- liblema_cuda: products with quantized weights on a CUDA device.

   Activations are of an enum lema_dtype. All matrices are the device's, aligned to their elements, and results overlap
   nothing. Work is queued on `cuda_stream`, CUDA's handle of a stream of `device`, and nothing is waited for. Functions
   return 0 or a code of the CUDA driver, which is 1 (CUDA_ERROR_INVALID_VALUE) for an unknown format or dtype and for sizes
   that do not fit. */

typedef struct lema_device_weight {
  const void *codes, *scales; /* contiguous */
  int64_t rows, k;
  int32_t format; /* of enum lema_quantized */
} lema_device_weight;

/* Why the kernels do not run on this device, such as "the kernels do not load on CUDA device 0: ..."; "" where they do. */
LEMA_API const char *lema_device_missing(int32_t device);

/* out_RK = weight in `dtype`, contiguous: what decoding to fp32 and rounding gives. rows * ceil(K / 8) < 2^31. */
LEMA_API int32_t lema_device_decode(const lema_device_weight *weight, void *out, int32_t dtype, int32_t device,
                                    void *cuda_stream);

/* out_R = weight x_K, summed in fp32; the weight is read once. */
LEMA_API int32_t lema_device_gemv(const lema_device_weight *weight, const void *x, void *out, int32_t dtype,
                                  int32_t device, void *cuda_stream);

/* Of a product with LEMA_COMPUTE_INT8, what x_KN becomes: codes q int8 [N, lema_device_padded(K)], aligned to 16 bytes, and
   scales s fp32 [N]; a column with an infinity or NaN has the scale NaN and zeros for codes. */
LEMA_API int64_t lema_device_padded(int64_t k);
LEMA_API int32_t lema_device_quantize(const void *x, int64_t x_stride, int64_t k, int64_t n, int32_t dtype,
                                      int8_t *codes, float *scales, int32_t device, void *cuda_stream);

/* out_RN of such a product, without a low-rank term. */
LEMA_API int32_t lema_device_product(const lema_device_weight *weight, const int8_t *codes, const float *scales,
                                     int64_t n, void *out, int64_t out_stride, int32_t dtype, int32_t device,
                                     void *cuda_stream);

#ifdef __cplusplus
}
#endif

#endif
