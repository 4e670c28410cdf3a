// Random numbers of rounding.py in loops: the uniform numbers of a stream, Philox4x32-10 over its places.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "definitions.h"

namespace altgrad {

// The key is 0: streams differ only in their counters.
struct Stream {
  uint32_t seed, tensor, step;

  static Stream of(const int64_t* numbers) {
    return {static_cast<uint32_t>(numbers[0]), static_cast<uint32_t>(numbers[1]), static_cast<uint32_t>(numbers[2])};
  }

  static constexpr int64_t kRow = 4 * philox::kLanes;  // places of one block per lane

  // Writes the numbers of n places from `first` on, where a row begins, and of the rest of the last row.
  void uniform(int64_t first, int64_t n, float* __restrict out) const { write(first, n, out, number); }

  // Writes 1 or -1 by the words' lowest bits; places as in `uniform`.
  void signs(int64_t first, int64_t n, float* __restrict out) const {
    write(first, n, out, [](uint32_t word) { return word & 1 ? -1.0f : 1.0f; });
  }

 private:
  // Returns an odd multiple of 2^-24, from a word's upper bits taken as the mantissa of a float32 from 1 to 2.
  static float number(uint32_t word) {
    return std::bit_cast<float>((word >> (32 - philox::kBits)) | 0x3f800000u) - (1 - 0x1p-24f);
  }

  template <class F>
  void write(int64_t first, int64_t n, float* __restrict out, const F& of) const {
    for (int64_t place = 0; place < n; place += kRow) {
      row(static_cast<uint32_t>((first + place) / 4), out + place, of);
    }
  }

  // Each word is the lower half of 64 bits, and the upper half is ignored, so that rounds need no widening or packing.
#if defined(__AVX512F__)
  static constexpr int kWords = 8;
#elif defined(__AVX2__)
  static constexpr int kWords = 4;
#else
  static constexpr int kWords = 2;
#endif
  using Words = uint64_t __attribute__((vector_size(8 * kWords)));

  // Multiplies the lower halves, in one instruction: GCC 12 would make some ten of shifts and sums.
  static Words product(Words x, Words y) {
#if defined(__AVX512F__)
    return reinterpret_cast<Words>(_mm512_mul_epu32(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#elif defined(__AVX2__)
    return reinterpret_cast<Words>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
#elif defined(__SSE2__)
    return reinterpret_cast<Words>(_mm_mul_epu32(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(y)));
#else
    return (x & 0xffffffffu) * (y & 0xffffffffu);
#endif
  }

  // Only the first word of the counter differs between lanes, so half of the first two rounds is computed beforehand.
  template <class F>
  void row(uint32_t block, float* __restrict out, const F& of) const {
    constexpr int kGroups = philox::kLanes / kWords;  // independent of each other, as each waits for its products
    const Words zero{}, multiplier0 = zero + philox::kMultiplier0, multiplier1 = zero + philox::kMultiplier1;
    const uint64_t first = uint64_t{tensor} * philox::kMultiplier1, at = static_cast<uint32_t>(first >> 32) ^ step;
    const uint64_t second = at * philox::kMultiplier0;
    uint32_t k0 = philox::kWeyl0, k1 = philox::kWeyl1;
    Words c[4][kGroups];
    for (int group = 0; group < kGroups; ++group) {
      Words lanes;
      for (int i = 0; i < kWords; ++i) lanes[i] = block + static_cast<uint32_t>(group * kWords + i);
      const Words p0 = product(lanes, multiplier0), p1 = product((p0 >> 32) ^ seed, multiplier1);
      c[0][group] = (p1 >> 32) ^ (first ^ k0), c[1][group] = p1;
      c[2][group] = p0 ^ ((second >> 32) ^ k1), c[3][group] = zero + second;
    }
#pragma GCC unroll 8
    for (unsigned round = 2; round < philox::kRounds; ++round) {
      k0 += philox::kWeyl0, k1 += philox::kWeyl1;
#pragma GCC unroll 8
      for (int group = 0; group < kGroups; ++group) {
        const Words p0 = product(c[0][group], multiplier0), p1 = product(c[2][group], multiplier1);
        c[0][group] = (p1 >> 32) ^ c[1][group] ^ k0, c[1][group] = p1;
        c[2][group] = (p0 >> 32) ^ c[3][group] ^ k1, c[3][group] = p0;
      }
    }
    uint64_t words[kRow];
    std::memcpy(words, c, sizeof words);
    for (int64_t i = 0; i < kRow; ++i) out[i] = of(static_cast<uint32_t>(words[i]));
  }
};

}  // namespace altgrad
