// Batched strided box copy on CUDA: one launch for any number of boxes, with cast and fingerprint. Plain C ABI
// and no torch headers, so that nvcc alone compiles it; called through ctypes with torch's current stream.
//
// Use: he_cuda_prepare on the host (once per change of addresses), upload boxes and tile starts, then
// he_cuda_run_boxes on the stream. Every block copies one tile of one box. Where sizes, strides and addresses
// permit, a thread moves 16 bytes of the destination at a time.

#include <cuda_runtime.h>

#include "normalise.h"
#include "weights.h"

namespace {

constexpr int kThreads = 256;
constexpr int64_t kTileElements = 16 * 1024;

__device__ __forceinline__ uint32_t round_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

template <bool kCast, typename Src, typename Dst>
__device__ __forceinline__ Dst convert(Src word) {
  return kCast ? static_cast<Dst>(round_bf16(static_cast<uint32_t>(word))) : static_cast<Dst>(word);
}

// V adjacent words; 16-byte accesses when they fill at least one.
template <typename Word, int V>
__device__ __forceinline__ void load(Word (&words)[V], const Word* from) {
  if constexpr (V * sizeof(Word) % 16 == 0) {
    uint4* parts = reinterpret_cast<uint4*>(words);
#pragma unroll
    for (int i = 0; i < static_cast<int>(V * sizeof(Word) / 16); ++i) parts[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) words[i] = from[i];
  }
}

template <typename Word, int V>
__device__ __forceinline__ void store(const Word (&words)[V], Word* to) {
  if constexpr (V * sizeof(Word) % 16 == 0) {
    const uint4* parts = reinterpret_cast<const uint4*>(words);
#pragma unroll
    for (int i = 0; i < static_cast<int>(V * sizeof(Word) / 16); ++i) reinterpret_cast<uint4*>(to)[i] = parts[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = words[i];
  }
}

// Elements [begin, end) of the box in row-major order, V at a time; returns this thread's share of the fingerprint.
// Index is 32 bits wide where the box permits: 64-bit division costs more than the memory access it serves.
template <typename Src, typename Dst, bool kCast, int V, bool kSums, typename Index>
__device__ uint64_t copy_tile(const HeBox& box, int64_t begin, int64_t end) {
  uint64_t total = 0;
  const Index n3 = box.sizes[3], n2 = box.sizes[2], n1 = box.sizes[1];
  const Src* src = reinterpret_cast<const Src*>(box.src);
  Dst* dst = reinterpret_cast<Dst*>(box.dst);
  for (int64_t at = begin + static_cast<int64_t>(threadIdx.x) * V; at < end; at += kThreads * V) {
    const Index element = static_cast<Index>(at);
    const Index row = element / n3, x3 = element - row * n3;
    const Index rest = row / n2, x2 = row - rest * n2;
    const Index x0 = rest / n1, x1 = rest - x0 * n1;
    const auto walk = [&](const int64_t* strides) {
      return static_cast<int64_t>(x0) * strides[0] + static_cast<int64_t>(x1) * strides[1] +
             static_cast<int64_t>(x2) * strides[2] + static_cast<int64_t>(x3) * strides[3];
    };
    alignas(16) Src in[V];
    alignas(16) Dst out[V];
    load<Src, V>(in, src + walk(box.src_strides));
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = convert<kCast, Src, Dst>(in[i]);
    if (dst) store<Dst, V>(out, dst + walk(box.dst_strides));
    if (kCast && box.tee) store<Dst, V>(out, reinterpret_cast<Dst*>(box.tee) + at);
    if (!kSums) continue;
    const uint64_t first = static_cast<uint64_t>(box.index + walk(box.index_strides));
    const uint64_t step = static_cast<uint64_t>(box.index_strides[3]);
    if constexpr (V > 1) {
      constexpr uint64_t kPer = sizeof(Dst) < 4 ? 4 / sizeof(Dst) : 1;
      const uint64_t word = first / kPer;
      const bool one_run = word >> he::kRunBits == (word + 3) >> he::kRunBits;
      if (sizeof(Dst) <= 4 && step == 1 && first % kPer == 0 && one_run) {  // 16 bytes: four whole words
        const uint32_t* words = reinterpret_cast<const uint32_t*>(out);
        uint64_t sum = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += words[k] * he::place_weight(word + k);
        total += he::run_weight(word) * sum;
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const auto weigh = [](uint64_t word) { return he::weight(word); };
      total += he::element_term<sizeof(Dst)>(out[i], first + i * step, weigh);
    }
  }
  return total;
}

// `reserved` of a prepared box: elements per access.
template <typename Src, typename Dst, bool kCast, bool kSums>
__device__ uint64_t copy_any(const HeBox& box, int64_t begin, int64_t end, bool narrow) {
  constexpr int kVector = 16 / sizeof(Dst);
  if (box.reserved == kVector) {
    return narrow ? copy_tile<Src, Dst, kCast, kVector, kSums, uint32_t>(box, begin, end)
                  : copy_tile<Src, Dst, kCast, kVector, kSums, uint64_t>(box, begin, end);
  }
  return narrow ? copy_tile<Src, Dst, kCast, 1, kSums, uint32_t>(box, begin, end)
                : copy_tile<Src, Dst, kCast, 1, kSums, uint64_t>(box, begin, end);
}

template <bool kSums>
__device__ uint64_t copy_op(const HeBox& box, int64_t begin, int64_t end, bool narrow) {
  switch (box.op) {
    case HE_COPY1: return copy_any<uint8_t, uint8_t, false, kSums>(box, begin, end, narrow);
    case HE_COPY2: return copy_any<uint16_t, uint16_t, false, kSums>(box, begin, end, narrow);
    case HE_COPY4: return copy_any<uint32_t, uint32_t, false, kSums>(box, begin, end, narrow);
    case HE_COPY8: return copy_any<uint64_t, uint64_t, false, kSums>(box, begin, end, narrow);
    default: return copy_any<uint32_t, uint16_t, true, kSums>(box, begin, end, narrow);
  }
}

__global__ void __launch_bounds__(kThreads)
    run_boxes(const HeBox* boxes, const int64_t* starts, int64_t count, unsigned long long* sums) {
  __shared__ HeBox box;
  __shared__ int64_t first_tile;
  __shared__ unsigned long long partial[kThreads / 32];
  const int64_t tile = blockIdx.x;
  if (threadIdx.x == 0) {
    int64_t low = 0, high = count - 1;  // last box whose first tile is not after this one
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (starts[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    box = boxes[low];
    first_tile = starts[low];
  }
  __syncthreads();
  const int64_t elements = box.sizes[0] * box.sizes[1] * box.sizes[2] * box.sizes[3];
  const int64_t begin = (tile - first_tile) * kTileElements;
  const int64_t end = begin + kTileElements < elements ? begin + kTileElements : elements;
  const bool narrow = elements <= INT32_MAX;
  if (box.slot[0] < 0 && box.slot[1] < 0) {  // the same for the whole block
    copy_op<false>(box, begin, end, narrow);
    return;
  }
  unsigned long long total = copy_op<true>(box, begin, end, narrow);
  for (int offset = 16; offset; offset /= 2) total += __shfl_down_sync(0xFFFFFFFFu, total, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned long long sum = 0;
    for (const unsigned long long part : partial) sum += part;
    for (const int32_t slot : box.slot) {
      if (slot >= 0) atomicAdd(sums + slot, sum);
    }
  }
}

// Whether `per` elements at a time are adjacent, complete and 16-byte aligned on both sides.
bool vectorises(const HeBox& box, int64_t per) {
  const int64_t src_bytes = he::src_width(box.op), dst_bytes = he::dst_width(box.op);
  if (box.sizes[3] % per || box.src_strides[3] != 1 || box.src % 16) return false;
  if ((box.dst && (box.dst_strides[3] != 1 || box.dst % 16)) || box.tee % 16) return false;
  for (int d = 0; d < HE_MAX_DIMS - 1; ++d) {
    if (box.sizes[d] == 1) continue;
    if (box.src_strides[d] * src_bytes % 16 || (box.dst && box.dst_strides[d] * dst_bytes % 16)) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int64_t he_cuda_box_bytes(void) { return sizeof(HeBox); }
uint64_t he_cuda_weight(uint64_t word) { return he::weight(word); }

// Host: simplified boxes and, per box, its first tile (count + 1 entries; the last is the number of tiles).
// Boxes that neither write nor sum get no tiles. Returns 0, or 1 + the position of a box that is not known.
int64_t he_cuda_prepare(const HeBox* boxes, int64_t count, HeBox* prepared, int64_t* starts) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!he::is_known(boxes[i])) return i + 1;
    HeBox box = he::normalised(boxes[i]);
    const int64_t per = 16 / he::dst_width(box.op);
    box.reserved = vectorises(box, per) ? static_cast<int32_t>(per) : 1;
    prepared[i] = box;
    starts[i] = tiles;
    const int64_t elements = box.sizes[0] * box.sizes[1] * box.sizes[2] * box.sizes[3];
    if (box.dst || he::wants_sums(box)) tiles += (elements + kTileElements - 1) / kTileElements;
  }
  starts[count] = tiles;
  return 0;
}

// Device pointers. Enqueues on `stream` and returns at once; a cudaError_t, 0 on success.
int32_t he_cuda_run_boxes(const HeBox* boxes, const int64_t* starts, int64_t count, int64_t tiles,
                          unsigned long long* sums, void* stream) {
  if (tiles == 0) return 0;
  if (tiles > INT32_MAX) return static_cast<int32_t>(cudaErrorInvalidValue);
  void* arguments[] = {&boxes, &starts, &count, &sums};
  return static_cast<int32_t>(cudaLaunchKernel(run_boxes, dim3(static_cast<unsigned>(tiles)), dim3(kThreads), arguments,
                                               0, static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
