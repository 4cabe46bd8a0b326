// Arguments, scratch and column chunks of products with a weight; the arithmetic is in tiles_avx2.cpp, dots_avx2.cpp.

#include "linear.h"

#include "../include/lema.h"
#include "pool.h"

#include <string.h>

namespace lema {
namespace {

constexpr int64_t LINE_FLOATS = 16;        // a cache line
constexpr int64_t MOST_INNER = 32 * KC;    // of the inner dimension at once: whole pieces, so no sum changes
constexpr int64_t PACKED_FLOATS = 2 << 20; // of b packed at once

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Columns that are packed and computed at once.
int64_t chunk_columns(int64_t inner, int64_t n) {
  const int64_t rows = at_most(inner, MOST_INNER);
  return rows > 0 ? at_most(n, PACKED_FLOATS / rows / NR * NR) : n;
}

int64_t packed_b_floats(int64_t inner, int64_t n) {
  return at_most(inner, MOST_INNER) * round_up(chunk_columns(inner, n), NR);
}

int64_t scratch_bytes(int64_t inner, int64_t n, int threads) {
  const int64_t a_floats = round_up(A_FLOATS, LINE_FLOATS);
  return static_cast<int64_t>(sizeof(float)) * (LINE_FLOATS + packed_b_floats(inner, n) + threads * a_floats);
}

using Body = void (*)(void *, int);

Body body_of(int dtype, bool dots) {
  switch (dtype) {
    case LEMA_F32: return dots ? run_dots<LEMA_F32> : run_tiles<LEMA_F32>;
    case LEMA_F16: return dots ? run_dots<LEMA_F16> : run_tiles<LEMA_F16>;
    case LEMA_BF16: return dots ? run_dots<LEMA_BF16> : run_tiles<LEMA_BF16>;
    default: return nullptr;
  }
}

void clear(const Product &p) {
  for (int64_t row = 0; row < p.m; ++row) memset(p.c + row * p.c_stride, 0, sizeof(float) * p.n);
}

// b [inner, n] -> packed_b [n, inner]
void pack_few(const Product &p) {
  for (int64_t i = 0; i < p.inner; ++i)
    for (int64_t n = 0; n < p.n; ++n) p.packed_b[n * p.inner + i] = p.b[i * p.b_stride + n];
}

// `whole` describes all columns; its packed_b and packed_a are set here.
int multiply(Product whole, int dtype, void *scratch, int64_t given_bytes) {
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  const bool dots = !whole.transposed && whole.n <= FEW;
  const Body body = body_of(dtype, dots);
  if (body == nullptr || whole.m < 0 || whole.inner < 0 || whole.n < 0 || whole.threads < 1 ||
      whole.b_stride < whole.n || whole.c_stride < whole.n)
    return LEMA_BAD_ARGUMENT;
  if (given_bytes < scratch_bytes(whole.inner, whole.n, whole.threads)) return LEMA_SMALL_SCRATCH;
  if (whole.m == 0 || whole.n == 0) return LEMA_OK;
  if (whole.inner == 0) {
    if (!whole.accumulate) clear(whole);
    return LEMA_OK;
  }
  const int64_t line_bytes = LINE_FLOATS * sizeof(float);
  whole.packed_b = reinterpret_cast<float *>(round_up(reinterpret_cast<int64_t>(scratch), line_bytes));
  whole.packed_a = whole.packed_b + packed_b_floats(whole.inner, whole.n);
  const int64_t step = chunk_columns(whole.inner, whole.n);
  for (int64_t column = 0; column < whole.n; column += step)
    for (int64_t row = 0; row < whole.inner; row += MOST_INNER) {
      Job job{whole};
      Product &p = job.product;
      p.n = at_most(step, whole.n - column);
      p.inner = at_most(MOST_INNER, whole.inner - row);
      p.weight += row * (whole.transposed ? whole.k : 1) * (dtype == LEMA_F32 ? 4 : 2);
      p.b += column + row * p.b_stride;
      p.c += column;
      p.accumulate = whole.accumulate || row > 0;
      if (dots) pack_few(p);
      run_in_pool(p.threads, body, &job);
    }
  return LEMA_OK;
}

}  // namespace
}  // namespace lema

extern "C" int64_t lema_linear_scratch_bytes(int64_t inner, int64_t n, int32_t threads) {
  return lema::scratch_bytes(inner, n, threads);
}

extern "C" int32_t lema_linear_forward(const void *weight, int32_t dtype, int64_t rows, int64_t k, const float *x,
                                       int64_t x_stride, int64_t n, float *out, int64_t out_stride, void *scratch,
                                       int64_t scratch_bytes, int32_t threads) {
  const lema::Product product{static_cast<const char *>(weight), k, false, rows, k, n, x, x_stride, out, out_stride,
                              false, threads, nullptr, nullptr};
  return lema::multiply(product, dtype, scratch, scratch_bytes);
}

extern "C" int32_t lema_linear_input_gradient(const void *weight, int32_t dtype, int64_t rows, int64_t k,
                                              const float *dy, int64_t dy_stride, int64_t n, float *dx,
                                              int64_t dx_stride, int32_t accumulate, void *scratch,
                                              int64_t scratch_bytes, int32_t threads) {
  const lema::Product product{static_cast<const char *>(weight), k, true, k, rows, n, dy, dy_stride, dx, dx_stride,
                              accumulate != 0, threads, nullptr, nullptr};
  return lema::multiply(product, dtype, scratch, scratch_bytes);
}
