// One product c (+)= a b + u v whose `a` is a weight in its storage format, as linear.cpp prepares it for
// tiles.h, tiles_amx.cpp and dots.h.

#pragma once

#include "../include/lema.h"

#include <stdint.h>

#include <atomic>

namespace lema {

constexpr int NR = 16;  // columns of a packed sliver of b
constexpr int MC = 192;                 // rows of `a` that are packed together: they stay in a second-level cache of 512 KB
constexpr int KC = 256;                 // inner length of a packed piece: such a sliver of b stays in the first-level cache
constexpr int SMALLEST_BLOCK = 48;      // rows that are dealt to a thread, unless fewer are left
constexpr int FEW = 4;                  // up to so many columns are computed without tiles
constexpr int A_ROW = KC + 8;           // a row of packed `a`: rows that a tile reads side by side start in other banks
constexpr int A_FLOATS = MC * A_ROW;    // what one thread packs `a` into
constexpr int U_FLOATS = MC * KC;       // what one thread packs `u` into

// c_MN (+)= a_MI b_IN + u_Mr v_rN. `a` is the weight [R, K] (M = R, I = K) or its transpose (M = K, I = R). m and n
// are > 0.
//
// The inner dimension is summed in pieces: piece j is columns [j KC, (j + 1) KC) of `a` followed by the same of `u`.
struct Product {
  const char *weight;
  const char *scales;  // of a quantized weight
  int64_t k;  // elements of a row of the weight
  bool transposed;
  int64_t m, inner, n;
  const float *b;
  int64_t b_stride;
  float *c;
  int64_t c_stride;
  bool accumulate;
  const float *u;  // scaled by `scale` as it is packed
  int64_t u_row, u_column;
  const float *v;
  int64_t v_stride;
  int64_t rank;
  float scale;
  int threads;
  float *packed_b;  // slivers [n / NR][inner][NR], zeros beyond n; for dot products [n][inner], of four-bit codes as
                    // DotBodies has it
  bool is_packed;   // packed_b is filled already ...
  bool in_terms;    // ... with terms of bf16, as by tiles_amx.cpp
  int16_t *codes;        // of b, where it is rounded to int8, see int8.h
  float *column_scales;  // [n rounded up to NR]
  float *packed_v;  // slivers [n / NR][rank][NR]
  float *packed_a;  // A_FLOATS for each thread ...
  float *packed_u;  // ... and U_FLOATS where the rank is not 0; other tiles pack all four as TileBodies has it
};

// A product that threads are working on: each takes what is next, so nobody waits for a thread that was held up.
struct Job {
  Product product;
  int64_t strip;                         // columns that are computed at once
  std::atomic<int64_t> next_piece{0};    // pieces of KC rows of b, then of v, to pack ...
  std::atomic<int64_t> packed_pieces{0}; // ... and those that are
  std::atomic<int64_t> next_row{0};      // rows of c to compute, strip after strip
};

inline int64_t pieces(int64_t inner) { return (inner + KC - 1) / KC; }

// For run_in_pool; `job` is a Job.
using Body = void (*)(void *job, int slot);

// A Body for each number of enum lema_dtype and lema_quantized, in their order.
constexpr int N_DTYPES = 8;
#define LEMA_FOR_EACH_DTYPE(body)                                                                              \
  {body<LEMA_F32>,     body<LEMA_F16>,     body<LEMA_BF16>,     body<LEMA_INT8>, \
   body<LEMA_INT4_32>, body<LEMA_INT4_64>, body<LEMA_INT4_128>, body<LEMA_NF4>}

struct TileBodies {
  Body pack;  // what the tiles of all dtypes share
  Body tiles[N_DTYPES];
  int64_t (*packed_floats)(int64_t inner, int64_t columns);  // of b, and of v
  // of one thread
  int64_t (*a_floats)(int dtype, int64_t rank);
  int64_t (*u_floats)(int64_t rank);
  bool in_terms;  // of bf16, what `pack` makes
};

struct DotBodies {
  Body dots[N_DTYPES];
  int64_t codes;                                                       // four-bit codes that are taken at once
  void (*order_codes)(const Product &p, bool is_nf4, float *target);  // [n][inner rounded up to `codes`]
};

extern const TileBodies TILES_AVX2, TILES_AVX512, TILES_AMX;  // of null pointers where it could not be compiled
extern const DotBodies DOTS_AVX2, DOTS_AVX512;
extern const Body SUMS_OF[N_DTYPES];

}  // namespace lema
