// Arguments, scratch and column chunks of products with a weight; the arithmetic is in tiles.h, tiles_amx.cpp,
// dots.h and sums_avx2.cpp.

#include "linear.h"

#include "../include/lema.h"
#include "features.h"
#include "int8.h"
#include "pool.h"

#include <string.h>

namespace lema {
namespace {

constexpr int64_t LINE_FLOATS = 16;         // a cache line
constexpr int64_t PACKED_FLOATS = 2 << 20;  // of b packed at once, unless 16 columns are more
constexpr int64_t WIDEST_STRIP = 1024;      // such a strip of MC rows of c stays in the third-level cache
constexpr int64_t NARROWEST_STRIP = 32;     // below it, packing `a` again costs too much
constexpr int64_t BLOCKS_PER_THREAD = 3;    // where the product is large enough
constexpr int64_t ALIGNMENT = 32;           // of what is packed, in bytes

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

bool is_aligned(const float *packed) { return reinterpret_cast<uintptr_t>(packed) % ALIGNMENT == 0; }

bool is_four_bits(int dtype) { return dtype >= LEMA_INT4_32 && dtype <= LEMA_NF4; }

// What a call computes with, asked for once.
struct Bodies {
  explicit Bodies(lema_instructions newest)
      : tiles(newest >= LEMA_AMX ? TILES_AMX : newest >= LEMA_AVX512 ? TILES_AVX512 : TILES_AVX2),
        dots(newest >= LEMA_AVX512 ? DOTS_AVX512 : DOTS_AVX2),
        int8(newest >= LEMA_AVX512_VNNI ? INT8_VNNI : INT8_AVX2),
        int8_tiles(newest >= LEMA_AMX ? INT8_TILES_AMX : int8.tiles) {}
  const TileBodies &tiles;
  const DotBodies &dots;
  const Int8Bodies &int8;
  Body int8_tiles;
};

// How a product is computed.
struct Way {
  explicit Way(const lema_product &given)
      : bodies(instructions()),
        dtype(given.dtype),
        int8(given.compute == LEMA_COMPUTE_INT8),
        // the sums for few columns have the order of tiles in registers, the dot products have not
        few(given.n <= FEW && (given.transposed ? given.rows : given.k) > 0 &&
            (!given.apart || (given.transposed && !bodies.tiles.in_terms))),
        codes(few && !given.transposed && is_four_bits(given.dtype)) {}
  Bodies bodies;
  int dtype;
  bool int8;   // b is rounded
  bool few;    // without tiles
  bool codes;  // dot products of four-bit codes
};

// Whether several products gain from packing what they share.
bool is_shared_packed(int64_t n, bool apart) { return n > FEW || apart; }

// Columns that are packed and computed at once.
int64_t chunk_columns(const Product &p, const Bodies &bodies) {
  if (p.is_packed || p.inner == 0) return p.n;
  return at_most(p.n, at_least(NR, PACKED_FLOATS / bodies.tiles.packed_floats(p.inner, NR) * NR));
}

// Columns that a thread computes at once: few where there are too few rows for every thread.
int64_t strip_columns(const Product &p) {
  const int64_t blocks = (p.m + SMALLEST_BLOCK - 1) / SMALLEST_BLOCK;
  const int64_t wanted = p.threads == 1 ? 1 : (BLOCKS_PER_THREAD * p.threads + blocks - 1) / blocks;
  return round_up(at_most(WIDEST_STRIP, at_least(NARROWEST_STRIP, (p.n + wanted - 1) / wanted)), NR);
}

// Floats of the parts of the scratch: packed_b, codes, column_scales, packed_v, and for all threads packed_a, packed_u.
struct Parts {
  Parts(const Product &p, const Way &way) {
    const int64_t columns = round_up(chunk_columns(p, way.bodies), NR);
    // codes and few columns leave the rest as tiles in registers take it
    const TileBodies &tiles = way.int8 || way.few ? TILES_AVX2 : way.bodies.tiles;
    if (way.codes) {
      b = p.n * round_up(p.inner, way.bodies.dots.codes);
    } else if (!p.is_packed && (way.few || !way.int8)) {
      b = tiles.packed_floats(p.inner, columns);
    }
    if (way.int8) {
      // of a byte each in AMX's tiles, elsewhere of two
      codes = way.few ? p.n * round_up(p.inner, FEW_STEP) / 2
                      : at_least(columns * round_up(p.inner, 2) / 2, columns * round_up(p.inner, CODES_IN_TILE) / 4);
      column_scales = columns;
    }
    v = tiles.packed_floats(p.rank, columns);
    a = round_up(tiles.a_floats(way.dtype, p.rank), LINE_FLOATS) * p.threads;
    u = tiles.u_floats(p.rank) * p.threads;
    b = round_up(b, LINE_FLOATS);
    codes = round_up(codes, LINE_FLOATS);
  }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(float)) * (LINE_FLOATS + b + codes + column_scales + v + a + u);
  }
  int64_t b = 0, codes = 0, column_scales = 0, v = 0, a = 0, u = 0;
};

// null for an unknown dtype.
Body body_of(const lema_product &given, const Way &way) {
  const int dtype = given.dtype;
  if (dtype < 0 || dtype >= N_DTYPES) return nullptr;
  if (way.int8) return way.few ? way.bodies.int8.few : way.bodies.int8_tiles;
  if (!way.few) return way.bodies.tiles.tiles[dtype];
  return given.transposed ? SUMS_OF[dtype] : way.bodies.dots.dots[dtype];
}

