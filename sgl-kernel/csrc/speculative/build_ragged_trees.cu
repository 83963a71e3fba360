#include "sgl_kernel/build_ragged_trees.cuh"
#include "sgl_kernel/launch.cuh"

// drafts, built: structs in host memory, as Python fills them.
extern "C" int sgl_build_ragged_trees(int device, const sgl_kernel::DraftCandidates* drafts,
                                      const sgl_kernel::PackedTrees* built, void* stream_handle) {
  using namespace sgl_kernel;
  if (drafts->num_requests < 1 || drafts->num_requests > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (drafts->num_candidates > 0x7FFFFFFF - kWarpSize) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  build_ragged_trees_kernel<<<static_cast<unsigned>(drafts->num_requests), kWarpSize, 0,
                              static_cast<cudaStream_t>(stream_handle)>>>(*drafts, *built);
  return cudaGetLastError();
}

extern "C" int sgl_preload_build_ragged_trees(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  return preload(build_ragged_trees_kernel);
}
