// What attention.cpp deals out and attention_blocks.h computes: one head of one row at a time.

#pragma once

#include "../include/lema.h"

#include <atomic>

namespace lema {

constexpr int64_t STRIP = 16;  // queries that are computed side by side
constexpr int64_t BLOCK = 64;  // queries, and keys, of a block
constexpr int64_t MOST_D = 256;

// Row `head` of a batch: tokens [column, column + tokens).
struct HeadRow {
  int64_t column, tokens, head;
};

// Floats that one thread needs.
inline int64_t attention_floats(int64_t d) { return 4 * BLOCK * d + BLOCK * STRIP; }
inline int64_t attention_gradient_floats(int64_t d, int64_t tokens) {
  return 7 * BLOCK * d + 2 * BLOCK * BLOCK + 2 * tokens * d;
}

struct AttentionBodies {
  // Queries [64 * block, 64 * block + 64) of the row.
  void (*attend)(const lema_attention &a, const HeadRow &row, int64_t block, float *scratch);
  // All of the row. Its part of dk and dv is added when `turn` says that the heads before it in the group are in.
  void (*attend_gradient)(const lema_attention &a, const HeadRow &row, std::atomic<int32_t> &turn, float *scratch);
};

extern const AttentionBodies ATTENTION_AVX2, ATTENTION_AVX512;

}  // namespace lema
