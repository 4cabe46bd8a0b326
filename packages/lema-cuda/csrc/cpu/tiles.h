// The arithmetic of products with a weight for many tokens. The loops are those of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): b is packed once into slivers of NR columns, a block of
// MC rows of `a` is widened to fp32 as it is packed, and tiles stay in registers while they are summed.
//
// An element of c is the sum over the pieces of the inner dimension, in order, of a chain of fused multiply-adds over
// the piece: KC columns of the weight, then KC of `u`. No choice of rows, columns or threads changes that, nor do the
// instructions that a file is compiled for.

#pragma once

#include "tile.h"

namespace lema {
namespace {

// Weight rows [row, row + rows), columns [column, column + length) -> target[rows][A_ROW]. A tile reads MR rows of it.
template <int DTYPE>
void pack_rows(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, float *target) {
  for (int64_t r = 0; r < rows; ++r, target += A_ROW) decode(Row<DTYPE>(p.weight, p.scales, p.k, row + r), column, length, target);
  const int64_t missing = (MR - rows % MR) % MR;
  for (int64_t r = 0; r < missing; ++r, target += A_ROW) memset(target, 0, length * sizeof(float));
}

// Weight columns [column, column + columns), rows [row, row + length) -> slivers of A_SLIVER, [KC][MR] each. Eights are
// stored, and those beyond MR are overwritten by the next row of the sliver. Rows are decoded some at a time, so that
// whole cache lines of a sliver are written together.
template <int DTYPE>
void pack_columns(const Product &p, int64_t column, int64_t columns, int64_t row, int64_t length, float *target) {
  constexpr int64_t START = Row<DTYPE>::ALIGNED > 1 ? 32 : 1;  // a row is decoded from a multiple of it on
  constexpr int64_t ROWS = 8;
  alignas(64) float wide[ROWS][MC + 2 * 32];
  const int64_t first = column / START * START, stop = at_most(p.k, (column + columns + START - 1) / START * START);
  for (int64_t r = 0; r < length; r += ROWS, target += ROWS * MR) {
    const int64_t here = at_most(ROWS, length - r);
    for (int64_t i = 0; i < here; ++i)
      decode(Row<DTYPE>(p.weight, p.scales, p.k, row + r + i), first, stop - first, wide[i]);
    const float *numbers = &wide[0][column - first];
    float *sliver = target;
    int64_t j = 0;
    for (; j + MR <= columns; j += MR, numbers += MR, sliver += A_SLIVER)
      for (int64_t i = 0; i < here; ++i)
        for (int64_t m = 0; m < MR; m += LANES)
          _mm256_storeu_ps(sliver + i * MR + m, _mm256_loadu_ps(numbers + i * (MC + 2 * 32) + m));
    if (j < columns)
      for (int64_t i = 0; i < here; ++i)
        for (int64_t m = 0; m < MR; ++m) sliver[i * MR + m] = j + m < columns ? numbers[i * (MC + 2 * 32) + m] : 0.0f;
  }
}

// One piece of a block: what is packed of the weight and of u, this thread's.
struct Piece {
  int64_t start, length, u_length;
  const float *packed, *packed_u;
  bool add;
};

// Columns [column, column + S NR) of a block, some of which c may lack.
template <bool TRANSPOSED, int S>
void multiply_slivers(const Product &p, const Block &block, const Piece &piece, int64_t column, Ahead &ahead) {
  constexpr int ROW = TRANSPOSED ? 1 : A_ROW, INNER = TRANSPOSED ? MR : 1;
  const int64_t apart = p.inner * NR, u_apart = p.rank * NR, after = column + S * NR;
  const int64_t row_tiles = (block.to - block.from + MR - 1) / MR;
  const float *const b = p.packed_b + column * p.inner + piece.start * NR;
  const float *const v = p.packed_v + column * p.rank + piece.start * NR;
  const float *next = after < block.right ? b + S * apart
                                          : p.packed_b + block.left * p.inner + (piece.start + piece.length) * NR;
  Ahead of_b[S];
  for (int s = 0; s < S; ++s, next += apart)
    of_b[s] = Ahead(reinterpret_cast<const char *>(next), SLIVER_ROW_BYTES, piece.length, SLIVER_ROW_BYTES, row_tiles);
  const float *a = piece.packed, *u = piece.packed_u;
  for (int64_t row = block.from; row < block.to; row += MR, a += A_SLIVER, u += piece.u_length * MR) {
    float *c = p.c + row * p.c_stride + column;
    Tile<S> tile{};
    ahead.step();
    for (Ahead &of_sliver : of_b) of_sliver.step();
    ask_for_tile<S>(c, p.c_stride);
    multiply_tile<ROW, INNER>(a, b, apart, piece.length, tile);
    if (piece.u_length > 0) multiply_tile<1, MR>(u, v, u_apart, piece.u_length, tile);
    put_part<S>(tile, c, p.c_stride, piece.add, at_most(MR, block.to - row), at_most(S * NR, p.n - column));
  }
}

// `packed` and `packed_u` are this thread's, for the weight and u.
template <int DTYPE, bool TRANSPOSED>
void multiply_block(const Job &job, const Block &block, float *packed, float *packed_u) {
  const Product &p = job.product;
  const int64_t from = block.from, to = block.to;
  const int64_t tiles = (to - from + MR - 1) / MR * ((block.right - block.left + SLIVERS * NR - 1) / (SLIVERS * NR));
  const int64_t longest = p.inner > p.rank ? p.inner : p.rank;
  const int64_t all = longest > 0 ? pieces(longest) : 1;  // zeros, where there is nothing to sum
  for (int64_t i = 0; i < all; ++i) {
    const int64_t start = i * KC;
    const int64_t length = at_most(KC, p.inner > start ? p.inner - start : 0);
    const int64_t u_length = at_most(KC, p.rank > start ? p.rank - start : 0);
    const Piece piece{start, length, u_length, packed, packed_u, p.accumulate || i > 0};
    if (TRANSPOSED) {
      pack_columns<DTYPE>(p, from, to - from, start, length, packed);
    } else {
      pack_rows<DTYPE>(p, from, to - from, start, length, packed);
    }
    pack_u(p, from, to - from, start, u_length, packed_u);
    Ahead ahead = after_piece<DTYPE, TRANSPOSED>(job, block, start, tiles);
    int64_t column = block.left;
    if constexpr (SLIVERS == 2)
      for (; column + NR < block.right; column += 2 * NR)
        multiply_slivers<TRANSPOSED, 2>(p, block, piece, column, ahead);
    for (; column < block.right; column += NR) multiply_slivers<TRANSPOSED, 1>(p, block, piece, column, ahead);
  }
}

// Packs what is left to pack of b and v, and waits for what other threads are packing.
void pack_all(Job &job) {
  const Product &p = job.product;
  pack_pieces(job, p.is_packed ? 0 : pieces(p.inner), [&](int64_t piece) {
    pack_slivers(p.b, p.b_stride, p.inner, p.n, piece * KC, at_most(p.inner, (piece + 1) * KC), p.packed_b);
  });
}

void run_pack(void *context, int) { pack_all(*static_cast<Job *>(context)); }

template <int DTYPE>
void run_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  float *const packed_u = p.packed_u + static_cast<int64_t>(slot) * U_FLOATS;
  pack_all(job);
  for (Block block; take(job, block, MR);) {
    if (p.transposed) {
      multiply_block<DTYPE, true>(job, block, packed, packed_u);
    } else {
      multiply_block<DTYPE, false>(job, block, packed, packed_u);
    }
  }
}

int64_t packed_floats(int64_t inner, int64_t columns) { return inner * ((columns + NR - 1) / NR * NR); }

int64_t a_floats(int, int64_t) { return A_FLOATS; }

int64_t u_floats(int64_t rank) { return rank > 0 ? U_FLOATS : 0; }

constexpr TileBodies TILES = {run_pack, LEMA_FOR_EACH_DTYPE(run_tiles), packed_floats, a_floats, u_floats, false};

}  // namespace
}  // namespace lema
