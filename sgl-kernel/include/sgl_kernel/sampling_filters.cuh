// The parameters of the rows that sample_tokens draws from, and which tokens they keep.
#pragma once

#include "sgl_kernel/reduce.cuh"

namespace sgl_kernel {

// Pointers in the order of SamplingRows in python/sgl_kernel/sampling_rows.py.
struct SamplingView {
  const float* temperature;  // [rows] float32
  const int64_t* top_k;      // [rows] int64
  const float* top_p;        // [rows] float32
  const float* min_p;        // [rows] float32
  const int64_t* seeds;      // [rows] int64
  const int64_t* positions;  // [rows] int64
};

// What is known of a row before it is read again, and which of its tokens are kept. Each filter keeps
// a prefix of the order (logit descending, token ascending).
struct RowParameters {
  Candidate best;  // the greatest logit and its lowest token
  float scale;
  int64_t top_k;
  float top_p;
  float min_p;

  SGL_INLINE RowParameters(const Candidate& best_, float scale_, const SamplingView& sampling,
                           int64_t row)
      : best(best_),
        scale(scale_),
        top_k(sampling.top_k[row]),
        top_p(sampling.top_p[row]),
        min_p(sampling.min_p[row]) {}

  SGL_INLINE bool keeps_best_only() const {
    return scale == 0.0f || !is_finite(best.key) || top_k <= 1 || !(top_p > 0.0f);
  }
  SGL_INLINE bool keeps_all(int size) const {
    return top_k >= size && top_p >= 1.0f && !(min_p > 0.0f);
  }
  // Whether `keeps` looks at the total.
  SGL_INLINE bool needs_total() const { return top_p < 1.0f; }
  // False for a token that its weight alone rules out; the best token's weight is 1.
  SGL_INLINE bool may_keep(float weight) const { return !(weight < min_p); }
  // rank, mass: number and weights of the tokens before it; total: weights of the whole row.
  SGL_INLINE bool keeps(float weight, int rank, float mass, float total) const {
    return rank < top_k && may_keep(weight) && (top_p >= 1.0f || mass < top_p * total);
  }
};

}  // namespace sgl_kernel
