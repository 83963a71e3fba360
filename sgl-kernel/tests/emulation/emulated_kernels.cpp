// The kernels of include/sgl_kernel on emulated CUDA threads, behind the C functions of csrc/.
#include "cuda_emulation.h"

#include "sgl_kernel/argmax_logprob.cuh"
#include "sgl_kernel/confirm_drafts.cuh"
#include "sgl_kernel/move_kept_kv.cuh"
#include "sgl_kernel/penalize_logits.cuh"
#include "sgl_kernel/select_tokens.cuh"
#include "sgl_kernel/topk_logprob.cuh"

using namespace sgl_kernel;

namespace {

template <typename Format>
void argmax(const LogitsView& view, int64_t rows, ArgmaxPartial* partials, int64_t* token_ids,
            float* best, float* logprobs) {
  const int chunks = num_chunks(view.size);
  emulation::run_grid(rows * chunks, kChunkThreads,
                      [&] { argmax_chunks_kernel<Format>(view, chunks, partials); });
  emulation::run_grid(rows, kWarpSize, [&] {
    argmax_combine_kernel(partials, chunks, view.size, token_ids, best, logprobs);
  });
}

template <typename Format>
void topk(const LogitsView& view, int64_t rows, int count, ArgmaxPartial* partials,
          int64_t* token_ids, float* logprobs) {
  const int chunks = num_chunks(view.size);
  RankedToken* lists = reinterpret_cast<RankedToken*>(partials + rows * chunks);
  emulation::run_grid(rows * chunks, kChunkThreads, [&] {
    topk_chunks_kernel<Format>(view, chunks, count, partials, lists);
  });
  emulation::run_grid(rows, kWarpSize, [&] {
    topk_combine_kernel(partials, lists, chunks, count, token_ids, logprobs);
  });
}

template <typename Format>
void sample(const LogitsView& view, const SamplingView& sampling, int64_t rows,
            RacePartial* partials, int64_t* token_ids, float* logprobs) {
  const int chunks = num_chunks(view.size);
  emulation::run_grid(rows * chunks, kChunkThreads,
                      [&] { race_chunks_kernel<Format>(view, sampling, chunks, partials); });
  emulation::run_grid(rows, kSelectThreads, [&] {
    select_tokens_kernel<Format>(view, sampling, chunks, partials, token_ids, logprobs);
  });
}

}  // namespace

extern "C" int64_t sgl_num_chunks(int64_t size) { return num_chunks(static_cast<int>(size)); }

extern "C" const char* sgl_error_string(int) { return "emulated error"; }

extern "C" int sgl_argmax_logprob(int, int dtype, const void* logits, int64_t row_stride,
                                    int64_t rows, int64_t size, const int64_t* banned,
                                    int64_t num_banned, void* workspace, int64_t* token_ids,
                                    float* best, float* logprobs, void*) {
  if (!is_supported_shape(rows, size)) return 1;
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  ArgmaxPartial* partials = static_cast<ArgmaxPartial*>(workspace);
  if (dtype == 0) argmax<Float32>(view, rows, partials, token_ids, best, logprobs);
  if (dtype == 1) argmax<Bfloat16>(view, rows, partials, token_ids, best, logprobs);
  if (dtype == 2) argmax<Float16>(view, rows, partials, token_ids, best, logprobs);
  return 0;
}

extern "C" int sgl_topk_logprob(int, int dtype, const void* logits, int64_t row_stride,
                                int64_t rows, int64_t size, const int64_t* banned,
                                int64_t num_banned, int64_t count, void* workspace,
                                int64_t* token_ids, float* logprobs, void*) {
  if (!is_supported_shape(rows, size) || count > kMostTop) return 1;
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  ArgmaxPartial* partials = static_cast<ArgmaxPartial*>(workspace);
  const int found = static_cast<int>(count);
  if (dtype == 0) topk<Float32>(view, rows, found, partials, token_ids, logprobs);
  if (dtype == 1) topk<Bfloat16>(view, rows, found, partials, token_ids, logprobs);
  if (dtype == 2) topk<Float16>(view, rows, found, partials, token_ids, logprobs);
  return 0;
}

