// The nodes of one draft tree in shared memory, by the node that each follows.
//
// Node 0 is the root. Every other node follows one before it, so walks towards the root end. A node
// whose path does not lead there (its parent is not in the tree, or is such a node itself) stays
// alone: no links lead to it, and it sees itself and the root.
#pragma once

#include "sgl_kernel/reduce.cuh"

namespace sgl_kernel {

constexpr int kNoNode = -1;

// The node before `node` that holds `id`; ids[0] is the root's and is not looked at.
template <typename Id>
__device__ __forceinline__ int find_node_before(const Id* ids, int node, Id id) {
  for (int other = 1; other < node; ++other) {
    if (ids[other] == id) return other;
  }
  return kNoNode;
}

struct NodePath {
  int parent;  // kNoNode for the root and for nodes that stay alone
  int depth;
};

// parents[i] is below i, or kNoNode.
__device__ __forceinline__ NodePath path_of(const int* parents, int node) {
  int depth = 0;
  int at = node;
  for (; at > 0; at = parents[at]) ++depth;
  if (at == 0) return NodePath{node == 0 ? kNoNode : parents[node], depth};
  return NodePath{kNoNode, 1};
}

struct NodeLinks {
  int first_child;
  int next_sibling;
};

// linked[i] is path_of(i).parent. Children of a node are in ascending order.
__device__ __forceinline__ NodeLinks links_of(const int* linked, int node, int count) {
  NodeLinks links{kNoNode, kNoNode};
  const int parent = linked[node];
  for (int other = count - 1; other > node; --other) {
    if (linked[other] == node) links.first_child = other;
    if (parent != kNoNode && linked[other] == parent) links.next_sibling = other;
  }
  return links;
}

// Calls visit for every node that `node` sees: itself, what is on its path, and the root.
template <typename Visit>
__device__ __forceinline__ void visit_seen(const int* linked, int node, Visit visit) {
  visit(0);
  for (int at = node; at > 0; at = linked[at]) visit(at);
}

}  // namespace sgl_kernel
