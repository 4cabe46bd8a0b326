// Packing of weights in fewer bits, and how far that took them. Every code follows from its row, or its group, by
// correctly rounded operations in a fixed order, those of the codecs in plain torch, so both give the same bytes.

#include "formats.h"

#include <float.h>
#include <math.h>

namespace lema {
namespace {

constexpr int64_t AT_ONCE = 32;  // four-bit codes that are packed together
constexpr int32_t INFINITE = 0x7f800000;
constexpr float MOST = 127.0f;

// The scales of int8, between the smallest number and the largest that 127 times it is finite.
constexpr float LEAST_INT8 = FLT_TRUE_MIN;
constexpr float GREATEST_INT8 = static_cast<float>(static_cast<double>(FLT_MAX) * (1 - 0x1p-23) / 127);

// The scales of int4, bf16: from its smallest on, to the largest that eight times it is finite.
constexpr float LEAST_INT4 = 0x1p-133f, GREATEST_INT4 = 0x1p125f * (1 - 0x1p-8f);
// The number of largest magnitude in a group is so many scales; the one with less error is taken, the first of equals.
constexpr float DIVISORS[] = {-8.0f, -8.625f};

constexpr float LEAST_ABSMAX = 1e-38f;  // of NF4: what a block is divided by

inline __m256 all(float value) { return _mm256_set1_ps(value); }

inline __m256i magnitude(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }

// Bits of magnitudes order as the numbers do, with infinity and NaN above all.
inline int32_t largest_of(__m256i v) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline float float_of(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline float clamped(float value, float least, float most) { return value < least ? least : value > most ? most : value; }

// Numbers [column, column + 8) of a row, zeros beyond its end.
template <int DTYPE>
inline __m256 eight(const char *row, int64_t k, int64_t column) {
  using F = Format<DTYPE>;
  if (column + LANES <= k) return F::eight(row + column * F::BYTES);
  float some[LANES] = {};
  for (int64_t i = column; i < k; ++i) some[i - column] = F::one(row + i * F::BYTES);
  return _mm256_loadu_ps(some);
}

// ---------------------------------------------------------------------------------------------------------------- int8

template <int DTYPE>
bool pack_int8(const char *row, int64_t k, char *codes, char *scale_at) {
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < k; i += LANES) largest = _mm256_max_epi32(largest, magnitude(eight<DTYPE>(row, k, i)));
  const int32_t bits = largest_of(largest);
  if (bits >= INFINITE) return false;
  const float scale = bits == 0 ? 0.0f : clamped(float_of(bits) / MOST, LEAST_INT8, GREATEST_INT8);
  memcpy(scale_at, &scale, sizeof scale);
  const __m256 divisor = all(bits == 0 ? 1.0f : scale);
  for (int64_t i = 0; i < k; i += LANES) {
    __m256i wide = _mm256_cvtps_epi32(_mm256_div_ps(eight<DTYPE>(row, k, i), divisor));
    wide = _mm256_max_epi32(_mm256_min_epi32(wide, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const __m128i narrow = _mm_packs_epi16(half, half);
    if (i + LANES <= k) {
      _mm_storel_epi64(reinterpret_cast<__m128i *>(codes + i), narrow);
    } else {
      char last[16];
      _mm_storeu_si128(reinterpret_cast<__m128i *>(last), narrow);
      memcpy(codes + i, last, k - i);
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------- four bits

// AT_ONCE codes of four vectors -> 16 bytes of two; `of_pair`: 1 for the code in the lower half and 16 for the other.
inline __m128i pairs_of(const __m256i *codes, __m256i of_pair) {
  const __m256i low = _mm256_packs_epi32(codes[0], codes[1]), high = _mm256_packs_epi32(codes[2], codes[3]);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i sums = _mm256_maddubs_epi16(bytes, of_pair);
  return _mm_packus_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

template <int VECTORS>
struct Group {
  __m256 x[VECTORS];
};

// Sums the first half and the second, until one number is left.
template <int VECTORS>
inline float add_halves(__m256 *values) {
  for (int half = VECTORS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) values[i] = _mm256_add_ps(values[i], values[i + half]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values[0]), _mm256_extractf128_ps(values[0], 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// What a group is with one of DIVISORS: its scale, its codes, and its squared error over the square of its largest number.
template <int VECTORS>
struct Try {
  uint16_t scale;
  float error;
  __m256i codes[VECTORS];
};

template <int VECTORS>
inline void try_divisor(const Group<VECTORS> &group, float largest, float by, Try<VECTORS> &out) {
  const float exact = largest / by;
  out.scale = largest == 0 ? 0 : to_bf16(copysignf(clamped(fabsf(exact), LEAST_INT4, GREATEST_INT4), exact));
  const float divisor = largest == 0 ? 1.0f : float_of(static_cast<int32_t>(static_cast<uint32_t>(out.scale) << 16));
  __m256 errors[VECTORS];
  for (int i = 0; i < VECTORS; ++i) {
    const __m256 scaled = _mm256_div_ps(group.x[i], all(divisor));
    __m256 rounded = _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rounded = _mm256_max_ps(_mm256_min_ps(rounded, all(7.0f)), all(-8.0f));
    const __m256 error = _mm256_sub_ps(scaled, rounded);
    errors[i] = _mm256_mul_ps(error, error);
    out.codes[i] = _mm256_cvtps_epi32(_mm256_add_ps(rounded, all(8.0f)));
  }
  const float share = divisor / largest;
  out.error = add_halves<VECTORS>(errors) * (share * share);
}

// The number of largest magnitude; of two the negative one.
template <int VECTORS>
inline float largest_number(const Group<VECTORS> &group) {
  __m256 low = group.x[0], high = group.x[0];
  for (int i = 1; i < VECTORS; ++i) {
    low = _mm256_min_ps(low, group.x[i]);
    high = _mm256_max_ps(high, group.x[i]);
  }
  float lows[LANES], highs[LANES];
  _mm256_storeu_ps(lows, low);
  _mm256_storeu_ps(highs, high);
  for (int i = 1; i < LANES; ++i) {
    lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];
    highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];
  }
  return -lows[0] >= highs[0] ? lows[0] : highs[0];
}

// -> false where a number is not finite
template <int DTYPE, int VECTORS>
inline bool load_group(const char *row, int64_t k, int64_t column, Group<VECTORS> &group, int32_t &largest_bits) {
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < VECTORS; ++i) {
    group.x[i] = eight<DTYPE>(row, k, column + i * LANES);
    largest = _mm256_max_epi32(largest, magnitude(group.x[i]));
  }
  largest_bits = largest_of(largest);
  return largest_bits < INFINITE;
}

// The codes of a row's columns from `column` on; of an odd row the last byte has a zero beside the last code.
template <int VECTORS>
inline void put_codes(const __m256i *codes, __m256i of_pair, int64_t column, int64_t k, char *target) {
  for (int i = 0; i < VECTORS && column < k; i += 4, column += AT_ONCE) {
    const __m128i packed = pairs_of(codes + i, of_pair);
    if (column + AT_ONCE <= k) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(target + column / 2), packed);
    } else {
      char last[AT_ONCE / 2];
      _mm_storeu_si128(reinterpret_cast<__m128i *>(last), packed);
      const int64_t bytes = (k - column + 1) / 2;
      if (k % 2 != 0) last[bytes - 1] &= 15;
      memcpy(target + column / 2, last, bytes);
    }
  }
}

template <int DTYPE, int COLUMNS>
bool pack_int4(const char *row, int64_t k, char *codes, char *scales) {
  constexpr int VECTORS = COLUMNS / LANES;
  const __m256i of_pair = _mm256_set1_epi16(1 | 16 << 8);
  for (int64_t column = 0; column < k; column += COLUMNS, scales += sizeof(uint16_t)) {
    Group<VECTORS> group;
    int32_t bits;
    if (!load_group<DTYPE, VECTORS>(row, k, column, group, bits)) return false;
    const float largest = largest_number(group);
    Try<VECTORS> tries[2];
    for (int i = 0; i < 2; ++i) try_divisor(group, largest, DIVISORS[i], tries[i]);
    const Try<VECTORS> &best = tries[1].error < tries[0].error ? tries[1] : tries[0];
    memcpy(scales, &best.scale, sizeof best.scale);
    put_codes<VECTORS>(best.codes, of_pair, column, k, codes);
  }
  return true;
}

template <int DTYPE>
bool pack_nf4(const char *row, int64_t k, char *codes, char *scales) {
  constexpr int VECTORS = NF4::COLUMNS / LANES;
  const __m256i of_pair = _mm256_set1_epi16(16 | 1 << 8);
  for (int64_t column = 0; column < k; column += NF4::COLUMNS, scales += sizeof(float)) {
    Group<VECTORS> group;
    int32_t bits;
    if (!load_group<DTYPE, VECTORS>(row, k, column, group, bits)) return false;
    const float absmax = float_of(bits);
    memcpy(scales, &absmax, sizeof absmax);
    const __m256 factor = all(1.0f / (absmax < LEAST_ABSMAX ? LEAST_ABSMAX : absmax));
    __m256i found[VECTORS];
    for (int i = 0; i < VECTORS; ++i) {
      const __m256 x = _mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(group.x[i], factor), all(1.0f)), all(-1.0f));
      // a comparison that holds is -1
      __m256i below = _mm256_setzero_si256();
      for (int j = 0; j < 15; ++j) {
        const __m256 middle = all((NF4::VALUES[j] + NF4::VALUES[j + 1]) / 2);
        below = _mm256_sub_epi32(below, _mm256_castps_si256(_mm256_cmp_ps(middle, x, _CMP_LT_OQ)));
      }
      found[i] = below;
    }
    put_codes<VECTORS>(found, of_pair, column, k, codes);
  }
  return true;
}

// Bytes of a row of codes, and of its scales.
struct RowBytes {
  RowBytes(int format, int64_t k) {
    switch (format) {
      case LEMA_INT8: codes = k, scales = 4; break;
      case LEMA_INT4_32: codes = (k + 1) / 2, scales = 2 * ((k + 31) / 32); break;
      case LEMA_INT4_64: codes = (k + 1) / 2, scales = 2 * ((k + 63) / 64); break;
      case LEMA_INT4_128: codes = (k + 1) / 2, scales = 2 * ((k + 127) / 128); break;
      default: codes = k / 2, scales = 4 * (k / 64); break;
    }
  }
  int64_t codes, scales;
};

// -------------------------------------------------------------------------------------------------------------- errors

constexpr int64_t ROWS_AT_ONCE = 64;  // whose strip of columns stays in the first-level cache

inline void add_square(__m256 x, __m256d *sums) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
  sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
}

inline void add_to(double *target, const __m256d *sums) {
  for (int i = 0; i < 2; ++i) _mm256_storeu_pd(target + 4 * i, _mm256_add_pd(_mm256_loadu_pd(target + 4 * i), sums[i]));
}

template <int DTYPE, int FORMAT>
void add_errors(const char *source, int64_t rows, int64_t k, const char *codes, const char *scales, double *squares,
                double *errors) {
  using F = Format<DTYPE>;
  const int64_t whole = k - k % LANES;
  for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
    const int64_t end = at_most(first + ROWS_AT_ONCE, rows);
    for (int64_t column = 0; column < whole; column += LANES) {
      __m256d square[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, error[2] = {square[0], square[0]};
      for (int64_t row = first; row < end; ++row) {
        const __m256 exact = F::eight(source + (row * k + column) * F::BYTES);
        add_square(exact, square);
        add_square(_mm256_sub_ps(Row<FORMAT>(codes, scales, k, row).eight(column), exact), error);
      }
      add_to(squares + column, square);
      add_to(errors + column, error);
    }
    for (int64_t row = first; row < end; ++row) {
      for (int64_t column = whole; column < k; ++column) {
        const float exact = F::one(source + (row * k + column) * F::BYTES);
        const double off = Row<FORMAT>(codes, scales, k, row).one(column) - exact;
        squares[column] += static_cast<double>(exact) * exact;
        errors[column] += off * off;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- functions

// Of a format, for numbers of one type; null where there is none.
struct Functions {
  bool (*pack_row)(const char *row, int64_t k, char *codes, char *scales);
  void (*add_errors)(const char *source, int64_t rows, int64_t k, const char *codes, const char *scales, double *squares,
                     double *errors);
};

template <int DTYPE>
Functions functions(int format) {
  switch (format) {
    case LEMA_INT8: return {pack_int8<DTYPE>, add_errors<DTYPE, LEMA_INT8>};
    case LEMA_INT4_32: return {pack_int4<DTYPE, 32>, add_errors<DTYPE, LEMA_INT4_32>};
    case LEMA_INT4_64: return {pack_int4<DTYPE, 64>, add_errors<DTYPE, LEMA_INT4_64>};
    case LEMA_INT4_128: return {pack_int4<DTYPE, 128>, add_errors<DTYPE, LEMA_INT4_128>};
    case LEMA_NF4: return {pack_nf4<DTYPE>, add_errors<DTYPE, LEMA_NF4>};
    default: return {};
  }
}

Functions functions_of(int dtype, int format) {
  switch (dtype) {
    case LEMA_F32: return functions<LEMA_F32>(format);
    case LEMA_F16: return functions<LEMA_F16>(format);
    case LEMA_BF16: return functions<LEMA_BF16>(format);
    default: return {};
  }
}

bool fits(int64_t rows, int64_t k, int32_t format) {
  return rows >= 0 && k >= 0 && (format != LEMA_NF4 || k % NF4::COLUMNS == 0);
}

}  // namespace
}  // namespace lema

extern "C" int32_t lema_quantize(const void *source, int32_t dtype, int64_t rows, int64_t k, int32_t format, void *codes,
                                 void *scales) {
  using namespace lema;
  const auto pack_row = functions_of(dtype, format).pack_row;
  if (pack_row == nullptr || !fits(rows, k, format)) return LEMA_BAD_ARGUMENT;
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  const int64_t source_bytes = k * (dtype == LEMA_F32 ? 4 : 2);
  const RowBytes bytes(format, k);
  const char *from = static_cast<const char *>(source);
  char *to = static_cast<char *>(codes), *scale = static_cast<char *>(scales);
  for (int64_t row = 0; row < rows; ++row, from += source_bytes, to += bytes.codes, scale += bytes.scales)
    if (!pack_row(from, k, to, scale)) return LEMA_NOT_FINITE;
  return LEMA_OK;
}

extern "C" int32_t lema_quantize_errors(const void *source, int32_t dtype, int64_t rows, int64_t k, int32_t format,
                                        const void *codes, const void *scales, double *squares, double *errors) {
  using namespace lema;
  const auto add = functions_of(dtype, format).add_errors;
  if (add == nullptr || !fits(rows, k, format)) return LEMA_BAD_ARGUMENT;
  if (*lema_cpu_missing()) return LEMA_MISSING_FEATURE;
  add(static_cast<const char *>(source), rows, k, static_cast<const char *>(codes), static_cast<const char *>(scales),
      squares, errors);
  return LEMA_OK;
}
