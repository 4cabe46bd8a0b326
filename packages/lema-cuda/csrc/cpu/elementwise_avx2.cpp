// Norms, the SiLU product, rotary embeddings and AdamW, eight numbers at a time. Every element is computed by the same
// operations wherever it lies: what fills no register is loaded into a part of one. They are those of plain torch in the
// same order, so the bits are torch's; a multiply-add is fused where torch fuses it, and nowhere else.

#include "elementwise.h"
#include "formats.h"

namespace lema {
namespace {

inline __m256 all(float value) { return _mm256_set1_ps(value); }

// Ones in the first `count` lanes; all of them from LANES on, none below 1.
inline __m256i first_lanes(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int64_t some = count < 0 ? 0 : at_most(count, LANES);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(some)), lane);
}

struct Whole {
  __m256 load(const float *p) const { return _mm256_loadu_ps(p); }
  void store(float *p, __m256 value) const { _mm256_storeu_ps(p, value); }
};

struct Part {
  __m256i mask;
  __m256 load(const float *p) const { return _mm256_maskload_ps(p, mask); }
  void store(float *p, __m256 value) const { _mm256_maskstore_ps(p, mask, value); }
};

// work(lanes, i) for all i in [from, to) that start a register.
template <class Work>
inline __attribute__((always_inline)) void in_registers(int64_t from, int64_t to, const Work &work) {
  int64_t i = from;
  for (; i + LANES <= to; i += LANES) work(Whole{}, i);
  if (i < to) work(Part{first_lanes(to - i)}, i);
}

// -------------------------------------------------------------------------------------------------------------- norms

// For columns [0, width) the sums of value(lanes, 0, i), ..., value(lanes, n - 1, i) as ops/elementwise.py adds them: of n
// rows the last n / 2 are added to the first, and so on with what is left. So row j at a level is row j of the level
// before, plus, where there is one, the row that lies this level's length further on.
template <class Value>
class HalvingSums {
 public:
  HalvingSums(const Value &value, int64_t n, int64_t width) : value_(value), width_(width) {
    for (length_[0] = n; length_[levels_] > 1; ++levels_)
      length_[levels_ + 1] = length_[levels_] - length_[levels_] / 2;
  }

  void into(float *sums) { put(levels_, 0, sums); }

 private:
  static constexpr int IN_REGISTERS = 3;  // levels, of eight rows together

  template <int LEVEL, class Lanes>
  inline __attribute__((always_inline)) __m256 at(Lanes lanes, int64_t j, int64_t i) const {
    if constexpr (LEVEL == 0) {
      return value_(lanes, j, i);
    } else {
      const __m256 first = at<LEVEL - 1>(lanes, j, i);
      const int64_t other = j + length_[LEVEL];
      return other < length_[LEVEL - 1] ? _mm256_add_ps(first, at<LEVEL - 1>(lanes, other, i)) : first;
    }
  }

  template <int LEVEL>
  void put_row(int64_t j, float *sums) const {
    in_registers(0, width_, [&](auto lanes, int64_t i) { lanes.store(sums + i, at<LEVEL>(lanes, j, i)); });
  }

  void put(int level, int64_t j, float *sums) {
    switch (level) {
      case 0: return put_row<0>(j, sums);
      case 1: return put_row<1>(j, sums);
      case 2: return put_row<2>(j, sums);
      case IN_REGISTERS: return put_row<IN_REGISTERS>(j, sums);
    }
    put(level - 1, j, sums);
    const int64_t other = j + length_[level];
    if (other >= length_[level - 1]) return;
    float *const more = sums_[level];
    put(level - 1, other, more);
    in_registers(0, width_, [&](auto lanes, int64_t i) {
      lanes.store(sums + i, _mm256_add_ps(lanes.load(sums + i), lanes.load(more + i)));
    });
  }

  const Value &value_;
  const int64_t width_;
  int levels_ = 0;
  int64_t length_[MOST_LEVELS + 1];
  float sums_[MOST_LEVELS + 1][MOST_COLUMNS];
};

template <class Value>
inline void halving_sums(const Value &value, int64_t n, int64_t width, float *sums) {
  HalvingSums<Value>(value, n, width).into(sums);
}

// --------------------------------------------------------------------------------------------------------------- SiLU

