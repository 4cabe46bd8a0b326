// The arithmetic of int8.h. Who includes it defines multiply_add(sum, a, b): to each of eight int32 the products of two
// pairs of int16. Sums are exact, so no order shows.

#pragma once

#include "few.h"
#include "int8.h"
#include "tile_avx2.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int KC8 = 2 * KC;      // inner length of a packed piece, in codes that fill 16 bits each ...
constexpr int ROW8 = 2 * A_ROW;  // ... and of a row with its end
constexpr int64_t BLOCK = 32;  // rows that a thread takes at once where columns are few
constexpr float LARGEST_CODE = 127.0f;

// ----------------------------------------------------------------------------------------------------------- rounding

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

struct Sixteen {
  __m256 low, high;
};

// NR columns of b from one on: as they lie, zeros beyond the last one, or a sliver.
class Columns {
 public:
  Columns(const Product &p, int64_t column)
      : first_(p.is_packed ? p.b + column * p.inner : p.b + column),
        stride_(p.is_packed ? NR : p.b_stride),
        here_(p.is_packed ? NR : at_most(NR, p.n - column)) {}

  Sixteen row(int64_t k) const {
    const float *source = first_ + k * stride_;
    if (here_ == NR) return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + LANES)};
    float some[NR] = {};
    memcpy(some, source, here_ * sizeof(float));
    return {_mm256_loadu_ps(some), _mm256_loadu_ps(some + LANES)};
  }

 private:
  const float *first_;
  int64_t stride_, here_;
};

// A sliver of codes, [pairs of rows][NR] with the two codes of a column beside each other, and its columns' scales.
void round_sliver(const Product &p, int64_t column) {
  const Columns columns(p, column);
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int64_t k = 0; k < p.inner; ++k) {
    const Sixteen x = columns.row(k);
    low = _mm256_max_epi32(low, magnitude(x.low));
    high = _mm256_max_epi32(high, magnitude(x.high));
  }
  const __m256 low_scale = scales_of(low), high_scale = scales_of(high);
  _mm256_storeu_ps(p.column_scales + column, low_scale);
  _mm256_storeu_ps(p.column_scales + column + LANES, high_scale);
  const __m256 low_divisor = divisors(low_scale), high_divisor = divisors(high_scale);
  const __m256i lower_half = _mm256_set1_epi32(0xffff);
  int16_t *target = p.codes + column * (p.inner + p.inner % 2);
  for (int64_t k = 0; k < p.inner; k += 2, target += 2 * NR) {
    const Sixteen x = columns.row(k);
    __m256i low_pair = _mm256_and_si256(codes_of(x.low, low_divisor), lower_half);
    __m256i high_pair = _mm256_and_si256(codes_of(x.high, high_divisor), lower_half);
    if (k + 1 < p.inner) {
      const Sixteen y = columns.row(k + 1);
      low_pair = _mm256_or_si256(low_pair, _mm256_slli_epi32(codes_of(y.low, low_divisor), 16));
      high_pair = _mm256_or_si256(high_pair, _mm256_slli_epi32(codes_of(y.high, high_divisor), 16));
    }
    _mm256_store_si256(reinterpret_cast<__m256i *>(target), low_pair);
    _mm256_store_si256(reinterpret_cast<__m256i *>(target + NR), high_pair);
  }
}

// Weight rows [row, row + rows), columns [column, column + length) -> target[rows][ROW8], zeros in what a tile reads beyond.
void pack_codes(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, int16_t *target) {
  const int64_t even = length + length % 2;
  for (int64_t r = 0; r < rows; ++r, target += ROW8) {
    const char *source = p.weight + (row + r) * p.k + column;
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + i), _mm256_cvtepi8_epi16(codes));
    }
    for (; i < length; ++i) target[i] = static_cast<signed char>(source[i]);
    if (even > length) target[length] = 0;
  }
  const int64_t missing = (MR - rows % MR) % MR;
  for (int64_t r = 0; r < missing; ++r, target += ROW8) memset(target, 0, even * sizeof(int16_t));
}

