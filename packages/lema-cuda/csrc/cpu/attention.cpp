// Arguments of attention and how it is dealt out; the arithmetic is in attention_blocks.h.

#include "attention.h"
#include "deal.h"
#include "features.h"

#include <new>

namespace lema {
namespace {

constexpr int64_t LINE_BYTES = 64;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

const AttentionBodies &chosen() { return instructions() >= LEMA_AVX512 ? ATTENTION_AVX512 : ATTENTION_AVX2; }

struct Sizes {
  int64_t rows = 0, longest = 0;
};

Sizes sizes_of(const lema_attention &a) {
  Sizes sizes;
  for (int64_t i = 0; i < a.n_segments; ++i) {
    const lema_segment &segment = a.segments[i];
    sizes.rows += segment.rows;
    if (segment.tokens > sizes.longest) sizes.longest = segment.tokens;
  }
  return sizes;
}

int64_t bytes_of_thread(const lema_attention &a) {
  const int64_t floats = a.d_out == nullptr ? attention_floats(a.d) : attention_gradient_floats(a.d, sizes_of(a).longest);
  return round_up(floats * static_cast<int64_t>(sizeof(float)), LINE_BYTES);
}

int64_t bytes_of_turns(const lema_attention &a) {
  const int64_t turns = a.d_out == nullptr ? 0 : sizes_of(a).rows * a.groups;
  return round_up(turns * static_cast<int64_t>(sizeof(std::atomic<int32_t>)), LINE_BYTES);
}

bool sound(const lema_attention &a) {
  if (a.d < STRIP || a.d > MOST_D || a.d % STRIP != 0 || a.groups < 1 || a.heads < 1 || a.heads % a.groups != 0 ||
      a.n < 0 || a.threads < 1)
    return false;
  if (a.q_stride < a.n || a.k_stride < a.n || a.v_stride < a.n || (a.d_out != nullptr && a.d_out_stride < a.n))
    return false;
  for (int64_t i = 0; i < a.n_segments; ++i) {
    const lema_segment &s = a.segments[i];
    if (s.start < 0 || s.rows < 0 || s.tokens < 0 || s.start + s.rows * s.tokens > a.n) return false;
  }
  return true;
}

char *aligned(void *scratch) {
  return reinterpret_cast<char *>(round_up(reinterpret_cast<int64_t>(scratch), LINE_BYTES));
}

float *scratch_of(char *first, int64_t bytes, int slot) { return reinterpret_cast<float *>(first + bytes * slot); }

void forward(const lema_attention &a) {
  const AttentionBodies &bodies = chosen();
  char *const scratch = aligned(a.scratch);
  const int64_t bytes = bytes_of_thread(a);
  int64_t units = 0;
  for (int64_t i = 0; i < a.n_segments; ++i)
    units += a.segments[i].rows * a.heads * (round_up(a.segments[i].tokens, BLOCK) / BLOCK);
  deal_out(a.threads, units, [&](int64_t unit, int slot) {
    const lema_segment *segment = a.segments;
    int64_t blocks, all;
    for (;; ++segment, unit -= all) {
      blocks = round_up(segment->tokens, BLOCK) / BLOCK;
      all = segment->rows * a.heads * blocks;
      if (unit < all) break;
    }
    // the later a block, the more keys it sees: the long ones come first
    const int64_t row = unit / (a.heads * blocks), rest = unit % (a.heads * blocks);
    const HeadRow head_row{segment->start + row * segment->tokens, segment->tokens, rest % a.heads};
    bodies.attend(a, head_row, blocks - 1 - rest / a.heads, scratch_of(scratch, bytes, slot));
  });
}

void backward(const lema_attention &a) {
  const AttentionBodies &bodies = chosen();
  char *const turns_at = aligned(a.scratch), *const scratch = turns_at + bytes_of_turns(a);
  const int64_t bytes = bytes_of_thread(a), rows = sizes_of(a).rows, per_group = a.heads / a.groups;
  auto *const turns = reinterpret_cast<std::atomic<int32_t> *>(turns_at);
  for (int64_t i = 0; i < rows * a.groups; ++i) new (turns + i) std::atomic<int32_t>(0);
  deal_out(a.threads, rows * a.heads, [&](int64_t unit, int slot) {
    // heads of one group as far apart as can be: each waits for the one before it to add its part
    const int64_t all_row = unit / a.heads, rest = unit % a.heads, group = rest % a.groups;
    const int64_t head = group * per_group + rest / a.groups;
    const lema_segment *segment = a.segments;
    int64_t row = all_row;
    for (; row >= segment->rows; ++segment) row -= segment->rows;
    const HeadRow head_row{segment->start + row * segment->tokens, segment->tokens, head};
    bodies.attend_gradient(a, head_row, turns[all_row * a.groups + group], scratch_of(scratch, bytes, slot));
  });
}

}  // namespace
}  // namespace lema

extern "C" int64_t lema_attention_scratch_bytes(const lema_attention *a) {
  return lema::LINE_BYTES + lema::bytes_of_turns(*a) + lema::bytes_of_thread(*a) * a->threads;
}

extern "C" int32_t lema_attend(const lema_attention *a) {
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  if (!lema::sound(*a)) return LEMA_BAD_ARGUMENT;
  if (a->scratch_bytes < lema_attention_scratch_bytes(a)) return LEMA_SMALL_SCRATCH;
  if (a->d_out == nullptr) {
    lema::forward(*a);
  } else {
    lema::backward(*a);
  }
  return LEMA_OK;
}
