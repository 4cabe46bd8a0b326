// Weights in their storage formats, widened to fp32, those of quantized ones decoded. At any address: a checkpoint aligns
// nothing.

#pragma once

#include "../include/lema.h"
#include "../include/nf4.h"
#include "four_bits.h"

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

// A row of a weight with k columns. eight() starts at a multiple of ALIGNED and ends within the row; one() is the same
// number, and many() are MANY from a multiple of it on, where there is such a faster way. Sums may be of eight code()s at an address, and then finish()ed by the factor of the row.
template <int DTYPE>
class Row {
  using F = Format<DTYPE>;

 public:
  static constexpr int64_t ALIGNED = 1;
  static constexpr int64_t bytes(int64_t columns) { return columns * F::BYTES; }

  Row(const char *weight, const char *, int64_t k, int64_t row) : numbers_(weight + row * bytes(k)) {}

  const char *at(int64_t column) const { return numbers_ + bytes(column); }
  __m256 eight(int64_t column) const { return F::eight(at(column)); }
  float one(int64_t column) const { return F::one(at(column)); }
  static __m256 code(const char *at) { return F::eight(at); }
  static float one_code(const char *at) { return F::one(at); }
  float finish(float sum) const { return sum; }

 private:
  const char *numbers_;
};

template <>
class Row<LEMA_INT8> {
 public:
  static constexpr int64_t ALIGNED = 1;
  static constexpr int64_t bytes(int64_t columns) { return columns; }

  Row(const char *weight, const char *scales, int64_t k, int64_t row)
      : codes_(weight + row * k), scale_(Format<LEMA_F32>::one(scales + row * 4)) {}

  const char *at(int64_t column) const { return codes_ + column; }
  static __m256 code(const char *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at))));
  }
  static float one_code(const char *at) { return static_cast<float>(static_cast<signed char>(*at)); }
  float finish(float sum) const { return sum * scale_; }
  __m256 eight(int64_t column) const { return _mm256_mul_ps(code(at(column)), _mm256_set1_ps(scale_)); }
  float one(int64_t column) const { return one_code(at(column)) * scale_; }

 private:
  const char *codes_;
  float scale_;
};

// Four-bit codes. nth(w, j) are, of eight words with eight codes each, the numbers of the j-th code from the lowest bits
// on, of int4 times 2^int4_power(j); SWAP is 1 where the even column's code is in the upper half of a byte. spread(s, b)
// are the scales of the b-th 64 columns of a row, one for each word. wide(b) are the numbers of eight codes, each a byte.
template <int GROUP>
struct Int4 {
  static constexpr int SWAP = 0;
  static constexpr int64_t COLUMNS = GROUP, SCALE_BYTES = 2;

  // A code stays where it is among the low bits of a number that begins at 2^23, which then goes: no shift, no conversion.
  static __m256 nth(__m256i words, int j) {
    const int unit = 1 << int4_power(j);
    const __m256i codes = j < CODES_IN_PLACE ? words : _mm256_srli_epi32(words, 4 * CODES_IN_PLACE);
    const __m256i digits = _mm256_and_si256(codes, _mm256_set1_epi32(15 * unit));
    const __m256i number = _mm256_or_si256(digits, _mm256_set1_epi32(0x4b000000));
    return _mm256_sub_ps(_mm256_castsi256_ps(number), _mm256_set1_ps(0x1p23f + 8.0f * static_cast<float>(unit)));
  }
  static __m256 wide(__m128i codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_sub_epi8(codes, _mm_set1_epi8(8))));
  }
  static __m256 eight(uint32_t word) {
    const __m256i turned = _mm256_set1_epi32(static_cast<int>(word ^ 0x88888888u));
    const __m256i places = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(turned, places), 28));
  }
  static float one(unsigned code) { return static_cast<float>(static_cast<int>(code) - 8); }
  static float scale(const char *scales, int64_t group) { return Format<LEMA_BF16>::one(scales + group * SCALE_BYTES); }
  static __m256 spread(const char *scales, int64_t block, int64_t groups) {
    const int64_t first = block * 64 / GROUP;
    if (GROUP > 32) return _mm256_set1_ps(scale(scales, first));
    uint32_t two;
    if (first + 1 < groups) {
      memcpy(&two, scales + first * SCALE_BYTES, sizeof two);
    } else {
      uint16_t last;
      memcpy(&last, scales + first * SCALE_BYTES, sizeof last);
      two = last;
    }
    // the first into the upper half of four words, the second into that of the others
    const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 0, 1, -1, -1, 0, 1, -1, -1, 0, 1,  //
                                            -1, -1, 2, 3, -1, -1, 2, 3, -1, -1, 2, 3, -1, -1, 2, 3);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(two)), places));
  }
};

struct NF4 {
  static constexpr int SWAP = 1;
  static constexpr int64_t COLUMNS = 64, SCALE_BYTES = 4;
  static constexpr float VALUES[16] = {LEMA_NF4_VALUES};

