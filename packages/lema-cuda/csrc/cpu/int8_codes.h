// What products of codes share: columns that are rounded to codes, and the low-rank term beyond what is summed with them.

#pragma once

#include "terms.h"
#include "tile.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr float LARGEST_CODE = 127.0f;

inline __m256i magnitude(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }

// From the bits of the largest magnitudes, which order as their numbers do, infinity and NaN above all: NaN for those.
inline __m256 scales_of(__m256i largest) {
  const __m256i above = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff));
  const __m256 scale = _mm256_div_ps(_mm256_castsi256_ps(largest), _mm256_set1_ps(LARGEST_CODE));
  return _mm256_or_ps(scale, _mm256_castsi256_ps(above));
}

// What columns are divided by: 1 where all is zero.
inline __m256 divisors(__m256 scales) {
  const __m256 zero = _mm256_cmp_ps(scales, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_blendv_ps(scales, _mm256_set1_ps(1.0f), zero);
}

inline __m256i codes_of(__m256 x, __m256 divisor) {
  const __m256i code = _mm256_cvtps_epi32(_mm256_div_ps(x, divisor));
  return _mm256_max_epi32(_mm256_min_epi32(code, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
}

// NR columns of b from one on: as they lie, zeros beyond the last one, or packed.
class Columns {
 public:
  Columns(const Product &p, int64_t column)
      : p_(p),
        column_(column),
        first_(p.is_packed ? p.b + column * p.inner : p.b + column),
        stride_(p.is_packed ? NR : p.b_stride),
        here_(p.is_packed ? NR : at_most(NR, p.n - column)) {}

  Sixteen row(int64_t k) const {
    if (p_.in_terms) return sum_of_terms(p_.b, p_.inner, k, column_);
    const float *source = first_ + k * stride_;
    if (here_ == NR) return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + LANES)};
    float some[NR] = {};
    memcpy(some, source, here_ * sizeof(float));
    return {_mm256_loadu_ps(some), _mm256_loadu_ps(some + LANES)};
  }

 private:
  const Product &p_;
  int64_t column_;
  const float *first_;
  int64_t stride_, here_;
};

// Of NR columns from `column`, whose scales are left in column_scales.
inline Sixteen divisors_of(const Product &p, const Columns &columns, int64_t column) {
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int64_t k = 0; k < p.inner; ++k) {
    const Sixteen x = columns.row(k);
    low = _mm256_max_epi32(low, magnitude(x.low));
    high = _mm256_max_epi32(high, magnitude(x.high));
  }
  const __m256 low_scale = scales_of(low), high_scale = scales_of(high);
  _mm256_storeu_ps(p.column_scales + column, low_scale);
  _mm256_storeu_ps(p.column_scales + column + LANES, high_scale);
  return {divisors(low_scale), divisors(high_scale)};
}

// The low-rank term beyond its first KC inner products.
inline void add_rest_of_low_rank(const Product &p, const Block &block, float *packed_u) {
  for (int64_t start = KC; start < p.rank; start += KC) {
    const int64_t length = at_most(KC, p.rank - start);
    pack_u(p, block.from, block.to - block.from, start, length, packed_u);
    for (int64_t column = block.left; column < block.right; column += NR) {
      const float *u = packed_u, *v = p.packed_v + column * p.rank + start * NR;
      for (int64_t row = block.from; row < block.to; row += MR, u += length * MR) {
        Tile<1> tile{};
        multiply_tile<1, MR>(u, v, 0, length, tile);
        put_part<1>(tile, p.c + row * p.c_stride + column, p.c_stride, true, at_most(MR, block.to - row),
                    at_most(NR, p.n - column));
      }
    }
  }
}

}  // namespace
}  // namespace lema
