// The arithmetic of int8.h. Who includes it defines, before, add_products(sum, a, b): to each int32 the products of two
// pairs of int16. Sums are exact, so no order shows.

#pragma once

#include "few.h"
#include "int8.h"
#include "int8_codes.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int KC8 = 2 * KC;      // inner length of a packed piece, in codes that fill 16 bits each ...
constexpr int ROW8 = 2 * A_ROW;  // ... and of a row with its end
constexpr int64_t BLOCK = 32;  // rows that a thread takes at once where columns are few

// ----------------------------------------------------------------------------------------------------------- packing

// A sliver of codes, [pairs of rows][NR] with the two codes of a column beside each other, and its columns' scales.
void round_sliver(const Product &p, int64_t column) {
  const Columns columns(p, column);
  const auto [low_divisor, high_divisor] = divisors_of(p, columns, column);
  const __m256i lower_half = _mm256_set1_epi32(0xffff);
  int16_t *target = p.codes + column * (p.inner + p.inner % 2);
  for (int64_t k = 0; k < p.inner; k += 2, target += 2 * NR) {
    const Sixteen x = columns.row(k);
    __m256i low_pair = _mm256_and_si256(codes_of(x.low, low_divisor), lower_half);
    __m256i high_pair = _mm256_and_si256(codes_of(x.high, high_divisor), lower_half);
    if (k + 1 < p.inner) {
      const Sixteen y = columns.row(k + 1);
      low_pair = _mm256_or_si256(low_pair, _mm256_slli_epi32(codes_of(y.low, low_divisor), 16));
      high_pair = _mm256_or_si256(high_pair, _mm256_slli_epi32(codes_of(y.high, high_divisor), 16));
    }
    _mm256_store_si256(reinterpret_cast<__m256i *>(target), low_pair);
    _mm256_store_si256(reinterpret_cast<__m256i *>(target + NR), high_pair);
  }
}

// Weight rows [row, row + rows), columns [column, column + length) -> target[rows][ROW8], zeros in what a tile reads beyond.
void pack_codes(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, int16_t *target) {
  const int64_t even = length + length % 2;
  for (int64_t r = 0; r < rows; ++r, target += ROW8) {
    const char *source = p.weight + (row + r) * p.k + column;
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + i), _mm256_cvtepi8_epi16(codes));
    }
    for (; i < length; ++i) target[i] = static_cast<signed char>(source[i]);
    if (even > length) target[length] = 0;
  }
  const int64_t missing = (MR - rows % MR) % MR;
  for (int64_t r = 0; r < missing; ++r, target += ROW8) memset(target, 0, even * sizeof(int16_t));
}

// -------------------------------------------------------------------------------------------------------------- tiles

template <int S>
using IntTile = Sums<int16_t, S>;

// Sums that are not complete wait in c, as the bits of integers. `rows`, `columns`: what of a tile c has.
template <int S>
void load_sums(IntTile<S> &tile, const float *c, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    if (columns == S * NR) {
      memcpy(&tile.of[i], c, sizeof tile.of[i]);
    } else {
      memcpy(&tile.of[i], c, columns * sizeof(int32_t));
    }
  }
}

template <int S>
void store_sums(const IntTile<S> &tile, float *c, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, c += stride) {
    if (columns == S * NR) {
      memcpy(c, &tile.of[i], sizeof tile.of[i]);
    } else {
      memcpy(c, &tile.of[i], columns * sizeof(int32_t));
    }
  }
}

// Rows from `row`, columns from `column`: times the scales of both.
template <int S>
inline Tile<S> scaled(const Product &p, const IntTile<S> &tile, int64_t row, int64_t rows, int64_t column) {
  Tile<S> out;
  for (int64_t i = 0; i < MR; ++i) {
    const Wide scale = all(i < rows ? Format<LEMA_F32>::one(p.scales + (row + i) * sizeof(float)) : 0.0f);
    for (int j = 0; j < S * PER_SLIVER; ++j)
      out.of[i][j] = mul(mul(numbers(tile.of[i][j]), scale), load(p.column_scales + column + j * WIDE));
  }
  return out;
}

