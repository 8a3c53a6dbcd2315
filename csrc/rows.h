// Blocks of contiguous rows: copied, cast and summed, in a version for each width of vector.

#pragma once

#include "normalise.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define HE_X86 1
#endif

#define HE_INLINE static inline __attribute__((always_inline))
#define HE_INLINE_MEMBER inline __attribute__((always_inline))
#define HE_INLINE_LAMBDA __attribute__((always_inline))

namespace {

using he::dst_width;
using he::is_known;
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
  char* tee;  // null: no second copy
  int64_t src_step, dst_step, tee_step, rows, n;
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

  template <bool kWrite, bool kStream, bool kTee>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, Dst*, int64_t count, Sums& lanes) {
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

  template <bool kWrite, bool kStream, bool kTee>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, Dst*, int64_t count, Sums& lanes) {
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

// float32 to bfloat16; the fingerprint is of the value after the cast. Two steps at a time fill a whole vector, which on
// AVX-512 is a cache line.
template <int kBytes>
struct Cast {
  using Src = uint32_t;
  using Dst = uint16_t;
  using U64 = typename Vector<kBytes>::U64;
  using U32 = typename Vector<kBytes>::U32;
  using Sums = Lanes<2, kBytes>;
  static constexpr int64_t kStep = kBytes / 4;
  HE_INLINE_MEMBER static Dst convert(Src w) { return static_cast<Dst>(round_bf16(w)); }

  template <bool kWrite, bool kStream, bool kTee>
  HE_INLINE_MEMBER static void steps(const Src* src, Dst* dst, Dst* tee, int64_t count, Sums& lanes) {
    using Half = typename Vector<kBytes>::Half;
    const auto rounded = [&](int64_t t) HE_INLINE_LAMBDA {
      U32 v;
      std::memcpy(&v, src + kStep * t, kBytes);
      return round_bf16_all(v);
    };
    for (int64_t t = 0; t < count;) {
      const int64_t end = std::min(count, t + kNarrowSteps);
      U32 sum = {}, prefix = {};
      for (; t + 2 <= end; t += 2) {
        const U32 first = rounded(t), second = rounded(t + 1);
        if (kWrite) {
          const Half halves[2] = {__builtin_convertvector(first, Half), __builtin_convertvector(second, Half)};
          U32 both;
          std::memcpy(&both, halves, kBytes);
          store<kStream>(dst + kStep * t, both);
          if (kTee) store<kStream>(tee + kStep * t, both);
        }
        sum += first, prefix += sum;
        sum += second, prefix += sum;
      }
      for (; t < end; ++t) {
        const U32 v = rounded(t);
        if (kWrite) store<kStream>(dst + kStep * t, __builtin_convertvector(v, Half));
        if (kTee) store<kStream>(tee + kStep * t, __builtin_convertvector(v, Half));
        sum += v, prefix += sum;
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

template <typename Op, bool kWrite, bool kStream, bool kTee>
HE_INLINE void block_sums(const Block& block, Sums& out) {
  constexpr int64_t kStep = Op::kStep;
  const int64_t steps = block.n / kStep;
  const RowPrefetch prefetch(block, block.n * sizeof(typename Op::Src));
  typename Op::Sums lanes;
  for (int64_t r = 0; r < block.rows; ++r) {
    prefetch.after(block.src + r * block.src_step);
    const auto* src = reinterpret_cast<const typename Op::Src*>(block.src + r * block.src_step);
    auto* dst = kWrite ? reinterpret_cast<typename Op::Dst*>(block.dst + r * block.dst_step) : nullptr;
    auto* tee = kTee ? reinterpret_cast<typename Op::Dst*>(block.tee + r * block.tee_step) : nullptr;
    Op::template steps<kWrite, kStream, kTee>(src, dst, tee, steps, lanes);
    lanes.end_row();
    for (int64_t j = steps * kStep; j < block.n; ++j) {
      const typename Op::Dst w = Op::convert(src[j]);
      if (kWrite) dst[j] = w;
      if (kTee) tee[j] = w;
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
  block.dst ? block_sums<Op, true, kStream, false>(block, out) : block_sums<Op, false, false, false>(block, out);
}

template <int kBytes, bool kStream>
HE_INLINE void block_any(int32_t op, const Block& block, bool sums, Sums& out) {
  if (op == HE_F32_TO_BF16 && block.tee) {
    block_sums<Cast<kBytes>, true, kStream, true>(block, out);
  } else if (op == HE_F32_TO_BF16) {
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

}  // namespace
