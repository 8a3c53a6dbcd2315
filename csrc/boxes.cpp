// Batched strided box copy on the CPU: many rectangles in one call, optionally cast (float32 to bfloat16) and
// fingerprinted in the same pass over memory. C ABI; called through ctypes, which releases the GIL.

#include "boxes.h"

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

namespace {

// The vectors below never cross a call boundary that is not inlined; GCC warns about their ABI regardless.
#pragma GCC diagnostic ignored "-Wpsabi"
typedef uint64_t U64x4 __attribute__((vector_size(32)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));

// Row sums from which a fingerprint follows: with i = i0 + step * j,
// sum w_j * A * (i + 1) = A * ((i0 + 1) * s0 + step * s1), s0 = sum w_j, s1 = sum j * w_j.
struct Sums {
  uint64_t s0 = 0, s1 = 0;
};

constexpr int64_t kItemElements = 64 * 1024;       // work is handed to threads in pieces of about this size
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;  // batches above this bypass the caches when storing

HE_INLINE uint32_t round_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

HE_INLINE U32x8 round_bf16(U32x8 u) {
  const U32x8 rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const U32x8 nan = (U32x8)((u & 0x7FFFFFFFu) > 0x7F800000u);
  return (nan & 0x7FC0u) | (~nan & rounded);
}

template <bool kStream>
HE_INLINE void store32(void* dst, U32x8 v) {
#if HE_X86
  if (kStream) {
    __m128i halves[2];
    std::memcpy(halves, &v, 32);
    _mm_stream_si128(static_cast<__m128i*>(dst), halves[0]);
    _mm_stream_si128(static_cast<__m128i*>(dst) + 1, halves[1]);
    return;
  }
#endif
  std::memcpy(dst, &v, 32);
}

template <bool kStream>
HE_INLINE void store16(void* dst, U16x8 v) {
#if HE_X86
  if (kStream) {
    __m128i value;
    std::memcpy(&value, &v, 16);
    _mm_stream_si128(static_cast<__m128i*>(dst), value);
    return;
  }
#endif
  std::memcpy(dst, &v, 16);
}

// ---------------------------------------------------------------------------------------------------------
// Contiguous rows. Index-weighted sums need no multiplication: per lane, s += w; p += s gives
// p = sum (T - t) * w_t after T steps, hence sum t * w_t = T * s - p.

// 4-byte words. Even and odd words of a vector are widened to 64-bit lanes by mask and shift.
template <bool kWrite, bool kStream>
HE_INLINE void row_words4(const uint32_t* src, uint32_t* dst, int64_t n, Sums& out) {
  int64_t j = 0;
  uint64_t s0 = 0, s1 = 0;
  if (kWrite && kStream) {
    for (; j < n && (reinterpret_cast<uintptr_t>(dst + j) & 31); ++j) {
      const uint32_t w = src[j];
      dst[j] = w;
      s0 += w, s1 += static_cast<uint64_t>(j) * w;
    }
  }
  const int64_t begin = j, steps = (n - j) / 8;
  U64x4 even = {}, odd = {}, even_p = {}, odd_p = {};
  for (int64_t t = 0; t < steps; ++t, j += 8) {
    U32x8 v;
    std::memcpy(&v, src + j, 32);
    if (kWrite) store32<kStream>(dst + j, v);
    const U64x4 w = (U64x4)v;
    even += w & 0xFFFFFFFFull, odd += w >> 32;
    even_p += even, odd_p += odd;
  }
  for (int lane = 0; lane < 4; ++lane) {
    const uint64_t e = even[lane], o = odd[lane];
    const uint64_t weighted = static_cast<uint64_t>(steps) * (e + o) - even_p[lane] - odd_p[lane];
    s0 += e + o;
    s1 += 8 * weighted + (begin + 2 * lane) * e + (begin + 2 * lane + 1) * o;
  }
  for (; j < n; ++j) {
    const uint32_t w = src[j];
    if (kWrite) dst[j] = w;
    s0 += w, s1 += static_cast<uint64_t>(j) * w;
  }
  out.s0 += s0, out.s1 += s1;
}

// 16-bit values in 32-bit lanes: sums stay below 2^32 for 256 steps, then are flushed into 64 bits.
constexpr int64_t kBlockSteps = 256;

// 2-byte words.
template <bool kWrite, bool kStream>
HE_INLINE void row_words2(const uint16_t* src, uint16_t* dst, int64_t n, Sums& out) {
  int64_t j = 0;
  uint64_t s0 = 0, s1 = 0;
  if (kWrite && kStream) {
    for (; j < n && (reinterpret_cast<uintptr_t>(dst + j) & 31); ++j) {
      dst[j] = src[j];
      s0 += src[j], s1 += static_cast<uint64_t>(j) * src[j];
    }
  }
  while (n - j >= 16) {
    const int64_t begin = j, steps = std::min((n - j) / 16, kBlockSteps);
    U32x8 even = {}, odd = {}, even_p = {}, odd_p = {};
    for (int64_t t = 0; t < steps; ++t, j += 16) {
      U32x8 v;
      std::memcpy(&v, src + j, 32);
      if (kWrite) store32<kStream>(dst + j, v);
      even += v & 0xFFFFu, odd += v >> 16;
      even_p += even, odd_p += odd;
    }
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t e = even[lane], o = odd[lane];
      const uint64_t weighted = static_cast<uint64_t>(steps) * (e + o) - even_p[lane] - odd_p[lane];
      s0 += e + o;
      s1 += 16 * weighted + (begin + 2 * lane) * e + (begin + 2 * lane + 1) * o;
    }
  }
  for (; j < n; ++j) {
    const uint16_t w = src[j];
    if (kWrite) dst[j] = w;
    s0 += w, s1 += static_cast<uint64_t>(j) * w;
  }
  out.s0 += s0, out.s1 += s1;
}

