// Weights in their storage formats, widened to fp32. At any address: a checkpoint aligns nothing.

#pragma once

#include "../include/lema.h"

#include <immintrin.h>
#include <string.h>

namespace lema {
namespace {  // each file's own: what is compiled for AVX2 must not be shared with what is not

constexpr int LANES = 8;

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

template <int DTYPE>
struct Format;

template <>
struct Format<LEMA_F32> {
  static constexpr int BYTES = 4;
  static inline __m256 eight(const char *p) { return _mm256_loadu_ps(reinterpret_cast<const float *>(p)); }
  static inline float one(const char *p) {
    float value;
    memcpy(&value, p, sizeof value);
    return value;
  }
};

template <>
struct Format<LEMA_F16> {
  static constexpr int BYTES = 2;
  static inline __m256 eight(const char *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static inline float one(const char *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
  }
};

template <>
struct Format<LEMA_BF16> {
  static constexpr int BYTES = 2;
  static inline __m256 eight(const char *p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static inline float one(const char *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

}  // namespace
}  // namespace lema
