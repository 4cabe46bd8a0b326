// Products of int8 weights with tokens that are quantized as they come: int8 x int8 -> int32 with __dp4a, then scales.

#pragma once

#include "formats.cuh"

namespace lema {

// A token with an infinity or NaN has the scale NaN and zeros for codes: its products are NaN.
template <class Format, class Dtype>
__device__ void quantize(const quantize_arguments &a) {
  constexpr int WORD = 4;
  __shared__ float found[quantize_THREADS];
  const auto *const x = static_cast<const typename Dtype::Stored *>(a.x);
  const int lanes = quantize_THREADS / a.tokens, lane = threadIdx.x / a.tokens;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * a.tokens + threadIdx.x % a.tokens;
  const bool inside = token < a.n;

  float largest = 0.0f;
  for (int64_t k = lane; inside && k < a.k; k += lanes) {
    const float value = fabsf(Dtype::load(x[k * a.x_stride + token]));
    if (value > largest || value != value) largest = value;  // NaN stays: nothing is larger
  }
  found[threadIdx.x] = largest;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane >= half) continue;
    const float other = found[threadIdx.x + half * a.tokens];
    if (other > found[threadIdx.x] || other != other) found[threadIdx.x] = other;
  }
  __syncthreads();
  if (!inside) return;

  largest = found[threadIdx.x % a.tokens];
  const float scale = largest <= 3.4028234663852886e38f ? largest / 127.0f : __uint_as_float(0x7fc00000);
  const bool has_codes = scale > 0.0f;
  if (lane == 0) a.scales[token] = scale;
  uint32_t *const words = reinterpret_cast<uint32_t *>(a.codes + token * a.padded);
  for (int64_t word = lane; word < a.padded / WORD; word += lanes) {
    uint32_t packed = 0;
#pragma unroll
    for (int j = 0; j < WORD; ++j) {
      const int64_t k = word * WORD + j;
      if (!has_codes || k >= a.k) continue;
      // of a subnormal scale, which is rounded coarsely, a code may be too large
      const float scaled = fminf(fmaxf(Dtype::load(x[k * a.x_stride + token]) / scale, -127.0f), 127.0f);
      const int code = __float2int_rn(scaled);
      packed |= static_cast<uint32_t>(code & 255) << (8 * j);
    }
    words[word] = packed;
  }
}

// 16 codes of a row from `k` on, zeros behind its end.
inline __device__ uint4 load_codes(const int8_t *row, int64_t k, int64_t end, bool aligned) {
  if (k >= end) return make_uint4(0, 0, 0, 0);
  if (aligned) return *reinterpret_cast<const uint4 *>(row + k);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (k + j < end) words[j / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(row[k + j])) << (8 * (j % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A tile of TILE rows x TILE tokens is computed by 16 x 16 threads of 4 x 4 elements, over 64 bytes of K at a time.
template <class Format, class Dtype>
__device__ void product(const product_arguments &a) {
  constexpr int WORDS = 16, SIDE = 4, ACROSS = TILE / SIDE, QUADS = WORDS / 4;
  static_assert(ACROSS * ACROSS == product_THREADS && TILE * QUADS == product_THREADS, "one load for each thread");
  // word after word, so that a thread's four rows, or tokens, are one load; the padding spreads stores over the banks
  alignas(16) __shared__ int left[WORDS][TILE + 4];
  alignas(16) __shared__ int right[WORDS][TILE + 4];

  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * TILE;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * TILE;
  const int loaded = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
  const bool row_inside = first_row + loaded < a.rows, token_inside = first_token + loaded < a.n;
  const int8_t *const row_codes = a.codes + (row_inside ? first_row + loaded : 0) * a.k;
  const int8_t *const token_codes = a.tokens + (token_inside ? first_token + loaded : 0) * a.padded;
  const int my_row = threadIdx.x / ACROSS * SIDE, my_token = threadIdx.x % ACROSS * SIDE;

  int sums[SIDE][SIDE] = {};
  for (int64_t start = 0; start < a.k; start += WORDS * 4) {
    const int64_t k = start + quad * 16;
    const uint4 of_row = load_codes(row_codes, k, row_inside ? a.k : 0, a.aligned);
    const uint4 of_token = load_codes(token_codes, k, token_inside ? a.padded : 0, true);
    __syncthreads();  // everybody is done with the words before
    left[quad * 4][loaded] = static_cast<int>(of_row.x);
    left[quad * 4 + 1][loaded] = static_cast<int>(of_row.y);
    left[quad * 4 + 2][loaded] = static_cast<int>(of_row.z);
    left[quad * 4 + 3][loaded] = static_cast<int>(of_row.w);
    right[quad * 4][loaded] = static_cast<int>(of_token.x);
    right[quad * 4 + 1][loaded] = static_cast<int>(of_token.y);
    right[quad * 4 + 2][loaded] = static_cast<int>(of_token.z);
    right[quad * 4 + 3][loaded] = static_cast<int>(of_token.w);
    __syncthreads();
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const int4 l = *reinterpret_cast<const int4 *>(&left[word][my_row]);
      const int4 r = *reinterpret_cast<const int4 *>(&right[word][my_token]);
      const int rows[SIDE] = {l.x, l.y, l.z, l.w}, tokens[SIDE] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int i = 0; i < SIDE; ++i) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j) sums[i][j] = __dp4a(rows[i], tokens[j], sums[i][j]);
      }
    }
  }

  auto *const out = static_cast<typename Dtype::Stored *>(a.out);
#pragma unroll
  for (int i = 0; i < SIDE; ++i) {
    const int64_t row = first_row + my_row + i;
#pragma unroll
    for (int j = 0; j < SIDE; ++j) {
      const int64_t token = first_token + my_token + j;
      if (row >= a.rows || token >= a.n) continue;
      out[row * a.out_stride + token] =
          Dtype::store(static_cast<float>(sums[i][j]) * a.scales[row] * a.token_scales[token]);
    }
  }
}

}  // namespace lema
