// int8_tiles.h for CPUs that add products of pairs in one instruction; nothing where the compiler does not know it.

#include "int8.h"

#ifdef __AVX512VNNI__

#include "wide.h"

namespace lema {
namespace {

inline WideInts add_products(WideInts sum, WideInts a, WideInts b) { return _mm512_dpwssd_epi32(sum, a, b); }

}  // namespace
}  // namespace lema

#include "int8_tiles.h"

namespace lema {

const Int8Bodies INT8_VNNI = {run_int8_tiles, run_int8_few, round_few};

}  // namespace lema

#else

namespace lema {

const Int8Bodies INT8_VNNI = {nullptr, nullptr, nullptr};

}  // namespace lema

#endif
