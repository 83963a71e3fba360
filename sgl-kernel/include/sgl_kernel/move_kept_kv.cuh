// Moves the KV of the rows that a tree keeps to the front of the request's pending rows.
#pragma once

#include "sgl_kernel/platform.cuh"

namespace sgl_kernel {

constexpr int kMoveThreads = 256;
constexpr int kMovesInFlight = 4;  // of one thread

// A tensor [num_slots, ...] of one layer of a pool. KVAddresses of python/sgl_kernel/ has a row of
// three int64 for each.
struct KVTensor {
  int64_t address;
  int64_t slot_bytes;
  int64_t num_slots;
};

// What R requests keep. Token p of page table row r is in slot page_table[r, p].
struct KeptRows {
  const int32_t* page_table;     // [num_table_rows, table_width] int32
  const int64_t* table_rows;     // [R] int64
  const int64_t* committed;      // [R] int64; position of the request's first pending row
  const int32_t* path;           // [R, path_width] int32; as confirm_drafts writes it
  const int64_t* num_confirmed;  // [R] int64; as confirm_drafts writes it
  int64_t num_table_rows;
  int64_t table_width;
  int path_width;
};

// The slots of one move; `from` is -1 where nothing is to be moved.
struct Move {
  int from;
  int to;
};

// The move of kept row k. A number outside of its range, in the page table too, moves nothing.
__device__ __forceinline__ Move move_of(const KeptRows& kept, int64_t request, int k,
                                        int64_t num_slots) {
  const Move none{-1, -1};
  const int source = kept.path[request * kept.path_width + k];
  const int64_t row = kept.table_rows[request];
  const int64_t first = kept.committed[request];
  if (source <= k || row < 0 || row >= kept.num_table_rows) return none;
  if (first < 0 || first >= kept.table_width - source) return none;
  const int32_t* slots = kept.page_table + row * kept.table_width + first;
  const Move move{slots[source], slots[k]};
  const bool is_inside =
      move.from >= 0 && move.from < num_slots && move.to >= 0 && move.to < num_slots;
  return is_inside ? move : none;
}

// Copies the slots of all moves, in their order. A thread copies the same columns of every slot and
// touches no others, so what a slot's column holds is changed by one thread alone.
template <typename Column>
__device__ __forceinline__ void copy_columns(const KVTensor& tensor, const Move* moves,
                                             int num_moves) {
  char* const data = reinterpret_cast<char*>(static_cast<uintptr_t>(tensor.address));
  const int64_t columns = tensor.slot_bytes / static_cast<int64_t>(sizeof(Column));
  for (int64_t column = threadIdx.x; column < columns; column += kMoveThreads) {
    char* const start = data + column * static_cast<int64_t>(sizeof(Column));
    for (int first = 0; first < num_moves; first += kMovesInFlight) {
      Column held[kMovesInFlight];
#pragma unroll
      for (int i = 0; i < kMovesInFlight; ++i) {
        if (first + i >= num_moves || moves[first + i].from < 0) continue;
        held[i] = *reinterpret_cast<const Column*>(start + moves[first + i].from *
                                                               tensor.slot_bytes);
      }
#pragma unroll
      for (int i = 0; i < kMovesInFlight; ++i) {
        if (first + i >= num_moves || moves[first + i].from < 0) continue;
        *reinterpret_cast<Column*>(start + moves[first + i].to * tensor.slot_bytes) = held[i];
      }
    }
  }
}

// Grid: one block of kMoveThreads per request and tensor.
//
// Every read gets what the slot held before the launch:
// - A thread reads and writes its own columns only, no two positions of a request share a slot, and
//   requests share no slot that they write. So only the moves of one thread, in one request, can
//   meet, and they meet only at equal positions (counted from `committed`).
// - A row stands behind the one that it follows, so path is strictly ascending from path[0] = 0:
//   path[k] >= k. Move k writes position k and reads position path[k]; moves run in ascending k.
// - If move j writes what move k reads, j = path[k] >= k. The write of j comes after the read of k:
//   for j > k because of the order (moves in flight at once are all read before any is written),
//   and for j = k nothing is moved.
static __global__ void __launch_bounds__(kMoveThreads)
    move_kept_kv_kernel(const KVTensor* tensors, int num_tensors, KeptRows kept) {
  __shared__ Move moves[kMoveThreads];
  const int64_t request = blockIdx.x / static_cast<unsigned>(num_tensors);
  const int64_t num_confirmed = kept.num_confirmed[request];
  const int last = num_confirmed < kept.path_width ? static_cast<int>(num_confirmed)
                                                   : kept.path_width - 1;
  // Since path is strictly ascending, a last row that stays means that all stay.
  if (num_confirmed < 1 || last < 1 || kept.path[request * kept.path_width + last] <= last) return;
  const KVTensor tensor = tensors[blockIdx.x % static_cast<unsigned>(num_tensors)];
  const int64_t bits = tensor.address | tensor.slot_bytes;
  for (int first = 1; first <= last; first += kMoveThreads) {
    const int k = first + static_cast<int>(threadIdx.x);
    if (k <= last) moves[threadIdx.x] = move_of(kept, request, k, tensor.num_slots);
    __syncthreads();
    const int num_moves = last - first + 1 < kMoveThreads ? last - first + 1 : kMoveThreads;
    if (bits % 16 == 0) {
      copy_columns<uint4>(tensor, moves, num_moves);
    } else if (bits % 4 == 0) {
      copy_columns<uint32_t>(tensor, moves, num_moves);
    } else {
      copy_columns<uint8_t>(tensor, moves, num_moves);
    }
    __syncthreads();
  }
}

}  // namespace sgl_kernel
