#include "sgl_kernel/confirm_drafts.cuh"
#include "sgl_kernel/launch.cuh"

// parents and target_starts may be null.
extern "C" int sgl_confirm_drafts(int device, const int64_t* tokens, const int64_t* targets,
                                  const int32_t* parents, const int64_t* starts,
                                  const int64_t* target_starts, const int64_t* num_rows,
                                  int64_t num_tokens, int64_t num_targets, int64_t num_requests,
                                  int64_t max_rows, int64_t* num_confirmed, int32_t* path,
                                  int64_t* next_token, void* stream_handle) {
  using namespace sgl_kernel;
  if (num_requests < 1 || num_requests > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (max_rows < 1 || max_rows > kMostPendingRows) return cudaErrorInvalidValue;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const DraftRows rows{tokens,   targets,    parents,     starts,
                       target_starts, num_rows, num_tokens, num_targets,
                       static_cast<int>(max_rows)};
  confirm_drafts_kernel<<<static_cast<unsigned>(num_requests), kWarpSize, 0,
                          static_cast<cudaStream_t>(stream_handle)>>>(
      rows, ConfirmedDrafts{num_confirmed, path, next_token});
  return cudaGetLastError();
}

extern "C" int sgl_preload_confirm_drafts(int device) {
  using namespace sgl_kernel;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  return preload(confirm_drafts_kernel);
}
