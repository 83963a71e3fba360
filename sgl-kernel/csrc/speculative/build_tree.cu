#include "sgl_kernel/build_tree.cuh"
#include "sgl_kernel/launch.cuh"

extern "C" int sgl_build_tree(int device, const int64_t* parent_list, const int64_t* selected,
                              const int64_t* seq_lens, int64_t parent_width, int64_t topk,
                              int64_t num_nodes, int64_t num_requests, void* mask,
                              int64_t mask_size, int64_t mask_mode, int64_t* positions,
                              int64_t* rows, int64_t* first_child, int64_t* next_sibling,
                              void* stream_handle) {
  using namespace sgl_kernel;
  if (num_requests < 1 || num_requests > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (num_nodes < 1 || num_nodes > kMostUniformNodes || topk < 1) return cudaErrorInvalidValue;
  if (mask_mode == kQueriesPacked && num_nodes > 32) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const SelectedCandidates tree{parent_list,  selected, seq_lens,
                                parent_width, topk,     static_cast<int>(num_nodes)};
  const UniformTrees built{static_cast<uint8_t*>(mask), mask_size, static_cast<int>(mask_mode),
                           positions, rows, first_child, next_sibling};
  const unsigned threads = (tree.num_nodes + kWarpSize - 1) / kWarpSize * kWarpSize;
  build_tree_kernel<<<static_cast<unsigned>(num_requests), threads, 0,
                      static_cast<cudaStream_t>(stream_handle)>>>(tree, built);
  return cudaGetLastError();
}

extern "C" int sgl_preload_build_tree(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  return preload(build_tree_kernel);
}
