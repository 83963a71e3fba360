// Noise of (seed, position, token): SplitMix64's finalizer (Steele, Lea, Flood, "Fast splittable
// pseudorandom number generators", OOPSLA 2014) as a counter-based generator.
#pragma once

#include "sgl_kernel/platform.cuh"

namespace sgl_kernel {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kMixFirst = 0xBF58476D1CE4E5B9ull;
constexpr uint64_t kMixSecond = 0x94D049BB133111EBull;
// The uniform numbers are odd multiples of 2^-24 between 2^-24 and 1 - 2^-24.
constexpr float kSmallestUniform = 5.9604644775390625e-08f;
constexpr float kLargestUniform = 0.999999940395355224609375f;

SGL_INLINE uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * kMixFirst;
  value = (value ^ (value >> 27)) * kMixSecond;
  return value ^ (value >> 31);
}

SGL_INLINE uint64_t noise_stream(int64_t seed, int64_t position) {
  return mix(mix(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position) * kGolden);
}

// (bits + 1/2) * 2^-23 with the 23 bits from 41 up of mix(stream + (token + 1) * golden), exact.
SGL_INLINE float uniform_noise(uint64_t stream, int token) {
  uint64_t value = stream + static_cast<uint64_t>(static_cast<uint32_t>(token) + 1u) * kGolden;
  value = (value ^ (value >> 30)) * kMixFirst;
  value = (value ^ (value >> 27)) * kMixSecond;
  // The last xor-shift of `mix` changes only bits 0 to 32.
  const uint32_t bits = static_cast<uint32_t>(value >> 41);
  return float_from_bits(0x3F800000u | bits) - kLargestUniform;
}

}  // namespace sgl_kernel
