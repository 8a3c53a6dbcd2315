// Blocks of contiguous rows: copied, cast and summed, in a version for each width of vector.

#pragma once

#include "normalise.h"
#include "weights.h"

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

// `rows` equal rows of `n` adjacent elements each; steps from row to row in bytes. Word j of row r has the canonical
// index `index + r * index_step + j`.
struct Block {
  const char* src;
  char* dst;  // null: read only
  char* tee;  // null: no second copy
  int64_t src_step, dst_step, tee_step, rows, n;
  uint64_t index, index_step;
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
// Weighted sums. Vectors hold an even and an odd 32-bit word in each 64-bit lane; the weights of each kind lie in a table
// of their own, in the order of the lanes.

struct PlaceTable {
  uint64_t weights[2][he::kRun / 2] = {};
  constexpr PlaceTable() {
    for (int64_t i = 0; i < he::kRun; ++i) weights[i % 2][i / 2] = he::place_weight(i);
  }
  // Of every second word from this place of a run on.
  HE_INLINE_MEMBER const uint64_t* at(int64_t place) const { return weights[place % 2] + place / 2; }
};
constexpr PlaceTable kPlaces;

// Weights of words one by one; the run's is kept.
class Weigher {
 public:
  HE_INLINE_MEMBER uint64_t operator()(uint64_t word) {
    if (word >> he::kRunBits != run_) run_ = word >> he::kRunBits, run_weight_ = he::run_weight(word);
    return run_weight_ * *kPlaces.at(word & (he::kRun - 1));
  }

 private:
  uint64_t run_ = ~uint64_t{0}, run_weight_ = 0;
};

// Sum of 32-bit words times the weights of their places, which begin at `place`.
template <int kBytes, bool kVex>
class PlaceSums {
 public:
  using U64 = typename Vector<kBytes>::U64;
  static constexpr int64_t kLanes = kBytes / 8;

  HE_INLINE_MEMBER explicit PlaceSums(int64_t place) : even_at_(kPlaces.at(place)), odd_at_(kPlaces.at(place + 1)) {}
  // The next kBytes bytes.
  HE_INLINE_MEMBER void add(U64 words) {
    even_ += times(words, even_at_), odd_ += times(words >> 32, odd_at_);
    even_at_ += kLanes, odd_at_ += kLanes;
  }
  HE_INLINE_MEMBER uint64_t total() const {
    const U64 sum = even_ + odd_;
    uint64_t found = 0;
    for (int m = 0; m < kLanes; ++m) found += sum[m];
    return found;
  }

 private:
  // The lower half of each lane of `words`, times what is at `weights`, below 2^32.
  HE_INLINE_MEMBER static U64 times(U64 words, const uint64_t* weights) {
    U64 w, product;
    std::memcpy(&w, weights, kBytes);
#if HE_X86
    if constexpr (kVex) {  // compilers would multiply all 64 bits
      asm("vpmuludq %2, %1, %0" : "=v"(product) : "v"(words), "v"(w));
      return product;
    }
#endif
    product = (words & 0xFFFFFFFFull) * w;
    return product;
  }

  const uint64_t *even_at_, *odd_at_;
  U64 even_ = {}, odd_ = {};
};

// Each kind has steps(): kStep elements at a time, `count` times, stored; with kSums the sum of their words times the
// weights of their places, which begin at `place`, is returned.

template <typename Word, int kBytes, bool kVex>
struct Words {
  using Src = Word;
  using Dst = Word;
  static constexpr int64_t kStep = kBytes / sizeof(Word);
  HE_INLINE_MEMBER static Dst convert(Src w) { return w; }

  template <bool kWrite, bool kStream, bool kTee, bool kSums>
  HE_INLINE_MEMBER static uint64_t steps(const Src* src, Dst* dst, Dst*, int64_t count, int64_t place) {
    PlaceSums<kBytes, kVex> sums(place);
    for (int64_t t = 0; t < count; ++t) {
      typename Vector<kBytes>::U64 v;
      std::memcpy(&v, src + kStep * t, kBytes);
      if (kWrite) store<kStream>(dst + kStep * t, v);
      if (kSums) sums.add(v);
    }
    return kSums ? sums.total() : 0;
  }
};

// float32 to bfloat16; the fingerprint is of the value after the cast. A step fills a whole vector of the destination,
// which on AVX-512 is a cache line.
template <int kBytes, bool kVex>
struct Cast {
  using Src = uint32_t;
  using Dst = uint16_t;
  using U64 = typename Vector<kBytes>::U64;
  using U32 = typename Vector<kBytes>::U32;
  using Half = typename Vector<kBytes>::Half;
  static constexpr int64_t kStep = kBytes / 2;
  HE_INLINE_MEMBER static Dst convert(Src w) { return static_cast<Dst>(round_bf16(w)); }

