// The kernels of draft trees on emulated CUDA threads, behind the C functions of csrc/speculative/.
#include "cuda_emulation.h"

#include "sgl_kernel/build_ragged_trees.cuh"
#include "sgl_kernel/build_tree.cuh"
#include "sgl_kernel/sample_trees.cuh"

using namespace sgl_kernel;

namespace {

template <typename Link, typename Verdict>
void sample(const LinkedTrees<Link>& trees, const TreeCoins& sampling, int64_t num_requests,
            const Verdict& verdict) {
  constexpr int kFewThreads = 32;
  // A request that is alone runs as on a GPU; for many that would take long.
  if (num_requests == 1) {
    emulation::run_grid(1, kSampleThreads, [&] {
      sample_trees_kernel<Link, Verdict, kSampleThreads>(trees, sampling, verdict);
    });
    return;
  }
  emulation::run_grid(static_cast<unsigned>(num_requests), kFewThreads, [&] {
    sample_trees_kernel<Link, Verdict, kFewThreads>(trees, sampling, verdict);
  });
}

}  // namespace

extern "C" int sgl_build_tree(int, const int64_t* parent_list, const int64_t* selected,
                              const int64_t* seq_lens, int64_t parent_width, int64_t topk,
                              int64_t num_nodes, int64_t num_requests, void* mask,
                              int64_t mask_size, int64_t mask_mode, int64_t* positions,
                              int64_t* rows, int64_t* first_child, int64_t* next_sibling, void*) {
  const SelectedCandidates tree{parent_list,  selected, seq_lens,
                                parent_width, topk,     static_cast<int>(num_nodes)};
  const UniformTrees built{static_cast<uint8_t*>(mask), mask_size, static_cast<int>(mask_mode),
                           positions, rows, first_child, next_sibling};
  const unsigned threads = (tree.num_nodes + kWarpSize - 1) / kWarpSize * kWarpSize;
  emulation::run_grid(static_cast<unsigned>(num_requests), threads,
                      [&] { build_tree_kernel(tree, built); });
  return 0;
}

extern "C" int sgl_build_ragged_trees(int, const DraftCandidates* drafts,
                                      const PackedTrees* built, void*) {
  emulation::run_grid(static_cast<unsigned>(drafts->num_requests), kWarpSize,
                      [&] { build_ragged_trees_kernel(*drafts, *built); });
  return 0;
}

extern "C" int sgl_verify_trees(int, const LinkedTrees<int64_t>* trees, const int64_t* targets,
                                int64_t num_requests, const UniformVerdict* verdict, void*) {
  emulation::run_grid(static_cast<unsigned>(num_requests), kWarpSize,
                      [&] { verify_trees_kernel(*trees, targets, *verdict); });
  return 0;
}

extern "C" int sgl_verify_ragged_trees(int, const LinkedTrees<int32_t>* trees,
                                       const int64_t* targets, int64_t num_requests,
                                       const PackedVerdict* verdict, void*) {
  emulation::run_grid(static_cast<unsigned>(num_requests), kWarpSize,
                      [&] { verify_trees_kernel(*trees, targets, *verdict); });
  return 0;
}

extern "C" int sgl_sample_trees(int, const LinkedTrees<int64_t>* trees, const TreeCoins* sampling,
                                int64_t num_requests, const UniformVerdict* verdict, void*) {
  sample(*trees, *sampling, num_requests, *verdict);
  return 0;
}

extern "C" int sgl_sample_ragged_trees(int, const LinkedTrees<int32_t>* trees,
                                       const TreeCoins* sampling, int64_t num_requests,
                                       const PackedVerdict* verdict, void*) {
  sample(*trees, *sampling, num_requests, *verdict);
  return 0;
}

extern "C" int sgl_preload_build_tree(int) { return 0; }
extern "C" int sgl_preload_build_ragged_trees(int) { return 0; }
extern "C" int sgl_preload_verify_trees(int) { return 0; }
extern "C" int sgl_preload_sample_trees(int) { return 0; }
