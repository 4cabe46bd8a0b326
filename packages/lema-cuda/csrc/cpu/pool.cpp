#include "pool.h"

#include "thread.h"

#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace lema {
namespace {

// How long a thread looks for the next product before it sleeps: about 20 us, less than waking it takes.
constexpr int SPINS = 500;

struct Pool {
  std::mutex caller;  // held by the one call that has the threads
  std::mutex mutex;   // guards all that follows
  std::condition_variable wake, left;
  void (*body)(void *, int) = nullptr;
  void *context = nullptr;
  int places = 0;   // slots not yet taken
  int slot = 0;     // the last one taken
  int running = 0;  // threads inside body, the caller apart
  int threads = 0;  // made so far
  std::atomic<unsigned> calls{0};
  std::atomic<int> running_now{0};
};

void spin_while(const std::atomic<unsigned> &value, unsigned old) {
  for (int i = 0; i < SPINS && value.load(std::memory_order_acquire) == old; ++i) _mm_pause();
}

void *serve(void *argument) {
  Pool &pool = *static_cast<Pool *>(argument);
  unsigned seen = 0;
  for (;;) {
    spin_while(pool.calls, seen);
    std::unique_lock<std::mutex> lock(pool.mutex);
    pool.wake.wait(lock, [&] { return pool.calls.load(std::memory_order_relaxed) != seen; });
    seen = pool.calls.load(std::memory_order_relaxed);
    if (pool.body == nullptr || pool.places == 0) continue;
    --pool.places;
    const int slot = ++pool.slot;
    const auto body = pool.body;
    void *const context = pool.context;
    pool.running_now.store(++pool.running, std::memory_order_relaxed);
    lock.unlock();
    body(context, slot);
    lock.lock();
    pool.running_now.store(--pool.running, std::memory_order_release);
    if (pool.running == 0) pool.left.notify_one();
  }
  return nullptr;
}

}  // namespace

void run_in_pool(int threads, void (*body)(void *, int), void *context) {
  if (threads <= 1) return body(context, 0);
  Pool &pool = pool_of_process<Pool>();
  std::unique_lock<std::mutex> mine(pool.caller, std::try_to_lock);
  if (!mine.owns_lock()) return body(context, 0);
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    while (pool.threads < threads - 1 && start_thread(serve, &pool)) ++pool.threads;
    pool.body = body;
    pool.context = context;
    pool.places = threads - 1;
    pool.slot = 0;
    pool.calls.fetch_add(1, std::memory_order_release);
  }
  pool.wake.notify_all();
  body(context, 0);
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.body = nullptr;
  }
  for (int i = 0; i < SPINS && pool.running_now.load(std::memory_order_acquire) != 0; ++i) _mm_pause();
  std::unique_lock<std::mutex> lock(pool.mutex);
  pool.left.wait(lock, [&] { return pool.running == 0; });
}

}  // namespace lema
