// Host-side preparation of boxes, shared by the CPU and the CUDA library.
#pragma once

#include <utility>

#include "boxes.h"

namespace he {

inline int64_t src_width(int32_t op) { return op == HE_F32_TO_BF16 ? 4 : int64_t{1} << op; }
inline int64_t dst_width(int32_t op) { return op == HE_F32_TO_BF16 ? 2 : int64_t{1} << op; }
inline bool is_known(const HeBox& box) {
  return box.op >= HE_COPY1 && box.op <= HE_F32_TO_BF16 && (!box.tee || (box.op == HE_F32_TO_BF16 && box.dst));
}
inline bool wants_sums(const HeBox& box) { return box.slot[0] >= 0 || box.slot[1] >= 0; }

// Merge neighbouring dimensions that are one run in source, destination and canonical index alike, and put the
// dimension that the destination stores contiguously last (not where the order of a dense second copy depends on it).
inline HeBox normalised(HeBox box) {
  const bool sums = wants_sums(box);
  const auto swap_dims = [&](int a, int b) {
    std::swap(box.sizes[a], box.sizes[b]);
    std::swap(box.src_strides[a], box.src_strides[b]);
    std::swap(box.dst_strides[a], box.dst_strides[b]);
    std::swap(box.index_strides[a], box.index_strides[b]);
  };
  const int last = HE_MAX_DIMS - 1;
  const auto* order = box.dst ? box.dst_strides : box.src_strides;
  for (int d = last - 1; d >= 0 && !box.tee; --d) {
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

}  // namespace he
