// Work dealt out in numbered units: each thread takes what is next, so nobody waits for one that was held up.

#pragma once

#include "pool.h"

#include <stdint.h>

#include <atomic>

namespace lema {
namespace {  // each file's own: what is compiled for AVX2 must not be shared with what is not

// work(unit, slot) for every unit below `units`, by at most `threads` threads, each with a slot of its own below that.
template <class Work>
void deal_out(int threads, int64_t units, const Work &work) {
  struct Job {
    const Work &work;
    const int64_t units;
    std::atomic<int64_t> next{0};
  } job{work, units};
  const auto body = [](void *context, int slot) {
    Job &job = *static_cast<Job *>(context);
    for (int64_t unit; (unit = job.next.fetch_add(1, std::memory_order_relaxed)) < job.units;) job.work(unit, slot);
  };
  run_in_pool(units < threads ? static_cast<int>(units) : threads, body, &job);
}

}  // namespace
}  // namespace lema
