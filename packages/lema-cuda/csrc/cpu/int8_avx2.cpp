#include "wide.h"

namespace lema {
namespace {

inline WideInts add_products(WideInts sum, WideInts a, WideInts b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

}  // namespace
}  // namespace lema

#include "int8_tiles.h"

namespace lema {

const Int8Bodies INT8_AVX2 = {run_int8_tiles, run_int8_few, round_few};

}  // namespace lema
