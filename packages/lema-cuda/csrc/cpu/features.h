#pragma once

namespace lema {

// AVX-512's int8 instructions for registers of 256 bits: AVX512F, VL and VNNI.
bool cpu_has_vnni();

}  // namespace lema