// float32 to bfloat16; the fingerprint is of the value after the cast.
template <bool kWrite, bool kStream>
HE_INLINE void row_cast(const uint32_t* src, uint16_t* dst, int64_t n, Sums& out) {
  int64_t j = 0;
  uint64_t s0 = 0, s1 = 0;
  if (kWrite && kStream) {
    for (; j < n && (reinterpret_cast<uintptr_t>(dst + j) & 15); ++j) {
      const uint32_t w = round_bf16(src[j]);
      dst[j] = static_cast<uint16_t>(w);
      s0 += w, s1 += static_cast<uint64_t>(j) * w;
    }
  }
  while (n - j >= 8) {
    const int64_t begin = j, steps = std::min((n - j) / 8, kBlockSteps);
    U32x8 sum = {}, sum_p = {};
    for (int64_t t = 0; t < steps; ++t, j += 8) {
      U32x8 v;
      std::memcpy(&v, src + j, 32);
      v = round_bf16(v);
      if (kWrite) store16<kStream>(dst + j, __builtin_convertvector(v, U16x8));
      sum += v;
      sum_p += sum;
    }
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t s = sum[lane];
      s0 += s;
      s1 += 8 * (static_cast<uint64_t>(steps) * s - sum_p[lane]) + (begin + lane) * s;
    }
  }
  for (; j < n; ++j) {
    const uint32_t w = round_bf16(src[j]);
    if (kWrite) dst[j] = static_cast<uint16_t>(w);
    s0 += w, s1 += static_cast<uint64_t>(j) * w;
  }
  out.s0 += s0, out.s1 += s1;
}

