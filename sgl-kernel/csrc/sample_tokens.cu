#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/select_tokens.cuh"

namespace sgl_kernel {
namespace {

template <typename Format>
cudaError_t launch(const LogitsView& view, const SamplingView& sampling, int64_t rows, int device,
                   cudaStream_t stream, RacePartial* partials, int64_t* token_ids,
                   float* logprobs) {
  const int chunks = num_chunks(view.size);
  const unsigned blocks = static_cast<unsigned>(rows * chunks);
  race_chunks_kernel<Format>
      <<<blocks, kChunkThreads, 0, stream>>>(view, sampling, chunks, partials);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  return launch_dependent(select_tokens_kernel<Format>, device, static_cast<unsigned>(rows),
                          kSelectThreads, stream, view, sampling, chunks,
                          static_cast<const RacePartial*>(partials), token_ids, logprobs);
}

}  // namespace
}  // namespace sgl_kernel

// sampling: a struct in host memory of addresses on the device.
// workspace: rows * sgl_num_chunks(size) * 32 bytes, aligned to 16.
extern "C" int sgl_sample_tokens(int device, int dtype, const void* logits, int64_t row_stride,
                                 int64_t rows, int64_t size, const int64_t* banned,
                                 int64_t num_banned, const sgl_kernel::SamplingView* sampling,
                                 void* workspace, int64_t* token_ids,
                                 float* logprobs, void* stream_handle) {
  using namespace sgl_kernel;
  if (!is_supported_shape(rows, size)) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  RacePartial* partials = static_cast<RacePartial*>(workspace);
  switch (dtype) {
    case kFloat32:
      return launch<Float32>(view, *sampling, rows, device, stream, partials, token_ids,
                             logprobs);
    case kBfloat16:
      return launch<Bfloat16>(view, *sampling, rows, device, stream, partials, token_ids,
                             logprobs);
    case kFloat16:
      return launch<Float16>(view, *sampling, rows, device, stream, partials, token_ids,
                             logprobs);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int sgl_preload_sample_tokens(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t results[] = {
      preload(race_chunks_kernel<Float32>),    preload(race_chunks_kernel<Bfloat16>),
      preload(race_chunks_kernel<Float16>),    preload(select_tokens_kernel<Float32>),
      preload(select_tokens_kernel<Bfloat16>), preload(select_tokens_kernel<Float16>)};
  for (const cudaError_t result : results) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}
