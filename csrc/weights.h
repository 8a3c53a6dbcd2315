// Weights in the fingerprint, alike in the CPU library, the CUDA kernel and hybridengine/native.py.
//
// A parameter, its elements in canonical order, is a sequence of 32-bit words: two bfloat16 each, or one float32. Word g has
// the weight R(g / 1024) * P(g % 1024) mod 2^64: a 64-bit mix of the run of 1024 words that it is in, times a 32-bit mix
// of its place in the run. Both are odd, and the places' weights differ from each other. In the inner loop a word then
// costs one 32-bit multiplication by a number from a table, where a mix of each index would cost three 64-bit ones.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define HE_BOTH __host__ __device__
#else
#define HE_BOTH
#endif

namespace he {

constexpr int kRunBits = 10;
constexpr int64_t kRun = int64_t{1} << kRunBits;

// Output of SplitMix64 in state x (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
HE_BOTH constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The finaliser of 32-bit MurmurHash3 (Appleby).
HE_BOTH constexpr uint32_t fmix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return x ^ (x >> 16);
}

HE_BOTH constexpr uint64_t run_weight(uint64_t word) { return splitmix64(word >> kRunBits) | 1; }
HE_BOTH constexpr uint64_t place_weight(uint64_t word) { return fmix32(static_cast<uint32_t>(word & (kRun - 1)) + 1) | 1; }
HE_BOTH constexpr uint64_t weight(uint64_t word) { return run_weight(word) * place_weight(word); }

// What an element of kBytes bytes adds to the fingerprint; `weigh` is weight() or knows its values.
template <int kBytes, typename Weigh>
HE_BOTH inline uint64_t element_term(uint64_t bits, uint64_t index, Weigh&& weigh) {
  if constexpr (kBytes == 8) {
    return (bits & 0xFFFFFFFFu) * weigh(2 * index) + (bits >> 32) * weigh(2 * index + 1);
  } else {
    constexpr uint64_t kPer = 4 / kBytes;
    return (bits << (8 * kBytes * (index % kPer))) * weigh(index / kPer);
  }
}

}  // namespace he
