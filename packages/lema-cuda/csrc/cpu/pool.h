// Threads that stay: a product of a millisecond cannot wait for threads to be made.

#pragma once

namespace lema {

// Runs body(context, slot) in the calling thread (slot 0) and in up to threads - 1 others, each with a slot of its own
// below `threads`, and returns when all of them have. Others take part as they wake: a body deals the work out through
// counters in `context`, so that the caller alone would do it all. Where another call is under way, or no thread can
// be made, the caller is alone.
void run_in_pool(int threads, void (*body)(void *context, int slot), void *context);

}  // namespace lema