// -------------------------------------------------------------------------------------------------------------- tiles

struct IntTile {
  __m256i sum[MR][2];
};

inline __m256i pair_at(const int16_t *codes) {
  int32_t pair;
  memcpy(&pair, codes, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// Adds a[i * ROW8 + k] times a sliver of codes.
inline __attribute__((always_inline)) void multiply_codes(const int16_t *a, const int16_t *b, int64_t pairs,
                                                          IntTile &tile) {
  __m256i c00 = tile.sum[0][0], c01 = tile.sum[0][1], c10 = tile.sum[1][0], c11 = tile.sum[1][1];
  __m256i c20 = tile.sum[2][0], c21 = tile.sum[2][1], c30 = tile.sum[3][0], c31 = tile.sum[3][1];
  __m256i c40 = tile.sum[4][0], c41 = tile.sum[4][1], c50 = tile.sum[5][0], c51 = tile.sum[5][1];
#pragma GCC unroll 4
  for (int64_t k = 0; k < pairs; ++k) {
    const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i *>(b));
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i *>(b + NR));
    __m256i x = pair_at(a), y = pair_at(a + ROW8);
    c00 = multiply_add(c00, x, low);
    c01 = multiply_add(c01, x, high);
    c10 = multiply_add(c10, y, low);
    c11 = multiply_add(c11, y, high);
    x = pair_at(a + 2 * ROW8);
    y = pair_at(a + 3 * ROW8);
    c20 = multiply_add(c20, x, low);
    c21 = multiply_add(c21, x, high);
    c30 = multiply_add(c30, y, low);
    c31 = multiply_add(c31, y, high);
    x = pair_at(a + 4 * ROW8);
    y = pair_at(a + 5 * ROW8);
    c40 = multiply_add(c40, x, low);
    c41 = multiply_add(c41, x, high);
    c50 = multiply_add(c50, y, low);
    c51 = multiply_add(c51, y, high);
    a += 2;
    b += 2 * NR;
  }
  tile = {{{c00, c01}, {c10, c11}, {c20, c21}, {c30, c31}, {c40, c41}, {c50, c51}}};
}

// Sums that are not complete wait in c, as the bits of integers. `rows`, `columns`: what of a tile c has.
void load_sums(IntTile &tile, const float *c, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    if (columns == NR) {
      memcpy(&tile.sum[i], c, sizeof tile.sum[i]);
    } else {
      memcpy(&tile.sum[i], c, columns * sizeof(int32_t));
    }
  }
}

void store_sums(const IntTile &tile, float *c, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    if (columns == NR) {
      memcpy(c, &tile.sum[i], sizeof tile.sum[i]);
    } else {
      memcpy(c, &tile.sum[i], columns * sizeof(int32_t));
    }
  }
}

// Rows from `row`, columns from `column`: times the scales of both.
inline Tile scaled(const Product &p, const IntTile &tile, int64_t row, int64_t rows, int64_t column) {
  const __m256 low = _mm256_loadu_ps(p.column_scales + column), high = _mm256_loadu_ps(p.column_scales + column + LANES);
  Tile out;
  for (int64_t i = 0; i < MR; ++i) {
    const float of_row = i < rows ? Format<LEMA_F32>::one(p.scales + (row + i) * sizeof(float)) : 0.0f;
    const __m256 scale = _mm256_set1_ps(of_row);
    out.sum[i][0] = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(tile.sum[i][0]), scale), low);
    out.sum[i][1] = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(tile.sum[i][1]), scale), high);
  }
  return out;
}

