// Products for few tokens, as when a token is generated: bound by memory, so the weight is read in its own order.
//
// An element is a dot product along a row of the weight: the sum over pieces of PIECE, in order; a piece is summed in
// WIDE lanes, the lanes pairwise, and what is left of it beyond the last WIDE one by one; last comes the low-rank term.
// Of an int8 weight the codes are summed, and each piece's sum is multiplied by the row's scale. Four-bit codes are
// summed in a lane for each word of eight, CODES at a time, to which the lanes' scales are applied.

#pragma once

#include "few.h"
#include "linear.h"
#include "wide_formats.h"

namespace lema {
namespace {

constexpr int64_t PIECE = 4096;
constexpr int64_t BLOCK = 32;   // rows that a thread takes at once
constexpr int64_t LINE_BYTES = 64;

inline float sum_of_lanes(Wide wide) {
  const __m256 v = folded(wide);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// b in the order in which words of eight four-bit codes come apart: of CODES columns first those of each word's first
// code, divided by what the codes are multiplied by. Zeros beyond the last column.
void order_codes(const Product &p, bool is_nf4, float *target) {
  const int64_t swap = is_nf4 ? 1 : 0;
  for (int64_t n = 0; n < p.n; ++n)
    for (int64_t first = 0; first < p.inner; first += CODES)
      for (int code = 0; code < 8; ++code) {
        const float factor = is_nf4 ? 1.0f : 1.0f / static_cast<float>(1 << code_power(code));
        for (int64_t word = 0; word < WIDE; ++word) {
          const int64_t i = first + 8 * word + (code ^ swap);
          *target++ = i < p.inner ? p.b[i * p.b_stride + n] * factor : 0.0f;
        }
      }
}

// ROWS rows of the weight from `row`, N columns; `first` piece or not.
template <int DTYPE, int ROWS, int N>
void dots(const Product &p, int64_t row, int64_t start, int64_t length, bool add) {
  using R = Row<DTYPE>;
  const char *const w = R(p.weight, p.scales, p.k, row).at(start);
  const int64_t row_bytes = R::bytes(p.k);
  const float *x = p.packed_b + start;
  Wide sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = zeros();
  int64_t i = 0;
  for (; i + WIDE <= length; i += WIDE)
    for (int r = 0; r < ROWS; ++r) {
      const char *const at = w + r * row_bytes + R::bytes(i);
      if (R::bytes(i) % LINE_BYTES == 0) _mm_prefetch(at + ROWS * row_bytes, _MM_HINT_T0);
      const Wide wide = wide_code<DTYPE>(at);
      for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(wide, load(x + n * p.inner + i), sums[r][n]);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) {
      float sum = sum_of_lanes(sums[r][n]);
      for (int64_t j = i; j < length; ++j)
        sum = __builtin_fmaf(R::one_code(w + r * row_bytes + R::bytes(j)), x[n * p.inner + j], sum);
      sum = R(p.weight, p.scales, p.k, row + r).finish(sum);
      float &c = p.c[(row + r) * p.c_stride + n];
      c = add ? c + sum : sum;
    }
}

// The same for four bits: rows from `row`, CODES at a time. Each lane sums the codes of a word, times x, then goes the
// scale of the word's group on it.
template <int DTYPE, int ROWS, int N>
void dots_of_codes(const Product &p, int64_t row, int64_t start, int64_t length, bool add) {
  using R = Row<DTYPE>;
  using C = WideCodes<DTYPE>;
  const char *const w = R(p.weight, p.scales, p.k, row).at(start), *const scales = R(p.weight, p.scales, p.k, row).scales();
  const int64_t row_bytes = R::bytes(p.k), groups = R::groups(p.k), scale_bytes = groups * FourBits<DTYPE>::SCALE_BYTES;
  const int64_t padded = (p.inner + CODES - 1) / CODES * CODES;
  const float *const x = p.packed_b + start;
  Wide sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = zeros();
  for (int64_t i = 0; i < length; i += CODES) {
    WideInts words[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const char *const at = w + r * row_bytes + i / 2;
      if (i + CODES <= length) {
        words[r] = load_words(at);
        _mm_prefetch(at + ROWS * row_bytes, _MM_HINT_T0);
      } else {
        char last[CODES / 2] = {};
        memcpy(last, at, R::bytes(length - i));
        words[r] = load_words(last);
      }
    }
    Wide parts[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < N; ++n) parts[r][n] = zeros();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      for (int r = 0; r < ROWS; ++r) {
        const Wide wide = C::nth(words[r], j);
        for (int n = 0; n < N; ++n)
          parts[r][n] = multiply_add(wide, load(x + n * padded + i + j * WIDE), parts[r][n]);
      }
    for (int r = 0; r < ROWS; ++r) {
      const Wide scale = C::spread(scales + r * scale_bytes, (start + i) / CODES, groups);
      for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(scale, parts[r][n], sums[r][n]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) {
      float &c = p.c[(row + r) * p.c_stride + n];
      const float sum = sum_of_lanes(sums[r][n]);
      c = add ? c + sum : sum;
    }
}

// c += u v for rows [from, to).
template <int N>
void add_low_rank(const Product &p, int64_t from, int64_t to) {
  for (int64_t row = from; row < to; ++row) {
    const float *u = p.u + row * p.u_row;
    float sums[N] = {};
    for (int64_t i = 0; i < p.rank; ++i)
      for (int n = 0; n < N; ++n) sums[n] = __builtin_fmaf(p.scale * u[i * p.u_column], p.v[i * p.v_stride + n], sums[n]);
    for (int n = 0; n < N; ++n) p.c[row * p.c_stride + n] += sums[n];
  }
}

template <int DTYPE, int ROWS, int N>
void some_rows(const Product &p, int64_t row, int64_t start, int64_t length, bool add) {
  if constexpr (Row<DTYPE>::ALIGNED == 1) {
    dots<DTYPE, ROWS, N>(p, row, start, length, add);
  } else {
    dots_of_codes<DTYPE, ROWS, N>(p, row, start, length, add);
  }
}

template <int DTYPE, int N>
void dot_rows(const Product &p, int64_t from, int64_t to) {
  constexpr int ROWS = N <= 2 ? 4 : 2;
  for (int64_t start = 0; start < p.inner; start += PIECE) {
    const int64_t length = at_most(PIECE, p.inner - start);
    int64_t row = from;
    for (; row + ROWS <= to; row += ROWS) some_rows<DTYPE, ROWS, N>(p, row, start, length, p.accumulate || start > 0);
    for (; row < to; ++row) some_rows<DTYPE, 1, N>(p, row, start, length, p.accumulate || start > 0);
  }
  add_low_rank<N>(p, from, to);
}

template <int DTYPE>
void run_dots(void *context, int) {
  deal_few(*static_cast<Job *>(context), BLOCK, [](auto columns, const Product &p, int64_t from, int64_t to) {
    dot_rows<DTYPE, decltype(columns)::value>(p, from, to);
  });
}

constexpr DotBodies DOTS = {LEMA_FOR_EACH_DTYPE(run_dots), CODES, order_codes};

}  // namespace
}  // namespace lema
