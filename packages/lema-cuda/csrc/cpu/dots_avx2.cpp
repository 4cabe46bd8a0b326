// Products for few tokens, as when a token is generated: bound by memory, so the weight is read in its own order.
//
// Forward, an element is a dot product along a row of the weight: the sum over pieces of PIECE, in order; a piece is
// summed in eight lanes, the lanes pairwise, and what is left of it beyond the last eight one by one; last comes the
// low-rank term. The input gradient is a sum of rows of the weight, in the order of tiles_avx2.cpp.

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
  using F = Format<DTYPE>;
  const char *w = p.weight + (row * p.k + start) * F::BYTES;
  const int64_t row_bytes = p.k * F::BYTES;
  const float *x = p.packed_b + start;
  __m256 sums[ROWS][N];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES)
    for (int r = 0; r < ROWS; ++r) {
      const __m256 wide = F::eight(w + r * row_bytes + i * F::BYTES);
      for (int n = 0; n < N; ++n) sums[r][n] = _mm256_fmadd_ps(wide, _mm256_loadu_ps(x + n * p.inner + i), sums[r][n]);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < N; ++n) {
      float sum = sum_of_lanes(sums[r][n]);
      for (int64_t j = i; j < length; ++j) sum = __builtin_fmaf(F::one(w + r * row_bytes + j * F::BYTES), x[n * p.inner + j], sum);
      float &c = p.c[(row + r) * p.c_stride + n];
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

template <int DTYPE, int N>
void dot_rows(const Product &p, int64_t from, int64_t to) {
  constexpr int ROWS = N <= 2 ? 4 : 2;
  for (int64_t start = 0; start < p.inner; start += PIECE) {
    const int64_t length = at_most(PIECE, p.inner - start);
    int64_t row = from;
    for (; row + ROWS <= to; row += ROWS) dots<DTYPE, ROWS, N>(p, row, start, length, p.accumulate || start > 0);
    for (; row < to; ++row) dots<DTYPE, 1, N>(p, row, start, length, p.accumulate || start > 0);
  }
  add_low_rank<N>(p, from, to);
}

// sums[n][i] += weight[row + r][from + i] * b[row + r][n], over r in order.
template <int DTYPE, int ROWS, int N>
void sum_rows(const Product &p, int64_t row, int64_t from, int64_t columns, float (*sums)[SUMS]) {
  using F = Format<DTYPE>;
  constexpr int64_t LINE = LINE_BYTES / F::BYTES;
  const int64_t row_bytes = p.k * F::BYTES;
  const char *w = p.weight + row * row_bytes + from * F::BYTES;
  const float *b = p.b + row * p.b_stride;
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) {
    if (i % LINE == 0)
      for (int r = 0; r < ROWS; ++r) _mm_prefetch(w + (ROWS + r) * row_bytes + i * F::BYTES, _MM_HINT_T0);
    __m256 sum[N];
    for (int n = 0; n < N; ++n) sum[n] = _mm256_load_ps(sums[n] + i);
    for (int r = 0; r < ROWS; ++r) {
      const __m256 wide = F::eight(w + r * row_bytes + i * F::BYTES);
      for (int n = 0; n < N; ++n) sum[n] = _mm256_fmadd_ps(wide, _mm256_broadcast_ss(b + r * p.b_stride + n), sum[n]);
    }
    for (int n = 0; n < N; ++n) _mm256_store_ps(sums[n] + i, sum[n]);
  }
  for (; i < columns; ++i)
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < N; ++n)
        sums[n][i] = __builtin_fmaf(F::one(w + r * row_bytes + i * F::BYTES), b[r * p.b_stride + n], sums[n][i]);
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
  static_assert(FEW == 4, "one case for each number of columns");
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  for (int64_t from; (from = job.next_row.fetch_add(BLOCK, std::memory_order_relaxed)) < p.m;) {
    const int64_t to = at_most(p.m, from + BLOCK);
    switch (p.n) {
      case 1: dot_rows<DTYPE, 1>(p, from, to); break;
      case 2: dot_rows<DTYPE, 2>(p, from, to); break;
      case 3: dot_rows<DTYPE, 3>(p, from, to); break;
      default: dot_rows<DTYPE, 4>(p, from, to); break;
    }
  }
}

template <int DTYPE>
void run_sums(void *context, int) {
  Job &job = *static_cast<Job *>(context);
  const Product &p = job.product;
  int64_t share = (p.m / (2 * p.threads) + LEAST - 1) / LEAST * LEAST;
  share = share < LEAST ? LEAST : at_most(share, SUMS);
  for (int64_t from; (from = job.next_row.fetch_add(share, std::memory_order_relaxed)) < p.m;) {
    const int64_t to = at_most(p.m, from + share);
    switch (p.n) {
      case 1: sum_columns<DTYPE, 1>(p, from, to); break;
      case 2: sum_columns<DTYPE, 2>(p, from, to); break;
      case 3: sum_columns<DTYPE, 3>(p, from, to); break;
      default: sum_columns<DTYPE, 4>(p, from, to); break;
    }
  }
}

template void run_dots<LEMA_F32>(void *, int);
template void run_dots<LEMA_F16>(void *, int);
template void run_dots<LEMA_BF16>(void *, int);
template void run_sums<LEMA_F32>(void *, int);
template void run_sums<LEMA_F16>(void *, int);
template void run_sums<LEMA_BF16>(void *, int);

}  // namespace lema
