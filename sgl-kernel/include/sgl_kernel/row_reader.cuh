// Reads a row of logits in aligned vectors of 16 bytes, whatever the alignment of the row.
#pragma once

#include "sgl_kernel/platform.cuh"

namespace sgl_kernel {

struct Float32 {
  using Storage = uint32_t;
  static constexpr uint32_t kMinusInfinity = 0xFF800000u;
  static SGL_INLINE float to_float(uint32_t bits) { return float_from_bits(bits); }
};

struct Bfloat16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusInfinity = 0xFF80u;
  static SGL_INLINE float to_float(uint32_t bits) { return float_from_bits(bits << 16); }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusInfinity = 0xFC00u;
  static SGL_INLINE float to_float(uint32_t bits) { return half_bits_to_float(bits); }
};

struct Packed {
  uint32_t words[4];
};

// What every kernel needs to know of the logits [rows, size]; `row_stride` counts elements.
struct LogitsView {
  const void* data;
  int64_t row_stride;
  int size;
  const int64_t* banned;  // [num_banned] int64; ids outside the row ban nothing
  int num_banned;
};

template <typename Format>
class RowReader {
 public:
  using Storage = typename Format::Storage;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Storage));

  __device__ RowReader(const LogitsView& view, int64_t row) : view_(view) {
    row_ = static_cast<const Storage*>(view.data) + row * view.row_stride;
    const uintptr_t address = reinterpret_cast<uintptr_t>(row_);
    lead_ = static_cast<int>((address & 15u) / sizeof(Storage));
  }

  // Vector 0 begins at the last aligned address up to the row's first logit.
  __device__ int num_vectors() const { return (lead_ + view_.size + kVector - 1) / kVector; }

  // The token of the vector's first element, below 0 where that lies before the row.
  __device__ int first_token(int vector) const { return vector * kVector - lead_; }

  // Elements outside the row hold minus infinity; nothing outside it is read.
  __device__ Packed load(int vector) const {
    const int first = first_token(vector);
    if (first >= 0 && first + kVector <= view_.size) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(row_ + first);
      return Packed{{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
    return load_edge(first);
  }

  // The vector's logits as float32: minus infinity for banned ids and for NaN.
  __device__ void unpack(const Packed& packed, int vector, float (&values)[kVector]) const {
    constexpr int kPerWord = kVector / 4;
    const uint32_t banned = banned_mask(vector);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t word = packed.words[i / kPerWord];
      uint32_t bits = word;
      if (kPerWord == 2) bits = (i % 2) ? word >> 16 : word & 0xFFFFu;
      const float value = Format::to_float(bits);
      const bool is_usable = value == value && !(banned >> i & 1u);
      values[i] = is_usable ? value : minus_infinity();
    }
  }

  // The logit of a token that is known to be neither banned nor NaN.
  __device__ float logit(int token) const { return Format::to_float(row_[token]); }

 private:
  // Bit i for a ban of the vector's element i. A store to values[offset] would move the array from
  // registers to memory.
  __device__ uint32_t banned_mask(int vector) const {
    uint32_t mask = 0;
#pragma unroll 1
    for (int b = 0; b < view_.num_banned; ++b) {
      const int64_t offset = view_.banned[b] - first_token(vector);
      if (offset >= 0 && offset < kVector) mask |= 1u << offset;
    }
    return mask;
  }

  __device__ Packed load_edge(int first) const {
    constexpr int kPerWord = kVector / 4;
    Packed packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed.words[w] = 0;
#pragma unroll
      for (int part = 0; part < kPerWord; ++part) {
        const int token = first + w * kPerWord + part;
        const bool inside = token >= 0 && token < view_.size;
        const uint32_t bits = inside ? row_[token] : Format::kMinusInfinity;
        packed.words[w] |= bits << (16 * part);
      }
    }
    return packed;
  }

  const LogitsView view_;
  const Storage* row_;
  int lead_;
};

}  // namespace sgl_kernel