// One piece of a block: what is packed of the weight, and of u, this thread's.
struct CodePiece {
  int64_t start, pairs, next;  // next: where the piece after it starts
  const int16_t *packed;
  const float *packed_u;
  bool first, last;
};

// Columns [column, column + S NR) of a block, some of which c may lack.
template <int S>
void multiply_slivers(const Product &p, const Block &block, const CodePiece &piece, int64_t column, Ahead &ahead) {
  const int64_t even = p.inner + p.inner % 2, apart = even * NR, u_length = at_most(KC, p.rank);
  const int64_t row_tiles = (block.to - block.from + MR - 1) / MR;
  const int16_t *const b = p.codes + column * even + piece.start * NR;
  const int16_t *next = column + S * NR < block.right ? b + S * apart : p.codes + block.left * even + piece.next * NR;
  Ahead of_b[S];
  for (int s = 0; s < S; ++s, next += apart)
    of_b[s] = Ahead(reinterpret_cast<const char *>(next), SLIVER_ROW_BYTES, piece.pairs, SLIVER_ROW_BYTES, row_tiles);
  const int16_t *a = piece.packed;
  const float *u = piece.packed_u, *const v = p.packed_v + column * p.rank;
  for (int64_t row = block.from; row < block.to; row += MR, a += MR * ROW8, u += u_length * MR) {
    float *c = p.c + row * p.c_stride + column;
    const int64_t rows = at_most(MR, block.to - row), columns = at_most(S * NR, p.n - column);
    ahead.step();
    for (Ahead &of_sliver : of_b) of_sliver.step();
    ask_for_tile<S>(c, p.c_stride);
    IntTile<S> sums{};
    if (!piece.first) load_sums<S>(sums, c, p.c_stride, rows, columns);
    multiply_tile<ROW8, 2>(a, b, apart, piece.pairs, sums);
    if (piece.last) {
      Tile<S> tile = scaled<S>(p, sums, row, rows, column);
      multiply_tile<1, MR>(u, v, p.rank * NR, u_length, tile);
      put_part<S>(tile, c, p.c_stride, false, rows, columns);
    } else {
      store_sums<S>(sums, c, p.c_stride, rows, columns);
    }
  }
}

void multiply_block(const Job &job, const Block &block, int16_t *packed, float *packed_u) {
  const Product &p = job.product;
  const int64_t from = block.from, to = block.to;
  const int64_t tiles = (to - from + MR - 1) / MR * ((block.right - block.left + SLIVERS * NR - 1) / (SLIVERS * NR));
  const int64_t all = p.inner > 0 ? (p.inner + KC8 - 1) / KC8 : 1;
  pack_u(p, from, to - from, 0, at_most(KC, p.rank), packed_u);
  for (int64_t i = 0; i < all; ++i) {
    const bool last = i + 1 == all;
    const int64_t start = i * KC8, length = at_most(KC8, p.inner - start), next = last ? 0 : start + KC8;
    const CodePiece piece{start, (length + 1) / 2, next, packed, packed_u, i == 0, last};
    pack_codes(p, from, to - from, start, length, packed);
    Ahead ahead = after_piece<LEMA_INT8, false, KC8>(job, block, start, tiles);
    int64_t column = block.left;
    if constexpr (SLIVERS == 2)
      for (; column + NR < block.right; column += 2 * NR) multiply_slivers<2>(p, block, piece, column, ahead);
    for (; column < block.right; column += NR) multiply_slivers<1>(p, block, piece, column, ahead);
  }
  add_rest_of_low_rank(p, block, packed_u);
}

// Rounds what is left to round of b, packs what is left of v, and waits for what other threads do of it.
void round_all(Job &job) {
  const Product &p = job.product;
  pack_pieces(job, (p.n + NR - 1) / NR, [&](int64_t piece) { round_sliver(p, piece * NR); });
}

