// What this CPU can do. Compiled for the oldest x86-64: on a CPU that lacks something, nothing else of this library runs.

#include "features.h"

#include "../include/lema.h"

#include <cpuid.h>
#include <stdint.h>

namespace {

bool bit(unsigned value, int index) { return (value >> index) & 1; }

// The registers the operating system saves (XCR0); AVX needs bits 1 and 2, AVX-512 bits 5 to 7 too.
unsigned saved_registers() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Index of the answer in MISSING: bit 0 AVX2, bit 1 FMA, bit 2 F16C.
unsigned missing_bits() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) || (saved_registers() & 6) != 6) return 7;
  const bool fma = bit(c, 12), f16c = bit(c, 29);
  const bool avx2 = __get_cpuid_count(7, 0, &a, &b, &c, &d) && bit(b, 5);
  return (avx2 ? 0 : 1) | (fma ? 0 : 2) | (f16c ? 0 : 4);
}

bool find_vnni() {
  unsigned a, b, c, d;
  if (missing_bits() != 0 || (saved_registers() & 0xe6) != 0xe6) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && bit(b, 16) && bit(b, 31) && bit(c, 11);
}

const char *const MISSING[8] = {"",     "AVX2",       "FMA",       "AVX2, FMA",
                                "F16C", "AVX2, F16C", "FMA, F16C", "AVX2, FMA, F16C"};

}  // namespace

bool lema::cpu_has_vnni() {
  static const bool answer = find_vnni();
  return answer;
}

extern "C" int32_t lema_abi_version(void) { return LEMA_ABI_VERSION; }

extern "C" const char *lema_cpu_missing(void) {
  static const char *const answer = MISSING[missing_bits()];
  return answer;
}
