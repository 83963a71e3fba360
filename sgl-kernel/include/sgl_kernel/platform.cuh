// Bits, fast math and the dependent-launch calls. No torch; without nvcc a test harness supplies
// the CUDA words (tests/emulation/cuda_emulation.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#define SGL_INLINE __host__ __device__ __forceinline__

namespace sgl_kernel {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kNoToken = 0x7FFFFFFF;

SGL_INLINE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

SGL_INLINE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

SGL_INLINE float minus_infinity() { return float_from_bits(0xFF800000u); }

SGL_INLINE float half_bits_to_float(uint32_t bits) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
#else
  uint16_t narrow = static_cast<uint16_t>(bits);
  _Float16 value;
  memcpy(&value, &narrow, sizeof(value));
  return static_cast<float>(value);
#endif
}

// Exact at 0, within 2 ulp elsewhere, results below the normal range are 0.
SGL_INLINE float fast_exp2(float exponent) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
#else
  return exp2f(exponent);
#endif
}

// exp(scale * (value - reference)) in base 2; 1 for equal values, infinities included.
SGL_INLINE float relative_weight(float value, float reference, float scale) {
  return value == reference ? 1.0f : fast_exp2((value - reference) * scale);
}

SGL_INLINE bool is_finite(float value) { return (float_bits(value) & 0x7F800000u) != 0x7F800000u; }

// A finite stand-in, so that no weight of a row without finite logits becomes NaN.
SGL_INLINE float finite_or_zero(float value) { return is_finite(value) ? value : 0.0f; }

// Index of the lowest set bit; bits is not 0.
SGL_INLINE int lowest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

SGL_INLINE int count_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// From here on the kernel launched after this one may be placed on the device.
__device__ __forceinline__ void allow_dependent_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Waits until everything that the kernel before this one wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace sgl_kernel
