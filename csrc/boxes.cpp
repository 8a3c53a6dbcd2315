// Batched strided box copy on the CPU: many rectangles in one call, optionally cast (float32 to bfloat16) and
// fingerprinted in the same pass over memory. C ABI; called through ctypes, which releases the GIL.

#include "normalise.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HE_X86 1
#endif

#define HE_INLINE static inline __attribute__((always_inline))
#define HE_INLINE_MEMBER inline __attribute__((always_inline))

namespace {

using he::dst_width;
using he::normalised;
using he::src_width;
using he::wants_sums;

// The vectors below never cross a call boundary that is not inlined; GCC warns about their ABI regardless.
#pragma GCC diagnostic ignored "-Wpsabi"

// kBytes is 32 (two registers on the baseline) or, with AVX-512, 64: what a compiler has to split over more registers
// than two it keeps in memory.
template <int kBytes>
struct Vector {
  typedef uint64_t U64 __attribute__((vector_size(kBytes)));
  typedef uint32_t U32 __attribute__((vector_size(kBytes)));
  typedef uint16_t Half __attribute__((vector_size(kBytes / 2)));  // as many 16-bit words as U32 has words
};

// Sums from which the fingerprint of a block of equal rows follows. Word j of row r has the canonical index
// i = i0 + row_step * r + step * j, so sum w * A * (i + 1) = A * ((i0 + 1) * s0 + row_step * r1 + step * s1).
struct Sums {
  uint64_t s0 = 0;  // sum w
  uint64_t s1 = 0;  // sum j * w
  uint64_t r1 = 0;  // sum r * w
};

// `rows` equal rows of `n` adjacent elements each; steps from row to row in bytes.
struct Block {
  const char* src;
  char* dst;  // null: read only
  int64_t src_step, dst_step, rows, n;
};

constexpr int64_t kItemElements = 64 * 1024;       // work is handed to threads in pieces of about this size
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;  // HE_STORES_BY_SIZE streams batches from here on

HE_INLINE uint32_t round_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

template <typename U32>
HE_INLINE U32 round_bf16_all(U32 u) {
  const U32 rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const U32 nan = (U32)((u & 0x7FFFFFFFu) > 0x7F800000u);
  return (nan & 0x7FC0u) | (~nan & rounded);
}

// kStream: past the caches, to an address that is a multiple of 64.
template <bool kStream, typename V>
HE_INLINE void store(void* dst, V v) {
#if HE_X86
  if constexpr (kStream && sizeof(V) == 64) {  // no intrinsic: those do not inline into what the baseline compiles too
    asm("vmovntdq %1, %0" : "=m"(*static_cast<V*>(dst)) : "v"(v));
    return;
  } else if constexpr (kStream) {
    __m128i parts[sizeof(V) / 16];
    std::memcpy(parts, &v, sizeof(V));
    for (size_t i = 0; i < sizeof(V) / 16; ++i) _mm_stream_si128(static_cast<__m128i*>(dst) + i, parts[i]);
    return;
  }
#endif
  std::memcpy(dst, &v, sizeof(V));
}

// ---------------------------------------------------------------------------------------------------------
// Blocks of contiguous rows. Index-weighted sums need no multiplication per element: per lane, s += w; p += s
// gives p = sum (T - t) * w_t after T steps, hence sum t * w_t = T * s - p. The same trick over rows gives r1.

// 64-bit lane sums. A step covers K words per lane; lane m of vector k holds word K * m + k of the step.
template <int K, int kBytes>
struct Lanes {
  using U64 = typename Vector<kBytes>::U64;
  static constexpr int kLanes = kBytes / 8;
  U64 row[K] = {}, total[K] = {}, rows_p[K] = {}, time[K] = {};

