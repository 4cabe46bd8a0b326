// Threads that the library starts and never ends.

#pragma once

#include <pthread.h>
#include <signal.h>

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

}  // namespace lema
