// Input gradients for few tokens: sums of rows of the weight, which is read in its own order, as memory bounds them. An
// element is summed in the order of tiles.h.

#include "few.h"
#include "formats.h"
#include "linear.h"

namespace lema {
namespace {

constexpr int64_t SUMS = 512;   // columns of the weight that are summed at once: they stay in the first-level cache
constexpr int64_t LEAST = 64;   // columns that a thread takes at once
constexpr int64_t LINE_BYTES = 64;

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

}  // namespace

const Body SUMS_OF[N_DTYPES] = LEMA_FOR_EACH_DTYPE(run_sums);

}  // namespace lema
