// What this CPU can do. Compiled for the oldest x86-64: on a CPU that lacks something, nothing else of this library runs.

#include "features.h"

#include "int8.h"
#include "linear.h"

#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// Whether the system gives this process the registers of AMX (XCR0 bits 17 and 18), which it wants to be asked for:
// "Using XSTATE features in user space applications" of the Linux kernel's documentation.
bool is_given_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (saved_registers() & 0x60000) == 0x60000 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// AMX with products of bf16 and int8, and rounding to bf16.
bool has_amx() {
  unsigned a, b, c, d;
  if (lema::TILES_AMX.pack == nullptr || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!bit(d, 22) || !bit(d, 24) || !bit(d, 25)) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 5) && is_given_tiles();
}

lema_instructions find_newest() {
  unsigned a, b, c, d;
  const bool is_compiled = lema::TILES_AVX512.pack != nullptr;
  if (!is_compiled || missing_bits() != 0 || (saved_registers() & 0xe6) != 0xe6) return LEMA_AVX2;
  // F, DQ, BW and VL
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 16) || !bit(b, 17) || !bit(b, 30) || !bit(b, 31))
    return LEMA_AVX2;
  if (!bit(c, 11) || lema::INT8_VNNI.tiles == nullptr) return LEMA_AVX512;
  return has_amx() ? LEMA_AMX : LEMA_AVX512_VNNI;
}

std::atomic<int32_t> limit{LEMA_AMX};

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
  if (most < LEMA_AVX2 || most > LEMA_AMX) return LEMA_BAD_ARGUMENT;
  limit.store(most, std::memory_order_relaxed);
  return LEMA_OK;
}
