#include "sgl_kernel/launch.cuh"
#include "sgl_kernel/move_kept_kv.cuh"

// tensors: [num_tensors] KVTensor on the device.
extern "C" int sgl_move_kept_kv(int device, const sgl_kernel::KVTensor* tensors,
                                int64_t num_tensors, const int32_t* page_table,
                                int64_t num_table_rows, int64_t table_width,
                                const int64_t* table_rows, const int64_t* committed,
                                const int32_t* path, const int64_t* num_confirmed,
                                int64_t num_requests, int64_t path_width, void* stream_handle) {
  using namespace sgl_kernel;
  if (num_tensors < 1 || num_requests < 1 || num_requests > 0x7FFFFFFF / num_tensors) {
    return cudaErrorInvalidValue;
  }
  if (path_width < 1 || path_width > 0x7FFFFFFF / kMoveThreads) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const KeptRows kept{page_table,     table_rows,  committed,
                      path,           num_confirmed, num_table_rows,
                      table_width,    static_cast<int>(path_width)};
  const unsigned blocks = static_cast<unsigned>(num_requests * num_tensors);
  move_kept_kv_kernel<<<blocks, kMoveThreads, 0, static_cast<cudaStream_t>(stream_handle)>>>(
      tensors, static_cast<int>(num_tensors), kept);
  return cudaGetLastError();
}

extern "C" int sgl_preload_move_kept_kv(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  return preload(move_kept_kv_kernel);
}
