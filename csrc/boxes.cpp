// Batched strided box copy on the CPU: many rectangles in one call, optionally cast (float32 to bfloat16) and
// fingerprinted in the same pass over memory. C ABI; called through ctypes, which releases the GIL.

#include "rows.h"
#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <vector>

namespace {

// ---------------------------------------------------------------------------------------------------------
// Rows whose elements are not adjacent (transposed views).

template <typename Src, typename Dst, bool kCast>
uint64_t row_strided(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, char* tee, int64_t n,
                     uint64_t index, uint64_t index_stride) {
  const auto* s = reinterpret_cast<const Src*>(src);
  auto* d = reinterpret_cast<Dst*>(dst);
  auto* t = reinterpret_cast<Dst*>(tee);
  Weigher weigh;
  uint64_t total = 0;
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t w = kCast ? round_bf16(static_cast<uint32_t>(s[j * src_stride])) : s[j * src_stride];
    if (d) d[j * dst_stride] = static_cast<Dst>(w);
    if (t) t[j] = static_cast<Dst>(w);
    total += he::element_term<sizeof(Dst)>(w, index + j * index_stride, weigh);
  }
  return total;
}

template <typename... Arguments>
uint64_t row_strided_any(int32_t op, Arguments... arguments) {
  switch (op) {
    case HE_COPY1: return row_strided<uint8_t, uint8_t, false>(arguments...);
    case HE_COPY2: return row_strided<uint16_t, uint16_t, false>(arguments...);
    case HE_COPY4: return row_strided<uint32_t, uint32_t, false>(arguments...);
    case HE_COPY8: return row_strided<uint64_t, uint64_t, false>(arguments...);
    default: return row_strided<uint32_t, uint16_t, true>(arguments...);
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

// Rows of one item that share the two outer coordinates: one block, or row by row when elements are not adjacent, in
// memory or (where they are summed) in the parameter.
uint64_t run_rows(const HeBox& box, const char* src, char* dst, char* tee, uint64_t index, int64_t rows, int64_t n,
                  BlockFn plain, BlockFn stream) {
  const int64_t sw = src_width(box.op), dw = dst_width(box.op);
  const auto index_step = static_cast<uint64_t>(box.index_strides[2]), step = static_cast<uint64_t>(box.index_strides[3]);
  Block block{src, dst, tee, box.src_strides[2] * sw, box.dst_strides[2] * dw, box.sizes[3] * dw, rows, n,
              index, index_step};
  const bool sums = wants_sums(box);
  const bool contiguous = n == 1 || (box.src_strides[3] == 1 && (!dst || box.dst_strides[3] == 1) && (!sums || step == 1));
  uint64_t total = 0;
  if (!contiguous) {
    for (int64_t r = 0; r < rows; ++r) {
      char* to = dst ? dst + r * block.dst_step : nullptr;
      char* also = tee ? tee + r * block.tee_step : nullptr;
      total += row_strided_any(box.op, src + r * block.src_step, box.src_strides[3], to, box.dst_strides[3], also, n,
                               index + r * index_step, step);
    }
    return total;
  }
  const auto bits = [](const char* at) { return reinterpret_cast<uintptr_t>(at); };
  const auto misaligned = static_cast<int64_t>(-bits(dst) & (kStreamAlign - 1));
  if (rows == 1 && stream != plain && dst && misaligned && misaligned < n * dw && misaligned % dw == 0) {
    const int64_t head = misaligned / dw;
    block.n = head;
    total = plain(box.op, block, sums);
    block = {src + head * sw, dst + misaligned, tee ? tee + misaligned : nullptr, 0, 0, 0, 1, n - head,
             index + head, index_step};
  }
  const int64_t steps = rows > 1 ? block.dst_step | (tee ? block.tee_step : 0) : 0;
  const bool aligned = (bits(block.dst) | bits(block.tee) | steps) % kStreamAlign == 0;
  return total + (aligned ? stream : plain)(box.op, block, sums);
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
    char* tee =
        box.tee ? reinterpret_cast<char*>(box.tee) + (r * box.sizes[3] + item.col_begin) * dst_width(box.op) : nullptr;
    total += run_rows(box, src, dst, tee, box.index + at(box.index_strides), rows, n, plain, stream);
    r += rows;
  }
  return total;
}

// A batch of boxes, prepared: cut into items that threads take in turn. The vectors are kept between batches.
class Batch {
 public:
  // False, and `unknown` says where, when a box is not known.
  bool prepare(const HeBox* boxes, int64_t count, int32_t stores, int64_t* unknown) {
    ready_.clear(), items_.clear();
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!is_known(boxes[i])) return *unknown = i, false;
      const HeBox box = normalised(boxes[i]);
      if (!box.dst && !wants_sums(box)) continue;
      cut(box, static_cast<int64_t>(ready_.size()), items_);
      ready_.push_back(box);
      bytes += box.sizes[0] * box.sizes[1] * box.sizes[2] * box.sizes[3] * dst_width(box.op);
    }
    stream_ = stores == HE_STORES_BY_SIZE ? bytes >= kStreamBytes : stores == HE_STORES_STREAMED;
    plain_ = choose_block(false), block_ = choose_block(stream_);
    next_ = 0;
    return true;
  }

  // One thread's part; returns when no item is left to take.
  void work(uint64_t* sums) {
    for (size_t i = next_.fetch_add(1); i < items_.size(); i = next_.fetch_add(1)) {
      const HeBox& box = ready_[items_[i].box];
      const uint64_t sum = run_item(box, items_[i], plain_, block_);
      for (const int32_t slot : box.slot) {
        if (slot >= 0) __atomic_fetch_add(sums + slot, sum, __ATOMIC_RELAXED);
      }
    }
#if HE_X86
    if (stream_) _mm_sfence();  // streamed stores are visible to other processes before the acknowledgement
#endif
  }

  int64_t size() const { return static_cast<int64_t>(items_.size()); }

 private:
  std::vector<HeBox> ready_;
  std::vector<Item> items_;
  std::atomic<size_t> next_{0};
  bool stream_ = false;
  BlockFn plain_ = nullptr, block_ = nullptr;
};