// The low-rank term beyond its first KC inner products.
void add_rest_of_low_rank(const Product &p, const Block &block, float *packed_u) {
  for (int64_t start = KC; start < p.rank; start += KC) {
    const int64_t length = at_most(KC, p.rank - start);
    pack_u(p, block.from, block.to - block.from, start, length, packed_u);
    for (int64_t column = block.left; column < block.right; column += NR) {
      const float *u = packed_u, *v = p.packed_v + column * p.rank + start * NR;
      for (int64_t row = block.from; row < block.to; row += MR, u += length * MR) {
        Tile tile{};
        multiply_tile<1, MR>(u, v, length, tile);
        put_part(tile, p.c + row * p.c_stride + column, p.c_stride, true, at_most(MR, block.to - row),
                 at_most(NR, p.n - column));
      }
    }
  }
}

void multiply_block(const Job &job, const Block &block, int16_t *packed, float *packed_u) {
  const Product &p = job.product;
  const int64_t from = block.from, to = block.to, even = p.inner + p.inner % 2;
  const int64_t row_tiles = (to - from + MR - 1) / MR, tiles = row_tiles * ((block.right - block.left + NR - 1) / NR);
  const int64_t all = p.inner > 0 ? (p.inner + KC8 - 1) / KC8 : 1;
  const int64_t u_length = at_most(KC, p.rank);
  pack_u(p, from, to - from, 0, u_length, packed_u);
  for (int64_t piece = 0; piece < all; ++piece) {
    const bool last = piece + 1 == all;
    const int64_t start = piece * KC8, length = at_most(KC8, p.inner - start), pairs = (length + 1) / 2;
    pack_codes(p, from, to - from, start, length, packed);
    // after the last piece likely the first one of the rows that are dealt out next
    const int64_t likely = job.next_row.load(std::memory_order_relaxed) % p.m, next = last ? 0 : start + KC8;
    const int64_t next_row = last ? likely : from, next_rows = last ? at_most(p.m - likely, to - from) : to - from;
    Ahead ahead(p.weight + next_row * p.k + next, p.k, next_rows, at_most(KC8, p.inner - next), tiles);
    for (int64_t column = block.left; column < block.right; column += NR) {
      const int16_t *a = packed, *b = p.codes + column * even + start * NR;
      const float *u = packed_u, *v = p.packed_v + column * p.rank;
      const int16_t *next_b = column + NR < block.right ? b + even * NR : p.codes + block.left * even + next * NR;
      Ahead of_b(reinterpret_cast<const char *>(next_b), SLIVER_ROW_BYTES, pairs, SLIVER_ROW_BYTES, row_tiles);
      for (int64_t row = from; row < to; row += MR, a += MR * ROW8, u += u_length * MR) {
        float *c = p.c + row * p.c_stride + column;
        const int64_t rows = at_most(MR, to - row), columns = at_most(NR, p.n - column);
        ahead.step();
        of_b.step();
        ask_for_tile(c, p.c_stride);
        IntTile sums{};
        if (piece > 0) load_sums(sums, c, p.c_stride, rows, columns);
        multiply_codes(a, b, pairs, sums);
        if (last) {
          Tile tile = scaled(p, sums, row, rows, column);
          multiply_tile<1, MR>(u, v, u_length, tile);
          put_part(tile, c, p.c_stride, false, rows, columns);
        } else {
          store_sums(sums, c, p.c_stride, rows, columns);
        }
      }
    }
  }
  add_rest_of_low_rank(p, block, packed_u);
}

// Rounds what is left to round of b, packs what is left of v, and waits for what other threads do of it.
void round_all(Job &job) {
  const Product &p = job.product;
  pack_pieces(job, (p.n + NR - 1) / NR, [&](int64_t piece) { round_sliver(p, piece * NR); });
}

void run_int8_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  float *const packed_u = p.packed_u + static_cast<int64_t>(slot) * U_FLOATS;
  round_all(job);
  for (Block block; take(job, block);) multiply_block(job, block, reinterpret_cast<int16_t *>(packed), packed_u);
}

// -------------------------------------------------------------------------------------------------------- few columns

