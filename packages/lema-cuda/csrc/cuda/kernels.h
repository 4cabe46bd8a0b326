// The kernels of kernels.cu, their arguments and shapes, for who launches them. Plain C++.
//
// Legend: R rows of a weight, K columns, N tokens. All matrices are row-major, all pointers the device's.

#pragma once

#include <stdint.h>

namespace lema {

constexpr int CHUNK = 8;  // neighbouring columns that a thread decodes at once; a scale is for a multiple of it

// A quantized weight [R, K] as it lies in a file.
struct Weight {
  const uint8_t *codes;  // [R, row_bytes]
  const void *scales;    // int8: fp32 [R]; int4: bf16 [R, groups]; nf4: fp32 [R, groups]
  int64_t rows, k, row_bytes, groups;
  int32_t group_shift;  // columns of a group are 1 << group_shift
  int32_t aligned;      // every chunk of a row is whole and lies at a multiple of its bytes
};

// out_RK = weight, contiguous. A thread writes one chunk.
struct decode_arguments {
  Weight weight;
  void *out;
  uint32_t chunks;   // of a row
  int32_t whole_out; // every chunk of `out` is whole and lies at a multiple of 16 bytes
};

// out_R = weight x_K. A block computes GEMV_ROWS rows.
struct gemv_arguments {
  Weight weight;
  const void *x;
  void *out;
  int32_t whole_x;  // every chunk of `x` is whole and lies at a multiple of 16 bytes
};

// Tokens [K, N] as int8 [N, padded] with zeros behind K, and fp32 scales [N]. A block quantizes `tokens` of them.
struct quantize_arguments {
  const void *x;
  int64_t x_stride, k, n, padded;
  int8_t *codes;
  float *scales;
  int32_t tokens;  // 1, 2, 4 ... MOST_TOKENS
};

// out_RN = (codes_RK tokens_KN) * scale_R * token_scale_N. A block computes a tile of TILE rows and TILE tokens.
struct product_arguments {
  const int8_t *codes;  // [R, K]
  const float *scales;
  const int8_t *tokens;  // [N, padded]
  const float *token_scales;
  void *out;
  int64_t out_stride, rows, k, n, padded;
  int32_t aligned;  // 16 codes of a row lie at a multiple of 16 bytes, and K is one
};

constexpr int decode_THREADS = 256;
constexpr int gemv_THREADS = 128;
constexpr int quantize_THREADS = 256;
constexpr int product_THREADS = 256;
constexpr int GEMV_ROWS = 4;
constexpr int MOST_TOKENS = 8;
constexpr int TILE = 64;
constexpr int TOKEN_PADDING = 16;  // `padded` is a multiple of it

// All kernels, as X(operation, format, dtype); those of a format stand in the order of enum lema_dtype.
#define LEMA_DTYPES(X, operation, format) X(operation, format, f32) X(operation, format, f16) X(operation, format, bf16)
#define LEMA_KERNELS(X)                                                                          \
  LEMA_DTYPES(X, decode, int8) LEMA_DTYPES(X, decode, int4) LEMA_DTYPES(X, decode, nf4)          \
  LEMA_DTYPES(X, gemv, int8) LEMA_DTYPES(X, gemv, int4) LEMA_DTYPES(X, gemv, nf4)                \
  LEMA_DTYPES(X, quantize, int8) LEMA_DTYPES(X, product, int8)

enum Kernel {
#define ENUMERATOR(operation, format, dtype) operation##_##format##_##dtype,
  LEMA_KERNELS(ENUMERATOR)
#undef ENUMERATOR
      KERNEL_COUNT
};

// Queues a kernel on a stream of a device; 0, or a code of the CUDA driver. `arguments`: its struct from above.
int32_t launch(Kernel kernel, uint32_t blocks_x, uint32_t blocks_y, int threads, const void *arguments, int32_t device,
               void *cuda_stream);

}  // namespace lema