bool is_open(const HeLane& lane, int64_t base) {
  for (int64_t i = lane.word_bounds[lane.at]; i < lane.word_bounds[lane.at + 1]; ++i) {
    if (__atomic_load_n(lane.words[i], __ATOMIC_ACQUIRE) < base + lane.marks[lane.at]) return false;
  }
  return true;
}

}  // namespace

extern "C" {

// Layout checks for the Python side.
int64_t he_box_bytes(void) { return sizeof(HeBox); }
int64_t he_lane_bytes(void) { return sizeof(HeLane); }
uint64_t he_weight(uint64_t word) { return he::weight(word); }

// Copy, cast and fingerprint `count` boxes with up to `threads` threads. `sums` has one accumulator per slot,
// added to (not cleared); it may be null when no box names a slot. Destinations must not overlap each other
// or any source. `stores`: HE_STORES_STREAMED goes past the caches, HE_STORES_BY_SIZE decides by the bytes of the
// batch. Returns 0, 1 + the position of a box that is not known, or -1 without memory (nothing is then copied).
int64_t he_run_boxes(const HeBox* boxes, int64_t count, uint64_t* sums, int32_t threads, int32_t stores) {
  try {
    Batch batch;
    int64_t unknown = 0;
    if (!batch.prepare(boxes, count, stores, &unknown)) return unknown + 1;
    he::Team(std::min<int64_t>(threads, batch.size()), [&] { batch.work(sums); }).run();
    return 0;
  } catch (const std::exception&) {  // of a vector; it must not reach the caller, who is no C++
    return -1;
  }
}

// Take the steps of all lanes, one of each in turn, as far as their gates allow. Returns 0 when all lanes are at
// their end, 1 when nothing could move for `idle_us` microseconds, 2 on a box that is not known,
// 3 without memory.
int64_t he_run_lanes(HeLane* lanes, int64_t count, int64_t base, uint64_t* sums, int32_t threads, int64_t idle_us) {
  try {
    Batch batch;
    he::Team team(threads, [&] { batch.work(sums); });
    const auto now = [] { return std::chrono::steady_clock::now(); };
    for (auto moved_at = now();;) {
      bool finished = true, moved = false;
      for (HeLane* lane = lanes; lane < lanes + count; ++lane) {
        if (lane->at == lane->steps) continue;
        finished = false;
        if (!is_open(*lane, base)) continue;
        const int64_t begin = lane->box_bounds[lane->at], end = lane->box_bounds[lane->at + 1];
        int64_t unknown = 0;
        if (!batch.prepare(lane->boxes + begin, end - begin, lane->stores, &unknown)) return 2;
        if (batch.size()) team.run();
        ++lane->at;
        __atomic_store_n(lane->signal, base + lane->at, __ATOMIC_RELEASE);
        moved = true;
      }
      if (finished) return 0;
      if (moved) {
        moved_at = now();
      } else if (now() - moved_at > std::chrono::microseconds(idle_us)) {
        return 1;
      } else {
        std::this_thread::yield();
      }
    }
  } catch (const std::exception&) {
    return 3;
  }
}

// Words of a control page shared between processes.
int64_t he_load(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void he_store(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // extern "C"
