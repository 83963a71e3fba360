// The second half of sample_tokens: one block per row checks the winner of the race against the
// filters and races again among fewer tokens until the winner is inside them.
#pragma once

#include "sgl_kernel/sample_tokens.cuh"

namespace sgl_kernel {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kSelectVectors = 2;  // loads in flight per thread

// Sums over the tokens strictly before the pivot, and the next race's winner among them.
struct Pass {
  int rank;
  float mass;
  float total;  // of the whole row; only the first pass counts it
  Candidate leader;
};

__device__ __forceinline__ Pass warp_combine(const Pass& pass) {
  return Pass{static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(pass.rank))),
              warp_sum(pass.mass), warp_sum(pass.total), warp_best(pass.leader)};
}

// Every thread gets the block's result; `by_warp` holds kSelectWarps entries.
__device__ __forceinline__ Pass block_combine(const Pass& pass, Pass* by_warp) {
  const Pass part = warp_combine(pass);
  if (threadIdx.x % kWarpSize == 0) by_warp[threadIdx.x / kWarpSize] = part;
  __syncthreads();
  const Pass combined = warp_combine(by_warp[threadIdx.x % kWarpSize]);
  __syncthreads();
  return combined;
}
static_assert(kSelectWarps == kWarpSize, "one lane per warp in the second step");

// One reading of the row. `pivot` holds the pivot's logit and token; it is not the best token.
template <typename Format>
__device__ __forceinline__ Pass read_row(const RowReader<Format>& reader, const RowParameters& row,
                                         const Candidate& pivot, bool with_total, Race& race) {
  constexpr int kVector = RowReader<Format>::kVector;
  Pass pass{0, 0.0f, 0.0f, no_candidate()};
  // The best token is always kept.
  race.offer(row.best.key, row.best.token);
  race.tighten();
  const int vectors = reader.num_vectors();
  for (int start = 0; start < vectors; start += kSelectThreads * kSelectVectors) {
    const int first = start + static_cast<int>(threadIdx.x);
    Packed packed[kSelectVectors];
#pragma unroll
    for (int v = 0; v < kSelectVectors; ++v) packed[v] = reader.load(first + v * kSelectThreads);
#pragma unroll
    for (int v = 0; v < kSelectVectors; ++v) {
      const int vector = first + v * kSelectThreads;
      const int first_token = reader.first_token(vector);
      uint32_t contenders = 0;
      float values[kVector];
      reader.unpack(packed[v], vector, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int token = first_token + i;
        const bool is_before =
            values[i] > pivot.key || (values[i] == pivot.key && token < pivot.token);
        if (!is_before && !with_total) continue;
        const float weight = fast_exp2((values[i] - row.best.key) * row.scale);
        if (with_total) pass.total += weight;
        if (!is_before) continue;
        pass.rank += 1;
        pass.mass += weight;
        if (row.may_keep(weight) && race.may_win(weight, token)) contenders |= 1u << i;
      }
      race.offer_all(reader, contenders, first_token);
    }
    race.tighten();
  }
  pass.leader = race.leader;
  return pass;
}

// The row's partials as one; every warp reads all of them.
__device__ __forceinline__ RacePartial combine_partials(const RacePartial* partials, int chunks,
                                                        float exponent_scale) {
  const int lane = threadIdx.x % kWarpSize;
  Candidate best = no_candidate();
  Candidate leader = no_candidate();
  for (int chunk = lane; chunk < chunks; chunk += kWarpSize) {
    const RacePartial part = partials[chunk];
    best.offer(part.best, part.best_token);
    leader.offer(part.score, part.token);
  }
  best = warp_best(best);
  leader = warp_best(leader);
  float sum = 0.0f;
  for (int chunk = lane; chunk < chunks; chunk += kWarpSize) {
    sum += partials[chunk].sum * relative_weight(partials[chunk].best, best.key, exponent_scale);
  }
  return RacePartial{best.key, best.token, leader.key, leader.token, warp_sum(sum)};
}

// The kept winner, starting from the winner among all tokens.
template <typename Format>
__device__ __forceinline__ int filtered_winner(const RowReader<Format>& reader,
                                               const RowParameters& row, uint64_t stream,
                                               int winner, Pass* by_warp) {
  float total = 0.0f;
  bool is_first = true;
  while (winner != row.best.token) {
    const Candidate pivot{reader.logit(winner), winner};
    Race race(stream, row.scale, row.best.key);
    const Pass part = read_row(reader, row, pivot, is_first && row.needs_total(), race);
    const Pass pass = block_combine(part, by_warp);
    if (is_first) total = pass.total;
    is_first = false;
    const float weight = fast_exp2((pivot.key - row.best.key) * row.scale);
    if (row.keeps(weight, pass.rank, pass.mass, total)) return winner;
    winner = pass.leader.token;
  }
  return winner;
}

// One block of kSelectThreads per row. token_ids: [rows] int64; logprobs: [rows] float32.
template <typename Format>
__global__ void __launch_bounds__(kSelectThreads)
    select_tokens_kernel(LogitsView view, SamplingView sampling, int chunks,
                         const RacePartial* partials, int64_t* token_ids, float* logprobs) {
  __shared__ Pass by_warp[kSelectWarps];
  wait_for_previous_kernel();
  const int64_t row_index = blockIdx.x;
  const float scale = race_scale(sampling.temperature[row_index]);
  const RacePartial start =
      combine_partials(partials + row_index * chunks, chunks, weight_scale(scale));
  const RowParameters row(Candidate{start.best, start.best_token}, scale, sampling, row_index);
  const RowReader<Format> reader(view, row_index);
  int token = start.best_token;
  if (!row.keeps_best_only() && start.token < view.size) {
    token = start.token;
    if (!row.keeps_all(view.size)) {
      const uint64_t stream =
          noise_stream(sampling.seeds[row_index], sampling.positions[row_index]);
      token = filtered_winner(reader, row, stream, token, by_warp);
    }
  }
  if (threadIdx.x != 0) return;
  token = token < view.size ? token : 0;
  token_ids[row_index] = token;
  const float distance = (reader.logit(token) - row.best.key) * weight_scale(scale);
  logprobs[row_index] = distance / kLog2E - logf(start.sum);
}

}  // namespace sgl_kernel
