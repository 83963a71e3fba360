// Walks from the root of each request's tree along the drafts that the model confirms.
#pragma once

#include "sgl_kernel/reduce.cuh"

namespace sgl_kernel {

constexpr int kMostVerifiedNodes = 1024;  // of one tree
constexpr int kEndOfLinks = -1;

// The trees of R requests as links between nodes. Children and siblings come behind the node that
// leads to them; other links end there.
template <typename Link>
struct LinkedTrees {
  const int64_t* tokens;     // [num_rows] int64
  const Link* first_child;   // [num_rows]
  const Link* next_sibling;  // [num_rows]
  const int64_t* rows;       // [num_rows] int64, or null: every node's own row
  const int64_t* starts;     // [R + 1] int64, or null: each request has num_nodes rows
  int64_t num_rows;
  int num_nodes;  // of each request, or the most of any; 1 to kMostVerifiedNodes
};

// A request's tree in shared memory.
struct StagedTree {
  int64_t tokens[kMostVerifiedNodes];
  int rows[kMostVerifiedNodes];  // kEndOfLinks: of no row, never kept
  int first_child[kMostVerifiedNodes];
  int next_sibling[kMostVerifiedNodes];
  int path[kMostVerifiedNodes];  // nodes kept
  int64_t next_token;            // behind the last of them
  int64_t start;                 // row of node 0
  int count;
  int num_kept;
};

__device__ __forceinline__ int checked_link(int64_t link, int node, int count) {
  return link > node && link < count ? static_cast<int>(link) : kEndOfLinks;
}

// All threads of the block; a barrier belongs behind it.
template <typename Link>
__device__ __forceinline__ void stage(const LinkedTrees<Link>& trees, int64_t request,
                                      StagedTree& tree) {
  int64_t start = request * trees.num_nodes;
  int64_t count = trees.num_nodes;
  if (trees.starts) {
    start = trees.starts[request];
    const int64_t next = trees.starts[request + 1];
    const int64_t end = next < trees.num_rows ? next : trees.num_rows;
    if (start < 0 || start >= end) {
      start = 0;
      count = 0;
    }
    if (count > end - start) count = end - start;
  }
  const int size = static_cast<int>(count);
  for (int node = static_cast<int>(threadIdx.x); node < size;
       node += static_cast<int>(blockDim.x)) {
    const int64_t place = start + node;
    const int64_t row = trees.rows ? trees.rows[place] : place;
    tree.tokens[node] = trees.tokens[place];
    tree.rows[node] = row >= 0 && row < trees.num_rows ? static_cast<int>(row) : kEndOfLinks;
    tree.first_child[node] = checked_link(trees.first_child[place], node, size);
    tree.next_sibling[node] = checked_link(trees.next_sibling[place], node, size);
  }
  if (threadIdx.x != 0) return;
  tree.start = start;
  tree.count = size;
}

// Whether the root can be kept; without it nothing is.
__device__ __forceinline__ bool has_root(const StagedTree& tree) {
  return tree.count > 0 && tree.rows[0] != kEndOfLinks;
}

// What upstream's callers read: rows among those of all requests, drafts without the root.
struct UniformVerdict {
  int32_t* predicts;          // [num_rows] int32; only kept rows are written
  int32_t* accept_index;      // [R, width] int32
  int32_t* accept_token_num;  // [R] int32
  int width;                  // nodes kept at most

  __device__ void write(const StagedTree& tree, int64_t request) const {
    for (int k = static_cast<int>(threadIdx.x); k < width; k += static_cast<int>(blockDim.x)) {
      int row = kEndOfLinks;
      if (k < tree.num_kept) {
        row = tree.rows[tree.path[k]];
        const bool is_last = k == tree.num_kept - 1;
        const int64_t next = is_last ? tree.next_token : tree.tokens[tree.path[k + 1]];
        predicts[row] = static_cast<int32_t>(next);
      }
      accept_index[request * width + k] = row;
    }
    if (threadIdx.x != 0) return;
    accept_token_num[request] = tree.num_kept > 0 ? tree.num_kept - 1 : 0;
  }
};

// The same as ConfirmedDrafts of confirm_drafts.cuh.
struct PackedVerdict {
  int64_t* num_confirmed;  // [R] int64
  int32_t* path;           // [R, width] int32; nodes
  int64_t* next_token;     // [R] int64
  int width;

  __device__ void write(const StagedTree& tree, int64_t request) const {
    for (int k = static_cast<int>(threadIdx.x); k < width; k += static_cast<int>(blockDim.x)) {
      path[request * width + k] = k < tree.num_kept ? tree.path[k] : kEndOfLinks;
    }
    if (threadIdx.x != 0) return;
    num_confirmed[request] = tree.num_kept > 0 ? tree.num_kept - 1 : 0;
    next_token[request] = tree.num_kept > 0 ? tree.next_token : 0;
  }
};

// Of each kept node the first child that holds the model's own token behind it. One warp per request.
template <typename Link, typename Verdict>
__global__ void __launch_bounds__(kWarpSize)
    verify_trees_kernel(LinkedTrees<Link> trees, const int64_t* targets, Verdict verdict) {
  __shared__ StagedTree tree;
  __shared__ int64_t own_targets[kMostVerifiedNodes];
  const int64_t request = blockIdx.x;
  stage(trees, request, tree);
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x);
  for (int node = lane; node < tree.count; node += kWarpSize) {
    if (tree.rows[node] != kEndOfLinks) own_targets[node] = targets[tree.rows[node]];
  }
  __syncwarp();
  if (lane == 0) {
    int num_kept = 0;
    int last = 0;
    if (has_root(tree)) tree.path[num_kept++] = 0;
    int node = num_kept > 0 ? tree.first_child[0] : kEndOfLinks;
    while (node != kEndOfLinks && num_kept < verdict.width) {
      if (tree.tokens[node] == own_targets[last] && tree.rows[node] != kEndOfLinks) {
        tree.path[num_kept++] = node;
        last = node;
        node = tree.first_child[node];
      } else {
        node = tree.next_sibling[node];
      }
    }
    tree.num_kept = num_kept;
    tree.next_token = num_kept > 0 ? own_targets[last] : 0;
  }
  __syncwarp();
  verdict.write(tree, request);
}

}  // namespace sgl_kernel
