#include "sgl_kernel/argmax_logprob.cuh"
#include "sgl_kernel/launch.cuh"

namespace sgl_kernel {
namespace {

template <typename Format>
cudaError_t launch(const LogitsView& view, int64_t rows, int device, cudaStream_t stream,
                   ArgmaxPartial* partials, int64_t* token_ids, float* best, float* logprobs) {
  const int chunks = num_chunks(view.size);
  const unsigned blocks = static_cast<unsigned>(rows * chunks);
  argmax_chunks_kernel<Format>
      <<<blocks, kChunkThreads, 0, stream>>>(view, chunks, partials);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  return launch_dependent(argmax_combine_kernel, device, static_cast<unsigned>(rows), kWarpSize,
                          stream, static_cast<const ArgmaxPartial*>(partials), chunks, view.size,
                          token_ids, best, logprobs);
}

}  // namespace
}  // namespace sgl_kernel

// workspace: rows * sgl_num_chunks(size) * 16 bytes, aligned to 16.
extern "C" int sgl_argmax_logprob(int device, int dtype, const void* logits, int64_t row_stride,
                                    int64_t rows, int64_t size, const int64_t* banned,
                                    int64_t num_banned, void* workspace, int64_t* token_ids,
                                    float* best, float* logprobs, void* stream_handle) {
  using namespace sgl_kernel;
  if (!is_supported_shape(rows, size)) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  ArgmaxPartial* partials = static_cast<ArgmaxPartial*>(workspace);
  switch (dtype) {
    case kFloat32:
      return launch<Float32>(view, rows, device, stream, partials, token_ids, best, logprobs);
    case kBfloat16:
      return launch<Bfloat16>(view, rows, device, stream, partials, token_ids, best, logprobs);
    case kFloat16:
      return launch<Float16>(view, rows, device, stream, partials, token_ids, best, logprobs);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int sgl_preload_argmax_logprob(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t results[] = {
      preload(argmax_chunks_kernel<Float32>), preload(argmax_chunks_kernel<Bfloat16>),
      preload(argmax_chunks_kernel<Float16>), preload(argmax_combine_kernel)};
  for (const cudaError_t result : results) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}
