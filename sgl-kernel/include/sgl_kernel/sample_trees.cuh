// Samples along each request's tree: drafts are accepted so that, with both thresholds at 1, the
// tokens follow the model's own distribution.
//
// One coin decides at each node: its children are intervals of the distribution, one after the
// other, and the child whose interval holds the coin is taken. If none does, a token is drawn from
// what is left, with a coin of its own.
#pragma once

#include "sgl_kernel/row_reader.cuh"
#include "sgl_kernel/verify_trees.cuh"

namespace sgl_kernel {

constexpr int kSampleThreads = 1024;
constexpr int kMostSampledTokens = 1 << 20;  // vocabulary
constexpr int kTileVectors = 4;              // of each lane, in flight at once
constexpr int kTileTokens = kWarpSize * kTileVectors * RowReader<Float32>::kVector;
// A row that is not aligned begins inside of its first vector.
constexpr int kMostTiles = kMostSampledTokens / kTileTokens + 1;

struct TreeCoins {
  const float* coins;        // [num_rows] float32, below 1; at a node for the choice of its child
  const float* final_coins;  // [R] float32, below 1
  const float* probs;        // [num_rows, size] float32; of the token after each node
  float* rejected_probs;     // [num_rows, size] float32, or null
  int size;
  float threshold_single;
  float threshold_acc;  // above 0
};

struct Rejected {
  int64_t tokens[kMostVerifiedNodes];
  int count;
};

__device__ __forceinline__ bool is_rejected(const Rejected& rejected, int64_t token) {
  for (int i = 0; i < rejected.count; ++i) {
    if (rejected.tokens[i] == token) return true;
  }
  return false;
}

// Looks at up to 32 siblings from `node` on, all lanes at the same. Returns the accepted one, or
// kEndOfLinks; node: the sibling behind them. One warp.
__device__ __forceinline__ int accept_sibling(const StagedTree& tree, const TreeCoins& sampling,
                                              int last, float coin, int& node, float& mass,
                                              Rejected& rejected) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int own = kEndOfLinks;
  int count = 0;
  for (; node != kEndOfLinks && count < kWarpSize; ++count) {
    if (count == lane) own = node;
    node = tree.next_sibling[node];
  }
  const int64_t row = (tree.start + last) * sampling.size;
  float own_prob = 0.0f;
  if (own != kEndOfLinks && tree.rows[own] != kEndOfLinks) {
    const int64_t token = tree.tokens[own];
    if (token >= 0 && token < sampling.size) own_prob = sampling.probs[row + token];
  }
  for (int i = 0; i < count; ++i) {
    const int sibling = __shfl_sync(kFullWarp, own, i);
    const float prob = __shfl_sync(kFullWarp, own_prob, i);
    const int64_t token = tree.tokens[sibling];
    // A token that a sibling held before has nothing left.
    if (!(prob > 0.0f) || is_rejected(rejected, token)) continue;
    mass += prob;
    if (coin < mass / sampling.threshold_acc || prob >= sampling.threshold_single) return sibling;
    __syncwarp();
    if (lane == 0) {
      rejected.tokens[rejected.count++] = token;
      if (sampling.rejected_probs) sampling.rejected_probs[row + token] = prob;
    }
    __syncwarp();
  }
  return kEndOfLinks;
}

// Fills tree.path and tree.num_kept, and `rejected` with the children of the last kept node that were
// not taken. One warp; the tree has a root.
__device__ __forceinline__ void accept_drafts(StagedTree& tree, const TreeCoins& sampling,
                                              int most_kept, Rejected& rejected) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int last = 0;
  int num_kept = 1;
  if (lane == 0) tree.path[0] = 0;
  while (num_kept < most_kept) {
    const float coin = sampling.coins[tree.start + last];
    float mass = 0.0f;
    int accepted = kEndOfLinks;
    for (int node = tree.first_child[last]; node != kEndOfLinks && accepted == kEndOfLinks;) {
      accepted = accept_sibling(tree, sampling, last, coin, node, mass, rejected);
    }
    if (accepted == kEndOfLinks) break;
    __syncwarp();
    if (lane == 0) {
      tree.path[num_kept] = accepted;
      rejected.count = 0;
    }
    __syncwarp();
    last = accepted;
    ++num_kept;
  }
  if (lane == 0) tree.num_kept = num_kept;
}

// A row's mass in tiles of kTileTokens, and the token at a place of it.
class RowMass {
 public:
  // rejected: they have no mass.
  __device__ RowMass(const float* probs, int size, const Rejected& rejected, int num_rejected)
      : reader_(LogitsView{probs, 0, size, rejected.tokens, num_rejected}, 0),
        num_tiles_((reader_.num_vectors() + kTileVectors * kWarpSize - 1) /
                   (kTileVectors * kWarpSize)) {}

