// Trees of W nodes each, from candidates numbered level by level: positions, links and masks.
#pragma once

#include "sgl_kernel/tree_nodes.cuh"

namespace sgl_kernel {

constexpr int kMostUniformNodes = 1024;  // of one tree

// Values of TreeMaskMode in python/sgl_kernel/tree_mask_mode.py.
enum TreeMaskMode { kFullMask = 0, kQueriesOnly = 1, kQueriesPacked = 2 };

// Of R trees. Candidate c of a request is a child of candidate parent_list[c / topk], or of the root
// where c < topk.
struct SelectedCandidates {
  const int64_t* parent_list;  // [R, parent_width] int64
  const int64_t* selected;     // [R, num_nodes - 1] int64; candidates of nodes 1 .. num_nodes - 1
  const int64_t* seq_lens;     // [R] int64; position of each root
  int64_t parent_width;
  int64_t topk;
  int num_nodes;  // W, 1 to kMostUniformNodes
};

struct UniformTrees {
  uint8_t* mask;  // as `mask_mode` says
  int64_t mask_size;
  int mask_mode;
  int64_t* positions;     // [R, W] int64
  int64_t* rows;          // [R, W] int64
  int64_t* first_child;   // [R, W] int64
  int64_t* next_sibling;  // [R, W] int64
};

// ids: the candidates of the nodes before `node`, and its own.
__device__ __forceinline__ int selected_parent(const SelectedCandidates& tree, const int64_t* ids,
                                               int64_t request, int node) {
  if (node == 0 || ids[node] < 0) return kNoNode;
  const int64_t group = ids[node] / tree.topk;
  if (group == 0) return 0;
  if (group >= tree.parent_width) return kNoNode;
  const int64_t parent = tree.parent_list[request * tree.parent_width + group];
  return parent < 0 ? kNoNode : find_node_before(ids, node, parent);
}

// Bytes of a request's full mask; more than `mask_size` where they cannot be inside of it.
__device__ __forceinline__ int64_t full_mask_bytes(int64_t seq_len, int num_nodes,
                                                   int64_t mask_size) {
  if (seq_len < 0) return static_cast<int64_t>(num_nodes) * num_nodes;
  if (seq_len > mask_size) return mask_size + 1;
  const int64_t bytes = num_nodes * (seq_len + num_nodes);
  return bytes <= mask_size ? bytes : mask_size + 1;
}

// Where the full mask of a request begins; one warp, the result in every lane.
__device__ __forceinline__ int64_t full_mask_start(const SelectedCandidates& tree,
                                                   int64_t request, int64_t mask_size) {
  int64_t bytes = 0;
  for (int64_t other = threadIdx.x % kWarpSize; other < request; other += kWarpSize) {
    bytes += full_mask_bytes(tree.seq_lens[other], tree.num_nodes, mask_size);
  }
  return warp_sum(bytes);
}

// Writes num_nodes x num_nodes bytes, the first at `start`, rows `stride` bytes apart.
__device__ __forceinline__ void write_byte_mask(const int* linked, int num_nodes, uint8_t* start,
                                                int64_t stride) {
  for (int i = static_cast<int>(threadIdx.x); i < num_nodes * num_nodes;
       i += static_cast<int>(blockDim.x)) {
    start[i / num_nodes * stride + i % num_nodes] = 0;
  }
  __syncthreads();
  const int node = static_cast<int>(threadIdx.x);
  if (node >= num_nodes) return;
  visit_seen(linked, node, [&](int seen) { start[node * stride + seen] = 1; });
}

__device__ __forceinline__ void write_packed_mask(const int* linked, int num_nodes,
                                                  uint8_t* start) {
  const int node = static_cast<int>(threadIdx.x);
  if (node >= num_nodes) return;
  const int row_bytes = num_nodes <= 8 ? 1 : num_nodes <= 16 ? 2 : 4;
  uint32_t bits = 0;
  visit_seen(linked, node, [&](int seen) { bits |= 1u << seen; });
  for (int i = 0; i < row_bytes; ++i) {
    start[node * row_bytes + i] = static_cast<uint8_t>(bits >> (8 * i));
  }
}

// All of a request's mask but the columns of its prefix, or nothing where it is not inside of it.
__device__ __forceinline__ void write_mask(const SelectedCandidates& tree,
                                           const UniformTrees& built, const int* linked,
                                           int64_t request, int64_t full_start) {
  const int64_t num_nodes = tree.num_nodes;
  if (built.mask_mode == kQueriesPacked) {
    const int64_t row_bytes = num_nodes <= 8 ? 1 : num_nodes <= 16 ? 2 : 4;
    write_packed_mask(linked, tree.num_nodes, built.mask + request * num_nodes * row_bytes);
  } else if (built.mask_mode == kQueriesOnly) {
    write_byte_mask(linked, tree.num_nodes, built.mask + request * num_nodes * num_nodes,
                    num_nodes);
  } else {
    const int64_t seq_len = tree.seq_lens[request] < 0 ? 0 : tree.seq_lens[request];
    const int64_t bytes = full_mask_bytes(seq_len, tree.num_nodes, built.mask_size);
    if (bytes > built.mask_size || full_start > built.mask_size - bytes) return;
    write_byte_mask(linked, tree.num_nodes, built.mask + full_start + seq_len,
                    seq_len + num_nodes);
  }
}

// Grid: one block per request, of a thread per node, filled up to whole warps.
static __global__ void __launch_bounds__(kMostUniformNodes)
    build_tree_kernel(SelectedCandidates tree, UniformTrees built) {
  __shared__ int64_t ids[kMostUniformNodes];
  __shared__ int parents[kMostUniformNodes];
  __shared__ int linked[kMostUniformNodes];
  __shared__ int64_t full_start;
  const int64_t request = blockIdx.x;
  const int node = static_cast<int>(threadIdx.x);
  const bool is_node = node < tree.num_nodes;
  if (built.mask_mode == kFullMask && node < kWarpSize) {
    const int64_t start = full_mask_start(tree, request, built.mask_size);
    if (node == 0) full_start = start;
  }
  if (is_node && node > 0) ids[node] = tree.selected[request * (tree.num_nodes - 1) + node - 1];
  __syncthreads();
  if (is_node) parents[node] = selected_parent(tree, ids, request, node);
  __syncthreads();
  const int64_t row = request * tree.num_nodes + node;
  if (is_node) {
    const NodePath path = path_of(parents, node);
    linked[node] = path.parent;
    built.positions[row] = tree.seq_lens[request] + path.depth;
    built.rows[row] = row;
  }
  __syncthreads();
  if (is_node) {
    const NodeLinks links = links_of(linked, node, tree.num_nodes);
    built.first_child[row] = links.first_child;
    built.next_sibling[row] = links.next_sibling;
  }
  write_mask(tree, built, linked, request, full_start);
}

}  // namespace sgl_kernel
