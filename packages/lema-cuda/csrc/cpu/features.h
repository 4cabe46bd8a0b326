#pragma once

#include "../include/lema.h"

namespace lema {

// The newest instructions that the CPU has, the library is compiled for and lema_cpu_limit() allows.
lema_instructions instructions();

}  // namespace lema
