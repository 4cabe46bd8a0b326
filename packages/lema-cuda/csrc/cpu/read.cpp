// Reads with several requests in flight: the calling thread and helpers that stay take pieces of a job in order, each a
// blocking pread. Containers forbid io_uring, and a process with a request of Linux AIO that hangs cannot be killed.

#include "../include/lema.h"
#include "thread.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace lema {
namespace {

// Direct reads come in whole sectors, except for a file's last.
constexpr int64_t SECTOR = 4096;
constexpr int MAX_HELPERS = 15;

struct Piece {
  int64_t range, start, bytes, needed;
};

// One call, on its caller's stack. The pool's mutex guards it.
struct Job {
  lema_range *ranges;
  int64_t count, request_bytes;
  int helpers;        // more of them may join
  int64_t range = 0;  // the next piece
  int64_t start = 0;
  int reading = 0;  // helpers inside a piece
  int64_t failed_range, failed_at = 0;
  int32_t error = 0;
  std::condition_variable over;
  Job *next = nullptr;

  // Ranges behind the first that failed are not begun.
  bool take(Piece &piece) {
    while (range < count && range <= failed_range) {
      const lema_range &r = ranges[range];
      if (start < r.needed_bytes && range != failed_range) {
        const int64_t left = r.bytes - start;
        piece.range = range;
        piece.start = start;
        piece.bytes = left < request_bytes ? left : request_bytes;
        piece.needed = r.needed_bytes - start < piece.bytes ? r.needed_bytes - start : piece.bytes;
        start += piece.bytes;
        return true;
      }
      ++range;
      start = 0;
    }
    return false;
  }

  void finish(const Piece &piece, int64_t done, int32_t problem) {
    if (done >= piece.needed) {
      ranges[piece.range].done_bytes += done;
      return;
    }
    const int64_t at = piece.start + done;
    if (piece.range < failed_range || (piece.range == failed_range && at < failed_at)) {
      failed_range = piece.range;
      failed_at = at;
      error = problem;
    }
  }
};

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  Job *first = nullptr;  // jobs that helpers may join, in order
  int helpers = 0;
};

// Bytes read; `problem` is an errno. Of the calling thread, an interrupted read is a problem: its signal waits for Python.
int64_t read_piece(const lema_range &r, const Piece &piece, bool helper, int32_t &problem) {
  char *const target = static_cast<char *>(r.target) + piece.start;
  const int64_t offset = r.offset + piece.start;
  int64_t done = 0;
  problem = 0;
  while (done < piece.needed) {
    const ssize_t count = pread(r.file, target + done, piece.bytes - done, offset + done);
    if (count < 0) {
      if (errno == EINTR && helper) continue;
      problem = errno;
      break;
    }
    done += count;
    if (count == 0 || (r.direct && count % SECTOR != 0)) break;
  }
  return done;
}

// Takes pieces until there is none. Called and left with the mutex held.
void work(Job &job, std::unique_lock<std::mutex> &lock, bool helper) {
  Piece piece;
  while (job.take(piece)) {
    lock.unlock();
    int32_t problem;
    const int64_t done = read_piece(job.ranges[piece.range], piece, helper, problem);
    lock.lock();
    job.finish(piece, done, problem);
  }
}

void *serve(void *argument) {
  Pool &pool = *static_cast<Pool *>(argument);
  std::unique_lock<std::mutex> lock(pool.mutex);
  for (;;) {
    Job *job = pool.first;
    while (job != nullptr && job->helpers == 0) job = job->next;
    if (job == nullptr) {
      pool.wake.wait(lock);
      continue;
    }
    --job->helpers;
    ++job->reading;
    work(*job, lock, true);
    if (--job->reading == 0) job->over.notify_one();
  }
  return nullptr;
}

void run(Pool &pool, Job &job) {
  std::unique_lock<std::mutex> lock(pool.mutex);
  if (job.helpers > 0) {
    while (pool.helpers < job.helpers && start_thread(serve, &pool)) ++pool.helpers;
    Job **last = &pool.first;
    while (*last != nullptr) last = &(*last)->next;
    *last = &job;
    pool.wake.notify_all();
  }
  const bool listed = job.helpers > 0;
  work(job, lock, false);
  if (listed) {
    Job **link = &pool.first;
    while (*link != &job) link = &(*link)->next;
    *link = job.next;
    job.over.wait(lock, [&] { return job.reading == 0; });
  }
}

}  // namespace
}  // namespace lema

extern "C" int32_t lema_read(struct lema_range *ranges, int64_t count, int64_t request_bytes, int32_t depth) {
  using namespace lema;
  if (count < 0 || request_bytes <= 0 || request_bytes % SECTOR != 0 || depth < 1 || depth > MAX_HELPERS + 1)
    return LEMA_BAD_ARGUMENT;
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) {
    lema_range &r = ranges[i];
    if (r.needed_bytes < 0 || r.needed_bytes > r.bytes || r.offset < 0) return LEMA_BAD_ARGUMENT;
    r.done_bytes = 0;
    r.error = 0;
    pieces += (r.needed_bytes + request_bytes - 1) / request_bytes;
  }
  Job job;
  job.ranges = ranges;
  job.count = job.failed_range = count;
  job.request_bytes = request_bytes;
  // A lone piece is read by the caller, who can be interrupted.
  job.helpers = static_cast<int>(pieces < depth ? (pieces > 0 ? pieces - 1 : 0) : depth - 1);
  run(pool_of_process<Pool>(), job);
  // Of whole ranges: a large page of the cache that two pieces share would belong to neither.
  for (int64_t i = 0; i < count; ++i)
    if (!ranges[i].direct) posix_fadvise(ranges[i].file, ranges[i].offset, ranges[i].bytes, POSIX_FADV_DONTNEED);
  if (job.failed_range < count) {
    ranges[job.failed_range].done_bytes = job.failed_at;
    ranges[job.failed_range].error = job.error;
    for (int64_t i = job.failed_range + 1; i < count; ++i) ranges[i].done_bytes = 0;
  }
  return LEMA_OK;
}
