// attention_blocks.h for CPUs with AVX-512; nothing where the compiler does not know it.

#include "attention.h"

#ifdef __AVX512F__

#include "attention_blocks.h"

namespace lema {

const AttentionBodies ATTENTION_AVX512 = ATTENTION;

}  // namespace lema

#else

namespace lema {

const AttentionBodies ATTENTION_AVX512 = {};

}  // namespace lema

#endif