  // Words of `steps` more steps of this row, ending before step `end`: their sum and prefix sum.
  HE_INLINE_MEMBER void add(int k, U64 sum, U64 prefix, uint64_t end) {
    row[k] += sum;
    time[k] += sum * end - prefix;
  }
  HE_INLINE_MEMBER void end_row() {
    for (int k = 0; k < K; ++k) {
      total[k] += row[k], rows_p[k] += total[k];
      row[k] = U64{};
    }
  }
  HE_INLINE_MEMBER void finish(uint64_t rows, Sums& out) const {
    for (int k = 0; k < K; ++k) {
      for (int m = 0; m < kLanes; ++m) {
        out.s0 += total[k][m];
        out.s1 += kLanes * K * time[k][m] + (K * m + k) * total[k][m];
        out.r1 += rows * total[k][m] - rows_p[k][m];
      }
    }
  }
};

// 32-bit lanes hold sums of 16-bit values below 2^32 for this many steps.
constexpr int64_t kNarrowSteps = 256;

template <typename U64, typename U32>
HE_INLINE U64 low(U32 v) { return (U64)v & 0xFFFFFFFFull; }
template <typename U64, typename U32>
HE_INLINE U64 high(U32 v) { return (U64)v >> 32; }

// Four-byte words: even and odd words of a vector are widened by mask and shift.
template <int kBytes>
struct Words4 {
  using Src = uint32_t;
  using Dst = uint32_t;
  using U64 = typename Vector<kBytes>::U64;
  using U32 = typename Vector<kBytes>::U32;
  using Sums = Lanes<2, kBytes>;
  static constexpr int64_t kStep = kBytes / 4;
  HE_INLINE_MEMBER static Dst convert(Src w) { return w; }

  template <bool kWrite, bool kStream>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, int64_t count, Sums& lanes) {
    U64 even = {}, odd = {}, even_p = {}, odd_p = {};
    for (int64_t t = 0; t < count; ++t) {
      U32 v;
      std::memcpy(&v, src + kStep * t, kBytes);
      if (kWrite) store<kStream>(dst + kStep * t, v);
      even += low<U64>(v), odd += high<U64>(v);
      even_p += even, odd_p += odd;
    }
    lanes.add(0, even, even_p, count);
    lanes.add(1, odd, odd_p, count);
  }
};

// Two-byte words: summed in 32-bit lanes, flushed to 64 bits before they can overflow.
template <int kBytes>
struct Words2 {
  using Src = uint16_t;
  using Dst = uint16_t;
  using U64 = typename Vector<kBytes>::U64;
  using U32 = typename Vector<kBytes>::U32;
  using Sums = Lanes<4, kBytes>;
  static constexpr int64_t kStep = kBytes / 2;
  HE_INLINE_MEMBER static Dst convert(Src w) { return w; }

  template <bool kWrite, bool kStream>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, int64_t count, Sums& lanes) {
    for (int64_t t = 0; t < count;) {
      const int64_t end = std::min(count, t + kNarrowSteps);
      U32 even = {}, odd = {}, even_p = {}, odd_p = {};
      for (; t < end; ++t) {
        U32 v;
        std::memcpy(&v, src + kStep * t, kBytes);
        if (kWrite) store<kStream>(dst + kStep * t, v);
        even += v & 0xFFFFu, odd += v >> 16;
        even_p += even, odd_p += odd;
      }
      lanes.add(0, low<U64>(even), low<U64>(even_p), end);
      lanes.add(1, low<U64>(odd), low<U64>(odd_p), end);
      lanes.add(2, high<U64>(even), high<U64>(even_p), end);
      lanes.add(3, high<U64>(odd), high<U64>(odd_p), end);
    }
  }
};

// float32 to bfloat16; the fingerprint is of the value after the cast.
template <int kBytes>
struct Cast {
  using Src = uint32_t;
  using Dst = uint16_t;
  using U64 = typename Vector<kBytes>::U64;
  using U32 = typename Vector<kBytes>::U32;
  using Sums = Lanes<2, kBytes>;
  static constexpr int64_t kStep = kBytes / 4;
  HE_INLINE_MEMBER static Dst convert(Src w) { return static_cast<Dst>(round_bf16(w)); }

  template <bool kWrite, bool kStream>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, int64_t count, Sums& lanes) {
    for (int64_t t = 0; t < count;) {
      const int64_t end = std::min(count, t + kNarrowSteps);
      U32 sum = {}, prefix = {};
      for (; t < end; ++t) {
        U32 v;
        std::memcpy(&v, src + kStep * t, kBytes);
        v = round_bf16_all(v);
        if (kWrite) store<kStream>(dst + kStep * t, __builtin_convertvector(v, typename Vector<kBytes>::Half));
        sum += v;
        prefix += sum;
      }
      lanes.add(0, low<U64>(sum), low<U64>(prefix), end);
      lanes.add(1, high<U64>(sum), high<U64>(prefix), end);
    }
  }
};

// The hardware prefetcher stops at the end of every short row, so rows to come are asked for here.
struct RowPrefetch {
  int64_t ahead = 0, bytes = 0;

