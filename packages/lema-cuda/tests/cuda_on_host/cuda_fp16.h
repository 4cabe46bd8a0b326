// Of CUDA's header of this name, what device code uses.

#pragma once

#include "runtime.h"

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  // the exponent, which is biased by 15 here and by 127 there, is mended by a product; subnormal numbers too
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

inline __half __float2half_rn(float value) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7fff)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x38800000) {
    // subnormal: what lies below its last place is rounded off by a sum
    const uint32_t rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t mended = magnitude - (112u << 23);
  return {static_cast<uint16_t>(sign | ((mended + 0xfff + ((mended >> 13) & 1)) >> 13))};
}
