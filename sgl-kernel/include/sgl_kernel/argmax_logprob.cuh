// The best token of each row and its log-probability, in one pass.
#pragma once

#include "sgl_kernel/chunk.cuh"

namespace sgl_kernel {

struct alignas(16) ArgmaxPartial {
  float best;
  float sum;  // of exp(logit - best)
  int token;
  int unused;
};

SGL_INLINE ArgmaxPartial empty_argmax() {
  return ArgmaxPartial{minus_infinity(), 0.0f, kNoToken, 0};
}

// The warp's 32 parts as one, in every lane.
__device__ __forceinline__ ArgmaxPartial warp_combine(const ArgmaxPartial& part) {
  const Candidate best = warp_best(Candidate{part.best, part.token});
  const float sum = warp_sum(part.sum * relative_weight(part.best, best.key, kLog2E));
  return ArgmaxPartial{best.key, sum, best.token, 0};
}

// Of the chunk that the block's threads share, in every lane of warp 0.
template <typename Format>
__device__ __forceinline__ ArgmaxPartial chunk_partial(const ChunkShare<Format>& share) {
  const Candidate best = warp_best(share.best());
  const float reference = finite_or_zero(best.key);
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < ChunkShare<Format>::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < ChunkShare<Format>::kVector; ++i) {
      sum += fast_exp2((share.values[v][i] - reference) * kLog2E);
    }
  }
  sum = warp_sum(sum);

  __shared__ ArgmaxPartial by_warp[kChunkWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) by_warp[warp] = ArgmaxPartial{best.key, sum, best.token, 0};
  __syncthreads();
  if (warp != 0) return empty_argmax();
  return warp_combine(lane < kChunkWarps ? by_warp[lane] : empty_argmax());
}

// Of a whole row, by one warp, in every lane. partials: [chunks].
__device__ __forceinline__ ArgmaxPartial row_partial(const ArgmaxPartial* partials, int chunks) {
  const int lane = threadIdx.x % kWarpSize;
  ArgmaxPartial combined = empty_argmax();
  for (int start = 0; start < chunks; start += kWarpSize) {
    const int chunk = start + lane;
    const ArgmaxPartial part = warp_combine(chunk < chunks ? partials[chunk] : empty_argmax());
    const float top = part.best > combined.best ? part.best : combined.best;
    combined.sum = combined.sum * relative_weight(combined.best, top, kLog2E) +
                   part.sum * relative_weight(part.best, top, kLog2E);
    // Earlier chunks hold lower tokens.
    if (part.best > combined.best) combined.token = part.token;
    combined.best = top;
  }
  return combined;
}

// Grid: rows * num_chunks blocks of kChunkThreads. partials: [rows, num_chunks].
template <typename Format>
__global__ void __launch_bounds__(kChunkThreads)
    argmax_chunks_kernel(LogitsView view, int chunks, ArgmaxPartial* partials) {
  allow_dependent_launch();
  const int64_t row = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  const RowReader<Format> reader(view, row);
  const ChunkShare<Format> share(reader, chunk);
  const ArgmaxPartial partial = chunk_partial(share);
  if (threadIdx.x == 0) partials[blockIdx.x] = partial;
}

// One warp per row. token_ids: [rows] int64; best, logprobs: [rows] float32.
static __global__ void __launch_bounds__(kWarpSize)
    argmax_combine_kernel(const ArgmaxPartial* partials, int chunks, int size, int64_t* token_ids,
                          float* best, float* logprobs) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const ArgmaxPartial combined = row_partial(partials + row * chunks, chunks);
  if (threadIdx.x != 0) return;
  token_ids[row] = combined.token < size ? combined.token : 0;
  best[row] = combined.best;
  logprobs[row] = -logf(combined.sum);
}

}  // namespace sgl_kernel
