// The tiles of AMX, of 16 rows of 64 bytes each.

#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

// The compiler does not know that tiles are read from memory, and written there.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// All eight, for as long as this lives. The system saves them with a thread that has them.
class Tiles {
 public:
  Tiles() {
    const Configuration configuration;
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;

 private:
  struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

// The first lanes, of `count` numbers that are left.
inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xffff : count > 0 ? static_cast<__mmask16>((1 << count) - 1) : 0;
}

}  // namespace
}  // namespace lema
