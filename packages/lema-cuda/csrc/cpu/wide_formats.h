// What dot products take of a row of a weight at once: WIDE numbers, or WIDE words of eight four-bit codes.

#pragma once

#include "formats.h"
#include "wide.h"

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int64_t CODES = 8 * WIDE;  // four-bit codes of WIDE words

inline WideInts load_words(const char *at) { return load(reinterpret_cast<const int16_t *>(at)); }

#ifdef __AVX512F__

// Numbers at an address, of an int8 weight its codes.
template <int DTYPE>
Wide wide_code(const char *at);
template <>
inline Wide wide_code<LEMA_F32>(const char *at) {
  return _mm512_loadu_ps(at);
}
template <>
inline Wide wide_code<LEMA_F16>(const char *at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}
template <>
inline Wide wide_code<LEMA_BF16>(const char *at) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <>
inline Wide wide_code<LEMA_INT8>(const char *at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))));
}

// The j-th code from the lowest bits on is taken times 2^code_power(j).
constexpr int code_power(int) { return 0; }

// nth(w, j): the numbers of the words' j-th codes; a permutation looks at the lowest four bits of a lane. spread(s, b):
// the scales of the b-th CODES columns of a row, one for each word.
template <int GROUP>
struct WideInt4 {
  static Wide nth(__m512i words, int j) {
    const Wide table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), table);
  }
  static Wide spread(const char *scales, int64_t block, int64_t groups) {
    constexpr int64_t HERE = CODES / GROUP;
    const char *const first = scales + block * HERE * sizeof(uint16_t);
    const int64_t left = groups - block * HERE;
    uint64_t some = 0;
    if (left >= HERE) {
      memcpy(&some, first, HERE * sizeof(uint16_t));
    } else {
      memcpy(&some, first, left * sizeof(uint16_t));
    }
    // a scale into the upper half of the words of its group
    const __m512i halves = _mm512_set1_epi64(static_cast<int64_t>(some));
    const __m512i of_word = _mm512_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
                                              at(11), at(12), at(13), at(14), at(15));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, of_word, halves));
  }

 private:
  // For the upper half of a word: which of the scales it takes.
  static constexpr int at(int word) { return word * 8 / GROUP << 16; }
};

struct WideNF4 {
  static Wide nth(__m512i words, int j) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), _mm512_loadu_ps(NF4::VALUES));
  }
  static Wide spread(const char *scales, int64_t block, int64_t groups) {
    const __m512 first = _mm512_set1_ps(NF4::scale(scales, 2 * block));
    if (2 * block + 1 == groups) return first;
    return _mm512_mask_blend_ps(0xff00, first, _mm512_set1_ps(NF4::scale(scales, 2 * block + 1)));
  }
};

template <int DTYPE>
struct WideCodes;
template <>
struct WideCodes<LEMA_INT4_32> : WideInt4<32> {};
template <>
struct WideCodes<LEMA_INT4_64> : WideInt4<64> {};
template <>
struct WideCodes<LEMA_INT4_128> : WideInt4<128> {};
template <>
struct WideCodes<LEMA_NF4> : WideNF4 {};

#else

template <int DTYPE>
inline Wide wide_code(const char *at) {
  return Row<DTYPE>::code(at);
}

constexpr int code_power(int j) { return int4_power(j); }

template <int DTYPE>
using WideCodes = FourBits<DTYPE>;

#endif

}  // namespace
}  // namespace lema
