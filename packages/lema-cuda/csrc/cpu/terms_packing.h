// Weights, and what they are multiplied with, packed as terms of bf16 for tiles_amx.cpp.

#pragma once

#include "amx.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int terms_of(int dtype) {
  if (dtype == LEMA_BF16 || dtype == LEMA_INT8) return 1;
  return dtype == LEMA_F32 || dtype == LEMA_NF4 ? 3 : 2;
}

inline __m512 widened(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

// The next term of 32 numbers, which is taken from them.
inline __m512i next_term(__m512 &low, __m512 &high) {
  const __m512i term = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(term)));
  high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(term, 1)));
  return term;
}

// 16 of a row and 16 of the next one, those of a column beside each other.
inline __m512i interleaved(__m512i rows) {
  const __m512i numbered = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i twice = _mm512_mullo_epi32(numbered, _mm512_set1_epi32(0x10001));
  const __m512i order = _mm512_add_epi32(twice, _mm512_set1_epi32(0x100000));
  return _mm512_permutexvar_epi16(order, rows);
}

inline __m512i interleaved(__m256i row, __m256i next) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(row), _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16));
}

// Rows of pairs -> the rows of a tile, of which each has its pairs from a column.
inline void store_turned(const __m512i (&rows)[SIDE], char *tile) {
  __m512i a[SIDE], b[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
  // b[4 i + j] has columns j, j + 4, j + 8 and j + 12, each of rows 4 i to 4 i + 3
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    store_row(tile, j, _mm512_shuffle_i32x4(low, high, 0x88));
    store_row(tile, j + 4, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    store_row(tile, j + 8, _mm512_shuffle_i32x4(low, high, 0xdd));
    store_row(tile, j + 12, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}

// Rows [from, to) of a matrix of `inner` rows and n columns -> [tiles of columns][steps of inner][term] tiles, whose rows
// have pairs of rows; zeros beyond either end. Row i is multiplied by factors[i], unless there are none.
void pack_terms(const float *matrix, int64_t stride, int64_t inner, int64_t n, int64_t from, int64_t to,
                const char *factors, float *packed) {
  const int64_t stop = depths(to) * DEPTH;
  for (int64_t row = from; row < stop; row += 2) {
    const float *source = matrix + row * stride;
    for (int64_t column = 0; column < n; column += SIDE) {
      char *const target = tiles_at(packed, inner, row, column);
      const __mmask16 here = lanes(n - column);
      __m512 even = _mm512_maskz_loadu_ps(row < to ? here : 0, source + column);
      __m512 odd = _mm512_maskz_loadu_ps(row + 1 < to ? here : 0, source + stride + column);
      if (factors != nullptr) {
        if (row < to) even = _mm512_mul_ps(even, _mm512_set1_ps(Format<LEMA_F32>::one(factors + 4 * row)));
        if (row + 1 < to) odd = _mm512_mul_ps(odd, _mm512_set1_ps(Format<LEMA_F32>::one(factors + 4 * (row + 1))));
      }
      for (int t = 0; t < MOST_TERMS; ++t)
        store_row(target + t * TILE_BYTES, row % DEPTH / 2, interleaved(next_term(even, odd)));
    }
  }
}

// 32 numbers as the row of TERMS tiles.
template <int TERMS>
inline void store_terms(__m512 low, __m512 high, char *tile, int64_t row) {
  for (int t = 0; t < TERMS; ++t) store_row(tile + t * TILE_BYTES, row, next_term(low, high));
}

// Int8 codes as they are; `here`: which there are.
inline __m512 codes(const char *at, __mmask16 here) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(here, at)));
}

