// Trees of different sizes from scored candidates, packed, in one launch: which candidates are kept,
// where each request's rows begin, and what a forward pass and a verification need of each row.
#pragma once

#include "sgl_kernel/tree_nodes.cuh"

namespace sgl_kernel {

constexpr int kMostRaggedNodes = 64;  // of one tree: a row's ancestors are one 64-bit mask

// Of R requests; request i has candidates starts[i] to starts[i + 1].
struct DraftCandidates {
  const int64_t* tokens;       // [C] int64
  const float* scores;         // [C] float32
  const int32_t* parents;      // [C] int32; a candidate of the request before it, -1: the root
  const int64_t* starts;       // [R + 1] int64
  const int64_t* root_tokens;  // [R] int64
  const int64_t* num_nodes;    // [R] int64; nodes wanted, the root is one of them
  const int64_t* seq_lens;     // [R] int64; position of each root
  int64_t num_candidates;      // C
  int64_t num_requests;        // R
  int64_t num_rows;            // T
};

struct PackedTrees {
  int64_t* tokens;        // [T] int64
  int32_t* parents;       // [T] int32
  int64_t* positions;     // [T] int64
  int64_t* ancestors;     // [T] int64
  int32_t* first_child;   // [T] int32
  int32_t* next_sibling;  // [T] int32
  int64_t* starts;        // [R + 1] int64
};

struct CandidateRange {
  int64_t first;
  int64_t count;
};

// No number makes it reach outside of the candidates.
__device__ __forceinline__ CandidateRange candidates_of(const DraftCandidates& drafts,
                                                        int64_t request) {
  const int64_t first = drafts.starts[request];
  const int64_t next = drafts.starts[request + 1];
  const int64_t end = next < drafts.num_candidates ? next : drafts.num_candidates;
  if (first < 0 || first >= end) return CandidateRange{0, 0};
  return CandidateRange{first, end - first};
}

// Rows of a request if T were large enough.
__device__ __forceinline__ int64_t wanted_rows(const DraftCandidates& drafts, int64_t request) {
  int64_t count = drafts.num_nodes[request];
  if (count < 1) return 0;
  const int64_t most = candidates_of(drafts, request).count + 1;
  if (count > most) count = most;
  return count < kMostRaggedNodes ? count : kMostRaggedNodes;
}

// In the order of the scores; what is not above 0, NaN too, is equal to 0.
SGL_INLINE uint32_t score_key(float score) { return score > 0.0f ? float_bits(score) : 0u; }

// How many keys are at least `bound`; one warp.
__device__ __forceinline__ int64_t count_from(const float* scores, int64_t count, uint32_t bound) {
  unsigned found = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kWarpSize) found += score_key(scores[i]) >= bound;
  return __reduce_add_sync(kFullWarp, found);
}

// The `wanted` candidates with the greatest (key, -number), in ascending order; one warp. A candidate
// comes behind its parent and scores no more, so a parent is taken before its children.
__device__ __forceinline__ void choose(const float* scores, int64_t count, int wanted,
                                       int* chosen) {
  uint32_t bound = 0;  // the greatest that `wanted` keys reach
  int64_t reaching = count;
  for (int bit = 30; bit >= 0 && reaching > wanted; --bit) {
    const uint32_t higher = bound | 1u << bit;
    const int64_t found = count_from(scores, count, higher);
    if (found < wanted) continue;
    bound = higher;
    reaching = found;
  }
  // Of those at the bound as many as are left, the first ones.
  int64_t at_bound = wanted;
  if (reaching > wanted) at_bound -= count_from(scores, count, bound + 1);
  int num_chosen = 0;
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t lanes_before = (1u << lane) - 1;
  for (int64_t first = 0; first < count && num_chosen < wanted; first += kWarpSize) {
    const bool is_inside = first + lane < count;
    const uint32_t key = is_inside ? score_key(scores[first + lane]) : 0u;
    const uint32_t equal = __ballot_sync(kFullWarp, is_inside && key == bound);
    const bool has_place = key == bound && count_bits(equal & lanes_before) < at_bound;
    const bool is_taken = is_inside && (key > bound || has_place);
    const uint32_t taken = __ballot_sync(kFullWarp, is_taken);
    const int place = num_chosen + count_bits(taken & lanes_before);
    if (is_taken) chosen[place] = static_cast<int>(first) + lane;
    num_chosen += count_bits(taken);
    at_bound -= count_bits(equal);
  }
}

__device__ __forceinline__ void write_padding(const PackedTrees& built, int64_t first,
                                              int64_t end) {
  for (int64_t row = first + threadIdx.x; row < end; row += kWarpSize) {
    built.tokens[row] = 0;
    built.parents[row] = kNoNode;
    built.positions[row] = 0;
    built.ancestors[row] = -1;
    built.first_child[row] = kNoNode;
    built.next_sibling[row] = kNoNode;
  }
}

// One warp per request.
static __global__ void __launch_bounds__(kWarpSize)
    build_ragged_trees_kernel(DraftCandidates drafts, PackedTrees built) {
  __shared__ int chosen[kMostRaggedNodes];  // candidates of nodes 1, 2, ..
  __shared__ int parents[kMostRaggedNodes];
  __shared__ int linked[kMostRaggedNodes];
  const int64_t request = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  int64_t start = 0;
  for (int64_t other = lane; other < request; other += kWarpSize) {
    start += wanted_rows(drafts, other);
  }
  start = warp_sum(start);
  if (start > drafts.num_rows) start = drafts.num_rows;
  int64_t rows = wanted_rows(drafts, request);
  if (rows > drafts.num_rows - start) rows = drafts.num_rows - start;
  const int count = static_cast<int>(rows);
  if (lane == 0) built.starts[request] = start;
  if (request == drafts.num_requests - 1) {
    if (lane == 0) built.starts[request + 1] = start + count;
    write_padding(built, start + count, drafts.num_rows);
  }
  if (count == 0) return;

  const CandidateRange range = candidates_of(drafts, request);
  choose(drafts.scores + range.first, range.count, count - 1, chosen + 1);
  __syncwarp();
  for (int node = lane; node < count; node += kWarpSize) {
    int parent = kNoNode;
    if (node > 0) {
      const int candidate = drafts.parents[range.first + chosen[node]];
      if (candidate == -1) parent = 0;
      if (candidate >= 0) parent = find_node_before(chosen, node, candidate);
    }
    parents[node] = parent;
  }
  __syncwarp();
  for (int node = lane; node < count; node += kWarpSize) {
    const NodePath path = path_of(parents, node);
    linked[node] = path.parent;
    built.parents[start + node] = path.parent;
    built.positions[start + node] = drafts.seq_lens[request] + path.depth;
    built.tokens[start + node] =
        node == 0 ? drafts.root_tokens[request] : drafts.tokens[range.first + chosen[node]];
  }
  __syncwarp();
  for (int node = lane; node < count; node += kWarpSize) {
    const NodeLinks links = links_of(linked, node, count);
    uint64_t seen_nodes = 0;
    visit_seen(linked, node, [&](int seen) { seen_nodes |= uint64_t{1} << seen; });
    built.ancestors[start + node] = static_cast<int64_t>(seen_nodes);
    built.first_child[start + node] = links.first_child;
    built.next_sibling[start + node] = links.next_sibling;
  }
}

}  // namespace sgl_kernel
