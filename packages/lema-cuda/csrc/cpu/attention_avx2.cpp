#include "attention_blocks.h"

namespace lema {

const AttentionBodies ATTENTION_AVX2 = ATTENTION;

}  // namespace lema
