// Products with few columns: rows of the result are dealt out, and what computes some of them is made for each number of
// columns.

#pragma once

#include "linear.h"

#include <type_traits>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

// `rows(number of columns, product, from, to)` for `share` rows at a time, until none is left.
template <typename Rows>
void deal_few(Job &job, int64_t share, Rows rows) {
  static_assert(FEW == 4, "one case for each number of columns");
  const Product &p = job.product;
  for (int64_t from; (from = job.next_row.fetch_add(share, std::memory_order_relaxed)) < p.m;) {
    const int64_t to = from + share < p.m ? from + share : p.m;
    switch (p.n) {
      case 1: rows(std::integral_constant<int, 1>(), p, from, to); break;
      case 2: rows(std::integral_constant<int, 2>(), p, from, to); break;
      case 3: rows(std::integral_constant<int, 3>(), p, from, to); break;
      default: rows(std::integral_constant<int, 4>(), p, from, to); break;
    }
  }
}

}  // namespace
}  // namespace lema
