#include "sgl_kernel/chunk.cuh"
#include "sgl_kernel/launch.cuh"

// Partial results per row, the unit of the workspaces.
extern "C" int64_t sgl_num_chunks(int64_t size) {
  return sgl_kernel::num_chunks(static_cast<int>(size));
}

extern "C" const char* sgl_error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
