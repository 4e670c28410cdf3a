// random.py in loops: the uniform numbers of a stream, Philox4x32-10 over its places.

#pragma once

#include <cstdint>

#include "definitions.h"

namespace altgrad {

// The key is 0: streams differ in their counters alone.
struct Stream {
  uint32_t seed, tensor, step;

  static constexpr int64_t kRow = 4 * philox::kLanes;  // places of one block per lane

  // Writes the numbers for places first to first + n, and for the rest of the last row; first is where a row begins.
  void uniform(int64_t first, int64_t n, float* __restrict out) const {
    for (int64_t place = 0; place < n; place += kRow) {
      row(static_cast<uint32_t>((first + place) / 4), out + place);
    }
  }

 private:
  // A word lies in the lower half of 64 bits and the upper half is left as it comes, so that a vectorized loop neither
  // widens nor packs between the rounds.
  void row(uint32_t block, float* __restrict out) const {
    constexpr uint64_t kWord = 0xffffffffu;
    for (uint32_t lane = 0; lane < philox::kLanes; ++lane) {
      uint64_t c0 = block + lane, c1 = step, c2 = tensor, c3 = seed;
      uint32_t k0 = 0, k1 = 0;
#pragma GCC unroll 10
      for (unsigned round = 0; round < philox::kRounds; ++round) {
        const uint64_t p0 = (c0 & kWord) * philox::kMultiplier0, p1 = (c2 & kWord) * philox::kMultiplier1;
        c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0;
        k0 += philox::kWeyl0, k1 += philox::kWeyl1;
      }
      out[lane] = of(static_cast<uint32_t>(c0)), out[philox::kLanes + lane] = of(static_cast<uint32_t>(c1));
      out[2 * philox::kLanes + lane] = of(static_cast<uint32_t>(c2));
      out[3 * philox::kLanes + lane] = of(static_cast<uint32_t>(c3));
    }
  }

  // An odd multiple of 2^-24 from a word's upper bits.
  static float of(uint32_t word) {
    return static_cast<float>(static_cast<int32_t>((word >> (32 - philox::kBits)) * 2 + 1)) * 0x1p-24f;
  }
};

}  // namespace altgrad
