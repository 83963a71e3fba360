#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/sample_trees.cuh"

namespace {

using namespace sgl_kernel;

template <typename Link, typename Verdict>
int launch(int device, const LinkedTrees<Link>& trees, const TreeCoins& sampling,
           int64_t num_requests, const Verdict& verdict, void* stream_handle) {
  if (num_requests < 1 || num_requests > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (trees.num_nodes < 1 || trees.num_nodes > kMostVerifiedNodes || verdict.width < 1) {
    return cudaErrorInvalidValue;
  }
  if (sampling.size < 1 || sampling.size > kMostSampledTokens) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  sample_trees_kernel<Link, Verdict, kSampleThreads>
      <<<static_cast<unsigned>(num_requests), kSampleThreads, 0,
         static_cast<cudaStream_t>(stream_handle)>>>(trees, sampling, verdict);
  return cudaGetLastError();
}

}  // namespace

extern "C" int sgl_sample_trees(int device, const sgl_kernel::LinkedTrees<int64_t>* trees,
                                const sgl_kernel::TreeCoins* sampling, int64_t num_requests,
                                const sgl_kernel::UniformVerdict* verdict, void* stream_handle) {
  return launch(device, *trees, *sampling, num_requests, *verdict, stream_handle);
}

extern "C" int sgl_sample_ragged_trees(int device, const sgl_kernel::LinkedTrees<int32_t>* trees,
                                       const sgl_kernel::TreeCoins* sampling,
                                       int64_t num_requests,
                                       const sgl_kernel::PackedVerdict* verdict,
                                       void* stream_handle) {
  return launch(device, *trees, *sampling, num_requests, *verdict, stream_handle);
}

extern "C" int sgl_preload_sample_trees(int device) {
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t status = preload(sample_trees_kernel<int64_t, UniformVerdict, kSampleThreads>);
  if (status != cudaSuccess) return status;
  return preload(sample_trees_kernel<int32_t, PackedVerdict, kSampleThreads>);
}