void run_int8_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  float *const packed_u = p.packed_u + static_cast<int64_t>(slot) * U_FLOATS;
  round_all(job);
  for (Block block; take(job, block, MR);) multiply_block(job, block, reinterpret_cast<int16_t *>(packed), packed_u);
}

// -------------------------------------------------------------------------------------------------------- few columns

constexpr int STEP = 2 * WIDE;  // codes that fill a register with 16 bits each
static_assert(FEW_STEP % STEP == 0, "rounded columns end with a whole register");

inline int64_t padded(int64_t inner) { return (inner + FEW_STEP - 1) / FEW_STEP * FEW_STEP; }

void round_few(const Product &p) {
  const int64_t length = padded(p.inner);
  for (int64_t n = 0; n < p.n; ++n) {
    const float *x = p.packed_b + n * p.inner;
    int16_t *target = p.codes + n * length;
    const auto eight = [&](int64_t k) {
      if (k + LANES <= p.inner) return _mm256_loadu_ps(x + k);
      float some[LANES] = {};
      if (k < p.inner) memcpy(some, x + k, (p.inner - k) * sizeof(float));
      return _mm256_loadu_ps(some);
    };
    __m256i largest = _mm256_setzero_si256();
    for (int64_t k = 0; k < length; k += LANES) largest = _mm256_max_epi32(largest, magnitude(eight(k)));
    largest = _mm256_max_epi32(largest, _mm256_permute2x128_si256(largest, largest, 1));
    largest = _mm256_max_epi32(largest, _mm256_shuffle_epi32(largest, 0x4e));
    largest = _mm256_max_epi32(largest, _mm256_shuffle_epi32(largest, 0xb1));
    const __m256 scale = scales_of(largest), divisor = divisors(scale);
    p.column_scales[n] = _mm256_cvtss_f32(scale);
    for (int64_t k = 0; k < length; k += LANES) {
      const __m256i codes = codes_of(eight(k), divisor);
      const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(target + k), narrow);
    }
  }
}

inline int32_t sum_of_lanes(WideInts wide) {
  const __m256i v = folded(wide);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

template <int ROWS, int N>
void few_dots(const Product &p, int64_t row) {
  const int64_t length = padded(p.inner);
  const char *w = p.weight + row * p.k;
  WideInts sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = all(0);
  const auto add = [&](int64_t k, int r, WideInts wide) {
    for (int n = 0; n < N; ++n) sums[r][n] = add_products(sums[r][n], wide, load(p.codes + n * length + k));
  };
  int64_t k = 0;
  for (; k + STEP <= p.inner; k += STEP)
    for (int r = 0; r < ROWS; ++r) add(k, r, widened(w + r * p.k + k));
  if (k < p.inner)
    for (int r = 0; r < ROWS; ++r) {
      char last[STEP] = {};
      memcpy(last, w + r * p.k + k, p.inner - k);
      add(k, r, widened(last));
    }
  for (int r = 0; r < ROWS; ++r) {
    const float scale = Format<LEMA_F32>::one(p.scales + (row + r) * sizeof(float));
    for (int n = 0; n < N; ++n) {
      float sum = static_cast<float>(sum_of_lanes(sums[r][n])) * scale * p.column_scales[n];
      const float *u = p.u + (row + r) * p.u_row;
      for (int64_t i = 0; i < p.rank; ++i) sum = __builtin_fmaf(p.scale * u[i * p.u_column], p.v[i * p.v_stride + n], sum);
      p.c[(row + r) * p.c_stride + n] = sum;
    }
  }
}

template <int N>
void few_rows(const Product &p, int64_t from, int64_t to) {
  constexpr int ROWS = N <= 2 ? 4 : 2;
  int64_t row = from;
  for (; row + ROWS <= to; row += ROWS) few_dots<ROWS, N>(p, row);
  for (; row < to; ++row) few_dots<1, N>(p, row);
}

void run_int8_few(void *context, int) {
  deal_few(*static_cast<Job *>(context), BLOCK, [](auto columns, const Product &p, int64_t from, int64_t to) {
    few_rows<decltype(columns)::value>(p, from, to);
  });
}

}  // namespace
}  // namespace lema
