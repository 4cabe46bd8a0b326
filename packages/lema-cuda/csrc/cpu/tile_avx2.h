// What products with tiles are made of: packing of b and u, the tile, what is read ahead, and how rows are dealt out.

#pragma once

#include "formats_avx2.h"
#include "linear.h"

#include <sched.h>

namespace lema {
namespace {  // each file's own: what is compiled for AVX2 must not be shared with what is not

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

// What c has of a tile: so many rows and columns.
inline void put_part(const Tile &tile, float *c, int64_t stride, bool add, int64_t rows, int64_t columns) {
  if (rows == MR && columns == NR) {
    put_tile(tile, c, stride, add);
  } else {
    put_corner(tile, c, stride, add, rows, columns);
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

// Asked for before a tile is multiplied, a tile of c is there when the sums are added to it.
inline void ask_for_tile(const float *c, int64_t stride) {
  for (int i = 0; i < MR; ++i, c += stride) _mm_prefetch(reinterpret_cast<const char *>(c), _MM_HINT_T0);
}

// A rectangle of c.
struct Block {
  int64_t from, to;     // rows, at most MC
  int64_t left, right;  // columns
};

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

// Until as many of the pieces that threads pack are packed.
inline void wait_for(const std::atomic<int64_t> &packed, int64_t all) {
  for (int spins = 0; packed.load(std::memory_order_acquire) < all; ++spins) {
    if (spins < 1000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

// Packs what is left of b, in `of_b` pieces, and of v, and waits for what other threads are packing.
template <typename PackOfB>
inline void pack_pieces(Job &job, int64_t of_b, PackOfB pack_of_b) {
  const Product &p = job.product;
  const int64_t all = of_b + pieces(p.rank);
  for (int64_t piece; (piece = job.next_piece.fetch_add(1, std::memory_order_relaxed)) < all;) {
    if (piece < of_b) {
      pack_of_b(piece);
    } else {
      const int64_t start = (piece - of_b) * KC;
      pack_slivers(p.v, p.v_stride, p.rank, p.n, start, at_most(p.rank, start + KC), p.packed_v);
    }
    job.packed_pieces.fetch_add(1, std::memory_order_release);
  }
  wait_for(job.packed_pieces, all);
}

}  // namespace
}  // namespace lema