// e^x to one unit in the last place: the polynomial of SLEEF's expf (Shibata and Petrogalli 2020), which torch uses.
inline __m256 exponential(__m256 x) {
  const __m256i power = _mm256_cvtps_epi32(_mm256_mul_ps(x, all(1.442695040888963407f)));
  const __m256 whole = _mm256_cvtepi32_ps(power);
  __m256 s = _mm256_fmadd_ps(whole, all(-0.693145751953125f), x);
  s = _mm256_fmadd_ps(whole, all(-1.428606765330187045e-06f), s);
  __m256 u = all(0.000198527617612853646278381f);
  u = _mm256_fmadd_ps(u, s, all(0.00139304355252534151077271f));
  u = _mm256_fmadd_ps(u, s, all(0.00833336077630519866943359f));
  u = _mm256_fmadd_ps(u, s, all(0.0416664853692054748535156f));
  u = _mm256_fmadd_ps(u, s, all(0.166666671633720397949219f));
  u = _mm256_fmadd_ps(u, s, all(0.5f));
  u = _mm256_add_ps(all(1.0f), _mm256_fmadd_ps(_mm256_mul_ps(s, s), u, s));
  // times 2^power in two steps, since 2^power itself may be beyond the largest number
  const __m256i half = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
  const auto two_to = [&](__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, bias), 23));
  };
  u = _mm256_mul_ps(_mm256_mul_ps(u, two_to(half)), two_to(_mm256_sub_epi32(power, half)));
  u = _mm256_andnot_ps(_mm256_cmp_ps(x, all(-104.0f), _CMP_LT_OQ), u);
  return _mm256_blendv_ps(u, all(__builtin_inff()), _mm256_cmp_ps(all(100.0f), x, _CMP_LT_OQ));
}

inline __m256 one_and_exponential_of_negative(__m256 x) {
  return _mm256_add_ps(all(1.0f), exponential(_mm256_xor_ps(x, all(-0.0f))));
}

}  // namespace

void normalize(const RmsNorm &norm, int64_t from, int64_t to) {
  const int64_t width = to - from;
  const float *const x = norm.x + from;
  float *const rstd = norm.rstd + from;
  float squares[MOST_COLUMNS];
  halving_sums(
      [&](auto lanes, int64_t c, int64_t i) {
        const __m256 value = lanes.load(x + c * norm.n + i);
        return _mm256_mul_ps(value, value);
      },
      norm.features, width, squares);
  in_registers(0, width, [&](auto lanes, int64_t i) {
    const __m256 mean = _mm256_div_ps(lanes.load(squares + i), all(static_cast<float>(norm.features)));
    lanes.store(rstd + i, _mm256_div_ps(all(1.0f), _mm256_sqrt_ps(_mm256_add_ps(mean, all(norm.eps)))));
  });
  for (int64_t c = 0; c < norm.features; ++c) {
    const float *const row = x + c * norm.n;
    float *const y = norm.y + from + c * norm.n;
    const __m256 weight = all(norm.weight[c]);
    in_registers(0, width, [&](auto lanes, int64_t i) {
      lanes.store(y + i, _mm256_mul_ps(_mm256_mul_ps(lanes.load(row + i), lanes.load(rstd + i)), weight));
    });
  }
}

void normalize_gradient(const RmsNormGradient &norm, int64_t from, int64_t to) {
  const int64_t width = to - from;
  const float *const x = norm.x + from, *const dy = norm.dy + from, *const rstd = norm.rstd + from;
  float means[MOST_COLUMNS];
  halving_sums(
      [&](auto lanes, int64_t c, int64_t i) {
        const __m256 g = _mm256_mul_ps(lanes.load(dy + c * norm.n + i), all(norm.weight[c]));
        return _mm256_mul_ps(g, lanes.load(x + c * norm.n + i));
      },
      norm.features, width, means);
  in_registers(0, width, [&](auto lanes, int64_t i) {
    const __m256 product = _mm256_mul_ps(lanes.load(means + i), lanes.load(rstd + i));
    lanes.store(means + i, _mm256_div_ps(product, all(static_cast<float>(norm.features))));
  });
  for (int64_t c = 0; c < norm.features; ++c) {
    const int64_t row = c * norm.n;
    const __m256 weight = all(norm.weight[c]);
    in_registers(0, width, [&](auto lanes, int64_t i) {
      const __m256 factor = lanes.load(rstd + i), g = _mm256_mul_ps(lanes.load(dy + row + i), weight);
      const __m256 along = _mm256_mul_ps(_mm256_mul_ps(lanes.load(x + row + i), factor), lanes.load(means + i));
      lanes.store(norm.dx + from + row + i, _mm256_mul_ps(_mm256_sub_ps(g, along), factor));
    });
  }
}

