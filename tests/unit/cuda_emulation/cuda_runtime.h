// Just enough CUDA on CPU threads to run csrc/boxes.cu's kernel where there is no GPU: every thread of a block is
// a thread here, blocks run one after the other. Slow, and blind to alignment faults and memory ordering between
// blocks; it checks the arithmetic, the addressing and the reductions. Found instead of CUDA's own header by -I.
#pragma once

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
  uint32_t x, y, z, w;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

inline thread_local dim3 threadIdx, blockIdx;
inline std::barrier<>* block_barrier = nullptr;
inline unsigned long long lanes[1024];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

// All threads of the block take part in every shuffle of this kernel, so a barrier of the block will do.
inline unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int offset) {
  lanes[threadIdx.x] = value;
  __syncthreads();
  const unsigned from = threadIdx.x % 32 + offset < 32 ? threadIdx.x + offset : threadIdx.x;
  const unsigned long long got = lanes[from];
  __syncthreads();
  return got;
}

inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

template <typename... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<Args*>(args[I])...);
}

template <typename... Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args...), dim3 grid, dim3 block, void** args, size_t, cudaStream_t) {
  for (unsigned tile = 0; tile < grid.x; ++tile) {
    std::barrier<> barrier(block.x);
    block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < block.x; ++t) {
      threads.emplace_back([&, t] {
        threadIdx = dim3(t), blockIdx = dim3(tile);
        call(kernel, args, std::index_sequence_for<Args...>{});
        block_barrier->arrive_and_drop();  // threads that return early do not hold up the others
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  return cudaSuccess;
}
