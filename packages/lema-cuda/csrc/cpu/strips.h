// What attention is made of: sums of products over strips of 16 columns, packing, turning, powers of two.

#pragma once

#include "attention.h"
#include "formats.h"
#include "wide.h"

namespace lema {
namespace {  // each file's own

constexpr int64_t PER_STRIP = STRIP / WIDE;  // registers of a row of it
constexpr float SMALLEST_POWER = -126.0f;

// 2^x for x <= 0, to one unit in the last place; below 2^-126 it is 2^-126.
inline Wide power_of_two(Wide x) {
  x = larger(all(SMALLEST_POWER), x);  // in this order NaN stays NaN
  const Wide shift = all(12582912.0f);  // 1.5 * 2^23: added, it leaves a whole number in the lowest bits
  const Wide shifted = add(x, shift), rest = sub(x, sub(shifted, shift));
  Wide p = all(0.000153456963f);
  p = multiply_add(p, rest, all(0.001340006331f));
  p = multiply_add(p, rest, all(0.009618490397f));
  p = multiply_add(p, rest, all(0.05550328451f));
  p = multiply_add(p, rest, all(0.2402264687f));
  p = multiply_add(p, rest, all(0.6931472059f));
  p = multiply_add(p, rest, all(1.0f));
  return times_power(p, shifted);
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

constexpr int TILE = WIDE == 16 ? 12 : 6;  // rows of which the sums stay in registers

template <int ROWS>
inline void tile(const Sum &s, int64_t row) {
  const float *a_of_row = s.a + row * s.a_row, *b = s.b;
  float *c = s.c + row * s.c_row;
  Wide sum[ROWS][PER_STRIP];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < PER_STRIP; ++i) sum[r][i] = s.add ? load(c + r * s.c_row + i * WIDE) : zeros();
  for (int64_t i = 0; i < s.outer; ++i, a_of_row += s.a_outer) {
    const float *a = a_of_row;
    for (int64_t j = 0; j < s.inner; ++j, a += s.a_inner, b += STRIP) {
      Wide of_b[PER_STRIP];
#pragma GCC unroll 2
      for (int k = 0; k < PER_STRIP; ++k) of_b[k] = load(b + k * WIDE);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        const Wide factor = all(a[r * s.a_row]);
#pragma GCC unroll 2
        for (int k = 0; k < PER_STRIP; ++k) sum[r][k] = multiply_add(factor, of_b[k], sum[r][k]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < PER_STRIP; ++i) store(c + r * s.c_row + i * WIDE, sum[r][i]);
}

// `rows`: at most ROWS.
template <int ROWS = TILE>
void tile_of(int rows, const Sum &sum, int64_t row) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of<ROWS - 1>(rows, sum, row);
  }
  tile<ROWS>(sum, row);
}

void multiply(const Sum &sum, int64_t rows) {
  for (int64_t row = 0; row < rows; row += TILE) tile_of(static_cast<int>(at_most(TILE, rows - row)), sum, row);
}

// ------------------------------------------------------------------------------------------------------------ packing

// `tokens` (at most 16) columns of x [D, ...], times `factor` -> strip[D][16], zeros beyond.
void pack_strip(const float *x, int64_t stride, int64_t d, int64_t tokens, float factor, float *strip) {
  const Wide by = all(factor);
  for (int64_t i = 0; i < d; ++i, x += stride, strip += STRIP) {
    if (tokens == STRIP) {
      for (int64_t t = 0; t < STRIP; t += WIDE) store(strip + t, mul(load(x + t), by));
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
