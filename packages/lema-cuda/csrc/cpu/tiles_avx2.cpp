// The arithmetic of products with a weight, for AVX2, FMA and F16C. The loops are those of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): b is packed once into slivers of NR columns, a block of
// MC rows of `a` is widened to fp32 as it is packed, and tiles of MR x NR stay in registers while they are summed.
//
// An element of c is the sum over the pieces of KC, in order, of a chain of fused multiply-adds over the piece. No
// choice of rows, columns or threads changes that.

#include "formats_avx2.h"
#include "linear.h"

#include <sched.h>

namespace lema {
namespace {

constexpr int64_t SMALLEST_BLOCK = 48;

// ------------------------------------------------------------------------------------------------------------ packing

// Rows [from, to) of b into every sliver.
void pack_piece_of_b(const Product &p, int64_t from, int64_t to) {
  const int64_t whole = p.n / NR * NR;
  for (int64_t row = from; row < to; ++row) {
    const float *source = p.b + row * p.b_stride;
    float *target = p.packed_b + row * NR;
    for (int64_t column = 0; column < whole; column += NR, target += p.inner * NR) {
      const __m256 low = _mm256_loadu_ps(source + column), high = _mm256_loadu_ps(source + column + LANES);
      _mm256_store_ps(target, low);
      _mm256_store_ps(target + LANES, high);
    }
    if (whole < p.n) {
      memset(target, 0, NR * sizeof(float));
      memcpy(target, source + whole, (p.n - whole) * sizeof(float));
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

// -------------------------------------------------------------------------------------------------------------- tiles

struct Tile {
  __m256 sum[MR][2];
};

// a[i * ROW + k * INNER] times a sliver of b, summed over k in order.
template <int ROW, int INNER>
inline __attribute__((always_inline)) void multiply_tile(const float *a, const float *b, int64_t length, Tile &tile) {
  __m256 c00 = _mm256_setzero_ps(), c01 = c00, c10 = c00, c11 = c00, c20 = c00, c21 = c00;
  __m256 c30 = c00, c31 = c00, c40 = c00, c41 = c00, c50 = c00, c51 = c00;
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

// A rectangle of the weight that will be packed next. Asked for a little at a time while tiles are computed: its pieces
// of rows lie far apart, which the processor does not foresee.
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

// Rows [from, to) of c, at most MC, with `packed` for the weight.
template <int DTYPE, bool TRANSPOSED>
void multiply_block(const Job &job, int64_t from, int64_t to, float *packed) {
  constexpr int ROW = TRANSPOSED ? 1 : KC, INNER = TRANSPOSED ? MR : 1, SLIVER = TRANSPOSED ? A_SLIVER : MR * KC;
  const Product &p = job.product;
  const int64_t tiles = ((to - from + MR - 1) / MR) * ((p.n + NR - 1) / NR);
  for (int64_t start = 0; start < p.inner; start += KC) {
    const int64_t length = at_most(KC, p.inner - start);
    if (TRANSPOSED) {
      pack_columns<DTYPE>(p, from, to - from, start, length, packed);
    } else {
      pack_rows<DTYPE>(p, from, to - from, start, length, packed);
    }
    // after the last piece likely the first one of the rows that are dealt out next
    const int64_t likely = at_most(job.next_row.load(std::memory_order_relaxed), p.m);
    Ahead ahead = start + KC < p.inner
                      ? ahead_of<DTYPE, TRANSPOSED>(p, from, to, start + KC, tiles)
                      : ahead_of<DTYPE, TRANSPOSED>(p, likely, at_most(p.m, likely + to - from), 0, tiles);
    const bool add = p.accumulate || start > 0;
    for (int64_t column = 0; column < p.n; column += NR) {
      const float *b = p.packed_b + column * p.inner + start * NR;
      const float *a = packed;
      for (int64_t row = from; row < to; row += MR, a += SLIVER) {
        float *c = p.c + row * p.c_stride + column;
        Tile tile;
        ahead.step();
        multiply_tile<ROW, INNER>(a, b, length, tile);
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

// The next rows of c for a thread: at most `most`, fewer towards the end, so that all threads end together.
bool take_rows(Job &job, int64_t most, int64_t &from, int64_t &to) {
  const Product &p = job.product;
  from = job.next_row.load(std::memory_order_relaxed);
  do {
    if (from >= p.m) return false;
    int64_t rows = ((p.m - from) / (2 * p.threads) + MR - 1) / MR * MR;
    if (rows < SMALLEST_BLOCK) rows = SMALLEST_BLOCK;
    if (rows > most) rows = most;
    to = at_most(p.m, from + rows);
  } while (!job.next_row.compare_exchange_weak(from, to, std::memory_order_relaxed));
  return true;
}

void pack_b(Job &job) {
  const Product &p = job.product;
  const int64_t all = pieces(p);
  for (int64_t piece; (piece = job.next_piece.fetch_add(1, std::memory_order_relaxed)) < all;) {
    pack_piece_of_b(p, piece * KC, at_most(p.inner, (piece + 1) * KC));
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

template <int DTYPE>
void run_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  pack_b(job);
  for (int64_t from, to; take_rows(job, MC, from, to);) {
    if (p.transposed) {
      multiply_block<DTYPE, true>(job, from, to, packed);
    } else {
      multiply_block<DTYPE, false>(job, from, to, packed);
    }
  }
}

template void run_tiles<LEMA_F32>(void *, int);
template void run_tiles<LEMA_F16>(void *, int);
template void run_tiles<LEMA_BF16>(void *, int);

}  // namespace lema
