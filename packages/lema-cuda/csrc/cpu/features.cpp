// What this CPU can do. Compiled for the oldest x86-64: on a CPU that lacks something, nothing else of this library runs.

#include "features.h"

#include "linear.h"

#include <cpuid.h>
#include <stdint.h>

#include <atomic>

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

lema_instructions find_newest() {
  unsigned a, b, c, d;
  const bool is_compiled = lema::TILES_AVX512.pack != nullptr;
  if (!is_compiled || missing_bits() != 0 || (saved_registers() & 0xe6) != 0xe6) return LEMA_AVX2;
  // F, DQ, BW and VL
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 16) || !bit(b, 17) || !bit(b, 30) || !bit(b, 31))
    return LEMA_AVX2;
  return bit(c, 11) ? LEMA_AVX512_VNNI : LEMA_AVX512;
}

std::atomic<int32_t> limit{LEMA_AVX512_VNNI};

const char *const MISSING[8] = {"",     "AVX2",       "FMA",       "AVX2, FMA",
                                "F16C", "AVX2, F16C", "FMA, F16C", "AVX2, FMA, F16C"};

}  // namespace

lema_instructions lema::instructions() {
  static const lema_instructions newest = find_newest();
  const int32_t most = limit.load(std::memory_order_relaxed);
  return most < newest ? static_cast<lema_instructions>(most) : newest;
}

extern "C" int32_t lema_abi_version(void) { return LEMA_ABI_VERSION; }

extern "C" const char *lema_cpu_missing(void) {
  static const char *const answer = MISSING[missing_bits()];
  return answer;
}

extern "C" int32_t lema_cpu_instructions(void) { return lema::instructions(); }

extern "C" int32_t lema_cpu_limit(int32_t most) {
  if (most < LEMA_AVX2 || most > LEMA_AVX512_VNNI) return LEMA_BAD_ARGUMENT;
  limit.store(most, std::memory_order_relaxed);
  return LEMA_OK;
}
