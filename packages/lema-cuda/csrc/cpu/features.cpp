// What this CPU can do. Compiled for the oldest x86-64: on a CPU that lacks something, nothing else of this library runs.

#include "../include/lema.h"

#include <cpuid.h>
#include <stdint.h>

namespace {

bool bit(unsigned value, int index) { return (value >> index) & 1; }

// The registers the operating system saves (XCR0); AVX needs bits 1 and 2.
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

const char *const MISSING[8] = {"",     "AVX2",       "FMA",       "AVX2, FMA",
                                "F16C", "AVX2, F16C", "FMA, F16C", "AVX2, FMA, F16C"};

}  // namespace

extern "C" int32_t lema_abi_version(void) { return LEMA_ABI_VERSION; }

extern "C" const char *lema_cpu_missing(void) {
  static const char *const answer = MISSING[missing_bits()];
  return answer;
}
