// Runs kernels on the CPU: the threads of a block are fibers of one thread, and every barrier or
// warp operation switches to the next fiber. Slow, deterministic, for small shapes.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  unsigned x, y, z;
};

inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 128 * 1024;

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warp_barriers;
inline Barrier block_barrier;
inline std::vector<uint64_t> exchange;
inline std::function<void()> body;

inline void yield() {
  const unsigned self = threadIdx.x;
  swapcontext(&fibers[self].context, &scheduler);
}

inline void wait(Barrier& barrier, int expected) {
  const long generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void enter() {
  body();
  fibers[threadIdx.x].is_done = true;
}

inline void run_block(unsigned threads) {
  if (threads % kLanes != 0) throw std::runtime_error("blocks hold whole warps");
  fibers.resize(threads);
  warp_barriers.assign(threads / kLanes, Barrier{});
  block_barrier = Barrier{};
  exchange.assign(threads, 0);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned running = threads; running > 0;) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (fibers[thread].is_done) continue;
      threadIdx.x = thread;
      swapcontext(&scheduler, &fibers[thread].context);
      if (fibers[thread].is_done) --running;
    }
  }
}

// Calls `kernel` once per thread of a one-dimensional grid.
inline void run_grid(unsigned blocks, unsigned threads, std::function<void()> kernel) {
  body = std::move(kernel);
  gridDim = Index{blocks, 1, 1};
  blockDim = Index{threads, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = Index{block, 0, 0};
    run_block(threads);
  }
}

// Every lane publishes a value, then folds what it sees of the warp's 32.
template <typename Fold>
inline uint64_t warp_operation(uint64_t value, Fold fold) {
  const unsigned warp = threadIdx.x / kLanes;
  exchange[threadIdx.x] = value;
  wait(warp_barriers[warp], kLanes);
  const uint64_t result = fold(&exchange[warp * kLanes], threadIdx.x % kLanes);
  wait(warp_barriers[warp], kLanes);
  return result;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block_barrier, blockDim.x); }

inline void __syncwarp() {
  emulation::wait(emulation::warp_barriers[threadIdx.x / emulation::kLanes], emulation::kLanes);
}

// Fibers change at barriers alone, so nothing comes between the reading and the writing.
inline int atomicMin(int* address, int value) {
  const int before = *address;
  if (value < before) *address = value;
  return before;
}

namespace emulation {

// The value that `source`, a function of the own lane, published.
template <typename Value, typename Source>
inline Value shuffle(Value value, Source source) {
  static_assert(sizeof(Value) <= sizeof(uint64_t), "the exchange holds 64 bits of a lane");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(value));
  bits = warp_operation(
      bits, [source](const uint64_t* lanes, unsigned lane) { return lanes[source(lane)]; });
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace emulation

template <typename Value>
inline Value __shfl_xor_sync(unsigned, Value value, int offset) {
  return emulation::shuffle(value, [offset](unsigned lane) { return lane ^ offset; });
}
template <typename Value>
inline Value __shfl_up_sync(unsigned, Value value, unsigned offset) {
  return emulation::shuffle(value,
                            [offset](unsigned lane) { return lane < offset ? lane : lane - offset; });
}
template <typename Value>
inline Value __shfl_sync(unsigned, Value value, int source) {
  return emulation::shuffle(value, [source](unsigned) { return source; });
}

inline unsigned __ballot_sync(unsigned, int is_set) {
  return emulation::warp_operation(is_set != 0, [](const uint64_t* lanes, unsigned) {
    uint64_t bits = 0;
    for (int i = 0; i < emulation::kLanes; ++i) bits |= lanes[i] << i;
    return bits;
  });
}

template <typename Choose>
inline unsigned reduce_lanes(unsigned value, Choose choose) {
  return emulation::warp_operation(value, [choose](const uint64_t* lanes, unsigned) {
    unsigned result = lanes[0];
    for (int i = 1; i < emulation::kLanes; ++i) result = choose(result, unsigned(lanes[i]));
    return uint64_t{result};
  });
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return a + b; });
}