  HE_INLINE_MEMBER RowPrefetch(const Block& block, int64_t row_bytes) {
    if (block.rows == 1 || row_bytes > 8192 || block.src_step == row_bytes) return;
    ahead = (1 + 2048 / row_bytes) * block.src_step;
    bytes = row_bytes;
  }
  HE_INLINE_MEMBER void after(const char* row) const {
    for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch(row + ahead + j);
  }
};

template <typename Op, bool kWrite, bool kStream>
HE_INLINE void block_sums(const Block& block, Sums& out) {
  constexpr int64_t kStep = Op::kStep;
  const int64_t steps = block.n / kStep;
  const RowPrefetch prefetch(block, block.n * sizeof(typename Op::Src));
  typename Op::Sums lanes;
  for (int64_t r = 0; r < block.rows; ++r) {
    prefetch.after(block.src + r * block.src_step);
    const auto* src = reinterpret_cast<const typename Op::Src*>(block.src + r * block.src_step);
    auto* dst = kWrite ? reinterpret_cast<typename Op::Dst*>(block.dst + r * block.dst_step) : nullptr;
    Op::template steps<kWrite, kStream>(src, dst, steps, lanes);
    lanes.end_row();
    for (int64_t j = steps * kStep; j < block.n; ++j) {
      const typename Op::Dst w = Op::convert(src[j]);
      if (kWrite) dst[j] = w;
      out.s0 += w;
      out.s1 += static_cast<uint64_t>(j) * w;
      out.r1 += static_cast<uint64_t>(r) * w;
    }
  }
  lanes.finish(block.rows, out);
}

// Copy without a fingerprint. glibc's memcpy decides by the size of one call whether to bypass the caches;
// here the size of the batch decides.
template <int kBytes, bool kStream>
HE_INLINE void block_plain(const Block& block, int64_t row_bytes) {
  const RowPrefetch prefetch(block, row_bytes);
  for (int64_t r = 0; r < block.rows; ++r) {
    const char* src = block.src + r * block.src_step;
    prefetch.after(src);
    char* dst = block.dst + r * block.dst_step;
    int64_t j = 0;
    for (; kStream && j + kBytes <= row_bytes; j += kBytes) {
      typename Vector<kBytes>::U32 v;
      std::memcpy(&v, src + j, kBytes);
      store<kStream>(dst + j, v);
    }
    std::memcpy(dst + j, src + j, row_bytes - j);
  }
}

// One- and eight-byte words are rare in weights: the compiler's vectorisation of the plain loop will do.
template <typename Word>
HE_INLINE void block_simple(const Block& block, Sums& out) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const auto* src = reinterpret_cast<const Word*>(block.src + r * block.src_step);
    if (block.dst) std::memcpy(block.dst + r * block.dst_step, src, block.n * sizeof(Word));
    uint64_t s0 = 0, s1 = 0;
    for (int64_t j = 0; j < block.n; ++j) {
      s0 += src[j];
      s1 += static_cast<uint64_t>(j) * src[j];
    }
    out.s0 += s0, out.s1 += s1, out.r1 += static_cast<uint64_t>(r) * s0;
  }
}

template <typename Op, bool kStream>
HE_INLINE void block_op(const Block& block, Sums& out) {
  block.dst ? block_sums<Op, true, kStream>(block, out) : block_sums<Op, false, false>(block, out);
}

template <int kBytes, bool kStream>
HE_INLINE void block_any(int32_t op, const Block& block, bool sums, Sums& out) {
  if (op == HE_F32_TO_BF16) {
    block_op<Cast<kBytes>, kStream>(block, out);
  } else if (!sums) {
    block_plain<kBytes, kStream>(block, block.n << op);  // HE_COPYn is log2 of the width
  } else if (op == HE_COPY4) {
    block_op<Words4<kBytes>, kStream>(block, out);
  } else if (op == HE_COPY2) {
    block_op<Words2<kBytes>, kStream>(block, out);
  } else {
    op == HE_COPY1 ? block_simple<uint8_t>(block, out) : block_simple<uint64_t>(block, out);
  }
}

// Compiled for the baseline, AVX2 and AVX-512 (whose registers are twice as wide), with ordinary and with
// cache-bypassing stores.
using BlockFn = void (*)(int32_t op, const Block& block, bool sums, Sums& out);
constexpr int64_t kStreamAlign = 64;  // of every row that is stored past the caches, whatever the width of the stores