// Copy without a fingerprint. glibc's memcpy decides by the size of one call whether to bypass the caches;
// here the size of the batch decides.
template <bool kStream>
HE_INLINE void row_plain(const char* src, char* dst, int64_t bytes) {
  if (!kStream || bytes < 256) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & 31);
  std::memcpy(dst, src, head);
  int64_t j = head;
  for (; j + 64 <= bytes; j += 64) {
    U32x8 a, b;
    std::memcpy(&a, src + j, 32);
    std::memcpy(&b, src + j + 32, 32);
    store32<kStream>(dst + j, a);
    store32<kStream>(dst + j + 32, b);
  }
  std::memcpy(dst + j, src + j, bytes - j);
}

// One contiguous row of any operation, compiled for the baseline and for AVX2.
template <bool kStream>
HE_INLINE void row_any(int32_t op, const char* src, char* dst, int64_t n, bool sums, Sums& out) {
  const auto* s4 = reinterpret_cast<const uint32_t*>(src);
  const auto* s2 = reinterpret_cast<const uint16_t*>(src);
  auto* d4 = reinterpret_cast<uint32_t*>(dst);
  auto* d2 = reinterpret_cast<uint16_t*>(dst);
  if (op == HE_F32_TO_BF16) {
    dst ? row_cast<true, kStream>(s4, d2, n, out) : row_cast<false, false>(s4, d2, n, out);
  } else if (!sums) {
    row_plain<kStream>(src, dst, n << op);  // HE_COPYn is log2 of the width
  } else if (op == HE_COPY4) {
    dst ? row_words4<true, kStream>(s4, d4, n, out) : row_words4<false, false>(s4, d4, n, out);
  } else if (op == HE_COPY2) {
    dst ? row_words2<true, kStream>(s2, d2, n, out) : row_words2<false, false>(s2, d2, n, out);
  } else {
    if (dst) row_plain<kStream>(src, dst, n << op);
    uint64_t s0 = 0, s1 = 0;
    for (int64_t j = 0; j < n; ++j) {
      const uint64_t w = op == HE_COPY1 ? static_cast<uint8_t>(src[j]) : reinterpret_cast<const uint64_t*>(src)[j];
      s0 += w, s1 += static_cast<uint64_t>(j) * w;
    }
    out.s0 += s0, out.s1 += s1;
  }
}

using RowFn = void (*)(int32_t op, const char* src, char* dst, int64_t n, bool sums, Sums& out);

void row_base(int32_t op, const char* src, char* dst, int64_t n, bool sums, Sums& out) {
  row_any<false>(op, src, dst, n, sums, out);
}
void row_base_stream(int32_t op, const char* src, char* dst, int64_t n, bool sums, Sums& out) {
  row_any<true>(op, src, dst, n, sums, out);
}

#if HE_X86
__attribute__((target("avx2"))) void row_avx2(int32_t op, const char* src, char* dst, int64_t n, bool sums,
                                              Sums& out) {
  row_any<false>(op, src, dst, n, sums, out);
}
__attribute__((target("avx2"))) void row_avx2_stream(int32_t op, const char* src, char* dst, int64_t n, bool sums,
                                                     Sums& out) {
  row_any<true>(op, src, dst, n, sums, out);
}
#endif