void multiply_silu(const SiluProduct &product, int64_t from, int64_t to) {
  in_registers(from, to, [&](auto lanes, int64_t i) {
    const __m256 gate = lanes.load(product.gate + i);
    const __m256 silu = _mm256_div_ps(gate, one_and_exponential_of_negative(gate));
    lanes.store(product.out + i, _mm256_mul_ps(silu, lanes.load(product.up + i)));
  });
}

void multiply_silu_gradient(const SiluProductGradient &product, int64_t from, int64_t to) {
  in_registers(from, to, [&](auto lanes, int64_t i) {
    const __m256 gate = lanes.load(product.gate + i), dy = lanes.load(product.dy + i);
    const __m256 divisor = one_and_exponential_of_negative(gate);
    lanes.store(product.d_up + i, _mm256_mul_ps(_mm256_div_ps(gate, divisor), dy));
    const __m256 sigmoid = _mm256_div_ps(all(1.0f), divisor);
    const __m256 slope = _mm256_fmadd_ps(gate, _mm256_sub_ps(all(1.0f), sigmoid), all(1.0f));
    const __m256 d_silu = _mm256_mul_ps(dy, lanes.load(product.up + i));
    lanes.store(product.d_gate + i, _mm256_mul_ps(_mm256_mul_ps(d_silu, sigmoid), slope));
  });
}

void rotate(const Rotation &rotation, bool inverse, int64_t from, int64_t to) {
  const __m256 sign = all(inverse ? -0.0f : 0.0f);
  const int64_t n = rotation.n, second = rotation.half * n;
  for (int64_t row = from; row < to; ++row) {
    const int64_t pair = row % rotation.half, first = (row / rotation.half * 2 * rotation.half + pair) * n;
    const float *const x = rotation.x + first, *const cos = rotation.cos + pair * n, *const sin = rotation.sin + pair * n;
    float *const y = rotation.y + first;
    in_registers(0, n, [&](auto lanes, int64_t i) {
      const __m256 c = lanes.load(cos + i), s = _mm256_xor_ps(lanes.load(sin + i), sign);
      const __m256 a = lanes.load(x + i), b = lanes.load(x + second + i);
      lanes.store(y + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
      lanes.store(y + second + i, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    });
  }
}

void update(const AdamW &adamw, int64_t from, int64_t to) {
  const lema_adamw_rates rates = adamw.rates;
  // from 1/2 on torch interpolates backwards, from the gradient to the moment
  const bool from_gradient = !(rates.rate1 < 0.5f);
  const __m256 rate1 = all(from_gradient ? rates.rate1 - 1.0f : rates.rate1);
  in_registers(from, to, [&](auto lanes, int64_t i) {
    const __m256 grad = _mm256_mul_ps(lanes.load(adamw.grad + i), all(rates.grad_scale));
    const __m256 before = lanes.load(adamw.exp_avg + i);
    const __m256 exp_avg = _mm256_fmadd_ps(rate1, _mm256_sub_ps(grad, before), from_gradient ? grad : before);
    const __m256 faded = _mm256_mul_ps(lanes.load(adamw.exp_avg_sq + i), all(rates.beta2));
    const __m256 exp_avg_sq = _mm256_fmadd_ps(_mm256_mul_ps(all(rates.rate2), grad), grad, faded);
    const __m256 root = _mm256_div_ps(_mm256_sqrt_ps(exp_avg_sq), all(rates.correction));
    const __m256 scaled = _mm256_mul_ps(all(rates.step), exp_avg);
    const __m256 change = _mm256_div_ps(scaled, _mm256_add_ps(root, all(rates.eps)));
    const __m256 kept = _mm256_mul_ps(lanes.load(adamw.param + i), all(rates.keep));
    lanes.store(adamw.exp_avg + i, exp_avg);
    lanes.store(adamw.exp_avg_sq + i, exp_avg_sq);
    lanes.store(adamw.param + i, _mm256_add_ps(kept, change));
  });
}

}  // namespace lema
