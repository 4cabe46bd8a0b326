#include "dots.h"

namespace lema {

const DotBodies DOTS_AVX2 = DOTS;

}  // namespace lema
