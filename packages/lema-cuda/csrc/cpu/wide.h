// Registers of fp32 numbers and of int32, as wide as those a file is compiled for: 16 lanes with AVX-512, else 8.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

#ifdef __AVX512F__

constexpr int WIDE = 16;
using Wide = __m512;
using WideInts = __m512i;

inline Wide zeros() { return _mm512_setzero_ps(); }
inline Wide all(float value) { return _mm512_set1_ps(value); }
inline Wide load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Wide value) { _mm512_storeu_ps(p, value); }
inline Wide add(Wide a, Wide b) { return _mm512_add_ps(a, b); }
inline Wide sub(Wide a, Wide b) { return _mm512_sub_ps(a, b); }
inline Wide mul(Wide a, Wide b) { return _mm512_mul_ps(a, b); }
inline Wide divide(Wide a, Wide b) { return _mm512_div_ps(a, b); }
inline Wide larger(Wide a, Wide b) { return _mm512_max_ps(a, b); }
inline Wide multiply_add(Wide a, Wide b, Wide sum) { return _mm512_fmadd_ps(a, b, sum); }

// first, first + 1, ...
inline Wide from(float first) {
  return add(all(first), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

// a times 2^n of whole numbers n, which are the lowest bits of `power`.
inline Wide times_power(Wide a, Wide power) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(power), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), exponent));
}

using Lanes = __mmask16;  // some of them
inline Lanes is_greater(Wide a, Wide b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Wide choose(Lanes lanes, Wide there, Wide elsewhere) { return _mm512_mask_blend_ps(lanes, elsewhere, there); }
inline Wide without(Lanes lanes, Wide v) { return _mm512_maskz_mov_ps(_knot_mask16(lanes), v); }

inline WideInts all(int32_t value) { return _mm512_set1_epi32(value); }
inline WideInts load(const int16_t *p) { return _mm512_loadu_si512(p); }
inline Wide numbers(WideInts v) { return _mm512_cvtepi32_ps(v); }

// 2 WIDE codes of int8, each in 16 bits.
inline WideInts widened(const char *codes) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes)));
}

// One half added to the other.
inline __m256 folded(Wide v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
inline __m256i folded(WideInts v) {
  return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

#else

constexpr int WIDE = 8;
using Wide = __m256;
using WideInts = __m256i;

inline Wide zeros() { return _mm256_setzero_ps(); }
inline Wide all(float value) { return _mm256_set1_ps(value); }
inline Wide load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, Wide value) { _mm256_storeu_ps(p, value); }
inline Wide add(Wide a, Wide b) { return _mm256_add_ps(a, b); }
inline Wide sub(Wide a, Wide b) { return _mm256_sub_ps(a, b); }
inline Wide mul(Wide a, Wide b) { return _mm256_mul_ps(a, b); }
inline Wide divide(Wide a, Wide b) { return _mm256_div_ps(a, b); }
inline Wide larger(Wide a, Wide b) { return _mm256_max_ps(a, b); }
inline Wide multiply_add(Wide a, Wide b, Wide sum) { return _mm256_fmadd_ps(a, b, sum); }

inline Wide from(float first) { return add(all(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)); }

inline Wide times_power(Wide a, Wide power) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(power), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}

using Lanes = __m256;
inline Lanes is_greater(Wide a, Wide b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Wide choose(Lanes lanes, Wide there, Wide elsewhere) { return _mm256_blendv_ps(elsewhere, there, lanes); }
inline Wide without(Lanes lanes, Wide v) { return _mm256_andnot_ps(lanes, v); }

inline WideInts all(int32_t value) { return _mm256_set1_epi32(value); }
inline WideInts load(const int16_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline Wide numbers(WideInts v) { return _mm256_cvtepi32_ps(v); }
inline WideInts widened(const char *codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes)));
}
inline __m256 folded(Wide v) { return v; }
inline __m256i folded(WideInts v) { return v; }

#endif

// What numbers are multiplied and summed in: codes of 16 bits two in a lane.
template <class Number>
struct RegisterOf;
template <>
struct RegisterOf<float> {
  using Type = Wide;
};
template <>
struct RegisterOf<int16_t> {
  using Type = WideInts;
};
template <class Number>
using Register = typename RegisterOf<Number>::Type;

// A number, or two codes that lie together, in every lane.
inline Wide factor_at(const float *number) { return all(*number); }
inline WideInts factor_at(const int16_t *codes) {
  int32_t pair;
  memcpy(&pair, codes, sizeof pair);
  return all(pair);
}

}  // namespace
}  // namespace lema
