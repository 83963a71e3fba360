// Draws one token per row among those that the filters keep, without sorting, and says how probable
// it was among all tokens.
//
// Each filter keeps a prefix of one order (sampling_filters.cuh). So: let all tokens race, count
// the rank and the mass of what comes before the winner, and where the winner is outside the
// filters, race again among the tokens strictly before it. The last winner is the winner of a race
// among the kept tokens alone, because all of those took part in every race.
#pragma once

#include "sgl_kernel/chunk.cuh"
#include "sgl_kernel/noise.cuh"
#include "sgl_kernel/sampling_filters.cuh"

namespace sgl_kernel {

struct alignas(16) RacePartial {
  float best;
  int best_token;
  float score;
  int token;
  float sum;  // of exp2((logit - best) * weight_scale)
};

// log2(e) / temperature, kept finite; 0 stands for a greedy row.
SGL_INLINE float race_scale(float temperature) {
  if (!(temperature > 0.0f)) return 0.0f;
  const float scale = kLog2E / temperature;
  return scale < 1e30f ? scale : 1e30f;
}

// What a logit is multiplied by for its weight as a power of 2: greedy rows have temperature 1.
SGL_INLINE float weight_scale(float scale) { return scale > 0.0f ? scale : kLog2E; }

// The race of exponential clocks: the greatest p / E, as log2, wins with probability p. The score
// is a function of the logit and the noise alone, so the winner does not depend on who races where.
struct Race {
  uint64_t stream;
  float scale;
  float reference;     // a finite logit that weights are relative to; equal in the whole warp
  float bound = 0.0f;  // no token with weight / E below it can win
  Candidate leader = no_candidate();

  SGL_INLINE Race(uint64_t stream_, float scale_, float reference_)
      : stream(stream_), scale(scale_), reference(reference_) {}

  // False where the token surely loses; weight: exp2((logit - reference) * scale).
  SGL_INLINE bool may_win(float weight, int token) const {
    if (!(weight > bound * kSmallestUniform)) return false;
    // -log(u) >= 1 - u: most tokens lose without a logarithm.
    return weight > bound * (1.0f - uniform_noise(stream, token));
  }

  SGL_INLINE void offer(float logit, int token) {
    leader.offer(logit * scale - log2f(-logf(uniform_noise(stream, token))), token);
  }

  // The second step for the tokens that may win: bit i of `contenders` is token first + i. Few
  // are left, so their logits are read again and the code of the logarithms stays outside the
  // unrolled loops.
  template <typename Reader>
  __device__ __forceinline__ void offer_all(const Reader& reader, uint32_t contenders, int first) {
#pragma unroll 1
    while (contenders != 0) {
      const int token = first + lowest_bit(contenders);
      offer(reader.logit(token), token);
      contenders &= contenders - 1;
    }
  }

  // Shares the leader's score with the warp; the slack covers every rounding on the way.
  __device__ __forceinline__ void tighten() {
    const float score = warp_max(leader.key);
    const float base = reference * scale;
    const float slack = (fabsf(score) + fabsf(base)) * 4.8e-7f + 2.5e-4f;
    const float shared = fast_exp2(score - base - slack);
    if (shared > bound) bound = shared;
  }
};

// Grid: rows * num_chunks blocks of kChunkThreads. partials: [rows, num_chunks].
template <typename Format>
__global__ void __launch_bounds__(kChunkThreads)
    race_chunks_kernel(LogitsView view, SamplingView sampling, int chunks, RacePartial* partials) {
  allow_dependent_launch();
  const int64_t row = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  const RowReader<Format> reader(view, row);
  const ChunkShare<Format> share(reader, chunk);
  const float scale = race_scale(sampling.temperature[row]);

  const Candidate best = warp_best(share.best());
  Race race(noise_stream(sampling.seeds[row], sampling.positions[row]), scale,
            finite_or_zero(best.key));
  const bool races = scale > 0.0f && is_finite(best.key);
  if (races) {
    const Candidate own = share.best();
    if (own.token != kNoToken) race.offer(own.key, own.token);
    race.tighten();
  }
  const float exponent_scale = weight_scale(scale);
  float sum = 0.0f;
  uint32_t contenders[ChunkShare<Format>::kVectors];
#pragma unroll
  for (int v = 0; v < ChunkShare<Format>::kVectors; ++v) {
    contenders[v] = 0;
#pragma unroll
    for (int i = 0; i < ChunkShare<Format>::kVector; ++i) {
      const float weight = fast_exp2((share.values[v][i] - race.reference) * exponent_scale);
      sum += weight;
      if (races && race.may_win(weight, share.first_tokens[v] + i)) contenders[v] |= 1u << i;
    }
  }
#pragma unroll
  for (int v = 0; v < ChunkShare<Format>::kVectors; ++v) {
    race.offer_all(reader, contenders[v], share.first_tokens[v]);
  }
  sum = warp_sum(sum);
  const Candidate leader = warp_best(race.leader);

  __shared__ RacePartial by_warp[kChunkWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) by_warp[warp] = RacePartial{best.key, best.token, leader.key, leader.token, sum};
  __syncthreads();
  if (warp != 0) return;
  RacePartial part{minus_infinity(), kNoToken, minus_infinity(), kNoToken, 0.0f};
  if (lane < kChunkWarps) part = by_warp[lane];
  const Candidate block_best = warp_best(Candidate{part.best, part.best_token});
  const Candidate block_leader = warp_best(Candidate{part.score, part.token});
  const float block_sum =
      warp_sum(part.sum * relative_weight(part.best, block_best.key, exponent_scale));
  if (lane != 0) return;
  partials[blockIdx.x] = RacePartial{block_best.key, block_best.token, block_leader.key,
                                     block_leader.token, block_sum};
}

}  // namespace sgl_kernel
