// The best tokens of each row and their log-probabilities, in one pass.
#pragma once

#include "sgl_kernel/argmax_logprob.cuh"

namespace sgl_kernel {

constexpr int kMostTop = 16;  // python/sgl_kernel/topk_logprob.py has the same

// A logit and its token; the larger key comes first, then the lower token.
struct RankedToken {
  uint32_t key;  // `ordered_bits` of the logit; 0, below that of minus infinity, for no token
  int token;
};

SGL_INLINE RankedToken no_ranked_token() { return RankedToken{0, kNoToken}; }

// The first of the warp's 32, in every lane.
__device__ __forceinline__ RankedToken warp_first(const RankedToken& own) {
  const uint32_t key = __reduce_max_sync(kFullWarp, own.key);
  const unsigned token = own.key == key ? static_cast<unsigned>(own.token) : kNoToken;
  return RankedToken{key, static_cast<int>(__reduce_min_sync(kFullWarp, token))};
}

// The tokens that a thread has of a chunk; those taken are gone.
template <typename Format>
struct RankedShare {
  using Share = ChunkShare<Format>;
  uint32_t keys[Share::kVectors][Share::kVector];
  const Share& share;

  __device__ RankedShare(const Share& chunk_share, int size) : share(chunk_share) {
#pragma unroll
    for (int v = 0; v < Share::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < Share::kVector; ++i) {
        const unsigned token = static_cast<unsigned>(share.first_tokens[v] + i);
        // The sum makes +0 of -0, which is its equal.
        keys[v][i] =
            token < static_cast<unsigned>(size) ? ordered_bits(share.values[v][i] + 0.0f) : 0;
      }
    }
  }

  __device__ RankedToken first() const {
    RankedToken found = no_ranked_token();
#pragma unroll
    for (int v = 0; v < Share::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < Share::kVector; ++i) {
        if (keys[v][i] > found.key) found = RankedToken{keys[v][i], share.first_tokens[v] + i};
      }
    }
    return found;
  }

  __device__ void take(int token) {
#pragma unroll
    for (int v = 0; v < Share::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < Share::kVector; ++i) {
        if (share.first_tokens[v] + i == token) keys[v][i] = 0;
      }
    }
  }
};

// Merges 32 lists, one of each lane, into one; all are [topk], best first. A lane without a list
// has none: nullptr.
__device__ __forceinline__ void warp_merge(const RankedToken* list, int topk,
                                           RankedToken* merged) {
  const int lane = threadIdx.x % kWarpSize;
  RankedToken head = list == nullptr ? no_ranked_token() : list[0];
  int taken = 0;
#pragma unroll 1
  for (int place = 0; place < topk; ++place) {
    const RankedToken first = warp_first(head);
    if (lane == 0) merged[place] = first;
    if (list == nullptr || head.token != first.token) continue;
    ++taken;
    head = taken < topk ? list[taken] : no_ranked_token();
  }
}

// Grid: rows * num_chunks blocks of kChunkThreads. partials: [rows, num_chunks], lists: [rows,
// num_chunks, topk]; each list is its chunk's, best first.
template <typename Format>
__global__ void __launch_bounds__(kChunkThreads)
    topk_chunks_kernel(LogitsView view, int chunks, int topk, ArgmaxPartial* partials,
                       RankedToken* lists) {
  allow_dependent_launch();
  const int64_t row = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  const RowReader<Format> reader(view, row);
  const ChunkShare<Format> share(reader, chunk);

  __shared__ RankedToken by_warp[kChunkWarps * kMostTop];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  RankedShare<Format> ranked(share, view.size);
  RankedToken own = ranked.first();
#pragma unroll 1
  for (int place = 0; place < topk; ++place) {
    const RankedToken first = warp_first(own);
    if (lane == 0) by_warp[warp * topk + place] = first;
    if (own.token != first.token || first.key == 0) continue;
    ranked.take(own.token);
    own = ranked.first();
  }
  const ArgmaxPartial partial = chunk_partial(share);  // a barrier: by_warp can be read
  if (warp != 0) return;
  if (lane == 0) partials[blockIdx.x] = partial;
  warp_merge(lane < kChunkWarps ? by_warp + lane * topk : nullptr, topk,
             lists + static_cast<int64_t>(blockIdx.x) * topk);
}

// One warp per row. token_ids: [rows, topk] int64; logprobs: [rows, topk] float32.
static __global__ void __launch_bounds__(kWarpSize)
    topk_combine_kernel(const ArgmaxPartial* partials, const RankedToken* lists, int chunks,
                        int topk, int64_t* token_ids, float* logprobs) {
  wait_for_previous_kernel();
  __shared__ RankedToken staged[kWarpSize * kMostTop];
  __shared__ RankedToken merged[2][kMostTop];
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x;
  const ArgmaxPartial combined = row_partial(partials + row * chunks, chunks);
  const RankedToken* own_lists = lists + row * chunks * topk;
  int turn = 0;
  // The last lane's list is what was merged before, but for the first time.
  for (int start = 0; start < chunks; start += start == 0 ? kWarpSize : kWarpSize - 1) {
    const int room = start == 0 ? kWarpSize : kWarpSize - 1;
    const int count = chunks - start < room ? chunks - start : room;
    for (int i = lane; i < count * topk; i += kWarpSize) staged[i] = own_lists[start * topk + i];
    __syncwarp();
    const RankedToken* list = lane < count ? staged + lane * topk : nullptr;
    if (start > 0 && lane == kWarpSize - 1) list = merged[1 - turn];
    warp_merge(list, topk, merged[turn]);
    __syncwarp();
    turn = 1 - turn;
  }
  if (lane >= topk) return;
  const RankedToken found = merged[1 - turn][lane];
  token_ids[row * topk + lane] = found.token;
  logprobs[row * topk + lane] =
      (from_ordered_bits(found.key) - combined.best) - logf(combined.sum);
}

}  // namespace sgl_kernel
