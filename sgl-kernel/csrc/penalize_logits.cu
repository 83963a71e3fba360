#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/penalize_logits.cuh"

// penalized_logits: [rows, size] float32.
extern "C" int sgl_penalize_logits(int device, int dtype, const void* logits, int64_t row_stride,
                                   int64_t rows, int64_t size, const int32_t* counts,
                                   const float* penalties, const int64_t* requests,
                                   const int64_t* extra_tokens, const int32_t* extra_counts,
                                   int64_t num_extra, float* penalized_logits,
                                   void* stream_handle) {
  using namespace sgl_kernel;
  if (!is_supported_shape(rows, size)) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const LogitsView view{logits, row_stride, static_cast<int>(size), nullptr, 0};
  const PenaltyView penalty{counts,       penalties,    requests,
                            extra_tokens, extra_counts, static_cast<int>(num_extra)};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int chunks = num_chunks(view.size);
  const unsigned blocks = static_cast<unsigned>(rows * chunks);
  switch (dtype) {
    case kFloat32:
      penalize_logits_kernel<Float32>
          <<<blocks, kChunkThreads, 0, stream>>>(view, penalty, chunks, penalized_logits);
      break;
    case kBfloat16:
      penalize_logits_kernel<Bfloat16>
          <<<blocks, kChunkThreads, 0, stream>>>(view, penalty, chunks, penalized_logits);
      break;
    case kFloat16:
      penalize_logits_kernel<Float16>
          <<<blocks, kChunkThreads, 0, stream>>>(view, penalty, chunks, penalized_logits);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

extern "C" int sgl_preload_penalize_logits(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t results[] = {preload(penalize_logits_kernel<Float32>),
                                 preload(penalize_logits_kernel<Bfloat16>),
                                 preload(penalize_logits_kernel<Float16>)};
  for (const cudaError_t result : results) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}
