// What packing for dot products with four-bit codes and their decoding agree on.

#pragma once

namespace lema {

constexpr int CODES_IN_PLACE = 5;  // codes of a word that fit among the digits of an fp32 number, and need no shift

// The j-th code of a word of int4 is taken times this power of two, and what it is multiplied with divided by it.
constexpr int int4_power(int j) { return 4 * (j % CODES_IN_PLACE); }

}  // namespace lema
