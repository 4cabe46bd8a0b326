// One product c (+)= a b whose `a` is a weight in its storage format, as linear.cpp prepares it for linear_avx2.cpp.

#pragma once

#include <stdint.h>

#include <atomic>

namespace lema {

constexpr int MR = 6;   // rows of a register tile
constexpr int NR = 16;  // columns of a register tile, and of a packed sliver of b
constexpr int MC = 192;                 // rows of `a` that are packed together: they stay in a second-level cache of 512 KB
constexpr int KC = 256;                 // inner length of a packed piece: such a sliver of b stays in the first-level cache
constexpr int FEW = 4;                  // up to so many columns are computed as dot products
constexpr int A_SLIVER = MR * KC + 16;  // MR rows of packed `a`, with room for a store that overhangs
constexpr int A_FLOATS = MC / MR * A_SLIVER;  // what one thread packs `a` into

// c_MN (+)= a_MI b_IN. `a` is the weight [R, K] (M = R, I = K) or its transpose (M = K, I = R). All m, n, inner > 0.
struct Product {
  const char *weight;
  int64_t k;  // elements of a row of the weight
  bool transposed;
  int64_t m, inner, n;
  const float *b;
  int64_t b_stride;
  float *c;
  int64_t c_stride;
  bool accumulate;
  int threads;
  float *packed_b;  // slivers [n / NR][inner][NR], zeros beyond n; for dot products [n][inner]
  float *packed_a;  // A_FLOATS for each thread
};

// A product that threads are working on: each takes what is next, so nobody waits for a thread that was held up.
struct Job {
  Product product;
  std::atomic<int64_t> next_piece{0};    // pieces of KC rows of b to pack ...
  std::atomic<int64_t> packed_pieces{0}; // ... and those that are
  std::atomic<int64_t> next_row{0};      // rows of c to compute
};

inline int64_t pieces(const Product &p) { return (p.inner + KC - 1) / KC; }

// Bodies for run_in_pool; `job` is a Job. DTYPE is of enum lema_dtype.
template <int DTYPE>
void run_tiles(void *job, int slot);
template <int DTYPE>
void run_dots(void *job, int slot);

}  // namespace lema
