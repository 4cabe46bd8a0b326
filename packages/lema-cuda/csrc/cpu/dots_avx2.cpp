// out = W x for few tokens, as when a token is generated: dot products along the rows of the weight, bound by memory.
//
// An element is the sum over pieces of PIECE, in order; a piece is summed in eight lanes, the lanes pairwise, and what
// is left of it beyond the last eight one by one.

#include "formats_avx2.h"
#include "linear.h"

namespace lema {
namespace {

constexpr int64_t PIECE = 4096;
constexpr int64_t BLOCK = 32;  // rows that a thread takes at once

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
      for (int64_t j = i; j < length; ++j) sum += F::one(w + r * row_bytes + j * F::BYTES) * x[n * p.inner + j];
      float &c = p.c[(row + r) * p.c_stride + n];
      c = add ? c + sum : sum;
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

template void run_dots<LEMA_F32>(void *, int);
template void run_dots<LEMA_F16>(void *, int);
template void run_dots<LEMA_BF16>(void *, int);

}  // namespace lema
