// The device code, compiled for the host, with a launch that runs it.

#include <ucontext.h>

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "../../csrc/cuda/kernels.cu"
#include "../../csrc/include/lema.h"

Index threadIdx, blockIdx;

namespace {

constexpr int32_t LAUNCH_FAILED = 719;  // CUDA_ERROR_LAUNCH_FAILED
constexpr size_t STACK_BYTES = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK_BYTES);
  bool over = false;
};

std::mutex mutex;
bool backwards = false;
ucontext_t scheduler;
std::vector<Fiber> fibers(1024);
std::function<void()> body;
float exchanged[1024];

Fiber &running() { return fibers[threadIdx.x]; }

void run_fiber() {
  body();
  running().over = true;
}

// Whether every barrier was reached by all threads of the block.
bool run_block(int threads) {
  for (int i = 0; i < threads; ++i) {
    Fiber &fiber = fibers[i];
    fiber.over = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (int over = 0; over < threads;) {
    if (over != 0) return false;
    for (int i = 0; i < threads; ++i) {
      const uint32_t thread = static_cast<uint32_t>(backwards ? threads - 1 - i : i);
      threadIdx = {thread, 0, 0};
      swapcontext(&scheduler, &fibers[thread].context);
      over += fibers[thread].over;
    }
  }
  return true;
}

}  // namespace

void __syncthreads() {
  const uint32_t me = threadIdx.x;
  swapcontext(&fibers[me].context, &scheduler);
}

float __shfl_xor_sync(uint32_t, float value, int mask) {
  exchanged[threadIdx.x] = value;
  __syncthreads();
  const float other = exchanged[threadIdx.x ^ static_cast<uint32_t>(mask)];
  __syncthreads();
  return other;
}

namespace lema {

int32_t launch(Kernel kernel, uint32_t blocks_x, uint32_t blocks_y, int threads, const void *arguments, int32_t,
               void *) {
  const std::lock_guard<std::mutex> lock(mutex);
  switch (kernel) {
#define CASE(operation, format, dtype)                                                                              \
  case operation##_##format##_##dtype:                                                                              \
    body = [arguments] {                                                                                            \
      lema_##operation##_##format##_##dtype(*static_cast<const operation##_arguments *>(arguments));                \
    };                                                                                                              \
    break;
    LEMA_KERNELS(CASE)
#undef CASE
    default:
      return LAUNCH_FAILED;
  }
  for (uint32_t y = 0; y < blocks_y; ++y) {
    for (uint32_t x = 0; x < blocks_x; ++x) {
      blockIdx = {x, y, 0};
      bool complete = false;
      std::thread([&] { complete = run_block(threads); }).join();
      if (!complete) return LAUNCH_FAILED;
    }
  }
  return 0;
}

}  // namespace lema

extern "C" {

// For the tests: in which order threads run between two barriers.
LEMA_API void host_backwards(int32_t on) { backwards = on != 0; }

int32_t lema_cuda_abi_version(void) { return LEMA_ABI_VERSION; }
const char *lema_cuda_missing(void) { return ""; }
const char *lema_cuda_error(int32_t code) {
  return code == LAUNCH_FAILED ? "a barrier was not reached by all" : "fake";
}
const char *lema_device_missing(int32_t) { return ""; }

}  // extern "C"
