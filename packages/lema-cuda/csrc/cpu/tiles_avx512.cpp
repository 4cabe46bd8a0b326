// tiles.h for CPUs with AVX-512; nothing where the compiler does not know it.

#include "linear.h"

#ifdef __AVX512F__

#include "tiles.h"

namespace lema {

const TileBodies TILES_AVX512 = TILES;

}  // namespace lema

#else

namespace lema {

const TileBodies TILES_AVX512 = {};

}  // namespace lema

#endif
