// What elementwise.cpp deals out and elementwise_avx2.cpp computes. All matrices are fp32 and contiguous.

#pragma once

#include "../include/lema.h"

#include <stdint.h>

namespace lema {

struct RmsNorm {  // y = x * rstd * weight
  const float *x, *weight;
  int64_t features, n;
  float eps;
  float *y, *rstd;
};

struct RmsNormGradient {
  const float *dy, *x, *weight, *rstd;
  int64_t features, n;
  float *dx;
};

struct SiluProduct {  // out = silu(gate) * up
  const float *gate, *up;
  float *out;
};

struct SiluProductGradient {
  const float *dy, *gate, *up;
  float *d_gate, *d_up;
};

struct Rotation {  // of pairs of rows `half` apart; x, y [heads, 2 * half, n], cos, sin [half, n]
  const float *x, *cos, *sin;
  int64_t half, n;
  float *y;
};

struct AdamW {
  float *param;
  const float *grad;
  float *exp_avg, *exp_avg_sq;
  lema_adamw_rates rates;
};

constexpr int64_t MOST_COLUMNS = 256;  // that a norm computes together
constexpr int MOST_LEVELS = 32;        // of additions of halves: up to 2^32 features

// Columns [from, to), at most MOST_COLUMNS.
void normalize(const RmsNorm &norm, int64_t from, int64_t to);
void normalize_gradient(const RmsNormGradient &norm, int64_t from, int64_t to);

// Elements [from, to).
void multiply_silu(const SiluProduct &product, int64_t from, int64_t to);
void multiply_silu_gradient(const SiluProductGradient &product, int64_t from, int64_t to);
void update(const AdamW &adamw, int64_t from, int64_t to);

// Pairs of rows [from, to), counted through all heads.
void rotate(const Rotation &rotation, bool inverse, int64_t from, int64_t to);

}  // namespace lema