void block_base(int32_t op, const Block& block, bool sums, Sums& out) { block_any<32, false>(op, block, sums, out); }
void block_base_stream(int32_t op, const Block& block, bool sums, Sums& out) {
  block_any<32, true>(op, block, sums, out);
}
#if HE_X86
#define HE_AVX2 __attribute__((target("avx2")))
#define HE_AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
HE_AVX2 void block_avx2(int32_t op, const Block& block, bool sums, Sums& out) {
  block_any<32, false>(op, block, sums, out);
}
HE_AVX2 void block_avx2_stream(int32_t op, const Block& block, bool sums, Sums& out) {
  block_any<32, true>(op, block, sums, out);
}
HE_AVX512 void block_avx512(int32_t op, const Block& block, bool sums, Sums& out) {
  block_any<64, false>(op, block, sums, out);
}
HE_AVX512 void block_avx512_stream(int32_t op, const Block& block, bool sums, Sums& out) {
  block_any<64, true>(op, block, sums, out);
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

BlockFn choose_block(bool stream) {
#if HE_X86
  if (has_avx512()) return stream ? block_avx512_stream : block_avx512;
  if (__builtin_cpu_supports("avx2")) return stream ? block_avx2_stream : block_avx2;
#endif
  return stream ? block_base_stream : block_base;
}

// ---------------------------------------------------------------------------------------------------------
// Rows whose elements are not adjacent (transposed views).

template <typename Src, typename Dst, bool kCast>
void row_strided(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t n, Sums& out) {
  const auto* s = reinterpret_cast<const Src*>(src);
  auto* d = reinterpret_cast<Dst*>(dst);
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t w = kCast ? round_bf16(static_cast<uint32_t>(s[j * src_stride])) : s[j * src_stride];
    if (d) d[j * dst_stride] = static_cast<Dst>(w);
    out.s0 += w, out.s1 += static_cast<uint64_t>(j) * w;
  }
}

void row_strided_any(int32_t op, const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t n,
                     Sums& out) {
  switch (op) {
    case HE_COPY1: return row_strided<uint8_t, uint8_t, false>(src, src_stride, dst, dst_stride, n, out);
    case HE_COPY2: return row_strided<uint16_t, uint16_t, false>(src, src_stride, dst, dst_stride, n, out);
    case HE_COPY4: return row_strided<uint32_t, uint32_t, false>(src, src_stride, dst, dst_stride, n, out);
    case HE_COPY8: return row_strided<uint64_t, uint64_t, false>(src, src_stride, dst, dst_stride, n, out);
    default: return row_strided<uint32_t, uint16_t, true>(src, src_stride, dst, dst_stride, n, out);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Boxes

struct Item {
  int64_t box, row_begin, row_end, col_begin, col_end;
};

// Long rows are cut along the row, short ones are grouped.
void cut(const HeBox& box, int64_t at, std::vector<Item>& items) {
  const int64_t rows = box.sizes[0] * box.sizes[1] * box.sizes[2], n = box.sizes[3];
  if (rows <= 0 || n <= 0) return;
  const int64_t step = std::max<int64_t>(1, kItemElements / n);
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t r_end = std::min(rows, r + step);
    for (int64_t c = 0; c < n; c += kItemElements) {
      items.push_back({at, r, r_end, c, std::min(n, c + kItemElements)});
    }
  }
}

// Rows of one item that share the two outer coordinates: one block, or row by row when elements are not adjacent.
uint64_t run_rows(const HeBox& box, const char* src, char* dst, uint64_t index, int64_t rows, int64_t n,
                  BlockFn plain, BlockFn stream) {
  const int64_t sw = src_width(box.op), dw = dst_width(box.op);
  Block block{src, dst, box.src_strides[2] * sw, box.dst_strides[2] * dw, rows, n};
  const bool sums = wants_sums(box);
  uint64_t total = 0;
  const auto add = [&](const Sums& s, uint64_t first) {
    total += (first + 1) * s.s0 + static_cast<uint64_t>(box.index_strides[2]) * s.r1 +
             static_cast<uint64_t>(box.index_strides[3]) * s.s1;
  };
  const bool contiguous = n == 1 || (box.src_strides[3] == 1 && (!dst || box.dst_strides[3] == 1));
  if (!contiguous) {
    for (int64_t r = 0; r < rows; ++r, src += block.src_step, dst += dst ? block.dst_step : 0) {
      Sums s;
      row_strided_any(box.op, src, box.src_strides[3], dst, box.dst_strides[3], n, s);
      add(s, index + r * box.index_strides[2]);
    }
    return total;
  }
  const auto misaligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kStreamAlign - 1));
  if (rows == 1 && stream != plain && dst && misaligned && misaligned < n * dw && misaligned % dw == 0) {
    const int64_t head = misaligned / dw;
    Sums s;
    block.n = head;
    plain(box.op, block, sums, s);
    add(s, index);
    block = {src + head * sw, dst + misaligned, 0, 0, 1, n - head};
    index += head * box.index_strides[3];
  }
  const bool aligned = (reinterpret_cast<uintptr_t>(block.dst) | (rows > 1 ? block.dst_step : 0)) % kStreamAlign == 0;
  Sums s;
  (aligned ? stream : plain)(box.op, block, sums, s);
  add(s, index);
  return total;
}

