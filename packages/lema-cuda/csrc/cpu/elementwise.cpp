// Arguments of the elementwise operations and how they are dealt out; the arithmetic is in elementwise_avx2.cpp.

#include "elementwise.h"

#include "../include/lema.h"
#include "deal.h"

namespace lema {
namespace {

constexpr int64_t ELEMENTS = 1 << 14;  // that a thread takes at once: what several streams of them fill stays in its cache

constexpr int64_t LINE = 16;           // columns of a cache line
constexpr int64_t MOST_FEATURES = int64_t{1} << MOST_LEVELS;

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Columns that a thread takes at once: whole lines, an equal share of them.
int64_t share(int64_t n, int32_t threads) {
  const int64_t lines = (n + LINE - 1) / LINE, each = threads > 0 ? (lines + threads - 1) / threads : lines;
  return at_most(MOST_COLUMNS, (each > 0 ? each : 1) * LINE);
}

// work(from, to) for pieces of [0, all), each of `piece` but the last. Returns of enum lema_error.
template <class Work>
int32_t in_pieces(int32_t threads, int64_t all, int64_t piece, const Work &work) {
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  if (all < 0 || threads < 1) return LEMA_BAD_ARGUMENT;
  deal_out(threads, (all + piece - 1) / piece,
           [&](int64_t unit, int) { work(unit * piece, at_most(all, (unit + 1) * piece)); });
  return LEMA_OK;
}

}  // namespace
}  // namespace lema

extern "C" int32_t lema_rms_norm(const float *x, const float *weight, int64_t features, int64_t n, float eps, float *y,
                                 float *rstd, int32_t threads) {
  if (features < 1 || features > lema::MOST_FEATURES) return LEMA_BAD_ARGUMENT;
  const lema::RmsNorm norm{x, weight, features, n, eps, y, rstd};
  return lema::in_pieces(threads, n, lema::share(n, threads), [&](int64_t from, int64_t to) { normalize(norm, from, to); });
}

extern "C" int32_t lema_rms_norm_gradient(const float *dy, const float *x, const float *weight, const float *rstd,
                                          int64_t features, int64_t n, float *dx, int32_t threads) {
  if (features < 1 || features > lema::MOST_FEATURES) return LEMA_BAD_ARGUMENT;
  const lema::RmsNormGradient norm{dy, x, weight, rstd, features, n, dx};
  return lema::in_pieces(threads, n, lema::share(n, threads),
                         [&](int64_t from, int64_t to) { normalize_gradient(norm, from, to); });
}

extern "C" int32_t lema_silu_product(const float *gate, const float *up, int64_t count, float *out, int32_t threads) {
  const lema::SiluProduct product{gate, up, out};
  return lema::in_pieces(threads, count, lema::ELEMENTS,
                         [&](int64_t from, int64_t to) { multiply_silu(product, from, to); });
}

extern "C" int32_t lema_silu_product_gradient(const float *dy, const float *gate, const float *up, int64_t count,
                                              float *d_gate, float *d_up, int32_t threads) {
  const lema::SiluProductGradient product{dy, gate, up, d_gate, d_up};
  return lema::in_pieces(threads, count, lema::ELEMENTS,
                         [&](int64_t from, int64_t to) { multiply_silu_gradient(product, from, to); });
}

extern "C" int32_t lema_rotate(const float *x, const float *cos, const float *sin, int64_t heads, int64_t half,
                               int64_t n, int32_t inverse, float *y, int32_t threads) {
  if (heads < 0 || half < 0 || n < 0) return LEMA_BAD_ARGUMENT;
  const lema::Rotation rotation{x, cos, sin, half, n, y};
  const int64_t rows = lema::ELEMENTS / (n > 0 ? 2 * n : 1) + 1;
  return lema::in_pieces(threads, heads * half, rows,
                         [&](int64_t from, int64_t to) { rotate(rotation, inverse != 0, from, to); });
}

extern "C" int32_t lema_adamw(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, int64_t count,
                              const lema_adamw_rates *rates, int32_t threads) {
  const lema::AdamW adamw{param, grad, exp_avg, exp_avg_sq, *rates};
  return lema::in_pieces(threads, count, lema::ELEMENTS, [&](int64_t from, int64_t to) { update(adamw, from, to); });
}