extern "C" int sgl_sample_tokens(int, int dtype, const void* logits, int64_t row_stride,
                                 int64_t rows, int64_t size, const int64_t* banned,
                                 int64_t num_banned, const SamplingView* sampling,
                                 void* workspace, int64_t* token_ids, float* logprobs, void*) {
  if (!is_supported_shape(rows, size)) return 1;
  const LogitsView view{logits, row_stride, static_cast<int>(size), banned,
                        static_cast<int>(num_banned)};
  RacePartial* partials = static_cast<RacePartial*>(workspace);
  if (dtype == 0) sample<Float32>(view, *sampling, rows, partials, token_ids, logprobs);
  if (dtype == 1) sample<Bfloat16>(view, *sampling, rows, partials, token_ids, logprobs);
  if (dtype == 2) sample<Float16>(view, *sampling, rows, partials, token_ids, logprobs);
  return 0;
}

extern "C" int sgl_penalize_logits(int, int dtype, const void* logits, int64_t row_stride,
                                   int64_t rows, int64_t size, const int32_t* counts,
                                   const float* penalties, const int64_t* requests,
                                   const int64_t* extra_tokens, const int32_t* extra_counts,
                                   int64_t num_extra, float* results, void*) {
  if (!is_supported_shape(rows, size)) return 1;
  const LogitsView view{logits, row_stride, static_cast<int>(size), nullptr, 0};
  const PenaltyView penalty{counts,       penalties,    requests,
                            extra_tokens, extra_counts, static_cast<int>(num_extra)};
  const int chunks = num_chunks(view.size);
  emulation::run_grid(rows * chunks, kChunkThreads, [&] {
    if (dtype == 0) penalize_logits_kernel<Float32>(view, penalty, chunks, results);
    if (dtype == 1) penalize_logits_kernel<Bfloat16>(view, penalty, chunks, results);
    if (dtype == 2) penalize_logits_kernel<Float16>(view, penalty, chunks, results);
  });
  return 0;
}

extern "C" int sgl_uniform_noise(int, const int64_t* seeds, const int64_t* positions, int64_t rows,
                                 int64_t size, float* noise, void*) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t stream = noise_stream(seeds[row], positions[row]);
    for (int64_t token = 0; token < size; ++token) {
      noise[row * size + token] = uniform_noise(stream, static_cast<int>(token));
    }
  }
  return 0;
}

extern "C" int sgl_confirm_drafts(int, const int64_t* tokens, const int64_t* targets,
                                  const int32_t* parents, const int64_t* starts,
                                  const int64_t* target_starts, const int64_t* num_rows,
                                  int64_t num_tokens, int64_t num_targets, int64_t num_requests,
                                  int64_t max_rows, int64_t* num_confirmed, int32_t* path,
                                  int64_t* next_token, void*) {
  const DraftRows rows{tokens,     targets,     parents,
                       starts,     target_starts, num_rows,
                       num_tokens, num_targets, static_cast<int>(max_rows)};
  const ConfirmedDrafts confirmed{num_confirmed, path, next_token};
  emulation::run_grid(static_cast<unsigned>(num_requests), kWarpSize,
                      [&] { confirm_drafts_kernel(rows, confirmed); });
  return 0;
}

extern "C" int sgl_move_kept_kv(int, const KVTensor* tensors, int64_t num_tensors,
                                const int32_t* page_table, int64_t num_table_rows,
                                int64_t table_width, const int64_t* table_rows,
                                const int64_t* committed, const int32_t* path,
                                const int64_t* num_confirmed, int64_t num_requests,
                                int64_t path_width, void*) {
  const KeptRows kept{page_table,     table_rows,  committed,
                      path,           num_confirmed, num_table_rows,
                      table_width,    static_cast<int>(path_width)};
  emulation::run_grid(static_cast<unsigned>(num_requests * num_tensors), kMoveThreads, [&] {
    move_kept_kv_kernel(tensors, static_cast<int>(num_tensors), kept);
  });
  return 0;
}

extern "C" int sgl_preload_argmax_logprob(int) { return 0; }
extern "C" int sgl_preload_topk_logprob(int) { return 0; }
extern "C" int sgl_preload_sample_tokens(int) { return 0; }
extern "C" int sgl_preload_penalize_logits(int) { return 0; }
extern "C" int sgl_preload_uniform_noise(int) { return 0; }
extern "C" int sgl_preload_confirm_drafts(int) { return 0; }
extern "C" int sgl_preload_move_kept_kv(int) { return 0; }
