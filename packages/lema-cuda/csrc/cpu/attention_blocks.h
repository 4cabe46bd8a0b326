// Attention of one head within one row, in blocks of 64 queries by 64 keys (Dao 2023, "FlashAttention-2"): no matrix of
// scores exists as a whole. Heads are feature-major, [D, tokens], so queries fill the lanes of a register, 16 of them in
// a strip, and nothing is transposed but for the gradients of keys and values.
//
// Blocks are counted from the row's first token and sums go through them in order: the bits of a token depend on its row
// alone, whatever the instructions are. Scores are powers of two: the factor log2(e) is part of what queries are multiplied
// by.

#pragma once

#include "attention.h"
#include "strips.h"

#include <sched.h>

namespace lema {
namespace {

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// ------------------------------------------------------------------------------------------------------------ forward

struct Keys {  // of one block
  int64_t first, count;
};

Keys keys_of(int64_t block, int64_t tokens) {
  return {block * BLOCK, at_most(BLOCK, tokens - block * BLOCK)};
}

// Of a block of keys that begins with the same token as the block of queries: what a strip of them sees.
int64_t seen_keys(bool same_block, int64_t count, int64_t strip) {
  return same_block ? at_most(count, (strip + 1) * STRIP) : count;
}

// The lanes of a strip, from `lane` on, whose query comes before the key `row` of the block.
inline Lanes hidden(int64_t row, int64_t strip, int64_t lane) {
  return is_greater(all(static_cast<float>(row)), from(static_cast<float>(strip * STRIP + lane)));
}

// Scores of a strip, from `lane` on, for one block of keys become powers of two. largest, sum: of the keys so far,
// updated; returns what the sums over earlier keys must be multiplied by.
Wide soften(float *scores, int64_t keys, bool same_block, int64_t strip, int64_t lane, Wide &largest, Wide &sum) {
  const int64_t open = same_block ? at_most(keys, strip * STRIP) : keys;
  const Wide before = largest;
  for (int64_t s = 0; s < open; ++s) largest = larger(largest, load(scores + s * STRIP));
  for (int64_t s = open; s < keys; ++s)
    largest = larger(largest, choose(hidden(s, strip, lane), largest, load(scores + s * STRIP)));
  const Wide correction = power_of_two(sub(before, largest));
  sum = mul(sum, correction);
  for (int64_t s = 0; s < open; ++s) {
    const Wide power = power_of_two(sub(load(scores + s * STRIP), largest));
    store(scores + s * STRIP, power);
    sum = add(sum, power);
  }
  for (int64_t s = open; s < keys; ++s) {
    const Wide power = without(hidden(s, strip, lane), power_of_two(sub(load(scores + s * STRIP), largest)));
    store(scores + s * STRIP, power);
    sum = add(sum, power);
  }
  return correction;
}

// A number for each query of a strip.
struct PerQuery {
  Wide of[PER_STRIP];

  static PerQuery loaded(const float *p) {
    PerQuery numbers;
    for (int i = 0; i < PER_STRIP; ++i) numbers.of[i] = load(p + i * WIDE);
    return numbers;
  }
  static PerQuery same(float value) {
    PerQuery numbers;
    for (int i = 0; i < PER_STRIP; ++i) numbers.of[i] = all(value);
    return numbers;
  }
  void put(float *p) const {
    for (int i = 0; i < PER_STRIP; ++i) store(p + i * WIDE, of[i]);
  }
};

void scale_rows(float *strip, int64_t d, const PerQuery &factors) {
  for (int64_t i = 0; i < d; ++i, strip += STRIP)
    for (int j = 0; j < PER_STRIP; ++j) store(strip + j * WIDE, mul(load(strip + j * WIDE), factors.of[j]));
}

// strip[D][16] -> `tokens` columns of x [D, ...].
void put_strip(const float *strip, int64_t d, int64_t tokens, float *x, int64_t stride) {
  for (int64_t i = 0; i < d; ++i) memcpy(x + i * stride, strip + i * STRIP, tokens * sizeof(float));
}

// What a thread computes in: consecutive pieces of its scratch.
class Pieces {
 public:
  explicit Pieces(float *first) : next_(first) {}
  float *take(int64_t floats) {
    float *const piece = next_;
    next_ += floats;
    return piece;
  }

