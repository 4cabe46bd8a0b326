// What attention is made of: sums of products over strips of 16 columns, packing, turning, powers of two.

#pragma once

#include "attention.h"
#include "formats_avx2.h"

namespace lema {
namespace {  // each file's own

constexpr float SMALLEST_POWER = -126.0f;

inline __m256 all(float value) { return _mm256_set1_ps(value); }

// 2^x for x <= 0, to one unit in the last place; below 2^-126 it is 2^-126.
inline __m256 power_of_two(__m256 x) {
  x = _mm256_max_ps(all(SMALLEST_POWER), x);  // in this order NaN stays NaN
  const __m256 shift = all(12582912.0f);  // 1.5 * 2^23: added, it leaves a whole number in the lowest bits
  const __m256 shifted = _mm256_add_ps(x, shift), rest = _mm256_sub_ps(x, _mm256_sub_ps(shifted, shift));
  __m256 p = all(0.000153456963f);
  p = _mm256_fmadd_ps(p, rest, all(0.001340006331f));
  p = _mm256_fmadd_ps(p, rest, all(0.009618490397f));
  p = _mm256_fmadd_ps(p, rest, all(0.05550328451f));
  p = _mm256_fmadd_ps(p, rest, all(0.2402264687f));
  p = _mm256_fmadd_ps(p, rest, all(0.6931472059f));
  p = _mm256_fmadd_ps(p, rest, all(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

inline __m256 lanes_from(float first) {
  return _mm256_add_ps(all(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
}

// ----------------------------------------------------------------------------------------------------------- products

// c[row][16] (+)= sum over i < outer, j < inner of a[row * a_row + i * a_outer + j * a_inner] * b[i * inner + j][16].
struct Sum {
  const float *a;
  int64_t a_row, a_inner, inner;
  const float *b;
  float *c;
  int64_t c_row;
  bool add;
  int64_t a_outer = 0, outer = 1;
};

template <int ROWS>
inline void tile(const Sum &s, int64_t row) {
  const float *a_of_row = s.a + row * s.a_row, *b = s.b;
  float *c = s.c + row * s.c_row;
  __m256 low[ROWS], high[ROWS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    low[r] = s.add ? _mm256_loadu_ps(c + r * s.c_row) : _mm256_setzero_ps();
    high[r] = s.add ? _mm256_loadu_ps(c + r * s.c_row + LANES) : _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < s.outer; ++i, a_of_row += s.a_outer) {
    const float *a = a_of_row;
    for (int64_t j = 0; j < s.inner; ++j, a += s.a_inner, b += STRIP) {
      const __m256 b_low = _mm256_load_ps(b), b_high = _mm256_load_ps(b + LANES);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const __m256 factor = _mm256_broadcast_ss(a + r * s.a_row);
        low[r] = _mm256_fmadd_ps(factor, b_low, low[r]);
        high[r] = _mm256_fmadd_ps(factor, b_high, high[r]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    _mm256_storeu_ps(c + r * s.c_row, low[r]);
    _mm256_storeu_ps(c + r * s.c_row + LANES, high[r]);
  }
}

void tile_of(int rows, const Sum &sum, int64_t row) {
  switch (rows) {
    case 1: return tile<1>(sum, row);
    case 2: return tile<2>(sum, row);
    case 3: return tile<3>(sum, row);
    case 4: return tile<4>(sum, row);
    case 5: return tile<5>(sum, row);
    default: return tile<6>(sum, row);
  }
}

constexpr int64_t TILE = 6;

void multiply(const Sum &sum, int64_t rows) {
  int64_t row = 0;
  for (; row + TILE <= rows; row += TILE) tile<TILE>(sum, row);
  if (row < rows) tile_of(static_cast<int>(rows - row), sum, row);
}

// ------------------------------------------------------------------------------------------------------------ packing

// `tokens` (at most 16) columns of x [D, ...], times `factor` -> strip[D][16], zeros beyond.
void pack_strip(const float *x, int64_t stride, int64_t d, int64_t tokens, float factor, float *strip) {
  const __m256 by = all(factor);
  for (int64_t i = 0; i < d; ++i, x += stride, strip += STRIP) {
    if (tokens == STRIP) {
      _mm256_store_ps(strip, _mm256_mul_ps(_mm256_loadu_ps(x), by));
      _mm256_store_ps(strip + LANES, _mm256_mul_ps(_mm256_loadu_ps(x + LANES), by));
    } else {
      for (int64_t t = 0; t < STRIP; ++t) strip[t] = t < tokens ? x[t] * factor : 0.0f;
    }
  }
}

// `tokens` (at most 64) columns of x [D, ...] -> block[D][64].
void pack_block(const float *x, int64_t stride, int64_t d, int64_t tokens, float *block) {
  for (int64_t i = 0; i < d; ++i) memcpy(block + i * BLOCK, x + i * stride, tokens * sizeof(float));
}

inline void transpose(const float *x, int64_t x_row, __m256 (&column)[8]) {
  __m256 r[8], pairs[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(x + i * x_row);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  __m256 fours[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    column[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    column[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// strip[D][16] -> for each 16 features [64 tokens][16]; `turned` is where the strip's first token goes.
void turn_strip(const float *strip, int64_t d, float *turned) {
  __m256 column[8];
  for (int64_t i = 0; i < d; i += LANES)
    for (int64_t t = 0; t < STRIP; t += LANES) {
      transpose(strip + i * STRIP + t, STRIP, column);
      float *target = turned + i / STRIP * BLOCK * STRIP + t * STRIP + i % STRIP;
      for (int j = 0; j < LANES; ++j) _mm256_store_ps(target + j * STRIP, column[j]);
    }
}

}  // namespace
}  // namespace lema
