// The arithmetic of products with a weight, for AVX2, FMA and F16C. The loops are those of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): b is packed once into slivers of NR columns, a block of
// MC rows of `a` is widened to fp32 as it is packed, and tiles of MR x NR stay in registers while they are summed.
//
// An element of c is the sum over the pieces of the inner dimension, in order, of a chain of fused multiply-adds over
// the piece: KC columns of the weight, then KC of `u`. No choice of rows, columns or threads changes that.

#include "tile_avx2.h"

namespace lema {
namespace {

// Columns [column, column + length) of a row -> target. Column: a multiple of 32.
template <int DTYPE>
inline void decode(const Row<DTYPE> &row, int64_t column, int64_t length, float *target) {
  int64_t i = 0;
  if constexpr (Row<DTYPE>::ALIGNED > 1)
    for (; i + Row<DTYPE>::MANY <= length; i += Row<DTYPE>::MANY) row.many(column + i, target + i);
  for (; i + LANES <= length; i += LANES) _mm256_store_ps(target + i, row.eight(column + i));
  for (; i < length; ++i) target[i] = row.one(column + i);
}

// Weight rows [row, row + rows), columns [column, column + length) -> target[rows][A_ROW]. A tile reads MR rows of it.
template <int DTYPE>
void pack_rows(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, float *target) {
  for (int64_t r = 0; r < rows; ++r, target += A_ROW) decode(Row<DTYPE>(p.weight, p.scales, p.k, row + r), column, length, target);
  const int64_t missing = (MR - rows % MR) % MR;
  for (int64_t r = 0; r < missing; ++r, target += A_ROW) memset(target, 0, length * sizeof(float));
}

// Weight columns [column, column + columns), rows [row, row + length) -> slivers of A_SLIVER, [KC][MR] each. Eight are
// stored for every six, and the two beyond are overwritten by the next row of the sliver. Rows are decoded some at a time,
// so that whole cache lines of a sliver are written together.
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
        _mm256_storeu_ps(sliver + i * MR, _mm256_loadu_ps(numbers + i * (MC + 2 * 32)));
    if (j < columns)
      for (int64_t i = 0; i < here; ++i)
        for (int64_t m = 0; m < MR; ++m) sliver[i * MR + m] = j + m < columns ? numbers[i * (MC + 2 * 32) + m] : 0.0f;
  }
}

template <int DTYPE, bool TRANSPOSED>
Ahead ahead_of(const Product &p, int64_t from, int64_t to, int64_t start, int64_t steps) {
  using R = Row<DTYPE>;
  const int64_t length = at_most(KC, p.inner - start), row_bytes = R::bytes(p.k);
  if (TRANSPOSED) return Ahead(p.weight + start * row_bytes + R::bytes(from), row_bytes, length, R::bytes(to - from), steps);
  return Ahead(p.weight + from * row_bytes + R::bytes(start), row_bytes, to - from, R::bytes(length), steps);
}

// `packed` and `packed_u` are this thread's, for the weight and u.
template <int DTYPE, bool TRANSPOSED>
void multiply_block(const Job &job, const Block &block, float *packed, float *packed_u) {
  constexpr int ROW = TRANSPOSED ? 1 : A_ROW, INNER = TRANSPOSED ? MR : 1;
  const Product &p = job.product;
  const int64_t from = block.from, to = block.to;
  const int64_t row_tiles = (to - from + MR - 1) / MR, tiles = row_tiles * ((block.right - block.left + NR - 1) / NR);
  const int64_t longest = p.inner > p.rank ? p.inner : p.rank;
  const int64_t all = longest > 0 ? pieces(longest) : 1;  // zeros, where there is nothing to sum
  for (int64_t piece = 0; piece < all; ++piece) {
    const int64_t start = piece * KC;
    const int64_t length = at_most(KC, p.inner > start ? p.inner - start : 0);
    const int64_t u_length = at_most(KC, p.rank > start ? p.rank - start : 0);
    if (TRANSPOSED) {
      pack_columns<DTYPE>(p, from, to - from, start, length, packed);
    } else {
      pack_rows<DTYPE>(p, from, to - from, start, length, packed);
    }
    pack_u(p, from, to - from, start, u_length, packed_u);
    // after the last piece likely the first one of the rows that are dealt out next
    const int64_t likely = job.next_row.load(std::memory_order_relaxed) % p.m;
    Ahead ahead = start + KC < p.inner
                      ? ahead_of<DTYPE, TRANSPOSED>(p, from, to, start + KC, tiles)
                      : ahead_of<DTYPE, TRANSPOSED>(p, likely, at_most(p.m, likely + to - from), 0, tiles);
    const bool add = p.accumulate || piece > 0;
    for (int64_t column = block.left; column < block.right; column += NR) {
      const float *b = p.packed_b + column * p.inner + start * NR, *v = p.packed_v + column * p.rank + start * NR;
      const float *a = packed, *u = packed_u;
      const float *next_b = column + NR < block.right ? b + p.inner * NR
                                                      : p.packed_b + block.left * p.inner + (start + length) * NR;
      Ahead of_b(reinterpret_cast<const char *>(next_b), SLIVER_ROW_BYTES, length, SLIVER_ROW_BYTES, row_tiles);
      for (int64_t row = from; row < to; row += MR, a += A_SLIVER, u += u_length * MR) {
        float *c = p.c + row * p.c_stride + column;
        Tile tile{};
        ahead.step();
        of_b.step();
        ask_for_tile(c, p.c_stride);
        multiply_tile<ROW, INNER>(a, b, length, tile);
        if (u_length > 0) multiply_tile<1, MR>(u, v, u_length, tile);
        put_part(tile, c, p.c_stride, add, at_most(MR, to - row), at_most(NR, p.n - column));
      }
    }
  }
}

// Packs what is left to pack of b and v, and waits for what other threads are packing.
void pack_all(Job &job) {
  const Product &p = job.product;
  pack_pieces(job, p.is_packed ? 0 : pieces(p.inner), [&](int64_t piece) {
    pack_slivers(p.b, p.b_stride, p.inner, p.n, piece * KC, at_most(p.inner, (piece + 1) * KC), p.packed_b);
  });
}

}  // namespace

void run_pack(void *context, int) { pack_all(*static_cast<Job *>(context)); }

template <int DTYPE>
void run_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  float *const packed_u = p.packed_u + static_cast<int64_t>(slot) * U_FLOATS;
  pack_all(job);
  for (Block block; take(job, block);) {
    if (p.transposed) {
      multiply_block<DTYPE, true>(job, block, packed, packed_u);
    } else {
      multiply_block<DTYPE, false>(job, block, packed, packed_u);
    }
  }
}

template void run_tiles<LEMA_F32>(void *, int);
template void run_tiles<LEMA_F16>(void *, int);
template void run_tiles<LEMA_BF16>(void *, int);
template void run_tiles<LEMA_INT8>(void *, int);
template void run_tiles<LEMA_INT4_32>(void *, int);
template void run_tiles<LEMA_INT4_64>(void *, int);
template void run_tiles<LEMA_INT4_128>(void *, int);
template void run_tiles<LEMA_NF4>(void *, int);

}  // namespace lema
