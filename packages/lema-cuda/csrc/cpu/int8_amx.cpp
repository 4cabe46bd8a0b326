// Products of int8 codes with codes in AMX's tiles, with the bits of int8_tiles.h: sums of codes are exact, and what comes
// after them has the same order. Nothing where the compiler does not know AMX.

#include "int8.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__)

#include "amx.h"
#include "int8_codes.h"

namespace lema {
namespace {

constexpr int64_t DEEP = CODES_IN_TILE;  // codes of a tile's row
constexpr int64_t PIECE = 8 * DEEP;      // inner length that is packed at once: such a sliver of b takes 8 KB
static_assert(MC * PIECE <= A_FLOATS * 4 && MC % SIDE == 0, "a block is of whole tiles");

inline int64_t deeps(int64_t length) { return (length + DEEP - 1) / DEEP; }

// Of columns from `column`, [steps][16 rows] with four codes of each column beside each other.
inline char *codes_at(const Product &p, int64_t step, int64_t column) {
  return reinterpret_cast<char *>(p.codes) + (column / SIDE * deeps(p.inner) + step) * TILE_BYTES;
}

void round_sliver(const Product &p, int64_t column) {
  const Columns columns(p, column);
  const auto [low_divisor, high_divisor] = divisors_of(p, columns, column);
  const __m256i byte = _mm256_set1_epi32(0xff);
  char *target = codes_at(p, 0, column);
  for (int64_t k = 0; k < deeps(p.inner) * DEEP; k += 4, target += ROW_BYTES) {
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int64_t i = 0; i < at_most(4, p.inner - k); ++i) {
      const Sixteen x = columns.row(k + i);
      const __m128i place = _mm_cvtsi64_si128(8 * i);
      low = _mm256_or_si256(low, _mm256_sll_epi32(_mm256_and_si256(codes_of(x.low, low_divisor), byte), place));
      high = _mm256_or_si256(high, _mm256_sll_epi32(_mm256_and_si256(codes_of(x.high, high_divisor), byte), place));
    }
    _mm256_store_si256(reinterpret_cast<__m256i *>(target), low);
    _mm256_store_si256(reinterpret_cast<__m256i *>(target + ROW_BYTES / 2), high);
  }
}

// Weight rows [row, row + rows), columns [column, column + length) -> [tiles of rows][steps] tiles, zeros beyond.
void pack_codes(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t length, char *target) {
  const int64_t steps = deeps(length);
  for (int64_t r = 0; r < sides(rows) * SIDE; ++r) {
    const char *const source = p.weight + (row + r) * p.k + column;
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t left = r < rows ? length - s * DEEP : 0;
      const __mmask64 here = left >= DEEP ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      store_row(target + (r / SIDE * steps + s) * TILE_BYTES, r % SIDE, _mm512_maskz_loadu_epi8(here, source + s * DEEP));
    }
  }
}

// M tiles of rows, the next of which is so many bytes further, over `steps` -> sums.
template <int M>
inline void multiply_tiles(const char *a, int64_t apart, const char *b, int64_t steps, int32_t (*sums)[SIDE * SIDE]) {
  clear_sums();
  for (int64_t step = 0; step < steps; ++step, a += TILE_BYTES, b += TILE_BYTES) {
    _tile_loadd(6, b, ROW_BYTES);
    load_rows<M>(a, apart);
    _tile_dpbssd(0, 3, 6);
    if (M > 1) _tile_dpbssd(1, 4, 6);
    if (M > 2) _tile_dpbssd(2, 5, 6);
  }
  store_sums<M>(sums);
}

// One piece of a block: what is packed of the weight, and of u in rows of `u_length`, this thread's.
struct Piece {
  int64_t start, length, u_length;
  const char *packed;
  const float *packed_u;
  bool first, last;
};

// Row `row` of c, columns from `column`. Sums that are not complete wait in c, as the bits of integers.
inline void put_row(const Product &p, const Piece &piece, const int32_t *sums, int64_t row, int64_t column,
                    const float *u) {
  const __mmask16 here = lanes(p.n - column);
  float *const c = p.c + row * p.c_stride + column;
  __m512i sum = _mm512_load_si512(sums);
  if (!piece.first) sum = _mm512_add_epi32(sum, _mm512_maskz_loadu_epi32(here, c));
  if (!piece.last) return _mm512_mask_storeu_epi32(c, here, sum);
  const Wide scale = all(Format<LEMA_F32>::one(p.scales + row * sizeof(float)));
  Wide value = mul(mul(_mm512_cvtepi32_ps(sum), scale), load(p.column_scales + column));
  const float *v = p.packed_v + column * p.rank;
  for (int64_t i = 0; i < piece.u_length; ++i, v += NR) value = multiply_add(all(u[i]), load(v), value);
  _mm512_mask_storeu_ps(c, here, value);
}

template <int M>
void multiply_part(const Product &p, const Block &block, const Piece &piece, int64_t row, int64_t column) {
  const int64_t steps = deeps(piece.length), apart = steps * TILE_BYTES;
  alignas(64) int32_t sums[M][SIDE * SIDE];
  multiply_tiles<M>(piece.packed + (row - block.from) / SIDE * apart, apart, codes_at(p, piece.start / DEEP, column), steps,
                    sums);
  const float *u = piece.packed_u + (row - block.from) * piece.u_length;
  for (int64_t i = 0; i < at_most(M * SIDE, block.to - row); ++i, u += piece.u_length)
    put_row(p, piece, sums[i / SIDE] + i % SIDE * SIDE, row + i, column, u);
}

// Rows of scale * u, as many columns of them as are summed with the codes' products.
void pack_rows_of_u(const Product &p, const Block &block, int64_t length, float *target) {
  for (int64_t row = block.from; row < block.to; ++row)
    for (int64_t i = 0; i < length; ++i) *target++ = p.scale * p.u[row * p.u_row + i * p.u_column];
}

void multiply_block(const Job &job, const Block &block, char *packed, float *packed_u) {
  const Product &p = job.product;
  const int64_t u_length = at_most(KC, p.rank);
  pack_rows_of_u(p, block, u_length, packed_u);
  for (int64_t start = 0; start < p.inner || start == 0; start += PIECE) {
    const int64_t length = at_most(PIECE, p.inner - start);
    const bool is_last = start + PIECE >= p.inner;
    pack_codes(p, block.from, block.to - block.from, start, length, packed);
    const Piece piece{start, length, u_length, packed, packed_u, start == 0, is_last};
    Ahead ahead = after_piece<LEMA_INT8, false, PIECE>(job, block, start, parts_of(block));
    for_each_part(block, ahead, [&](auto tiles, int64_t row, int64_t column) {
      multiply_part<decltype(tiles)::value>(p, block, piece, row, column);
    });
  }
  add_rest_of_low_rank(p, block, packed_u);
}

void run_tiles(void *context, int slot) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  float *const packed = p.packed_a + static_cast<int64_t>(slot) * A_FLOATS;
  float *const packed_u = p.packed_u + static_cast<int64_t>(slot) * U_FLOATS;
  pack_pieces(job, sides(p.n), [&](int64_t piece) { round_sliver(p, piece * SIDE); });
  const Tiles tiles;
  for (Block block; take(job, block, SIDE);) multiply_block(job, block, reinterpret_cast<char *>(packed), packed_u);
}

}  // namespace

const Body INT8_TILES_AMX = run_tiles;

}  // namespace lema

#else

namespace lema {

const Body INT8_TILES_AMX = nullptr;

}  // namespace lema

#endif