// b [inner, n] -> target [n, inner]
void pack_few(const Product &p, float *target) {
  for (int64_t i = 0; i < p.inner; ++i)
    for (int64_t n = 0; n < p.n; ++n) target[n * p.inner + i] = p.b[i * p.b_stride + n];
}

Product product_of(const lema_product &given) {
  Product p{};
  p.weight = static_cast<const char *>(given.weight);
  p.scales = static_cast<const char *>(given.scales);
  p.k = given.k;
  p.transposed = given.transposed != 0;
  p.m = p.transposed ? given.k : given.rows;
  p.inner = p.transposed ? given.rows : given.k;
  p.n = given.n;
  p.b = given.right;
  p.b_stride = given.right_stride;
  p.c = given.out;
  p.c_stride = given.out_stride;
  p.accumulate = given.accumulate != 0;
  p.u = given.factor;
  p.u_row = p.transposed ? given.factor_column : given.factor_row;
  p.u_column = p.transposed ? given.factor_row : given.factor_column;
  p.v = given.inner;
  p.v_stride = given.inner_stride;
  p.rank = given.rank;
  p.scale = given.scale;
  p.threads = given.threads;
  p.is_packed = given.right_stride == 0 && p.n > 0;
  return p;
}

bool is_wrong(const Product &p) {
  if (p.m < 0 || p.inner < 0 || p.n < 0 || p.rank < 0 || p.threads < 1) return true;
  if (p.is_packed && (p.transposed || !is_aligned(p.b))) return true;
  return (!p.is_packed && p.b_stride < p.n) || p.c_stride < p.n || (p.rank > 0 && p.v_stride < p.n);
}

bool cannot_be_int8(const lema_product &given) {
  return given.dtype != LEMA_INT8 || given.transposed || given.accumulate || given.k > MOST_CODES;
}

int multiply(const lema_product &given) {
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  Product whole = product_of(given);
  const Way way(given);
  whole.in_terms = whole.is_packed && way.bodies.tiles.in_terms;
  if (whole.is_packed && way.few) return LEMA_BAD_ARGUMENT;
  const Body body = body_of(given, way);
  if (body == nullptr || is_wrong(whole)) return LEMA_BAD_ARGUMENT;
  if (way.int8 ? cannot_be_int8(given) : given.compute != LEMA_COMPUTE_F32) return LEMA_BAD_ARGUMENT;
  const Parts parts(whole, way);
  if (given.scratch_bytes < parts.bytes()) return LEMA_SMALL_SCRATCH;
  if (whole.m == 0 || whole.n == 0) return LEMA_OK;
  const int64_t line_bytes = LINE_FLOATS * sizeof(float);
  float *const scratch = reinterpret_cast<float *>(round_up(reinterpret_cast<int64_t>(given.scratch), line_bytes));
  whole.packed_b = parts.b > 0 ? scratch : const_cast<float *>(whole.b);
  whole.codes = reinterpret_cast<int16_t *>(scratch + parts.b);
  whole.column_scales = scratch + parts.b + parts.codes;
  whole.packed_v = whole.column_scales + parts.column_scales;
  whole.packed_a = whole.packed_v + parts.v;
  whole.packed_u = whole.packed_a + parts.a;
  const int64_t step = chunk_columns(whole, way.bodies);
  for (int64_t column = 0; column < whole.n; column += step) {
    Job job{whole, 0};
    Product &p = job.product;
    p.n = at_most(step, whole.n - column);
    p.b += column;
    p.v += column;
    p.c += column;
    job.strip = strip_columns(p);
    if (way.codes) {
      way.bodies.dots.order_codes(p, given.dtype == LEMA_NF4, p.packed_b);
    } else if (way.few && !p.transposed) {
      pack_few(p, p.packed_b);
    }
    if (way.int8 && way.few) way.bodies.int8.round_few(p);
    run_in_pool(p.threads, body, &job);
  }
  return LEMA_OK;
}

int pack(Product p, bool apart) {
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  if (p.inner < 0 || p.n < 0 || p.b_stride < p.n || p.threads < 1 || !is_aligned(p.packed_b)) return LEMA_BAD_ARGUMENT;
  if (p.inner == 0 || p.n == 0) return LEMA_OK;
  if (!is_shared_packed(p.n, apart)) return LEMA_BAD_ARGUMENT;
  Job job{p, 0};
  run_in_pool(p.threads, Bodies(instructions()).tiles.pack, &job);
  return LEMA_OK;
}

}  // namespace
}  // namespace lema

extern "C" int64_t lema_linear_scratch_bytes(const lema_product *product) {
  return lema::Parts(lema::product_of(*product), lema::Way(*product)).bytes();
}

extern "C" int32_t lema_linear(const lema_product *product) { return lema::multiply(*product); }

extern "C" int64_t lema_linear_packed_bytes(int64_t k, int64_t n, int32_t apart) {
  if (!lema::is_shared_packed(n, apart != 0)) return 0;
  return static_cast<int64_t>(sizeof(float)) * lema::Bodies(lema::instructions()).tiles.packed_floats(k, n);
}

extern "C" int32_t lema_linear_pack(const float *x, int64_t x_stride, int64_t k, int64_t n, float *packed,
                                    int32_t apart, int32_t threads) {
  lema::Product product{};
  product.b = x;
  product.b_stride = x_stride;
  product.inner = k;
  product.n = n;
  product.packed_b = packed;
  product.threads = threads;
  return lema::pack(product, apart != 0);
}
