// Products of an int8 weight with columns that are rounded to int8 as well ("W8A8"), as linear.cpp prepares them.

#pragma once

#include "linear.h"

namespace lema {

constexpr int64_t MOST_CODES = 131072;  // products of two codes that an int32 holds the sum of
constexpr int64_t FEW_STEP = 32;        // codes that columns are filled up to, where they are few

struct Int8Bodies {
  // For run_in_pool; `job` is a Job. Tiles take b as it is or in slivers, few columns their codes.
  void (*tiles)(void *job, int slot);
  void (*few)(void *job, int slot);
  // packed_b [n][inner] -> codes [n][inner rounded up to FEW_STEP] and column_scales.
  void (*round_few)(const Product &p);
};

extern const Int8Bodies INT8_AVX2;
extern const Int8Bodies INT8_VNNI;  // of null pointers where it could not be compiled
extern const Body INT8_TILES_AMX;   // for run_in_pool; null where it could not be compiled

constexpr int64_t CODES_IN_TILE = 64;  // of a column, which is filled up to them

}  // namespace lema
