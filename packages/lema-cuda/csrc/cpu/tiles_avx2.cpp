#include "tiles.h"

namespace lema {

const TileBodies TILES_AVX2 = TILES;

}  // namespace lema