uint64_t run_item(const HeBox& box, const Item& item, BlockFn plain, BlockFn stream) {
  const int64_t n = item.col_end - item.col_begin;
  uint64_t total = 0;
  for (int64_t r = item.row_begin; r < item.row_end;) {
    const int64_t x2 = r % box.sizes[2], rest = r / box.sizes[2], x1 = rest % box.sizes[1], x0 = rest / box.sizes[1];
    const int64_t rows = std::min(item.row_end - r, box.sizes[2] - x2);
    const auto at = [&](const int64_t* strides) {
      return x0 * strides[0] + x1 * strides[1] + x2 * strides[2] + item.col_begin * strides[3];
    };
    const char* src = reinterpret_cast<const char*>(box.src) + at(box.src_strides) * src_width(box.op);
    char* dst = box.dst ? reinterpret_cast<char*>(box.dst) + at(box.dst_strides) * dst_width(box.op) : nullptr;
    total += run_rows(box, src, dst, box.index + at(box.index_strides), rows, n, plain, stream);
    r += rows;
  }
  return total * HE_FINGERPRINT_A;
}

}  // namespace

extern "C" {

// Layout check for the Python side.
int64_t he_box_bytes(void) { return sizeof(HeBox); }

// Copy, cast and fingerprint `count` boxes with up to `threads` threads. `sums` has one accumulator per slot,
// added to (not cleared); it may be null when no box names a slot. Destinations must not overlap each other
// or any source. `stores`: HE_STORES_CACHED leaves what is written in the caches, HE_STORES_STREAMED goes past them,
// HE_STORES_BY_SIZE decides by the bytes of the batch. Returns 0, or 1 + the position of a box with an unknown op
// (nothing is then copied).
int64_t he_run_boxes(const HeBox* boxes, int64_t count, uint64_t* sums, int32_t threads, int32_t stores) {
  std::vector<HeBox> ready(count);
  std::vector<Item> items;
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (boxes[i].op < HE_COPY1 || boxes[i].op > HE_F32_TO_BF16) return i + 1;
    ready[i] = normalised(boxes[i]);
    if (!ready[i].dst && !wants_sums(ready[i])) continue;
    cut(ready[i], i, items);
    const int64_t* n = ready[i].sizes;
    bytes += n[0] * n[1] * n[2] * n[3] * dst_width(ready[i].op);
  }
  const bool stream = stores == HE_STORES_BY_SIZE ? bytes >= kStreamBytes : stores == HE_STORES_STREAMED;
  const BlockFn plain = choose_block(false), block = choose_block(stream);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < items.size(); i = next.fetch_add(1)) {
      const HeBox& box = ready[items[i].box];
      const uint64_t sum = run_item(box, items[i], plain, block);
      for (const int32_t slot : box.slot) {
        if (slot >= 0) __atomic_fetch_add(sums + slot, sum, __ATOMIC_RELAXED);
      }
    }
#if HE_X86
    if (stream) _mm_sfence();  // streamed stores are visible to other processes before the acknowledgement
#endif
  };
  const int32_t helpers = std::min<int64_t>(threads, static_cast<int64_t>(items.size())) - 1;
  std::vector<std::thread> pool;
  for (int32_t t = 0; t < helpers; ++t) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  return 0;
}

// Words of a control page shared between processes.
int64_t he_load(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void he_store(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // extern "C"
