// What products with tiles in registers are made of: packing of b, u and v, and the tile.

#pragma once

#include "blocks.h"
#include "wide.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

// A tile: as many sums as registers hold beside a row of b. Its slivers of b lie beside each other.
constexpr int MR = WIDE == 16 ? 12 : 6;      // rows
constexpr int SLIVERS = WIDE == 16 ? 2 : 1;  // at most, of NR columns
constexpr int PER_SLIVER = NR / WIDE;        // registers of its row
constexpr int64_t A_SLIVER = MR * A_ROW;     // MR rows of packed `a`, with room for a store that overhangs
static_assert(MC % MR == 0 && MC * A_ROW == A_FLOATS && SMALLEST_BLOCK % MR == 0, "a block is of whole tiles");

constexpr int64_t SLIVER_ROW_BYTES = NR * sizeof(float);

// ------------------------------------------------------------------------------------------------------------ packing

// Rows [from, to) of a matrix of `inner` rows and n columns into every sliver.
void pack_slivers(const float *matrix, int64_t stride, int64_t inner, int64_t n, int64_t from, int64_t to,
                  float *packed) {
  const int64_t whole = n / NR * NR;
  for (int64_t row = from; row < to; ++row) {
    const float *source = matrix + row * stride;
    float *target = packed + row * NR;
    for (int64_t column = 0; column < whole; column += NR, target += inner * NR) {
      const __m256 low = _mm256_loadu_ps(source + column), high = _mm256_loadu_ps(source + column + LANES);
      _mm256_store_ps(target, low);
      _mm256_store_ps(target + LANES, high);
    }
    if (whole < n) {
      memset(target, 0, NR * sizeof(float));
      memcpy(target, source + whole, (n - whole) * sizeof(float));
    }
  }
}

// Rows [row, row + rows), columns [column, column + length) of scale * u -> slivers [length][MR], zeros beyond the rows.
inline void pack_u(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, float *target) {
  for (int64_t r = 0; r < rows; r += MR) {
    const int64_t here = at_most(MR, rows - r);
    const float *source = p.u + (row + r) * p.u_row + column * p.u_column;
    for (int64_t i = 0; i < length; ++i, source += p.u_column, target += MR)
      for (int64_t j = 0; j < MR; ++j) target[j] = j < here ? p.scale * source[j * p.u_row] : 0.0f;
  }
}

// -------------------------------------------------------------------------------------------------------------- tiles

template <class Number, int S>
struct Sums {  // of S slivers
  Register<Number> of[MR][S * PER_SLIVER];
};
template <int S>
using Tile = Sums<float, S>;

inline Wide add_products(Wide sum, Wide a, Wide b) { return multiply_add(a, b, sum); }

// What a lane takes of `a` at once, a number or a pair of codes, and as much of a row of slivers, `apart` numbers from
// each other: adds their products, over `length` of them in order. ROW and INNER: from a row of the tile, and from one
// of them, to the next in `a`.
template <int ROW, int INNER, class Number, int S>
inline __attribute__((always_inline)) void multiply_tile(const Number *a, const Number *b, int64_t apart, int64_t length,
                                                         Sums<Number, S> &tile) {
  constexpr int ACROSS = S * PER_SLIVER, IN_LANE = sizeof(float) / sizeof(Number);
  Register<Number> sum[MR][ACROSS];
#pragma GCC unroll 12
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < ACROSS; ++j) sum[i][j] = tile.of[i][j];
#pragma GCC unroll 4
  for (int64_t k = 0; k < length; ++k, a += INNER, b += IN_LANE * NR) {
    Register<Number> row[ACROSS];
#pragma GCC unroll 2
    for (int j = 0; j < ACROSS; ++j) row[j] = load(b + j / PER_SLIVER * apart + j % PER_SLIVER * IN_LANE * WIDE);
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      const Register<Number> factor = factor_at(a + i * ROW);
#pragma GCC unroll 2
      for (int j = 0; j < ACROSS; ++j) sum[i][j] = add_products(sum[i][j], factor, row[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < ACROSS; ++j) tile.of[i][j] = sum[i][j];
}

// What c has of a tile: so many rows and columns.
template <int S>
inline void put_part(const Tile<S> &tile, float *c, int64_t stride, bool accumulate, int64_t rows, int64_t columns) {
  if (columns == S * NR) {
    for (int64_t i = 0; i < rows; ++i, c += stride)
      for (int j = 0; j < S * PER_SLIVER; ++j) {
        float *const target = c + j * WIDE;
        store(target, accumulate ? add(load(target), tile.of[i][j]) : tile.of[i][j]);
      }
  } else {
    for (int64_t i = 0; i < rows; ++i, c += stride) {
      float row[S * NR];
      memcpy(row, tile.of[i], sizeof row);
      for (int64_t j = 0; j < columns; ++j) c[j] = accumulate ? c[j] + row[j] : row[j];
    }
  }
}

// Asked for before a tile is multiplied, a tile of c is there when the sums are added to it.
template <int S>
inline void ask_for_tile(const float *c, int64_t stride) {
  for (int i = 0; i < MR; ++i, c += stride)
    for (int j = 0; j < S; ++j) _mm_prefetch(reinterpret_cast<const char *>(c + j * NR), _MM_HINT_T0);
}

// Packs what is left of b, in `of_b` pieces, and of v, and waits for what other threads are packing.
template <typename PackOfB>
inline void pack_pieces(Job &job, int64_t of_b, PackOfB pack_of_b) {
  const Product &p = job.product;
  pack_pieces(job, of_b, pack_of_b, [&](int64_t from, int64_t to) {
    pack_slivers(p.v, p.v_stride, p.rank, p.n, from, to, p.packed_v);
  });
}

}  // namespace
}  // namespace lema
