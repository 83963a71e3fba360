#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/verify_trees.cuh"

namespace {

using namespace sgl_kernel;

template <typename Link, typename Verdict>
int launch(int device, const LinkedTrees<Link>& trees, const int64_t* targets,
           int64_t num_requests, const Verdict& verdict, void* stream_handle) {
  if (num_requests < 1 || num_requests > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (trees.num_nodes < 1 || trees.num_nodes > kMostVerifiedNodes || verdict.width < 1) {
    return cudaErrorInvalidValue;
  }
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  verify_trees_kernel<<<static_cast<unsigned>(num_requests), kWarpSize, 0,
                        static_cast<cudaStream_t>(stream_handle)>>>(trees, targets, verdict);
  return cudaGetLastError();
}

}  // namespace

extern "C" int sgl_verify_trees(int device, const sgl_kernel::LinkedTrees<int64_t>* trees,
                                const int64_t* targets, int64_t num_requests,
                                const sgl_kernel::UniformVerdict* verdict, void* stream_handle) {
  return launch(device, *trees, targets, num_requests, *verdict, stream_handle);
}

extern "C" int sgl_verify_ragged_trees(int device, const sgl_kernel::LinkedTrees<int32_t>* trees,
                                       const int64_t* targets, int64_t num_requests,
                                       const sgl_kernel::PackedVerdict* verdict,
                                       void* stream_handle) {
  return launch(device, *trees, targets, num_requests, *verdict, stream_handle);
}

extern "C" int sgl_preload_verify_trees(int device) {
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const cudaError_t status = preload(verify_trees_kernel<int64_t, UniformVerdict>);
  return status != cudaSuccess ? status : preload(verify_trees_kernel<int32_t, PackedVerdict>);
}
