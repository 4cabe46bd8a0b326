// Products for few tokens, as when a token is generated: bound by memory, so the weight is read in its own order.
//
// Forward, an element is a dot product along a row of the weight: the sum over pieces of PIECE, in order; a piece is
// summed in eight lanes, the lanes pairwise, and what is left of it beyond the last eight one by one; last comes the
// low-rank term. Of an int8 weight the codes are summed, and each piece's sum is multiplied by the row's scale. Four-bit
// codes are summed in a lane for each word of eight, 64 codes at a time, to which the lanes' scales are applied. The input gradient is a sum of rows of the weight, in the order of tiles_avx2.cpp.

#include "few.h"
#include "formats_avx2.h"
#include "linear.h"

namespace lema {
namespace {

constexpr int64_t PIECE = 4096;
constexpr int64_t BLOCK = 32;   // rows that a thread takes at once
constexpr int64_t SUMS = 512;   // columns of the weight that are summed at once: they stay in the first-level cache
constexpr int64_t LEAST = 64;   // columns that a thread takes at once
constexpr int64_t LINE_BYTES = 64;

inline float sum_of_lanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// ROWS rows of the weight from `row`, N columns; `first` piece or not.
template <int DTYPE, int ROWS, int N>
void dots(const Product &p, int64_t row, int64_t start, int64_t length, bool add) {
  using R = Row<DTYPE>;
  const char *const w = R(p.weight, p.scales, p.k, row).at(start);
  const int64_t row_bytes = R::bytes(p.k);
  const float *x = p.packed_b + start;
  __m256 sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES)
    for (int r = 0; r < ROWS; ++r) {
      const char *const at = w + r * row_bytes + R::bytes(i);
      if (R::bytes(i) % LINE_BYTES == 0) _mm_prefetch(at + ROWS * row_bytes, _MM_HINT_T0);
      const __m256 wide = R::code(at);
      for (int n = 0; n < N; ++n) sums[r][n] = _mm256_fmadd_ps(wide, _mm256_loadu_ps(x + n * p.inner + i), sums[r][n]);
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

// The same for four bits: rows from `row`, 64 codes at a time. Each lane sums the codes of a word, times x, then goes the
// scale of the word's group on it.
template <int DTYPE, int ROWS, int N>
void dots_of_codes(const Product &p, int64_t row, int64_t start, int64_t length, bool add) {
  using R = Row<DTYPE>;
  using C = FourBits<DTYPE>;
  const char *const w = R(p.weight, p.scales, p.k, row).at(start), *const scales = R(p.weight, p.scales, p.k, row).scales();
  const int64_t row_bytes = R::bytes(p.k), groups = R::groups(p.k), scale_bytes = groups * C::SCALE_BYTES;
  const int64_t padded = (p.inner + CODES - 1) / CODES * CODES;
  const float *const x = p.packed_b + start;
  __m256 sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm256_setzero_ps();
  for (int64_t i = 0; i < length; i += CODES) {
    __m256i words[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const char *const at = w + r * row_bytes + i / 2;
      if (i + CODES <= length) {
        words[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
        _mm_prefetch(at + ROWS * row_bytes, _MM_HINT_T0);
      } else {
        char last[CODES / 2] = {};
        memcpy(last, at, R::bytes(length - i));
        words[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(last));
      }
    }
    __m256 parts[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < N; ++n) parts[r][n] = _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      for (int r = 0; r < ROWS; ++r) {
        const __m256 wide = C::nth(words[r], j);
        for (int n = 0; n < N; ++n)
          parts[r][n] = _mm256_fmadd_ps(wide, _mm256_loadu_ps(x + n * padded + i + j * LANES), parts[r][n]);
      }
    for (int r = 0; r < ROWS; ++r) {
      const __m256 scale = C::spread(scales + r * scale_bytes, (start + i) / CODES, groups);
      for (int n = 0; n < N; ++n) sums[r][n] = _mm256_fmadd_ps(scale, parts[r][n], sums[r][n]);
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

// sums[n][i] += weight[row + r][from + i] * b[row + r][n], over r in order.
template <int DTYPE, int ROWS, int N>
void sum_rows(const Product &p, int64_t row, int64_t from, int64_t columns, float (*sums)[SUMS]) {
  using R = Row<DTYPE>;
  const int64_t row_bytes = R::bytes(p.k);
  const char *const w = p.weight + row * row_bytes;
  const float *b = p.b + row * p.b_stride;
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) {
    if (R::bytes(i) % LINE_BYTES == 0)
      for (int r = 0; r < ROWS; ++r) _mm_prefetch(w + (ROWS + r) * row_bytes + R::bytes(from + i), _MM_HINT_T0);
    __m256 sum[N];
    for (int n = 0; n < N; ++n) sum[n] = _mm256_load_ps(sums[n] + i);
    for (int r = 0; r < ROWS; ++r) {
      const __m256 wide = R(p.weight, p.scales, p.k, row + r).eight(from + i);
      for (int n = 0; n < N; ++n) sum[n] = _mm256_fmadd_ps(wide, _mm256_broadcast_ss(b + r * p.b_stride + n), sum[n]);
    }
    for (int n = 0; n < N; ++n) _mm256_store_ps(sums[n] + i, sum[n]);
  }
  for (; i < columns; ++i)
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < N; ++n)
        sums[n][i] = __builtin_fmaf(R(p.weight, p.scales, p.k, row + r).one(from + i), b[r * p.b_stride + n], sums[n][i]);
}

// Rows [from, to) of c, at most SUMS: columns of the weight.
template <int DTYPE, int N>
void sum_columns(const Product &p, int64_t from, int64_t to) {
  constexpr int ROWS = N <= 2 ? 8 : 4;
  alignas(LINE_BYTES) float sums[N][SUMS];
  const int64_t all = pieces(p.inner > p.rank ? p.inner : p.rank);
  for (int64_t piece = 0; piece < all; ++piece) {
    const int64_t start = piece * KC, stop = at_most(p.inner, start + KC), u_stop = at_most(p.rank, start + KC);
    memset(sums, 0, sizeof sums);
    int64_t row = start;
    for (; row + ROWS <= stop; row += ROWS) sum_rows<DTYPE, ROWS, N>(p, row, from, to - from, sums);
    for (; row < stop; ++row) sum_rows<DTYPE, 1, N>(p, row, from, to - from, sums);
    for (int64_t i = start; i < u_stop; ++i)
      for (int64_t m = from; m < to; ++m) {
        const float u = p.scale * p.u[m * p.u_row + i * p.u_column];
        for (int n = 0; n < N; ++n)
          sums[n][m - from] = __builtin_fmaf(u, p.v[i * p.v_stride + n], sums[n][m - from]);
      }
    const bool add = p.accumulate || piece > 0;
    for (int64_t m = from; m < to; ++m)
      for (int n = 0; n < N; ++n) {
        float &c = p.c[m * p.c_stride + n];
        c = add ? c + sums[n][m - from] : sums[n][m - from];
      }
  }
}

}  // namespace

template <int DTYPE>
void run_dots(void *context, int) {
  deal_few(*static_cast<Job *>(context), BLOCK, [](auto columns, const Product &p, int64_t from, int64_t to) {
    dot_rows<DTYPE, decltype(columns)::value>(p, from, to);
  });
}

template <int DTYPE>
void run_sums(void *context, int) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  int64_t share = (p.m / (2 * p.threads) + LEAST - 1) / LEAST * LEAST;
  share = share < LEAST ? LEAST : at_most(share, SUMS);
  deal_few(job, share, [](auto columns, const Product &p, int64_t from, int64_t to) {
    sum_columns<DTYPE, decltype(columns)::value>(p, from, to);
  });
}

template void run_dots<LEMA_F32>(void *, int);
template void run_dots<LEMA_F16>(void *, int);
template void run_dots<LEMA_BF16>(void *, int);
template void run_dots<LEMA_INT8>(void *, int);
template void run_dots<LEMA_INT4_32>(void *, int);
template void run_dots<LEMA_INT4_64>(void *, int);
template void run_dots<LEMA_INT4_128>(void *, int);
template void run_dots<LEMA_NF4>(void *, int);
template void run_sums<LEMA_F32>(void *, int);
template void run_sums<LEMA_F16>(void *, int);
template void run_sums<LEMA_BF16>(void *, int);
template void run_sums<LEMA_INT8>(void *, int);
template void run_sums<LEMA_INT4_32>(void *, int);
template void run_sums<LEMA_INT4_64>(void *, int);
template void run_sums<LEMA_INT4_128>(void *, int);
template void run_sums<LEMA_NF4>(void *, int);

}  // namespace lema
