// How numbers lie: activations of any dtype, and eight neighbouring columns of a quantized row at a time.

#pragma once

#include <cuda_fp16.h>

#include "../include/nf4.h"
#include "kernels.h"

namespace lema {

// Sixteen bytes of eight numbers at a time.
template <class Stored>
constexpr int QUADS = CHUNK * sizeof(Stored) / sizeof(uint4);

struct Dtype_f32 {
  using Stored = float;
  static __device__ float load(float stored) { return stored; }
  static __device__ float store(float value) { return value; }
};

struct Dtype_f16 {
  using Stored = uint16_t;
  static __device__ float load(uint16_t stored) { return __half2float(__ushort_as_half(stored)); }
  static __device__ uint16_t store(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

struct Dtype_bf16 {
  using Stored = uint16_t;
  static __device__ float load(uint16_t stored) { return __uint_as_float(static_cast<uint32_t>(stored) << 16); }
  static __device__ uint16_t store(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
};

// Eight numbers, of which the first `left` are there, and zeros. `whole`: all are, at a multiple of 16 bytes.
template <class Dtype>
__device__ void load_numbers(const typename Dtype::Stored *numbers, int64_t left, bool whole, float (&values)[CHUNK]) {
  using Stored = typename Dtype::Stored;
  if (whole) {
    alignas(16) Stored loaded[CHUNK];
#pragma unroll
    for (int i = 0; i < QUADS<Stored>; ++i) {
      reinterpret_cast<uint4 *>(loaded)[i] = reinterpret_cast<const uint4 *>(numbers)[i];
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = Dtype::load(loaded[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = j < left ? Dtype::load(numbers[j]) : 0.0f;
}

// The same, stored.
template <class Dtype>
__device__ void store_numbers(typename Dtype::Stored *numbers, int64_t left, bool whole, const float (&values)[CHUNK]) {
  using Stored = typename Dtype::Stored;
  alignas(16) Stored results[CHUNK];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) results[j] = Dtype::store(values[j]);
  if (whole) {
#pragma unroll
    for (int i = 0; i < QUADS<Stored>; ++i) {
      reinterpret_cast<uint4 *>(numbers)[i] = reinterpret_cast<const uint4 *>(results)[i];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    if (j < left) numbers[j] = results[j];
  }
}

// A format has, of the chunk that starts at `column` of `row`:
//   load(weight, row, column, values, table)   its numbers before any scale, zero or of a zero's scale behind K;
//   of_chunk(weight, row, column)              the scale that is for this chunk alone;
//   of_row(weight, row)                        the scale that is for the whole row;
// and prepare(table), which all threads of a block call once, before anything else.

struct Format_int8 {
  static __device__ void prepare(float *) {}
  static __device__ float of_chunk(const Weight &, int64_t, int64_t) { return 1.0f; }
  static __device__ float of_row(const Weight &weight, int64_t row) {
    return static_cast<const float *>(weight.scales)[row];
  }
  static __device__ void load(const Weight &weight, int64_t row, int64_t column, float (&values)[CHUNK],
                              const float *) {
    const uint8_t *const codes = weight.codes + row * weight.row_bytes + column;
    uint32_t words[2] = {0, 0};
    if (weight.aligned) {
      const uint2 both = *reinterpret_cast<const uint2 *>(codes);
      words[0] = both.x;
      words[1] = both.y;
    } else {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        if (column + j < weight.k) words[j / 4] |= static_cast<uint32_t>(codes[j]) << (8 * (j % 4));
      }
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = static_cast<float>(static_cast<int8_t>(words[j / 4] >> (8 * (j % 4))));
  }
};

// Four bytes of codes, two in each.
inline __device__ uint32_t load_nibbles(const Weight &weight, int64_t row, int64_t column) {
  const uint8_t *const codes = weight.codes + row * weight.row_bytes + column / 2;
  if (weight.aligned) return *reinterpret_cast<const uint32_t *>(codes);
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < CHUNK / 2; ++j) {
    if (column + 2 * j < weight.k) word |= static_cast<uint32_t>(codes[j]) << (8 * j);
  }
  return word;
}

struct Format_int4 {
  static __device__ void prepare(float *) {}
  static __device__ float of_chunk(const Weight &weight, int64_t row, int64_t column) {
    const uint16_t *const scales = static_cast<const uint16_t *>(weight.scales);
    return Dtype_bf16::load(scales[row * weight.groups + (column >> weight.group_shift)]);
  }
  static __device__ float of_row(const Weight &, int64_t) { return 1.0f; }
  static __device__ void load(const Weight &weight, int64_t row, int64_t column, float (&values)[CHUNK],
                              const float *) {
    const uint32_t word = load_nibbles(weight, row, column);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = static_cast<float>(static_cast<int>((word >> (4 * j)) & 15) - 8);
  }
};

struct Format_nf4 {
  // From a table in shared memory: different codes are different banks.
  static __device__ void prepare(float *table) {
    constexpr float VALUES[16] = {LEMA_NF4_VALUES};
    if (threadIdx.x == 0) {
#pragma unroll
      for (int code = 0; code < 16; ++code) table[code] = VALUES[code];
    }
    __syncthreads();
  }
  static __device__ float of_chunk(const Weight &weight, int64_t row, int64_t column) {
    return static_cast<const float *>(weight.scales)[row * weight.groups + (column >> weight.group_shift)];
  }
  static __device__ float of_row(const Weight &, int64_t) { return 1.0f; }
  static __device__ void load(const Weight &weight, int64_t row, int64_t column, float (&values)[CHUNK],
                              const float *table) {
    const uint32_t word = load_nibbles(weight, row, column);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const int upper_first = j ^ 1;  // the even column's code is the upper one of its byte
      values[j] = table[(word >> (4 * upper_first)) & 15];
    }
  }
};

}  // namespace lema
