// dots.h for CPUs with AVX-512; nothing where the compiler does not know it.

#include "linear.h"

#ifdef __AVX512F__

#include "dots.h"

namespace lema {

const DotBodies DOTS_AVX512 = DOTS;

}  // namespace lema

#else

namespace lema {

const DotBodies DOTS_AVX512 = {};

}  // namespace lema

#endif