  // tiles: [kMostTiles]; all warps of the block, a barrier belongs behind it.
  __device__ void sum_tiles(float* tiles) const {
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int tile = static_cast<int>(threadIdx.x) / kWarpSize; tile < num_tiles_;
         tile += num_warps) {
      float values[kTileVectors][kVector];
      load_tile(tile, values);
      float sum = 0.0f;
#pragma unroll
      for (int v = 0; v < kTileVectors; ++v) sum += sum_of(values[v]);
      sum = warp_sum(sum);
      if (threadIdx.x % kWarpSize == 0) tiles[tile] = sum;
    }
  }

  // One warp, like all that follows.
  __device__ float total(const float* tiles) const {
    float running = 0.0f;
    for (int first = 0; first < num_tiles_; first += kWarpSize) {
      running += last_lane(warp_running_sum(tile_sum(tiles, first)));
    }
    return running;
  }

  // The first token with mass at which the running mass is above `place`; where rounding leaves
  // none, the last token with mass, and 0 where no token has any.
  __device__ int token_at(const float* tiles, float place) const {
    float running = 0.0f;
    int last_tile = kEndOfLinks;
    float before_last = 0.0f;
    for (int first = 0; first < num_tiles_; first += kWarpSize) {
      const float own = tile_sum(tiles, first);
      const float sum = warp_running_sum(own);
      const uint32_t with_mass = __ballot_sync(kFullWarp, own > 0.0f);
      const uint32_t above = __ballot_sync(kFullWarp, own > 0.0f && running + sum > place);
      if (with_mass) {
        const int lane = above ? lowest_bit(above) : highest_bit(with_mass);
        last_tile = first + lane;
        before_last = running + __shfl_sync(kFullWarp, sum - own, lane);
      }
      if (above) break;
      running += last_lane(sum);
    }
    return last_tile == kEndOfLinks ? 0 : token_in_tile(last_tile, before_last, place);
  }

 private:
  static constexpr int kVector = RowReader<Float32>::kVector;

  __device__ static int highest_bit(uint32_t bits) {
    int bit = 31;
    while (!(bits >> bit & 1u)) --bit;
    return bit;
  }
  __device__ static float last_lane(float value) {
    return __shfl_sync(kFullWarp, value, kWarpSize - 1);
  }
  __device__ static float sum_of(const float (&values)[kVector]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += values[i];
    return sum;
  }
  __device__ int vector_of(int tile, int v) const {
    return (tile * kTileVectors + v) * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
  }
  __device__ float tile_sum(const float* tiles, int first) const {
    const int tile = first + static_cast<int>(threadIdx.x) % kWarpSize;
    return tile < num_tiles_ ? tiles[tile] : 0.0f;
  }

  // Nothing is negative: what is outside of the row, rejected or no number is 0.
  __device__ void load_tile(int tile, float (&values)[kTileVectors][kVector]) const {
    Packed packed[kTileVectors];
#pragma unroll
    for (int v = 0; v < kTileVectors; ++v) packed[v] = reader_.load(vector_of(tile, v));
#pragma unroll
    for (int v = 0; v < kTileVectors; ++v) {
      reader_.unpack(packed[v], vector_of(tile, v), values[v]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] = values[v][i] > 0.0f ? values[v][i] : 0.0f;
    }
  }

  __device__ int token_in_tile(int tile, float running, float place) const {
    float values[kTileVectors][kVector];
    load_tile(tile, values);
    unsigned first_above = kNoToken;
    unsigned last_with_mass = 0;
#pragma unroll
    for (int v = 0; v < kTileVectors; ++v) {
      const float own = sum_of(values[v]);
      const float sum = warp_running_sum(own);
      float mass = running + (sum - own);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const unsigned token = static_cast<unsigned>(reader_.first_token(vector_of(tile, v)) + i);
        mass += values[v][i];
        if (!(values[v][i] > 0.0f)) continue;
        if (mass > place && token < first_above) first_above = token;
        last_with_mass = token;
      }
      running += last_lane(sum);
    }
    first_above = __reduce_min_sync(kFullWarp, first_above);
    last_with_mass = __reduce_max_sync(kFullWarp, last_with_mass);
    return static_cast<int>(first_above != kNoToken ? first_above : last_with_mass);
  }

  const RowReader<Float32> reader_;
  const int num_tiles_;
};

// One block of kThreads, whole warps, per request. Its number changes no result.
template <typename Link, typename Verdict, int kThreads>
__global__ void __launch_bounds__(kThreads)
    sample_trees_kernel(LinkedTrees<Link> trees, TreeCoins sampling, Verdict verdict) {
  __shared__ StagedTree tree;
  __shared__ Rejected rejected;
  __shared__ float tiles[kMostTiles];
  __shared__ bool is_done;
  const int64_t request = blockIdx.x;
  const bool is_first_warp = threadIdx.x < kWarpSize;
  stage(trees, request, tree);
  if (threadIdx.x == 0) rejected.count = 0;
  __syncthreads();
  if (!has_root(tree)) {
    if (threadIdx.x == 0) tree.num_kept = 0;
    __syncthreads();
    verdict.write(tree, request);
    return;
  }
  if (is_first_warp) accept_drafts(tree, sampling, verdict.width, rejected);
  __syncthreads();

  const int64_t row = tree.start + tree.path[tree.num_kept - 1];
  // Where the drafts that were not taken held all of the mass, the second round draws from them.
  for (int num_rejected = rejected.count;; num_rejected = 0) {
    const RowMass mass(sampling.probs + row * sampling.size, sampling.size, rejected,
                       num_rejected);
    mass.sum_tiles(tiles);
    __syncthreads();
    if (is_first_warp) {
      const float total = mass.total(tiles);
      const float place = sampling.final_coins[request] * total;
      const int token = mass.token_at(tiles, place);
      if (threadIdx.x == 0) {
        tree.next_token = token;
        is_done = total > 0.0f || num_rejected == 0;
      }
    }
    __syncthreads();
    if (is_done) break;
  }
  verdict.write(tree, request);
}

}  // namespace sgl_kernel
