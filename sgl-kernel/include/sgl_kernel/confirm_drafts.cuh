// Which drafts of each request the model confirms, along one path through its chain or tree.
#pragma once

#include "sgl_kernel/reduce.cuh"

namespace sgl_kernel {

constexpr int kMostPendingRows = 1024;  // of one request

// R requests of a step. A request's pending rows are its first packed rows.
struct DraftRows {
  const int64_t* tokens;         // [num_tokens] int64; what each packed row feeds
  const int64_t* targets;        // [num_targets] int64; the model's own token after each row read
  const int32_t* parents;        // [num_tokens] int32, or null: every row follows the one before it
  const int64_t* starts;         // [R + 1] int64; each request's first packed row
  const int64_t* target_starts;  // [R] int64, or null: `starts`
  const int64_t* num_rows;       // [R] int64; pending rows
  int64_t num_tokens;
  int64_t num_targets;
  int max_rows;  // 1 to kMostPendingRows; rows of a request from there on are ignored
};

struct ConfirmedDrafts {
  int64_t* num_confirmed;  // [R] int64
  int32_t* path;           // [R, max_rows] int32
  int64_t* next_token;     // [R] int64
};

// Pending rows of a request. No number makes them reach outside of the request, of the tokens, of
// the targets or of a row of `path`.
__device__ __forceinline__ int num_pending_rows(const DraftRows& rows, int64_t request,
                                                int64_t start, int64_t target_start) {
  const int64_t next_start = rows.starts[request + 1];
  const int64_t end = next_start < rows.num_tokens ? next_start : rows.num_tokens;
  if (start < 0 || start >= end) return 0;
  if (target_start < 0 || target_start >= rows.num_targets) return 0;
  int64_t count = rows.num_rows[request];
  if (count > rows.max_rows) count = rows.max_rows;
  if (count > end - start) count = end - start;
  if (count > rows.num_targets - target_start) count = rows.num_targets - target_start;
  return count > 0 ? static_cast<int>(count) : 0;
}

// One warp per request. First all rows look at once whether the row that they follow drew their
// token; then the warp walks from row 0 along those that did.
static __global__ void __launch_bounds__(kWarpSize)
    confirm_drafts_kernel(DraftRows rows, ConfirmedDrafts confirmed) {
  __shared__ int followers[kMostPendingRows];  // the lowest row that a row confirms
  const int64_t request = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t start = rows.starts[request];
  const int64_t target_start = rows.target_starts ? rows.target_starts[request] : start;
  const int count = num_pending_rows(rows, request, start, target_start);

  for (int row = lane; row < count; row += kWarpSize) followers[row] = kMostPendingRows;
  __syncwarp();
  for (int row = 1 + lane; row < count; row += kWarpSize) {
    const int parent = rows.parents ? rows.parents[start + row] : row - 1;
    if (parent < 0 || parent >= row) continue;
    if (rows.tokens[start + row] != rows.targets[target_start + parent]) continue;
    atomicMin(&followers[parent], row);
  }
  __syncwarp();

  // A row stands behind the one that it follows, so the walk ends, within `count` rows.
  int32_t* path = confirmed.path + request * rows.max_rows;
  int last = 0;
  int num_kept = 0;
  for (int row = count > 0 ? 0 : kMostPendingRows; row < kMostPendingRows; row = followers[row]) {
    if (lane == 0) path[num_kept] = row;
    last = row;
    ++num_kept;
  }
  for (int k = num_kept + lane; k < rows.max_rows; k += kWarpSize) path[k] = -1;
  if (lane != 0) return;
  confirmed.num_confirmed[request] = num_kept > 0 ? num_kept - 1 : 0;
  confirmed.next_token[request] = num_kept > 0 ? rows.targets[target_start + last] : 0;
}

}  // namespace sgl_kernel
