// What the kernels are given: arguments are checked, and laid out in blocks.

#include "../include/lema.h"
#include "kernels.h"

namespace lema {
namespace {

constexpr int32_t BAD_ARGUMENT = 1;            // CUDA_ERROR_INVALID_VALUE
constexpr int64_t MOST_BLOCKS = INT32_MAX;     // along x ...
constexpr int64_t MOST_BLOCKS_ACROSS = 65535;  // ... and along y
constexpr int64_t MOST_K = int64_t{1} << 17;   // 127 * 127 * K is an int32

int64_t blocks(int64_t count, int64_t each) { return (count + each - 1) / each; }

bool lies_at(const void *memory, uintptr_t multiple) { return reinterpret_cast<uintptr_t>(memory) % multiple == 0; }

// Whether a weight is what kernels can read; `out` describes it to them.
bool describe(const lema_device_weight &weight, Weight *out) {
  constexpr int32_t NF4_SHIFT = 6, INT4_32_SHIFT = 5;
  if (weight.rows < 0 || weight.k < 1 || weight.format < LEMA_INT8 || weight.format > LEMA_NF4) return false;
  const bool nibbles = weight.format != LEMA_INT8;
  int32_t shift = 0;
  if (nibbles) shift = weight.format == LEMA_NF4 ? NF4_SHIFT : INT4_32_SHIFT + weight.format - LEMA_INT4_32;
  *out = {static_cast<const uint8_t *>(weight.codes),
          weight.scales,
          weight.rows,
          weight.k,
          nibbles ? blocks(weight.k, 2) : weight.k,
          nibbles ? blocks(weight.k, int64_t{1} << shift) : 1,
          shift,
          weight.k % CHUNK == 0 && lies_at(weight.codes, nibbles ? CHUNK / 2 : CHUNK)};
  return true;
}

// The kernel of an operation for this format and dtype; `int8`, `int4`, `nf4`: those for fp32.
Kernel chosen(Kernel int8, Kernel int4, Kernel nf4, int32_t format, int32_t dtype) {
  const Kernel first = format == LEMA_INT8 ? int8 : format == LEMA_NF4 ? nf4 : int4;
  return static_cast<Kernel>(first + dtype);
}

bool is_dtype(int32_t dtype) { return dtype == LEMA_F32 || dtype == LEMA_F16 || dtype == LEMA_BF16; }

}  // namespace
}  // namespace lema

using namespace lema;

extern "C" {

int32_t lema_device_decode(const lema_device_weight *weight, void *out, int32_t dtype, int32_t device,
                           void *cuda_stream) {
  decode_arguments a{};
  if (!describe(*weight, &a.weight) || !is_dtype(dtype)) return BAD_ARGUMENT;
  const int64_t chunks = blocks(weight->k, CHUNK);
  if (chunks > INT32_MAX || weight->rows > INT32_MAX / chunks) return BAD_ARGUMENT;
  if (weight->rows == 0) return 0;
  a.out = out;
  a.chunks = static_cast<uint32_t>(chunks);
  a.whole_out = weight->k % CHUNK == 0 && lies_at(out, 16);
  return launch(chosen(decode_int8_f32, decode_int4_f32, decode_nf4_f32, weight->format, dtype),
                static_cast<uint32_t>(blocks(weight->rows * chunks, decode_THREADS)), 1, decode_THREADS, &a, device,
                cuda_stream);
}

int32_t lema_device_gemv(const lema_device_weight *weight, const void *x, void *out, int32_t dtype, int32_t device,
                         void *cuda_stream) {
  gemv_arguments a{};
  if (!describe(*weight, &a.weight) || !is_dtype(dtype)) return BAD_ARGUMENT;
  const int64_t count = blocks(weight->rows, GEMV_ROWS);
  if (count > MOST_BLOCKS) return BAD_ARGUMENT;
  if (count == 0) return 0;
  a.x = x;
  a.out = out;
  a.whole_x = weight->k % CHUNK == 0 && lies_at(x, 16);
  return launch(chosen(gemv_int8_f32, gemv_int4_f32, gemv_nf4_f32, weight->format, dtype),
                static_cast<uint32_t>(count), 1, gemv_THREADS, &a, device, cuda_stream);
}

int64_t lema_device_padded(int64_t k) { return blocks(k, TOKEN_PADDING) * TOKEN_PADDING; }

int32_t lema_device_quantize(const void *x, int64_t x_stride, int64_t k, int64_t n, int32_t dtype, int8_t *codes,
                             float *scales, int32_t device, void *cuda_stream) {
  if (!is_dtype(dtype) || k < 1 || n < 0 || x_stride < n || !lies_at(codes, TOKEN_PADDING)) return BAD_ARGUMENT;
  // Few tokens are dealt out by k: somebody has to read them.
  int32_t tokens = 1;
  while (tokens < MOST_TOKENS && tokens < n) tokens *= 2;
  const int64_t count = blocks(n, tokens);
  if (count > MOST_BLOCKS) return BAD_ARGUMENT;
  if (count == 0) return 0;
  const quantize_arguments a{x, x_stride, k, n, lema_device_padded(k), codes, scales, tokens};
  return launch(static_cast<Kernel>(quantize_int8_f32 + dtype), static_cast<uint32_t>(count), 1, quantize_THREADS, &a,
                device, cuda_stream);
}

int32_t lema_device_product(const lema_device_weight *weight, const int8_t *codes, const float *scales, int64_t n,
                            void *out, int64_t out_stride, int32_t dtype, int32_t device, void *cuda_stream) {
  const bool is_int8 = weight->format == LEMA_INT8 && weight->rows >= 0;
  if (!is_int8 || !is_dtype(dtype) || weight->k < 1 || weight->k > MOST_K) return BAD_ARGUMENT;
  if (n < 0 || out_stride < n || !lies_at(codes, TOKEN_PADDING)) return BAD_ARGUMENT;
  const int64_t across = blocks(weight->rows, TILE), along = blocks(n, TILE);
  if (across > MOST_BLOCKS || along > MOST_BLOCKS_ACROSS) return BAD_ARGUMENT;
  if (across == 0 || along == 0) return 0;
  const bool aligned = weight->k % 16 == 0 && lies_at(weight->codes, 16);
  const product_arguments a{static_cast<const int8_t *>(weight->codes),
                            static_cast<const float *>(weight->scales),
                            codes,
                            scales,
                            out,
                            out_stride,
                            weight->rows,
                            weight->k,
                            n,
                            lema_device_padded(weight->k),
                            aligned};
  return launch(static_cast<Kernel>(product_int8_f32 + dtype), static_cast<uint32_t>(across),
                static_cast<uint32_t>(along), product_THREADS, &a, device, cuda_stream);
}

}  // extern "C"