  // of codes in the highest four bits
  static __m256 values(__m256i high) {
    const __m256i low = _mm256_srli_epi32(high, 28);
    const __m256 small = _mm256_permutevar8x32_ps(_mm256_loadu_ps(VALUES), low);
    const __m256 large = _mm256_permutevar8x32_ps(_mm256_loadu_ps(VALUES + LANES), low);
    return _mm256_blendv_ps(small, large, _mm256_castsi256_ps(high));
  }
  static __m256 nth(__m256i words, int j) { return values(_mm256_slli_epi32(words, 28 - 4 * j)); }
  static __m256 wide(__m128i codes) { return values(_mm256_slli_epi32(_mm256_cvtepu8_epi32(codes), 28)); }
  static __m256 eight(uint32_t word) {
    const __m256i places = _mm256_setr_epi32(24, 28, 16, 20, 8, 12, 0, 4);
    return values(_mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(word)), places));
  }
  static float one(unsigned code) { return VALUES[code]; }
  static float scale(const char *scales, int64_t group) { return Format<LEMA_F32>::one(scales + group * SCALE_BYTES); }
  static __m256 spread(const char *scales, int64_t block, int64_t) { return _mm256_set1_ps(scale(scales, block)); }
};

template <int DTYPE>
struct FourBits;
template <>
struct FourBits<LEMA_INT4_32> : Int4<32> {};
template <>
struct FourBits<LEMA_INT4_64> : Int4<64> {};
template <>
struct FourBits<LEMA_INT4_128> : Int4<128> {};
template <>
struct FourBits<LEMA_NF4> : NF4 {};

template <int DTYPE>
class FourBitRow {
  using C = FourBits<DTYPE>;

 public:
  static constexpr int64_t ALIGNED = 8, MANY = 32;
  static constexpr int64_t bytes(int64_t columns) { return (columns + 1) / 2; }
  static constexpr int64_t groups(int64_t columns) { return (columns + C::COLUMNS - 1) / C::COLUMNS; }

  FourBitRow(const char *weight, const char *scales, int64_t k, int64_t row)
      : codes_(weight + row * bytes(k)), scales_(scales + row * groups(k) * C::SCALE_BYTES) {}

  const char *at(int64_t column) const { return codes_ + column / 2; }
  const char *scales() const { return scales_; }
  __m256 eight(int64_t column) const {
    uint32_t word;
    memcpy(&word, at(column), sizeof word);
    return _mm256_mul_ps(C::eight(word), _mm256_set1_ps(C::scale(scales_, column / C::COLUMNS)));
  }
  // Columns [column, column + MANY), of one group.
  void many(int64_t column, float *target) const {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at(column))), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    const __m128i even = C::SWAP ? high : low, odd = C::SWAP ? low : high;
    const __m256 scale = _mm256_set1_ps(C::scale(scales_, column / C::COLUMNS));
    const __m128i sixteen[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    for (int i = 0; i < 2; ++i, target += 2 * LANES) {
      _mm256_store_ps(target, _mm256_mul_ps(C::wide(sixteen[i]), scale));
      _mm256_store_ps(target + LANES, _mm256_mul_ps(C::wide(_mm_unpackhi_epi64(sixteen[i], sixteen[i])), scale));
    }
  }
  float one(int64_t column) const {
    const unsigned two = static_cast<unsigned char>(*at(column));
    return C::one(column % 2 == C::SWAP ? two & 15 : two >> 4) * C::scale(scales_, column / C::COLUMNS);
  }

 private:
  const char *codes_, *scales_;
};

template <>
class Row<LEMA_INT4_32> : public FourBitRow<LEMA_INT4_32> {
  using FourBitRow::FourBitRow;
};
template <>
class Row<LEMA_INT4_64> : public FourBitRow<LEMA_INT4_64> {
  using FourBitRow::FourBitRow;
};
template <>
class Row<LEMA_INT4_128> : public FourBitRow<LEMA_INT4_128> {
  using FourBitRow::FourBitRow;
};
template <>
class Row<LEMA_NF4> : public FourBitRow<LEMA_NF4> {
  using FourBitRow::FourBitRow;
};

// Columns [column, column + length) of a row -> target. Column: a multiple of 32.
template <int DTYPE>
inline void decode(const Row<DTYPE> &row, int64_t column, int64_t length, float *target) {
  int64_t i = 0;
  if constexpr (Row<DTYPE>::ALIGNED > 1)
    for (; i + Row<DTYPE>::MANY <= length; i += Row<DTYPE>::MANY) row.many(column + i, target + i);
  for (; i + LANES <= length; i += LANES) _mm256_store_ps(target + i, row.eight(column + i));
  for (; i < length; ++i) target[i] = row.one(column + i);
}

}  // namespace
}  // namespace lema
