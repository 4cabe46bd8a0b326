// What threads share of a product with tiles: the blocks of c that are dealt out, the pieces that are packed first, and
// what is read ahead meanwhile.

#pragma once

#include "formats.h"
#include "linear.h"

#include <sched.h>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

// A rectangle of c.
struct Block {
  int64_t from, to;     // rows, at most MC
  int64_t left, right;  // columns
};

// The next block for a thread: at most MC rows, in tiles of `tile` rows, fewer towards the end, so that all threads end
// together.
bool take(Job &job, Block &block, int64_t tile) {
  const Product &p = job.product;
  const int64_t all = (p.n + job.strip - 1) / job.strip * p.m;
  int64_t first = job.next_row.load(std::memory_order_relaxed), rows;
  do {
    if (first >= all) return false;
    rows = ((all - first) / (2 * p.threads) + tile - 1) / tile * tile;
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

// Packs what is left of b, in `of_b` pieces, and of v, rows [from, to) at once, and waits for what other threads are
// packing.
template <typename PackOfB, typename PackOfV>
inline void pack_pieces(Job &job, int64_t of_b, PackOfB pack_of_b, PackOfV pack_of_v) {
  const Product &p = job.product;
  const int64_t all = of_b + pieces(p.rank);
  for (int64_t piece; (piece = job.next_piece.fetch_add(1, std::memory_order_relaxed)) < all;) {
    if (piece < of_b) {
      pack_of_b(piece);
    } else {
      const int64_t start = (piece - of_b) * KC;
      pack_of_v(start, at_most(p.rank, start + KC));
    }
    job.packed_pieces.fetch_add(1, std::memory_order_release);
  }
  wait_for(job.packed_pieces, all);
}

// Memory that is read next, a rectangle of the weight or a sliver of b. Asked for a little at a time while tiles are
// computed: its pieces lie far apart, which the processor does not foresee.
class Ahead {
 public:
  Ahead(const char *first, int64_t row_bytes, int64_t rows, int64_t bytes, int64_t steps)
      : next_(first), row_bytes_(row_bytes), rows_(rows), bytes_(bytes), steps_(steps) {}

  Ahead() : Ahead(nullptr, 0, 0, 0, 1) {}

  void step() {
    for (due_ += rows_; due_ >= steps_; due_ -= steps_, next_ += row_bytes_)
      for (int64_t i = 0; i < bytes_; i += 64) _mm_prefetch(next_ + i, _MM_HINT_T1);
  }

 private:
  const char *next_;
  int64_t row_bytes_, rows_, bytes_, steps_, due_ = 0;
};

// The weight of the piece, of LENGTH columns, after the one that starts at `start` of a block; after the last piece likely
// the first one of the rows that are dealt out next.
template <int DTYPE, bool TRANSPOSED, int64_t LENGTH = KC>
Ahead after_piece(const Job &job, const Block &block, int64_t start, int64_t steps) {
  using R = Row<DTYPE>;
  const Product &p = job.product;
  const bool is_last = start + LENGTH >= p.inner;
  const int64_t likely = job.next_row.load(std::memory_order_relaxed) % p.m, next = is_last ? 0 : start + LENGTH;
  const int64_t from = is_last ? likely : block.from;
  const int64_t to = is_last ? at_most(p.m, likely + block.to - block.from) : block.to;
  const int64_t length = at_most(LENGTH, p.inner - next), row_bytes = R::bytes(p.k);
  if (TRANSPOSED) return Ahead(p.weight + next * row_bytes + R::bytes(from), row_bytes, length, R::bytes(to - from), steps);
  return Ahead(p.weight + from * row_bytes + R::bytes(next), row_bytes, to - from, R::bytes(length), steps);
}

}  // namespace
}  // namespace lema
