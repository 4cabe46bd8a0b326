// The arithmetic of products with a weight, for AVX2, FMA and F16C. The loops are those of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): b is packed once into slivers of NR columns, a block of
// MC rows of `a` is widened to fp32 as it is packed, and tiles of MR x NR stay in registers while they are summed.
//
// An element of c is the sum over the pieces of the inner dimension, in order, of a chain of fused multiply-adds over
// the piece: KC columns of the weight, then KC of `u`. No choice of rows, columns or threads changes that.

#include "formats_avx2.h"
#include "linear.h"

#include <sched.h>

namespace lema {
namespace {

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

// Weight rows [row, row + rows), columns [column, column + length) -> target[rows][KC]. A tile reads MR rows of it.
template <int DTYPE>
void pack_rows(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, float *target) {
  using F = Format<DTYPE>;
  for (int64_t r = 0; r < rows; ++r, target += KC) {
    const char *source = p.weight + ((row + r) * p.k + column) * F::BYTES;
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) _mm256_store_ps(target + i, F::eight(source + i * F::BYTES));
    for (; i < length; ++i) target[i] = F::one(source + i * F::BYTES);
  }
  const int64_t missing = (MR - rows % MR) % MR;
  for (int64_t r = 0; r < missing; ++r, target += KC) memset(target, 0, length * sizeof(float));
}

// Weight columns [column, column + columns), rows [row, row + length) -> slivers of A_SLIVER, [KC][MR] each. Eight are
// stored for every six, and the two beyond are overwritten by the next row of the sliver.
template <int DTYPE>
void pack_columns(const Product &p, int64_t column, int64_t columns, int64_t row, int64_t length, float *target) {
  using F = Format<DTYPE>;
  for (int64_t r = 0; r < length; ++r) {
    const char *source = p.weight + ((row + r) * p.k + column) * F::BYTES;
    float *sliver = target + r * MR;
    int64_t i = 0;
    for (; i + LANES <= columns; i += MR, sliver += A_SLIVER)
      _mm256_storeu_ps(sliver, F::eight(source + i * F::BYTES));
    for (; i < columns; i += MR, sliver += A_SLIVER)
      for (int64_t j = 0; j < MR; ++j) sliver[j] = i + j < columns ? F::one(source + (i + j) * F::BYTES) : 0.0f;
  }
}

// Rows [row, row + rows), columns [column, column + length) of scale * u -> slivers [length][MR], zeros beyond the rows.
void pack_u(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, float *target) {
  for (int64_t r = 0; r < rows; r += MR) {
    const int64_t here = at_most(MR, rows - r);
    const float *source = p.u + (row + r) * p.u_row + column * p.u_column;
    for (int64_t i = 0; i < length; ++i, source += p.u_column, target += MR)
      for (int64_t j = 0; j < MR; ++j) target[j] = j < here ? p.scale * source[j * p.u_row] : 0.0f;
  }
}

// -------------------------------------------------------------------------------------------------------------- tiles

struct Tile {
  __m256 sum[MR][2];
};

// Adds a[i * ROW + k * INNER] times a sliver of b, over k in order.
template <int ROW, int INNER>
inline __attribute__((always_inline)) void multiply_tile(const float *a, const float *b, int64_t length, Tile &tile) {
  __m256 c00 = tile.sum[0][0], c01 = tile.sum[0][1], c10 = tile.sum[1][0], c11 = tile.sum[1][1];
  __m256 c20 = tile.sum[2][0], c21 = tile.sum[2][1], c30 = tile.sum[3][0], c31 = tile.sum[3][1];
  __m256 c40 = tile.sum[4][0], c41 = tile.sum[4][1], c50 = tile.sum[5][0], c51 = tile.sum[5][1];
#pragma GCC unroll 4
  for (int64_t k = 0; k < length; ++k) {
    const __m256 low = _mm256_load_ps(b), high = _mm256_load_ps(b + LANES);
    __m256 x = _mm256_broadcast_ss(a);
    __m256 y = _mm256_broadcast_ss(a + ROW);
    c00 = _mm256_fmadd_ps(x, low, c00);
    c01 = _mm256_fmadd_ps(x, high, c01);
    c10 = _mm256_fmadd_ps(y, low, c10);
    c11 = _mm256_fmadd_ps(y, high, c11);
    x = _mm256_broadcast_ss(a + 2 * ROW);
    y = _mm256_broadcast_ss(a + 3 * ROW);
    c20 = _mm256_fmadd_ps(x, low, c20);
    c21 = _mm256_fmadd_ps(x, high, c21);
    c30 = _mm256_fmadd_ps(y, low, c30);
    c31 = _mm256_fmadd_ps(y, high, c31);
    x = _mm256_broadcast_ss(a + 4 * ROW);
    y = _mm256_broadcast_ss(a + 5 * ROW);
    c40 = _mm256_fmadd_ps(x, low, c40);
    c41 = _mm256_fmadd_ps(x, high, c41);
    c50 = _mm256_fmadd_ps(y, low, c50);
    c51 = _mm256_fmadd_ps(y, high, c51);
    a += INNER;
    b += NR;
  }
  tile = {{{c00, c01}, {c10, c11}, {c20, c21}, {c30, c31}, {c40, c41}, {c50, c51}}};
}

inline void put(float *c, __m256 value, bool add) {
  _mm256_storeu_ps(c, add ? _mm256_add_ps(_mm256_loadu_ps(c), value) : value);
}

void put_tile(const Tile &tile, float *c, int64_t stride, bool add) {
  for (int i = 0; i < MR; ++i, c += stride) {
    put(c, tile.sum[i][0], add);
    put(c + LANES, tile.sum[i][1], add);
  }
}

// The part of a tile that c has.
void put_corner(const Tile &tile, float *c, int64_t stride, bool add, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    float row[NR];
    memcpy(row, tile.sum[i], sizeof row);
    for (int64_t j = 0; j < columns; ++j) c[j] = add ? c[j] + row[j] : row[j];
  }
}

