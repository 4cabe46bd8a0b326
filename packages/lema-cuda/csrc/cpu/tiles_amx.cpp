// Products with a weight for many tokens on CPUs with AMX, whose tiles multiply bf16 and sum in fp32, an order of
// magnitude faster than fp32 is multiplied. Nothing where the compiler does not know it.
//
// A number of fp32 is a sum of three of bf16, exactly: each is what is left, rounded. b is split so as it is packed. A
// weight is a single term where it is stored in bf16 or in codes of int8, whose scale comes after the sum or, of an inner
// row, before it; numbers of fp16 and int4 are two terms, all others three. Products of terms are exact, and those below
// 2^-26 of the whole are left out: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations" (2019). What AMX takes for zero, numbers below 2^-126, is lost, and infinity becomes NaN.
//
// An element of c is the sum over the pieces of the inner dimension, in order, then over those of the low-rank term; no
// choice of rows, columns or threads changes that.

#include "linear.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include "terms_packing.h"

namespace lema {
namespace {

static_assert(KC % DEPTH == 0 && MC % SIDE == 0 && SMALLEST_BLOCK % SIDE == 0 && NR == SIDE, "a block is of whole tiles");

// M tiles of rows, the next of which is so many bytes further, over `steps` of the inner dimension -> sums.
template <int TERMS, int M>
inline void multiply_tiles(const char *a, int64_t apart, const char *b, int64_t steps, float (*sums)[SIDE * SIDE]) {
  clear_sums();
  for (int64_t step = 0; step < steps; ++step, a += TERMS * TILE_BYTES, b += MOST_TERMS * TILE_BYTES)
#pragma GCC unroll 3
    for (int i = 0; i < TERMS; ++i) {
      load_rows<M>(a + i * TILE_BYTES, apart);
#pragma GCC unroll 3
      for (int j = 0; i + j < MOST_TERMS; ++j) {
        _tile_loadd(6, b + j * TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(0, 3, 6);
        if (M > 1) _tile_dpbf16ps(1, 4, 6);
        if (M > 2) _tile_dpbf16ps(2, 5, 6);
      }
    }
  store_sums<M>(sums);
}

// A piece of a block's inner dimension, packed.
struct Piece {
  const char *a;
  const float *b;
  int64_t inner, start, steps;  // of b as a whole; of the piece
  const char *factors;          // of rows of c, or null
  bool add;
};

// A tile of sums -> c, which has so many of its rows and columns.
inline void put_tile(const float *sums, const Piece &piece, float *c, int64_t stride, int64_t row, int64_t rows,
                     int64_t columns) {
  const __mmask16 here = lanes(columns);
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    __m512 value = _mm512_load_ps(sums + i * SIDE);
    if (piece.factors != nullptr)
      value = _mm512_mul_ps(value, _mm512_set1_ps(Format<LEMA_F32>::one(piece.factors + (row + i) * sizeof(float))));
    if (piece.add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(here, c), value);
    _mm512_mask_storeu_ps(c, here, value);
  }
}

// Rows [row, row + M SIDE) and a sliver of columns, some of which c may lack.
template <int TERMS, int M>
inline void multiply_part(const Product &p, const Block &block, const Piece &piece, int64_t row, int64_t column) {
  const int64_t apart = piece.steps * TERMS * TILE_BYTES;
  const char *const a = piece.a + (row - block.from) / SIDE * apart;
  float *const c = p.c + row * p.c_stride + column;
  if (piece.add)
    for (int64_t i = 0; i < at_most(M * SIDE, block.to - row); ++i)
      _mm_prefetch(reinterpret_cast<const char *>(c + i * p.c_stride), _MM_HINT_T0);
  alignas(64) float sums[M][SIDE * SIDE];
  multiply_tiles<TERMS, M>(a, apart, tiles_at(piece.b, piece.inner, piece.start, column), piece.steps, sums);
  for (int i = 0; i < M; ++i)
    put_tile(sums[i], piece, c + i * SIDE * p.c_stride, p.c_stride, row + i * SIDE,
             at_most(SIDE, block.to - row - i * SIDE), p.n - column);
}

template <int TERMS>
void multiply_piece(const Product &p, const Block &block, const Piece &piece, Ahead &ahead) {
  for_each_part(block, ahead, [&](auto tiles, int64_t row, int64_t column) {
    multiply_part<TERMS, decltype(tiles)::value>(p, block, piece, row, column);
  });
}

// `packed` is this thread's.
template <int DTYPE, bool TRANSPOSED>
void multiply_block(const Job &job, const Block &block, char *packed) {
  const Product &p = job.product;
  const int64_t from = block.from, to = block.to;
  const char *const factors = DTYPE == LEMA_INT8 && !TRANSPOSED ? p.scales : nullptr;
  for (int64_t start = 0; start < p.inner || start == 0; start += KC) {
    const int64_t length = at_most(KC, p.inner - start);
    if (TRANSPOSED) {
      pack_columns<DTYPE>(p, from, to - from, start, length, packed);
    } else {
      pack_rows<DTYPE>(p, from, to - from, start, length, packed);
    }
    Ahead ahead = after_piece<DTYPE, TRANSPOSED>(job, block, start, parts_of(block));
    const Piece piece{packed, p.packed_b, p.inner, start, depths(length), factors, p.accumulate || start > 0};
    multiply_piece<terms_of(DTYPE)>(p, block, piece, ahead);
  }
  for (int64_t start = 0; start < p.rank; start += KC) {
    const int64_t length = at_most(KC, p.rank - start);
    pack_u(p, from, to - from, start, length, packed);
    Ahead nothing;
    const Piece piece{packed, p.packed_v, p.rank, start, depths(length), nullptr, true};
    multiply_piece<MOST_TERMS>(p, block, piece, nothing);
  }
}

// Packs what is left to pack of b and v, and waits for what other threads are packing.
void pack_all(Job &job, const char *factors) {
  const Product &p = job.product;
  pack_pieces(
      job, p.is_packed ? 0 : pieces(p.inner),
      [&](int64_t piece) {
        const int64_t start = piece * KC;
        pack_terms(p.b, p.b_stride, p.inner, p.n, start, at_most(p.inner, start + KC), factors, p.packed_b);
      },
      [&](int64_t from, int64_t to) { pack_terms(p.v, p.v_stride, p.rank, p.n, from, to, nullptr, p.packed_v); });
}

void run_pack(void *context, int) { pack_all(*static_cast<Job *>(context), nullptr); }

int64_t packed_floats(int64_t inner, int64_t columns) {
  return depths(inner) * sides(columns) * MOST_TERMS * TILE_BYTES / static_cast<int64_t>(sizeof(float));
}

// `a`, and u after it in the same place.
int64_t a_floats(int dtype, int64_t rank) {
  const int64_t u_depth = depths(at_most(rank, KC)) * DEPTH * MOST_TERMS, depth = KC * terms_of(dtype);
  return MC * (u_depth > depth ? u_depth : depth) / 2;
}

int64_t u_floats(int64_t) { return 0; }

template <int DTYPE>
void run_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  char *const packed = reinterpret_cast<char *>(p.packed_a + slot * a_floats(DTYPE, p.rank));
  pack_all(job, DTYPE == LEMA_INT8 && p.transposed ? p.scales : nullptr);
  const Tiles tiles;
  for (Block block; take(job, block, SIDE);) {
    if (p.transposed) {
      multiply_block<DTYPE, true>(job, block, packed);
    } else {
      multiply_block<DTYPE, false>(job, block, packed);
    }
  }
}

}  // namespace

const TileBodies TILES_AMX = {run_pack, LEMA_FOR_EACH_DTYPE(run_tiles), packed_floats, a_floats, u_floats, true};

}  // namespace lema

#else

namespace lema {

const TileBodies TILES_AMX = {};

}  // namespace lema

#endif
