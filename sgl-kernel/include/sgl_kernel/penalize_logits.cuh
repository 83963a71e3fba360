// Repetition, frequency and presence penalties over the tokens that a request has generated.
#pragma once

#include "sgl_kernel/chunk.cuh"

namespace sgl_kernel {

struct PenaltyView {
  const int32_t* counts;        // [num_requests, size] int32; how often each token was generated
  const float* penalties;       // [num_requests, 3] float32; repetition, frequency, presence
  const int64_t* requests;      // [rows] int64; whose penalties a row of logits gets
  const int64_t* extra_tokens;  // [rows, num_extra] int64; count as generated for that row alone
  const int32_t* extra_counts;  // [rows, num_extra] int32; how often
  int num_extra;
};

// Rounds as torch does, which never fuses a product and a sum.
SGL_INLINE float penalized(float logit, int count, float repetition, float frequency,
                           float presence) {
  if (count <= 0) return logit;
  const float scaled = logit > 0.0f ? logit / repetition : logit * repetition;
#ifdef __CUDA_ARCH__
  return __fsub_rn(scaled, __fadd_rn(__fmul_rn(static_cast<float>(count), frequency), presence));
#else
  return scaled - (static_cast<float>(count) * frequency + presence);
#endif
}

// Grid: rows * num_chunks blocks of kChunkThreads. penalized_logits: [rows, size] float32. Threads
// of a warp read neighbouring tokens, so nothing needs to be aligned.
template <typename Format>
__global__ void __launch_bounds__(kChunkThreads)
    penalize_logits_kernel(LogitsView view, PenaltyView penalty, int chunks,
                           float* penalized_logits) {
  constexpr int kTokens = kChunkTokens / kChunkThreads;
  using Storage = typename Format::Storage;
  const int64_t row = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  const int64_t request = penalty.requests[row];
  const Storage* logits = static_cast<const Storage*>(view.data) + row * view.row_stride;
  const int32_t* counts = penalty.counts + request * view.size;
  float* results = penalized_logits + row * view.size;
  const float repetition = penalty.penalties[request * 3];
  const float frequency = penalty.penalties[request * 3 + 1];
  const float presence = penalty.penalties[request * 3 + 2];

  const int start = chunk * kChunkTokens;
  const int first = start + static_cast<int>(threadIdx.x);
  uint32_t bits[kTokens];
  int count[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = first + i * kChunkThreads;
    bits[i] = token < view.size ? logits[token] : 0u;
    count[i] = token < view.size ? counts[token] : 0;
  }
  for (int e = 0; e < penalty.num_extra; ++e) {
    const int64_t offset = penalty.extra_tokens[row * penalty.num_extra + e] - start;
    if (offset < 0 || offset >= kChunkTokens) continue;
    const int extra = penalty.extra_counts[row * penalty.num_extra + e];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (offset == static_cast<int>(threadIdx.x) + i * kChunkThreads) count[i] += extra;
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = first + i * kChunkThreads;
    if (token >= view.size) continue;
    results[token] =
        penalized(Format::to_float(bits[i]), count[i], repetition, frequency, presence);
  }
}

}  // namespace sgl_kernel
