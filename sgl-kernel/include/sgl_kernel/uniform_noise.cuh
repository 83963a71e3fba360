// The sampler's noise as a tensor.
#pragma once

#include "sgl_kernel/noise.cuh"

namespace sgl_kernel {

// Grid: x over blocks of tokens, y over rows. noise: [rows, size] float32.
static __global__ void uniform_noise_kernel(const int64_t* seeds, const int64_t* positions,
                                            int size, float* noise) {
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= size) return;
  const uint64_t stream = noise_stream(seeds[blockIdx.y], positions[blockIdx.y]);
  noise[static_cast<int64_t>(blockIdx.y) * size + token] = uniform_noise(stream, token);
}

}  // namespace sgl_kernel