RowFn choose_row(bool stream) {
#if HE_X86
  if (__builtin_cpu_supports("avx2")) return stream ? row_avx2_stream : row_avx2;
#endif
  return stream ? row_base_stream : row_base;
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

int64_t src_width(int32_t op) { return op == HE_F32_TO_BF16 ? 4 : int64_t{1} << op; }
int64_t dst_width(int32_t op) { return op == HE_F32_TO_BF16 ? 2 : int64_t{1} << op; }
bool wants_sums(const HeBox& box) { return box.slot[0] >= 0 || box.slot[1] >= 0; }

// Merge neighbouring dimensions that are one run in source, destination and canonical index alike, and put the
// dimension that the destination stores contiguously last.
HeBox normalised(HeBox box) {
  const bool sums = wants_sums(box);
  const auto swap_dims = [&](int a, int b) {
    std::swap(box.sizes[a], box.sizes[b]);
    std::swap(box.src_strides[a], box.src_strides[b]);
    std::swap(box.dst_strides[a], box.dst_strides[b]);
    std::swap(box.index_strides[a], box.index_strides[b]);
  };
  const int last = HE_MAX_DIMS - 1;
  const auto* order = box.dst ? box.dst_strides : box.src_strides;
  for (int d = last - 1; d >= 0; --d) {
    if (box.sizes[d] > 1 && order[d] == 1 && (order[last] != 1 || box.sizes[last] == 1)) swap_dims(d, last);
  }
  HeBox out = box;
  int at = last;
  for (int d = last - 1; d >= 0; --d) {
    if (box.sizes[d] == 1) continue;
    const int64_t n = out.sizes[at];
    const bool run = box.src_strides[d] == out.src_strides[at] * n &&
                     (!box.dst || box.dst_strides[d] == out.dst_strides[at] * n) &&
                     (!sums || box.index_strides[d] == out.index_strides[at] * n);
    if (n == 1) {
      out.sizes[at] = box.sizes[d], out.src_strides[at] = box.src_strides[d];
      out.dst_strides[at] = box.dst_strides[d], out.index_strides[at] = box.index_strides[d];
    } else if (run) {
      out.sizes[at] *= box.sizes[d];
    } else {
      --at;
      out.sizes[at] = box.sizes[d], out.src_strides[at] = box.src_strides[d];
      out.dst_strides[at] = box.dst_strides[d], out.index_strides[at] = box.index_strides[d];
    }
  }
  for (int d = 0; d < at; ++d) out.sizes[d] = 1;
  return out;
}

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

uint64_t run_item(const HeBox& box, const Item& item, RowFn row) {
  const int64_t sw = src_width(box.op), dw = dst_width(box.op), n = item.col_end - item.col_begin;
  const bool sums = wants_sums(box);
  const bool contiguous = n == 1 || (box.src_strides[3] == 1 && (!box.dst || box.dst_strides[3] == 1));
  uint64_t total = 0;
  for (int64_t r = item.row_begin; r < item.row_end; ++r) {
    const int64_t x2 = r % box.sizes[2], rest = r / box.sizes[2], x1 = rest % box.sizes[1], x0 = rest / box.sizes[1];
    const auto at = [&](const int64_t* strides) {
      return x0 * strides[0] + x1 * strides[1] + x2 * strides[2] + item.col_begin * strides[3];
    };
    const char* src = reinterpret_cast<const char*>(box.src) + at(box.src_strides) * sw;
    char* dst = box.dst ? reinterpret_cast<char*>(box.dst) + at(box.dst_strides) * dw : nullptr;
    Sums s;
    if (contiguous) {
      row(box.op, src, dst, n, sums, s);
    } else {
      row_strided_any(box.op, src, box.src_strides[3], dst, box.dst_strides[3], n, s);
    }
    const uint64_t first = static_cast<uint64_t>(box.index + at(box.index_strides));
    total += (first + 1) * s.s0 + static_cast<uint64_t>(box.index_strides[3]) * s.s1;
  }
  return total * HE_FINGERPRINT_A;
}

}  // namespace

extern "C" {

// Layout check for the Python side.
int64_t he_box_bytes(void) { return sizeof(HeBox); }

// Copy, cast and fingerprint `count` boxes with up to `threads` threads. `sums` has one accumulator per slot,
// added to (not cleared); it may be null when no box names a slot. Destinations must not overlap each other
// or any source. Returns 0, or 1 + the position of a box with an unknown op (nothing is then copied).
int64_t he_run_boxes(const HeBox* boxes, int64_t count, uint64_t* sums, int32_t threads) {
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
  const bool stream = bytes >= kStreamBytes;
  const RowFn row = choose_row(stream);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < items.size(); i = next.fetch_add(1)) {
      const HeBox& box = ready[items[i].box];
      const uint64_t sum = run_item(box, items[i], row);
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
