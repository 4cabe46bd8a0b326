// A CUDA driver for tests, as libcuda.so.1: device memory is host memory, and a stream's work is done when somebody waits
// for it, as late as that allows. What is queued on a held stream waits until the stream is let go. Kernels are not run,
// the latest launch is kept.

#include <cuda.h>

#include <string.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct Event {
  long recorded = 0, over = 0;  // records so far, of which so many are over
};

struct Operation {
  enum { COPY, RECORD, WAIT } kind;
  void *target = nullptr;
  const void *source = nullptr;
  size_t bytes = 0;
  Event *event = nullptr;
  long number = 0;
};

struct Stream {
  std::deque<Operation> queue;
  bool held = false;
};

std::mutex mutex;
std::set<Stream *> streams;
std::set<Event *> events;
std::map<void *, size_t> registered;
int contexts = 0, depth = 0, fail_copies = 0, modules = 0;

struct Launch {
  const std::string *function = nullptr;
  unsigned blocks_x = 0, blocks_y = 0, threads = 0;
  void *stream = nullptr;
  void *first_argument = nullptr;  // what the arguments begin with
  int depth = 0;
} latest;

bool advance_one(Stream &stream) {
  if (stream.held || stream.queue.empty()) return false;
  const Operation op = stream.queue.front();
  if (op.kind == Operation::WAIT && op.event->over < op.number) return false;
  if (op.kind == Operation::COPY) memcpy(op.target, op.source, op.bytes);
  if (op.kind == Operation::RECORD) op.event->over = op.number;
  stream.queue.pop_front();
  return true;
}

void advance_all() {
  for (bool any = true; any;) {
    any = false;
    for (Stream *stream : streams) any = advance_one(*stream) || any;
  }
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

extern "C" {

// -- for the tests

void *fake_stream() {
  const Lock lock(mutex);
  return *streams.insert(new Stream).first;
}
void fake_hold(void *stream, int held) {
  const Lock lock(mutex);
  static_cast<Stream *>(stream)->held = held;
}
void fake_work() {
  const Lock lock(mutex);
  advance_all();
}
void fake_fail_copies(int code) { fail_copies = code; }
long fake_registered_bytes() {
  long total = 0;
  for (const auto &each : registered) total += each.second;
  return total;
}
long fake_count(int what) {
  const long counts[] = {static_cast<long>(streams.size()), static_cast<long>(events.size()), contexts, depth, modules};
  return counts[what];
}
const char *fake_launched() { return latest.function == nullptr ? "" : latest.function->c_str(); }
long fake_launch(int what) {
  const long parts[] = {latest.blocks_x, latest.blocks_y, latest.threads, reinterpret_cast<long>(latest.stream),
                        reinterpret_cast<long>(latest.first_argument), latest.depth};
  return parts[what];
}

// -- the driver

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : code == CUDA_ERROR_INVALID_DEVICE ? "invalid device" : "fake";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ++contexts;
  *context = reinterpret_cast<CUcontext>(static_cast<size_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  --contexts;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext) {
  const Lock lock(mutex);
  ++depth;
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *) {
  const Lock lock(mutex);
  --depth;
  return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned) {
  if (bytes > (size_t{1} << 30)) return CUDA_ERROR_OUT_OF_MEMORY;
  return registered.emplace(memory, bytes).second ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}
CUresult cuMemHostUnregister(void *memory) {
  return registered.erase(memory) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CUresult cuStreamCreate(CUstream *stream, unsigned) {
  *stream = static_cast<CUstream>(fake_stream());
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  const Lock lock(mutex);
  streams.erase(reinterpret_cast<Stream *>(stream));
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
  const Lock lock(mutex);
  advance_all();
  return reinterpret_cast<Stream *>(stream)->queue.empty() ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  const Lock lock(mutex);
  Event *const e = reinterpret_cast<Event *>(event);
  reinterpret_cast<Stream *>(stream)->queue.push_back({Operation::WAIT, nullptr, nullptr, 0, e, e->recorded});
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
  const Lock lock(mutex);
  *event = reinterpret_cast<CUevent>(*events.insert(new Event).first);
  return flags == (CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuEventDestroy(CUevent event) {
  const Lock lock(mutex);
  return events.erase(reinterpret_cast<Event *>(event)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  const Lock lock(mutex);
  Event *const e = reinterpret_cast<Event *>(event);
  reinterpret_cast<Stream *>(stream)->queue.push_back({Operation::RECORD, nullptr, nullptr, 0, e, ++e->recorded});
  return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) {
  const Lock lock(mutex);
  advance_all();
  const Event *const e = reinterpret_cast<Event *>(event);
  return e->over == e->recorded ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_TIMEOUT;
}
CUresult cuEventQuery(CUevent event) {
  const Lock lock(mutex);
  const Event *const e = reinterpret_cast<Event *>(event);
  return e->over == e->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t bytes, CUstream stream) {
  const Lock lock(mutex);
  if (fail_copies) return static_cast<CUresult>(fail_copies);
  reinterpret_cast<Stream *>(stream)->queue.push_back(
      {Operation::COPY, reinterpret_cast<void *>(target), source, bytes, nullptr, 0});
  return CUDA_SUCCESS;
}


CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  const Lock lock(mutex);
  constexpr unsigned FATBIN = 0xba55ed50;
  if (depth != 1 || *static_cast<const unsigned *>(image) != FATBIN) return CUDA_ERROR_INVALID_IMAGE;
  ++modules;
  *module = reinterpret_cast<CUmodule>(const_cast<void *>(image));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  const Lock lock(mutex);
  static std::set<std::string> names;
  *function = reinterpret_cast<CUfunction>(const_cast<std::string *>(&*names.insert(name).first));
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                        unsigned threads_z, unsigned shared, CUstream stream, void **parameters, void **extra) {
  const Lock lock(mutex);
  if (z != 1 || threads_y != 1 || threads_z != 1 || shared != 0 || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  latest = {reinterpret_cast<const std::string *>(function), x, y, threads, stream,
            *static_cast<void **>(parameters[0]), depth};
  return CUDA_SUCCESS;
}

}  // extern "C"
