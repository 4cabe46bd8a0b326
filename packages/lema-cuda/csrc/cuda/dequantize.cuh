// A quantized weight's numbers, and its product with one token.

#pragma once

#include "formats.cuh"

namespace lema {

template <class Format, class Dtype>
__device__ void decode(const decode_arguments &a) {
  __shared__ float table[16];
  Format::prepare(table);
  const uint32_t index = blockIdx.x * decode_THREADS + threadIdx.x;
  const int64_t row = index / a.chunks, column = static_cast<int64_t>(index % a.chunks) * CHUNK;
  if (row >= a.weight.rows) return;
  float values[CHUNK];
  Format::load(a.weight, row, column, values, table);
  const float scale = Format::of_chunk(a.weight, row, column) * Format::of_row(a.weight, row);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] *= scale;
  auto *const out = static_cast<typename Dtype::Stored *>(a.out) + row * a.weight.k + column;
  store_numbers<Dtype>(out, a.weight.k - column, a.whole_out, values);
}

// Every element is summed in an order that depends on K alone: its neighbours change no bit.
template <class Format, class Dtype>
__device__ void gemv(const gemv_arguments &a) {
  constexpr int WARP = 32, WARPS = gemv_THREADS / WARP;
  static_assert(WARPS == GEMV_ROWS, "each warp adds up one row");
  using Stored = typename Dtype::Stored;
  __shared__ float table[16];
  __shared__ float sums[GEMV_ROWS][gemv_THREADS];
  Format::prepare(table);

  const Weight &weight = a.weight;
  const Stored *const x = static_cast<const Stored *>(a.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * GEMV_ROWS;
  float sum[GEMV_ROWS] = {};
  for (int64_t column = threadIdx.x * CHUNK; column < weight.k; column += gemv_THREADS * CHUNK) {
    float given[CHUNK];
    load_numbers<Dtype>(x + column, weight.k - column, a.whole_x, given);
#pragma unroll
    for (int i = 0; i < GEMV_ROWS; ++i) {
      // The last row stands in for those behind it: no branch, and nothing outside is read.
      const int64_t row = first + i < weight.rows ? first + i : weight.rows - 1;
      float values[CHUNK];
      Format::load(weight, row, column, values, table);
      float of_chunk = 0.0f;
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) of_chunk = fmaf(values[j], given[j], of_chunk);
      sum[i] = fmaf(of_chunk, Format::of_chunk(weight, row, column), sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < GEMV_ROWS; ++i) sums[i][threadIdx.x] = sum[i];
  __syncthreads();

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += sums[warp][i * WARP + lane];
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, distance);
  }
  const int64_t row = first + warp;
  if (lane == 0 && row < weight.rows) {
    static_cast<Stored *>(a.out)[row] = Dtype::store(total * Format::of_row(weight, row));
  }
}

}  // namespace lema
