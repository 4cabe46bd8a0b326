// Threads that the library starts and never ends.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>

namespace lema {

// A thread that no signal is delivered to: those are for Python's. False where the system gives none.
inline bool start_thread(void *(*body)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const bool made = pthread_create(&thread, nullptr, body, argument) == 0;
  if (made) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return made;
}

// The one Pool of this process. Never freed: its threads use it until the process ends. In a forked child the threads
// are gone and the locks are as they happened to be: it starts with a new pool.
template <class Pool>
Pool &pool_of_process() {
  static std::atomic<Pool *> current{nullptr};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  static_cast<void>(registered);
  Pool *pool = current.load();
  if (pool == nullptr) {
    Pool *const made = new Pool;
    if (current.compare_exchange_strong(pool, made)) {
      pool = made;
    } else {
      delete made;
    }
  }
  return *pool;
}

}  // namespace lema