 private:
  float *next_;
};

void attend(const lema_attention &a, const HeadRow &row, int64_t block, float *scratch) {
  const int64_t d = a.d, group = row.head / (a.heads / a.groups);
  const float *const k = a.k + group * d * a.k_stride + row.column, *const v = a.v + group * d * a.v_stride + row.column;
  const Keys queries = keys_of(block, row.tokens);
  const int64_t strips = (queries.count + STRIP - 1) / STRIP, column = row.column + queries.first;
  const float *const q = a.q + row.head * d * a.q_stride + column;
  Pieces pieces(scratch);
  float *const q_strips = pieces.take(BLOCK * d), *const sums = pieces.take(BLOCK * d);
  float *const k_block = pieces.take(BLOCK * d), *const v_block = pieces.take(BLOCK * d);
  float *const scores = pieces.take(BLOCK * STRIP);
  PerQuery largest[BLOCK / STRIP], total[BLOCK / STRIP];
  for (int64_t c = 0; c < strips; ++c) {
    const int64_t tokens = at_most(STRIP, queries.count - c * STRIP);
    pack_strip(q + c * STRIP, a.q_stride, d, tokens, a.scale * LOG2_E, q_strips + c * STRIP * d);
    largest[c] = PerQuery::same(-__builtin_inff());
    total[c] = PerQuery::same(0.0f);
  }
  for (int64_t other = 0; other <= block; ++other) {
    const Keys keys = keys_of(other, row.tokens);
    pack_block(k + keys.first, a.k_stride, d, keys.count, k_block);
    pack_block(v + keys.first, a.v_stride, d, keys.count, v_block);
    for (int64_t c = 0; c < strips; ++c) {
      const int64_t seen = seen_keys(other == block, keys.count, c);
      float *const sum = sums + c * STRIP * d;
      multiply({k_block, 1, BLOCK, d, q_strips + c * STRIP * d, scores, STRIP, false}, seen);
      PerQuery corrections;
      for (int i = 0; i < PER_STRIP; ++i)
        corrections.of[i] =
            soften(scores + i * WIDE, seen, other == block, c, i * WIDE, largest[c].of[i], total[c].of[i]);
      if (other > 0) scale_rows(sum, d, corrections);
      multiply({v_block, BLOCK, 1, seen, scores, sum, STRIP, other > 0}, d);
    }
  }
  for (int64_t c = 0; c < strips; ++c) {
    const int64_t tokens = at_most(STRIP, queries.count - c * STRIP), first = column + c * STRIP;
    PerQuery inverses;
    for (int i = 0; i < PER_STRIP; ++i) inverses.of[i] = divide(all(1.0f), total[c].of[i]);
    float inverse[STRIP], most[STRIP];
    inverses.put(inverse);
    largest[c].put(most);
    float *const sum = sums + c * STRIP * d;
    scale_rows(sum, d, inverses);
    put_strip(sum, d, tokens, a.out + row.head * d * a.n + first, a.n);
    memcpy(a.largest + row.head * a.n + first, most, tokens * sizeof(float));
    memcpy(a.inverse + row.head * a.n + first, inverse, tokens * sizeof(float));
  }
}

// ----------------------------------------------------------------------------------------------------------- backward

// Blocks of the row that the gradient works on. Powers are those of the forward pass without its division by their sum,
// which is made up for in `dy`.
struct Gradient {
  const lema_attention &a;
  int64_t d;
  float *q, *dy;            // strips[D][16]
  float *q_turned, *dy_turned;
  float *dq;                // strips[D][16]
  float *k, *v;             // [D][64]
  float *powers, *slopes;   // strips[64 keys][16]
  float *dk, *dv;           // [tokens][D]
  float largest[BLOCK], offset[BLOCK];
};

void pack_queries(Gradient &g, const HeadRow &row, const Keys &queries) {
  const lema_attention &a = g.a;
  const int64_t d = g.d, column = row.column + queries.first, strips = (queries.count + STRIP - 1) / STRIP;
  for (int64_t c = 0; c < strips; ++c) {
    const int64_t tokens = at_most(STRIP, queries.count - c * STRIP), first = column + c * STRIP;
    float *const q = g.q + c * STRIP * d, *const dy = g.dy + c * STRIP * d;
    pack_strip(a.q + row.head * d * a.q_stride + first, a.q_stride, d, tokens, a.scale * LOG2_E, q);
    pack_strip(a.d_out + row.head * d * a.d_out_stride + first, a.d_out_stride, d, tokens, 1.0f, dy);
    float inverse[STRIP] = {}, *const largest = g.largest + c * STRIP, *const offset = g.offset + c * STRIP;
    memset(largest, 0, STRIP * sizeof(float));
    memcpy(largest, a.largest + row.head * a.n + first, tokens * sizeof(float));
    memcpy(inverse, a.inverse + row.head * a.n + first, tokens * sizeof(float));
    scale_rows(dy, d, PerQuery::loaded(inverse));
    float *const out = g.dq + c * STRIP * d;  // until the sums begin
    pack_strip(a.out + row.head * d * a.n + first, a.n, d, tokens, 1.0f, out);
    PerQuery offsets = PerQuery::same(0.0f);
    for (int64_t i = 0; i < STRIP * d; i += STRIP)
      for (int j = 0; j < PER_STRIP; ++j)
        offsets.of[j] = multiply_add(load(dy + i + j * WIDE), load(out + i + j * WIDE), offsets.of[j]);
    offsets.put(offset);
    turn_strip(q, d, g.q_turned + c * STRIP * STRIP);
    turn_strip(dy, d, g.dy_turned + c * STRIP * STRIP);
    memset(out, 0, STRIP * d * sizeof(float));
  }
}

// Powers from scores, and the slopes powers * (slopes - offset), of `keys` rows; zero where the key is hidden.
void slope_strip(Gradient &g, int64_t c, int64_t keys, int64_t seen, bool same_block) {
  const int64_t open = same_block ? at_most(seen, c * STRIP) : seen;
  for (int64_t lane = 0; lane < STRIP; lane += WIDE) {
    float *powers = g.powers + c * BLOCK * STRIP + lane, *slopes = g.slopes + c * BLOCK * STRIP + lane;
    const Wide largest = load(g.largest + c * STRIP + lane), offset = load(g.offset + c * STRIP + lane);
    int64_t s = 0;
    for (; s < open; ++s, powers += STRIP, slopes += STRIP) {
      const Wide power = power_of_two(sub(load(powers), largest));
      store(powers, power);
      store(slopes, mul(power, sub(load(slopes), offset)));
    }
    for (; s < seen; ++s, powers += STRIP, slopes += STRIP) {
      const Wide power = without(hidden(s, c, lane), power_of_two(sub(load(powers), largest)));
      store(powers, power);
      store(slopes, mul(power, sub(load(slopes), offset)));
    }
    for (; s < keys; ++s, powers += STRIP, slopes += STRIP) {
      store(powers, zeros());
      store(slopes, zeros());
    }
  }
}

// [keys][D] += the product of strips[keys][16] with what is turned, over all strips that see the keys.
void add_turned(const float *strips_of_keys, const float *turned, const Keys &keys, int64_t strips, bool same_block,
                int64_t d, float *sums) {
  for (int64_t s = 0; s < keys.count; s += TILE) {
    const int64_t from = same_block ? s / STRIP : 0;
    if (from >= strips) break;
    for (int64_t i = 0; i < d; i += STRIP) {
      const float *const b = turned + i / STRIP * BLOCK * STRIP + from * STRIP * STRIP;
      const float *const rows = strips_of_keys + (from * BLOCK + s) * STRIP;
      float *const c = sums + (keys.first + s) * d + i;
      const Sum sum{rows, STRIP, 1, STRIP, b, c, d, true, BLOCK * STRIP, strips - from};
      tile_of(static_cast<int>(at_most(TILE, keys.count - s)), sum, 0);
    }
  }
}

// x [D, ...] (+)= factor * sums[tokens][D] transposed.
void put_turned(const float *sums, int64_t d, int64_t tokens, float factor, bool add, float *x, int64_t stride) {
  __m256 column[8];
  for (int64_t i = 0; i < d; i += LANES) {
    int64_t t = 0;
    for (; t + LANES <= tokens; t += LANES) {
      transpose(sums + t * d + i, d, column);
      for (int j = 0; j < LANES; ++j) {
        float *const target = x + (i + j) * stride + t;
        const __m256 value = _mm256_mul_ps(column[j], _mm256_set1_ps(factor));
        _mm256_storeu_ps(target, add ? _mm256_add_ps(_mm256_loadu_ps(target), value) : value);
      }
    }
    for (; t < tokens; ++t)
      for (int64_t j = i; j < i + LANES; ++j) {
        const float value = sums[t * d + j] * factor;
        x[j * stride + t] = add ? x[j * stride + t] + value : value;
      }
  }
}

void await(const std::atomic<int32_t> &turn, int32_t mine) {
  for (int spins = 0; turn.load(std::memory_order_acquire) != mine; ++spins) {
    if (spins < 1000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

void attend_gradient(const lema_attention &a, const HeadRow &row, std::atomic<int32_t> &turn, float *scratch) {
  const int64_t d = a.d, per_group = a.heads / a.groups, group = row.head / per_group, in_group = row.head % per_group;
  const float *const k = a.k + group * d * a.k_stride + row.column, *const v = a.v + group * d * a.v_stride + row.column;
  Pieces pieces(scratch);
  Gradient g{a, d, pieces.take(BLOCK * d), pieces.take(BLOCK * d), pieces.take(BLOCK * d), pieces.take(BLOCK * d),
             pieces.take(BLOCK * d), pieces.take(BLOCK * d), pieces.take(BLOCK * d), pieces.take(BLOCK * BLOCK),
             pieces.take(BLOCK * BLOCK), pieces.take(row.tokens * d), pieces.take(row.tokens * d), {}, {}};
  memset(g.dk, 0, row.tokens * d * sizeof(float));
  memset(g.dv, 0, row.tokens * d * sizeof(float));
  for (int64_t block = 0; block * BLOCK < row.tokens; ++block) {
    const Keys queries = keys_of(block, row.tokens);
    const int64_t strips = (queries.count + STRIP - 1) / STRIP;
    pack_queries(g, row, queries);
    for (int64_t other = 0; other <= block; ++other) {
      const Keys keys = keys_of(other, row.tokens);
      pack_block(k + keys.first, a.k_stride, d, keys.count, g.k);
      pack_block(v + keys.first, a.v_stride, d, keys.count, g.v);
      for (int64_t c = 0; c < strips; ++c) {
        const int64_t seen = seen_keys(other == block, keys.count, c);
        float *const powers = g.powers + c * BLOCK * STRIP, *const slopes = g.slopes + c * BLOCK * STRIP;
        multiply({g.k, 1, BLOCK, d, g.q + c * STRIP * d, powers, STRIP, false}, seen);
        multiply({g.v, 1, BLOCK, d, g.dy + c * STRIP * d, slopes, STRIP, false}, seen);
        slope_strip(g, c, keys.count, seen, other == block);
        multiply({g.k, BLOCK, 1, seen, slopes, g.dq + c * STRIP * d, STRIP, true}, d);
      }
      add_turned(g.powers, g.dy_turned, keys, strips, other == block, d, g.dv);
      add_turned(g.slopes, g.q_turned, keys, strips, other == block, d, g.dk);
    }
    for (int64_t c = 0; c < strips; ++c) {
      const int64_t tokens = at_most(STRIP, queries.count - c * STRIP);
      float *const dq = g.dq + c * STRIP * d;
      scale_rows(dq, d, PerQuery::same(a.scale));
      put_strip(dq, d, tokens, a.dq + row.head * d * a.n + row.column + queries.first + c * STRIP, a.n);
    }
  }
  await(turn, static_cast<int32_t>(in_group));
  const int64_t at = group * d * a.n + row.column;
  put_turned(g.dk, d, row.tokens, LN_2, in_group > 0, a.dk + at, a.n);
  put_turned(g.dv, d, row.tokens, 1.0f, in_group > 0, a.dv + at, a.n);
  turn.store(static_cast<int32_t>(in_group) + 1, std::memory_order_release);
}

constexpr AttentionBodies ATTENTION = {attend, attend_gradient};

}  // namespace
}  // namespace lema
