// A row cut into chunks, one block each. The cut depends on the vocabulary alone, never on the
// number of rows, so a row's result does not depend on the batch.
#pragma once

#include "sgl_kernel/reduce.cuh"
#include "sgl_kernel/row_reader.cuh"

namespace sgl_kernel {

constexpr int kChunkTokens = 4096;
constexpr int kChunkThreads = 256;
constexpr int kChunkWarps = kChunkThreads / kWarpSize;
constexpr int kMostLead = 7;  // elements of a vector that may lie before the row

SGL_INLINE int num_chunks(int size) {
  return (size + kMostLead + kChunkTokens - 1) / kChunkTokens;
}

// Whether rows * num_chunks(size) blocks and the 32-bit token ids of the kernels suffice.
SGL_INLINE bool is_supported_shape(int64_t rows, int64_t size) {
  if (rows < 1 || size < 1 || size > (1 << 30)) return false;
  return rows <= 0x7FFFFFFF / num_chunks(static_cast<int>(size));
}

// A thread's share of a chunk: `kVectors` vectors, neighbouring threads on neighbouring vectors.
template <typename Format>
struct ChunkShare {
  static constexpr int kVector = RowReader<Format>::kVector;
  static constexpr int kVectors = kChunkTokens / (kChunkThreads * kVector);
  static_assert(kVectors * kChunkThreads * kVector == kChunkTokens, "chunks hold whole vectors");

  float values[kVectors][kVector];
  int first_tokens[kVectors];

  __device__ ChunkShare(const RowReader<Format>& reader, int chunk) {
    const int first = chunk * (kChunkTokens / kVector) + static_cast<int>(threadIdx.x);
    Packed packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) packed[v] = reader.load(first + v * kChunkThreads);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = first + v * kChunkThreads;
      reader.unpack(packed[v], vector, values[v]);
      first_tokens[v] = reader.first_token(vector);
    }
  }

  // The thread's greatest logit and the lowest token that has it.
  __device__ Candidate best() const {
    Candidate best = no_candidate();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (values[v][i] > best.key) best = Candidate{values[v][i], first_tokens[v] + i};
      }
    }
    return best;
  }
};

}  // namespace sgl_kernel
