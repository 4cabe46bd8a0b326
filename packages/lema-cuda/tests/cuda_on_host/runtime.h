// What device code needs of CUDA, on the host: it is included before everything else.
//
// The threads of a block are fibers of one thread of the host. Each runs to the next barrier, one after another, so that
// what lies between two barriers runs in one order, or in the opposite one: where a barrier is missing, results differ.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static thread_local  // each block has a thread of its own: nothing is left of the one before

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Index {
  uint32_t x, y, z;
};
extern Index threadIdx, blockIdx;  // of the fiber that runs

void __syncthreads();
float __shfl_xor_sync(uint32_t lanes, float value, int mask);

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }

inline int __dp4a(int left, int right, int sum) {
  for (int shift = 0; shift < 32; shift += 8) {
    sum += static_cast<int8_t>(left >> shift) * static_cast<int8_t>(right >> shift);
  }
  return sum;
}
