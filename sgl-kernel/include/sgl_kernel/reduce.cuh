// Reductions over a warp; the order of float32 sums is fixed.
#pragma once

#include "sgl_kernel/platform.cuh"

namespace sgl_kernel {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;

// Unsigned integers in the order of the floats (-0 just below +0).
SGL_INLINE uint32_t ordered_bits(float value) {
  const uint32_t bits = float_bits(value);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

SGL_INLINE float from_ordered_bits(uint32_t bits) {
  return float_from_bits((bits & 0x80000000u) ? bits & 0x7FFFFFFFu : ~bits);
}

__device__ __forceinline__ float warp_max(float value) {
  return from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(value)));
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, static_cast<long long>(value), offset);
  }
  return value;
}

// Each lane's value and those of the lanes below it.
__device__ __forceinline__ float warp_running_sum(float value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const float below = __shfl_up_sync(kFullWarp, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// A token and what it is ranked by; the larger key wins, then the lower token.
struct Candidate {
  float key;
  int token;

  // Offers in any order; a token not yet seen loses to nobody's -infinity.
  SGL_INLINE void offer(float other_key, int other_token) {
    if (other_key > key || (other_key == key && other_token < token)) {
      key = other_key;
      token = other_token;
    }
  }
};

SGL_INLINE Candidate no_candidate() { return Candidate{minus_infinity(), kNoToken}; }

__device__ __forceinline__ Candidate warp_best(Candidate candidate) {
  const float key = warp_max(candidate.key);
  const unsigned token = candidate.key == key ? static_cast<unsigned>(candidate.token) : kNoToken;
  return Candidate{key, static_cast<int>(__reduce_min_sync(kFullWarp, token))};
}

}  // namespace sgl_kernel
