// Numbers of fp32 as sums of three of bf16, exactly (each is what is left, rounded), and how they are packed: a matrix lies
// as [16 columns][32 rows][term] tiles of 16 rows, which have two rows of the matrix, those of a column beside each other.

#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int SIDE = 16;       // rows of a tile, and columns of the matrix that it has
constexpr int ROW_BYTES = 64;  // of a tile
constexpr int DEPTH = 32;      // rows of the matrix that a tile has
constexpr int MOST_TERMS = 3;
constexpr int64_t TILE_BYTES = SIDE * ROW_BYTES;

inline int64_t depths(int64_t inner) { return (inner + DEPTH - 1) / DEPTH; }

inline int64_t sides(int64_t length) { return (length + SIDE - 1) / SIDE; }

// The tiles of columns from `column`, a multiple of SIDE, and rows from `row`.
inline char *tiles_at(float *packed, int64_t inner, int64_t row, int64_t column) {
  return reinterpret_cast<char *>(packed) + (column / SIDE * depths(inner) + row / DEPTH) * MOST_TERMS * TILE_BYTES;
}
inline const char *tiles_at(const float *packed, int64_t inner, int64_t row, int64_t column) {
  return tiles_at(const_cast<float *>(packed), inner, row, column);
}

struct Sixteen {
  __m256 low, high;
};

// A row of such columns, again as numbers.
inline Sixteen sum_of_terms(const float *packed, int64_t inner, int64_t row, int64_t column) {
  const char *pairs = tiles_at(packed, inner, row, column) + row % DEPTH / 2 * ROW_BYTES;
  const auto numbers = [&](int64_t term, int64_t half) {
    const void *at = pairs + term * TILE_BYTES + half * ROW_BYTES / 2;
    const __m256i pair = _mm256_loadu_si256(static_cast<const __m256i *>(at)), upper = _mm256_set1_epi32(-0x10000);
    return _mm256_castsi256_ps(row % 2 == 0 ? _mm256_slli_epi32(pair, 16) : _mm256_and_si256(pair, upper));
  };
  const auto sum = [&](int64_t half) {
    return _mm256_add_ps(_mm256_add_ps(numbers(2, half), numbers(1, half)), numbers(0, half));
  };
  return {sum(0), sum(1)};
}

}  // namespace
}  // namespace lema