  template <bool kWrite, bool kStream, bool kTee, bool kSums>
  HE_INLINE_MEMBER static uint64_t steps(const Src* src, Dst* dst, Dst* tee, int64_t count, int64_t place) {
    PlaceSums<kBytes, kVex> sums(place);
    const auto rounded = [](const Src* from) HE_INLINE_LAMBDA {
      U32 v;
      std::memcpy(&v, from, kBytes);
      return __builtin_convertvector(round_bf16_all(v), Half);
    };
    for (int64_t t = 0; t < count; ++t) {
      const Half halves[2] = {rounded(src + kStep * t), rounded(src + kStep * t + kStep / 2)};
      U64 both;
      std::memcpy(&both, halves, kBytes);
      if (kWrite) store<kStream>(dst + kStep * t, both);
      if (kTee) store<kStream>(tee + kStep * t, both);
      if (kSums) sums.add(both);
    }
    return kSums ? sums.total() : 0;
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

// Fingerprint of `n` elements that have been converted, one by one.
template <typename Op>
HE_INLINE uint64_t sum_elements(const typename Op::Src* src, int64_t n, uint64_t index, Weigher& weigh) {
  uint64_t total = 0;
  for (int64_t j = 0; j < n; ++j) {
    total += he::element_term<sizeof(typename Op::Dst)>(Op::convert(src[j]), index + j, weigh);
  }
  return total;
}

// One row; with kSums its first element begins a word of the parameter.
template <typename Op, bool kWrite, bool kStream, bool kTee, bool kSums>
HE_INLINE uint64_t row_sums(const typename Op::Src* src, typename Op::Dst* dst, typename Op::Dst* tee, int64_t n,
                            uint64_t index, Weigher& weigh) {
  using Dst = typename Op::Dst;
  constexpr int64_t kStep = Op::kStep, kPer = 4 / sizeof(Dst), kStepWords = kStep / kPer;
  const int64_t steps = n / kStep;
  uint64_t total = 0;
  for (int64_t t = 0; t < steps;) {
    const int64_t j = t * kStep, place = (index + j) / kPer & (he::kRun - 1);
    Dst *to = kWrite ? dst + j : nullptr, *also = kTee ? tee + j : nullptr;
    const int64_t in_run = kSums ? std::min(steps - t, (he::kRun - place) / kStepWords) : steps;
    if (in_run) {
      const uint64_t sum = Op::template steps<kWrite, kStream, kTee, kSums>(src + j, to, also, in_run, place);
      if (kSums) total += he::run_weight((index + j) / kPer) * sum;
      t += in_run;
    } else {  // a step in two runs of weights
      if (kWrite) Op::template steps<kWrite, kStream, kTee, false>(src + j, to, also, 1, 0);
      total += sum_elements<Op>(src + j, kStep, index + j, weigh);
      ++t;
    }
  }
  const int64_t done = steps * kStep;
  for (int64_t j = done; kWrite && j < n; ++j) {
    const Dst w = Op::convert(src[j]);
    dst[j] = w;
    if (kTee) tee[j] = w;
  }
  if (kSums) total += sum_elements<Op>(src + done, n - done, index + done, weigh);
  return total;
}

template <typename Op, bool kWrite, bool kStream, bool kTee, bool kSums>
HE_INLINE uint64_t block_sums(const Block& block) {
  using Dst = typename Op::Dst;
  constexpr int64_t kPer = 4 / sizeof(Dst);
  const RowPrefetch prefetch(block, block.n * sizeof(typename Op::Src));
  Weigher weigh;
  uint64_t total = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    prefetch.after(block.src + r * block.src_step);
    const auto* src = reinterpret_cast<const typename Op::Src*>(block.src + r * block.src_step);
    auto* dst = kWrite ? reinterpret_cast<Dst*>(block.dst + r * block.dst_step) : nullptr;
    auto* tee = kTee ? reinterpret_cast<Dst*>(block.tee + r * block.tee_step) : nullptr;
    const uint64_t index = block.index + static_cast<uint64_t>(r) * block.index_step;
    if (!kSums || index % kPer == 0) {
      total += row_sums<Op, kWrite, kStream, kTee, kSums>(src, dst, tee, block.n, index, weigh);
      continue;
    }
    // The row begins in the middle of a word: written, and summed from the next word on.
    if (kWrite) row_sums<Op, kWrite, kStream, kTee, false>(src, dst, tee, block.n, index, weigh);
    const int64_t head = std::min<int64_t>(block.n, kPer - index % kPer);
    total += sum_elements<Op>(src, head, index, weigh);
    total += row_sums<Op, false, false, false, true>(src + head, nullptr, nullptr, block.n - head, index + head, weigh);
  }
  return total;
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

// Eight-byte elements are rare in weights.
HE_INLINE uint64_t block_eight(const Block& block) {
  Weigher weigh;
  uint64_t total = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const auto* src = reinterpret_cast<const uint64_t*>(block.src + r * block.src_step);
    if (block.dst) std::memcpy(block.dst + r * block.dst_step, src, block.n * sizeof(uint64_t));
    const uint64_t index = block.index + static_cast<uint64_t>(r) * block.index_step;
    for (int64_t j = 0; j < block.n; ++j) total += he::element_term<8>(src[j], index + j, weigh);
  }
  return total;
}

template <typename Op, bool kStream>
HE_INLINE uint64_t block_op(const Block& block) {
  return block.dst ? block_sums<Op, true, kStream, false, true>(block)
                   : block_sums<Op, false, false, false, true>(block);
}

template <int kBytes, bool kStream, bool kVex>
HE_INLINE uint64_t block_any(int32_t op, const Block& block, bool sums) {
  if (op == HE_F32_TO_BF16 && block.tee) {
    return sums ? block_sums<Cast<kBytes, kVex>, true, kStream, true, true>(block)
                : block_sums<Cast<kBytes, kVex>, true, kStream, true, false>(block);
  }
  if (op == HE_F32_TO_BF16) {
    return sums ? block_op<Cast<kBytes, kVex>, kStream>(block)
                : block_sums<Cast<kBytes, kVex>, true, kStream, false, false>(block);
  }
  if (!sums) return block_plain<kBytes, kStream>(block, block.n << op), 0;  // HE_COPYn is log2 of the width
  if (op == HE_COPY4) return block_op<Words<uint32_t, kBytes, kVex>, kStream>(block);
  if (op == HE_COPY2) return block_op<Words<uint16_t, kBytes, kVex>, kStream>(block);
  return op == HE_COPY1 ? block_op<Words<uint8_t, kBytes, kVex>, kStream>(block) : block_eight(block);
}

// Compiled for the baseline, AVX2 and AVX-512 (whose registers are twice as wide), with ordinary and with
// cache-bypassing stores. They return the block's fingerprint, 0 without `sums`.
using BlockFn = uint64_t (*)(int32_t op, const Block& block, bool sums);
constexpr int64_t kStreamAlign = 64;  // of every row that is stored past the caches, whatever the width of the stores

uint64_t block_base(int32_t op, const Block& block, bool sums) { return block_any<32, false, false>(op, block, sums); }
uint64_t block_base_stream(int32_t op, const Block& block, bool sums) {
  return block_any<32, true, false>(op, block, sums);
}
#if HE_X86
#define HE_AVX2 __attribute__((target("avx2")))
#define HE_AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
HE_AVX2 uint64_t block_avx2(int32_t op, const Block& block, bool sums) {
  return block_any<32, false, true>(op, block, sums);
}
HE_AVX2 uint64_t block_avx2_stream(int32_t op, const Block& block, bool sums) {
  return block_any<32, true, true>(op, block, sums);
}
HE_AVX512 uint64_t block_avx512(int32_t op, const Block& block, bool sums) {
  return block_any<64, false, true>(op, block, sums);
}
HE_AVX512 uint64_t block_avx512_stream(int32_t op, const Block& block, bool sums) {
  return block_any<64, true, true>(op, block, sums);
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
