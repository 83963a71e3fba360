#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/uniform_noise.cuh"

// noise: [rows, size] float32, contiguous.
extern "C" int sgl_uniform_noise(int device, const int64_t* seeds, const int64_t* positions,
                                 int64_t rows, int64_t size, float* noise, void* stream_handle) {
  using namespace sgl_kernel;
  if (rows < 1 || rows > 65535 || size < 1 || size > (1 << 30)) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  constexpr unsigned kThreads = 256;
  const dim3 grid((static_cast<unsigned>(size) + kThreads - 1) / kThreads,
                  static_cast<unsigned>(rows));
  uniform_noise_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream_handle)>>>(
      seeds, positions, static_cast<int>(size), noise);
  return cudaGetLastError();
}

extern "C" int sgl_preload_uniform_noise(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  return preload(uniform_noise_kernel);
}
