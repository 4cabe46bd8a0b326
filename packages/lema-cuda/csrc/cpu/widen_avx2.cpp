#include "formats.h"

namespace lema {
namespace {

template <int DTYPE>
void widen(const char *source, float *out, int64_t count) {
  using F = Format<DTYPE>;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) _mm256_storeu_ps(out + i, F::eight(source + i * F::BYTES));
  for (; i < count; ++i) out[i] = F::one(source + i * F::BYTES);
}

}  // namespace
}  // namespace lema

extern "C" int32_t lema_widen(const void *source, int32_t dtype, int64_t count, float *out) {
  using namespace lema;
  const char *const bytes = static_cast<const char *>(source);
  if (count < 0) return LEMA_BAD_ARGUMENT;
  switch (dtype) {
    case LEMA_F32:
      widen<LEMA_F32>(bytes, out, count);
      return LEMA_OK;
    case LEMA_F16:
      widen<LEMA_F16>(bytes, out, count);
      return LEMA_OK;
    case LEMA_BF16:
      widen<LEMA_BF16>(bytes, out, count);
      return LEMA_OK;
    default:
      return LEMA_BAD_ARGUMENT;
  }
}