inline int64_t padded(int64_t inner) { return (inner + FEW_STEP - 1) / FEW_STEP * FEW_STEP; }

void round_few(const Product &p) {
  const int64_t length = padded(p.inner);
  for (int64_t n = 0; n < p.n; ++n) {
    const float *x = p.packed_b + n * p.inner;
    int16_t *target = p.codes + n * length;
    const auto eight = [&](int64_t k) {
      if (k + LANES <= p.inner) return _mm256_loadu_ps(x + k);
      float some[LANES] = {};
      if (k < p.inner) memcpy(some, x + k, (p.inner - k) * sizeof(float));
      return _mm256_loadu_ps(some);
    };
    __m256i largest = _mm256_setzero_si256();
    for (int64_t k = 0; k < length; k += LANES) largest = _mm256_max_epi32(largest, magnitude(eight(k)));
    largest = _mm256_max_epi32(largest, _mm256_permute2x128_si256(largest, largest, 1));
    largest = _mm256_max_epi32(largest, _mm256_shuffle_epi32(largest, 0x4e));
    largest = _mm256_max_epi32(largest, _mm256_shuffle_epi32(largest, 0xb1));
    const __m256 scale = scales_of(largest), divisor = divisors(scale);
    p.column_scales[n] = _mm256_cvtss_f32(scale);
    for (int64_t k = 0; k < length; k += LANES) {
      const __m256i codes = codes_of(eight(k), divisor);
      const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(target + k), narrow);
    }
  }
}

inline int32_t sum_of_lanes(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

template <int ROWS, int N>
void few_dots(const Product &p, int64_t row) {
  const int64_t length = padded(p.inner);
  const char *w = p.weight + row * p.k;
  __m256i sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm256_setzero_si256();
  const auto add = [&](int64_t k, const __m128i (&codes)[ROWS]) {
    for (int r = 0; r < ROWS; ++r) {
      const __m256i wide = _mm256_cvtepi8_epi16(codes[r]);
      for (int n = 0; n < N; ++n) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p.codes + n * length + k));
        sums[r][n] = multiply_add(sums[r][n], wide, x);
      }
    }
  };
  __m128i codes[ROWS];
  int64_t k = 0;
  for (; k + FEW_STEP <= p.inner; k += FEW_STEP) {
    for (int r = 0; r < ROWS; ++r) codes[r] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(w + r * p.k + k));
    add(k, codes);
  }
  if (k < p.inner) {
    for (int r = 0; r < ROWS; ++r) {
      char last[FEW_STEP] = {};
      memcpy(last, w + r * p.k + k, p.inner - k);
      codes[r] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(last));
    }
    add(k, codes);
  }
  for (int r = 0; r < ROWS; ++r) {
    const float scale = Format<LEMA_F32>::one(p.scales + (row + r) * sizeof(float));
    for (int n = 0; n < N; ++n) {
      float sum = static_cast<float>(sum_of_lanes(sums[r][n])) * scale * p.column_scales[n];
      const float *u = p.u + (row + r) * p.u_row;
      for (int64_t i = 0; i < p.rank; ++i) sum = __builtin_fmaf(p.scale * u[i * p.u_column], p.v[i * p.v_stride + n], sum);
      p.c[(row + r) * p.c_stride + n] = sum;
    }
  }
}

template <int N>
void few_rows(const Product &p, int64_t from, int64_t to) {
  constexpr int ROWS = N <= 2 ? 4 : 2;
  int64_t row = from;
  for (; row + ROWS <= to; row += ROWS) few_dots<ROWS, N>(p, row);
  for (; row < to; ++row) few_dots<1, N>(p, row);
}

void run_int8_few(void *context, int) {
  deal_few(*static_cast<Job *>(context), BLOCK, [](auto columns, const Product &p, int64_t from, int64_t to) {
    few_rows<decltype(columns)::value>(p, from, to);
  });
}

}  // namespace
}  // namespace lema
