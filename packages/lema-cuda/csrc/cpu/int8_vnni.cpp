// int8_tiles.h for CPUs that add products of pairs in one instruction; nothing where the compiler does not know it.

#include "int8.h"

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#include "formats_avx2.h"

namespace lema {
namespace {

inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(sum, a, b); }

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