// Memory that is read next, a rectangle of the weight or a sliver of b. Asked for a little at a time while tiles are
// computed: its pieces lie far apart, which the processor does not foresee.
class Ahead {
 public:
  Ahead(const char *first, int64_t row_bytes, int64_t rows, int64_t bytes, int64_t steps)
      : next_(first), row_bytes_(row_bytes), rows_(rows), bytes_(bytes), steps_(steps) {}

  void step() {
    for (due_ += rows_; due_ >= steps_; due_ -= steps_, next_ += row_bytes_)
      for (int64_t i = 0; i < bytes_; i += 64) _mm_prefetch(next_ + i, _MM_HINT_T1);
  }

 private:
  const char *next_;
  int64_t row_bytes_, rows_, bytes_, steps_, due_ = 0;
};

template <int DTYPE, bool TRANSPOSED>
Ahead ahead_of(const Product &p, int64_t from, int64_t to, int64_t start, int64_t steps) {
  const int64_t bytes = Format<DTYPE>::BYTES, length = at_most(KC, p.inner - start), row_bytes = p.k * bytes;
  if (TRANSPOSED) return Ahead(p.weight + start * row_bytes + from * bytes, row_bytes, length, (to - from) * bytes, steps);
  return Ahead(p.weight + from * row_bytes + start * bytes, row_bytes, to - from, length * bytes, steps);
}

// Asked for before a tile is multiplied, a tile of c is there when the sums are added to it.
inline void ask_for_tile(const float *c, int64_t stride) {
  for (int i = 0; i < MR; ++i, c += stride) _mm_prefetch(reinterpret_cast<const char *>(c), _MM_HINT_T0);
}

// A rectangle of c.
struct Block {
  int64_t from, to;     // rows, at most MC
  int64_t left, right;  // columns
};

// `packed` and `packed_u` are this thread's, for the weight and u.
template <int DTYPE, bool TRANSPOSED>
void multiply_block(const Job &job, const Block &block, float *packed, float *packed_u) {
  constexpr int ROW = TRANSPOSED ? 1 : KC, INNER = TRANSPOSED ? MR : 1, SLIVER = TRANSPOSED ? A_SLIVER : MR * KC;
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
      for (int64_t row = from; row < to; row += MR, a += SLIVER, u += u_length * MR) {
        float *c = p.c + row * p.c_stride + column;
        Tile tile{};
        ahead.step();
        of_b.step();
        ask_for_tile(c, p.c_stride);
        multiply_tile<ROW, INNER>(a, b, length, tile);
        multiply_tile<1, MR>(u, v, u_length, tile);
        if (row + MR <= to && column + NR <= p.n) {
          put_tile(tile, c, p.c_stride, add);
        } else {
          put_corner(tile, c, p.c_stride, add, at_most(MR, to - row), at_most(NR, p.n - column));
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------- dealing out

// The next block for a thread: at most MC rows, fewer towards the end, so that all threads end together.
bool take(Job &job, Block &block) {
  const Product &p = job.product;
  const int64_t all = (p.n + job.strip - 1) / job.strip * p.m;
  int64_t first = job.next_row.load(std::memory_order_relaxed), rows;
  do {
    if (first >= all) return false;
    rows = ((all - first) / (2 * p.threads) + MR - 1) / MR * MR;
    if (rows < SMALLEST_BLOCK) rows = SMALLEST_BLOCK;
    if (rows > MC) rows = MC;
    rows = at_most(rows, p.m - first % p.m);
  } while (!job.next_row.compare_exchange_weak(first, first + rows, std::memory_order_relaxed));
  const int64_t left = first / p.m * job.strip;
  block = {first % p.m, first % p.m + rows, left, at_most(p.n, left + job.strip)};
  return true;
}

// Packs what is left to pack of b and v, and waits for what other threads are packing.
void pack_all(Job &job) {
  const Product &p = job.product;
  const int64_t of_b = p.is_packed ? 0 : pieces(p.inner), all = of_b + pieces(p.rank);
  for (int64_t piece; (piece = job.next_piece.fetch_add(1, std::memory_order_relaxed)) < all;) {
    if (piece < of_b) {
      pack_slivers(p.b, p.b_stride, p.inner, p.n, piece * KC, at_most(p.inner, (piece + 1) * KC), p.packed_b);
    } else {
      const int64_t start = (piece - of_b) * KC;
      pack_slivers(p.v, p.v_stride, p.rank, p.n, start, at_most(p.rank, start + KC), p.packed_v);
    }
    job.packed_pieces.fetch_add(1, std::memory_order_release);
  }
  for (int spins = 0; job.packed_pieces.load(std::memory_order_acquire) < all; ++spins) {
    if (spins < 1000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
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

}  // namespace lema
