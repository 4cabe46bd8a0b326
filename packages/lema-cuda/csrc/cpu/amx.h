// The tiles of AMX: tiles 0 to 2 sum, 3 to 5 hold rows of `a`, 6 holds columns of b.

#pragma once

#include "blocks.h"
#include "terms.h"

#include <type_traits>

namespace lema {
namespace {  // each file's own: what is compiled for other instructions must not be shared

constexpr int64_t TALL = 3 * SIDE;  // rows that are computed at once

// All eight tiles, for as long as this lives. The system saves them with a thread that has them.
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
    uint16_t row_bytes[16] = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
  };
};

// The compiler does not know that tiles are read from memory, and written there.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

inline void clear_sums() {
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
}

// M tiles, each so many bytes after the one before.
template <int M>
inline void load_rows(const char *a, int64_t apart) {
  _tile_loadd(3, a, ROW_BYTES);
  if (M > 1) _tile_loadd(4, a + apart, ROW_BYTES);
  if (M > 2) _tile_loadd(5, a + 2 * apart, ROW_BYTES);
}

template <int M, class Number>
inline void store_sums(Number (*sums)[SIDE * SIDE]) {
  _tile_stored(0, sums[0], ROW_BYTES);
  if (M > 1) _tile_stored(1, sums[1], ROW_BYTES);
  if (M > 2) _tile_stored(2, sums[2], ROW_BYTES);
  settle_memory();
}

inline void store_row(char *tile, int64_t row, __m512i numbers) { _mm512_store_si512(tile + row * ROW_BYTES, numbers); }

// The lanes that there are of `count` numbers.
inline __mmask16 lanes(int64_t count) {
  return count >= SIDE ? 0xffff : count > 0 ? static_cast<__mmask16>((1 << count) - 1) : 0;
}

inline int64_t parts_of(const Block &block) {
  return (block.to - block.from + TALL - 1) / TALL * sides(block.right - block.left);
}

// `part(number of tiles, row, column)` for the parts of a block, each of so many tiles of rows and one of columns.
template <typename Part>
inline void for_each_part(const Block &block, Ahead &ahead, Part part) {
  for (int64_t column = block.left; column < block.right; column += SIDE)
    for (int64_t row = block.from; row < block.to; row += TALL) {
      ahead.step();
      switch (sides(at_most(TALL, block.to - row))) {
        case 1: part(std::integral_constant<int, 1>(), row, column); break;
        case 2: part(std::integral_constant<int, 2>(), row, column); break;
        default: part(std::integral_constant<int, 3>(), row, column); break;
      }
    }
}

}  // namespace
}  // namespace lema
