// Batched strided box copy on the CPU: many rectangles in one call, optionally cast (float32 to bfloat16) and
// fingerprinted in the same pass over memory. C ABI; called through ctypes, which releases the GIL.

#include "rows.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {

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
