// The box: one strided rectangle to copy, cast or fingerprint. Shared by the CPU and the CUDA kernels and
// mirrored field by field by BOX_DTYPE in hybridengine/native.py (sizes are compared when the library is loaded).
//
// Plain C layout, raw addresses, no torch headers: the library does not depend on torch's ABI, compiles in
// a few seconds and one table can be built once and replayed at every weight sync.
#pragma once

#include <stdint.h>

#define HE_MAX_DIMS 4

// What happens to an element on its way; COPYn moves n-byte words unchanged.
enum HeOp { HE_COPY1 = 0, HE_COPY2 = 1, HE_COPY4 = 2, HE_COPY8 = 3, HE_F32_TO_BF16 = 4 };

// Whether what the CPU copy writes stays in the caches.
enum HeStores { HE_STORES_BY_SIZE = 0, HE_STORES_STREAMED = 1 };

struct HeBox {
  uint64_t src;                        // byte address of the first element read
  uint64_t dst;                        // byte address of the first element written; 0 = fingerprint only
  uint64_t tee;                        // with HE_F32_TO_BF16: byte address of a dense copy of what is written; 0 = none
  int64_t sizes[HE_MAX_DIMS];          // row major, leading dimensions padded with 1
  int64_t src_strides[HE_MAX_DIMS];    // in source elements
  int64_t dst_strides[HE_MAX_DIMS];    // in destination elements
  int64_t index;                       // canonical flat index of the first element
  int64_t index_strides[HE_MAX_DIMS];  // step of the canonical flat index along each dimension
  int32_t slot[2];                     // accumulators the fingerprint is added to; -1 = none
  int32_t op;                          // HeOp
  int32_t reserved;
};

// Steps taken in order by one rank of several that share memory. Step i runs boxes[box_bounds[i]..box_bounds[i + 1])
// once every word in words[word_bounds[i]..word_bounds[i + 1]) has reached base + marks[i]; then base + i + 1 is
// stored in *signal. `base` belongs to the run. Mirrored by native.LaneRow.
struct HeLane {
  const struct HeBox* boxes;
  const int64_t* box_bounds;
  const int64_t* const* words;
  const int64_t* word_bounds;
  const int64_t* marks;
  int64_t* signal;
  int64_t steps;
  int64_t at;  // the next step
  int64_t stores;
};

// Fingerprint of a canonical parameter: sum over g of word_g * weight(g) mod 2^64, word_g the g-th 32 bits of the whole
// parameter in row-major order, little-endian; weights.h.
