#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/topk_logprob.cuh"

namespace sgl_kernel {
namespace {

template <typename Format>
cudaError_t launch(const LogitsView& view, int64_t rows, int topk, int device, cudaStream_t stream,
                   ArgmaxPartial* partials, int64_t* token_ids, float* logprobs) {
  const int chunks = num_chunks(view.size);
  const unsigned blocks = static_cast<unsigned>(rows * chunks);
  RankedToken* lists = reinterpret_cast<RankedToken*>(partials + rows * chunks);
  topk_chunks_kernel<Format>
      <<<blocks, kChunkThreads, 0, stream>>>(view, chunks, topk, partials, lists);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  return launch_dependent(topk_combine_kernel, device, static_cast<unsigned>(rows), kWarpSize,
                          stream, static_cast<const ArgmaxPartial*>(partials),
                          static_cast<const RankedToken*>(lists), chunks, topk, token_ids,
                          logprobs);
}

}  // namespace
}  // namespace sgl_kernel

// workspace: rows * sgl_num_chunks(size) * (16 + 8 * topk) bytes, aligned to 16.
extern "C" int sgl_topk_logprob(int device, int dtype, const void* logits, int64_t row_stride,
                                int64_t rows, int64_t size, const int64_t* banned,
                                int64_t num_banned, int64_t topk, void* workspace,
                                int64_t* token_ids, float* logprobs, void* stream_handle) {
  using namespace sgl_kernel;
  if (!is_supported_shape(rows, size)) return cudaErrorInvalidValue;
  if (topk < 1 || topk > size || topk > kMostTop) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  ArgmaxPartial* partials = static_cast<ArgmaxPartial*>(workspace);
  const int count = static_cast<int>(topk);
  switch (dtype) {
    case kFloat32:
      return launch<Float32>(view, rows, count, device, stream, partials, token_ids, logprobs);
    case kBfloat16:
      return launch<Bfloat16>(view, rows, count, device, stream, partials, token_ids, logprobs);
    case kFloat16:
      return launch<Float16>(view, rows, count, device, stream, partials, token_ids, logprobs);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int sgl_preload_topk_logprob(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t results[] = {
      preload(topk_chunks_kernel<Float32>), preload(topk_chunks_kernel<Bfloat16>),
      preload(topk_chunks_kernel<Float16>), preload(topk_combine_kernel)};
  for (const cudaError_t result : results) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}