// Weight rows [row, row + rows), columns [column, column + length) -> [tiles of rows][steps][term] tiles.
template <int DTYPE>
void pack_rows(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, char *target) {
  constexpr int TERMS = terms_of(DTYPE);
  const int64_t steps = depths(length);
  alignas(64) float wide[KC];
  for (int64_t r = 0; r < sides(rows) * SIDE; ++r) {
    char *tile = target + r / SIDE * steps * TERMS * TILE_BYTES;
    if (r >= rows) {
      for (int64_t i = 0; i < steps * TERMS; ++i) store_row(tile + i * TILE_BYTES, r % SIDE, _mm512_setzero_si512());
      continue;
    }
    const Row<DTYPE> source(p.weight, p.scales, p.k, row + r);
    if constexpr (TERMS > 1) {
      decode(source, column, length, wide);
      for (int64_t i = length; i < steps * DEPTH; ++i) wide[i] = 0.0f;
    }
    for (int64_t i = 0; i < steps * DEPTH; i += DEPTH, tile += TERMS * TILE_BYTES) {
      const __mmask16 low = lanes(length - i), high = lanes(length - i - SIDE);
      const char *const at = source.at(column + i);
      if constexpr (TERMS > 1) {
        store_terms<TERMS>(_mm512_load_ps(wide + i), _mm512_load_ps(wide + i + SIDE), tile, r % SIDE);
      } else if constexpr (DTYPE == LEMA_INT8) {
        store_terms<1>(codes(at, low), codes(at + SIDE, high), tile, r % SIDE);
      } else {
        store_row(tile, r % SIDE, _mm512_maskz_loadu_epi16(low | static_cast<__mmask32>(high) << SIDE, at));
      }
    }
  }
}

// Weight columns [column, column + columns), rows [row, row + length) -> [tiles of columns][steps][term] tiles.
template <int DTYPE>
void pack_columns(const Product &p, int64_t column, int64_t columns, int64_t row, int64_t length, char *target) {
  constexpr int TERMS = terms_of(DTYPE);
  constexpr int64_t START = Row<DTYPE>::ALIGNED > 1 ? 32 : 1;  // a row is decoded from a multiple of it on
  constexpr int64_t WIDTH = TERMS > 1 ? MC + 2 * 32 : 1;
  alignas(64) float wide[DEPTH][WIDTH];
  const int64_t steps = depths(length);
  const int64_t left = column / START * START, stop = at_most(p.k, (column + columns + START - 1) / START * START);
  for (int64_t s = 0; s < steps; ++s, target += TERMS * TILE_BYTES) {
    const int64_t here = at_most(DEPTH, length - s * DEPTH);
    const char *at[DEPTH];
    for (int64_t i = 0; i < here; ++i) {
      const Row<DTYPE> source(p.weight, p.scales, p.k, row + s * DEPTH + i);
      at[i] = source.at(column);
      if constexpr (TERMS > 1) decode(source, left, stop - left, wide[i]);
    }
    char *tile = target;
    for (int64_t j = 0; j < columns; j += SIDE, tile += steps * TERMS * TILE_BYTES) {
      const __mmask16 there = lanes(columns - j);
      const auto bits = [&](int64_t i) {
        return i < here ? _mm256_maskz_loadu_epi16(there, at[i] + 2 * j) : _mm256_setzero_si256();
      };
      const auto number = [&](int64_t i) {
        if (i >= here) return _mm512_setzero_ps();
        if constexpr (DTYPE == LEMA_INT8) return codes(at[i] + j, there);
        return _mm512_maskz_loadu_ps(there, wide[i] + (column - left + j) % WIDTH);
      };
      __m512i pairs[TERMS][SIDE];
      for (int i = 0; i < SIDE; ++i) {
        if constexpr (DTYPE == LEMA_BF16) {
          pairs[0][i] = interleaved(bits(2 * i), bits(2 * i + 1));
        } else {
          __m512 even = number(2 * i), odd = number(2 * i + 1);
          for (int t = 0; t < TERMS; ++t) pairs[t][i] = interleaved(next_term(even, odd));
        }
      }
      for (int t = 0; t < TERMS; ++t) store_turned(pairs[t], tile + t * TILE_BYTES);
    }
  }
}

// Rows [row, row + rows), columns [column, column + length) of scale * u -> [tiles of rows][steps][term] tiles.
void pack_u(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, char *target) {
  const int64_t steps = depths(length);
  for (int64_t r = 0; r < sides(rows) * SIDE; ++r)
    for (int64_t s = 0; s < steps; ++s) {
      alignas(64) float wide[DEPTH] = {};
      const float *source = p.u + (row + r) * p.u_row + (column + s * DEPTH) * p.u_column;
      if (r < rows)
        for (int64_t i = 0; i < at_most(DEPTH, length - s * DEPTH); ++i) wide[i] = p.scale * source[i * p.u_column];
      store_terms<MOST_TERMS>(_mm512_load_ps(wide), _mm512_load_ps(wide + SIDE),
                           target + (r / SIDE * steps + s) * MOST_TERMS * TILE_BYTES, r % SIDE);
    }
}

}  // namespace
}  // namespace lema
