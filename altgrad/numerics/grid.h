// What the loops in C++ have in common: a format, its rounding and its scales, and loops over a tensor's elements.
//
// The way to the spacing of the grid differs from rounding.py, as the exponent bits are at hand here; every bit agrees.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// Before a loop whose elements do not depend on each other, though it may write where it reads.
#ifdef __clang__
#define EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH_ALONE _Pragma("GCC ivdep")
#endif

namespace altgrad {

using torch::stable::Tensor;

constexpr int64_t kGrain = 1 << 17;  // elements per thread, some 30 us: waking another one takes about as long

// --- the grid ------------------------------------------------------------------------------------

// Packed as in constants.py.
struct Grid {
  float max, ulps, spacing, root, zero, target;

  explicit Grid(const Tensor& packed) {
    const float* c = packed.const_data_ptr<float>();
    max = c[0], ulps = c[1], spacing = c[2], root = c[4], zero = c[5], target = c[6];
  }
  // 2^-M, from 2^(23 - M) float32 ulps per spacing.
  float per_binade() const { return ulps * 0x1p-23f; }
  // A normal value's code is its float32 bits, shifted, less an offset.
  int shift() const { return std::ilogb(ulps); }
  uint32_t offset() const { return static_cast<uint32_t>(std::ilogb(spacing) + 23 - shift() + 126) << (23 - shift()); }
  float smallest_normal() const { return spacing * static_cast<float>(1 << (23 - shift())); }
};

// Nearest-even with saturation. kAlternating: the format has no mantissa, so that the even code alternates
// with the exponent.
template <bool kAlternating>
struct Rounder {
  float max, zero, lowest, highest, per_binade;
  uint32_t odd;

  explicit Rounder(const Grid& g)
      : max(g.max), zero(g.zero), lowest(g.spacing * kAnchor), highest(std::max(lowest, binade_of(g.max) * g.per_binade() * kAnchor)),
        per_binade(g.per_binade() * kAnchor), odd(g.root < 0 ? 0 : 1) {}

  float operator()(float x) const {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const float absolute = std::bit_cast<float>(bits & 0x7fffffffu);
    const float magnitude = absolute > max ? max : absolute;  // NaN stays
    float anchor = binade_of(x) * per_binade;  // 2^23 spacings of the grid and half as many
    anchor = anchor > lowest ? anchor : lowest;
    anchor = anchor < highest ? anchor : highest;
    if constexpr (kAlternating) {  // one spacing more where the even code is below: a last place of the anchor
      const uint32_t anchor_bits = std::bit_cast<uint32_t>(anchor);
      anchor = std::bit_cast<float>(anchor_bits + (((anchor_bits >> 23) ^ odd) & 1));
    }
    const float rounded = (magnitude + anchor) - anchor;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) | (bits & 0x80000000u)) + zero;
  }

 private:
  static constexpr float kAnchor = 0x1.8p23f;

  static float binade_of(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000u); }
};

// --- reading and writing -------------------------------------------------------------------------

using bf16 = uint16_t;

inline float load(float x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// What is on the grid of a format that bfloat16 holds is exact, and so is a quiet NaN.
inline void store_exact(float* to, float x) { *to = x; }
inline void store_exact(bf16* to, float x) { *to = static_cast<bf16>(std::bit_cast<uint32_t>(x) >> 16); }

// To nearest even.
inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *to = static_cast<bf16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// |x| as an unsigned number of its own width: monotone in |x|, and NaN above infinity.
inline uint32_t order(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
inline uint16_t order(bf16 x) { return x & 0x7fffu; }
inline float from_order(uint32_t x) { return std::bit_cast<float>(x); }
inline float from_order(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
template <class T>
using Order = decltype(order(T{}));

template <class T>
Order<T> largest(const T* x, int64_t n) {
  Order<T> found = 0;
  for (int64_t i = 0; i < n; ++i) found = std::max(found, order(x[i]));
  return found;
}

// --- scales --------------------------------------------------------------------------------------

// compute_scale of scaling.py: fp32, or a power of two rounded down. Without a branch on amax, so that loops over it
// are vectorized.
inline float scale_of(float amax, float target, bool pow2) {
  float scale;
  if (pow2) {
    // The exponent of the ratio is the difference of theirs, one less where the dividend has the smaller mantissa.
    const uint64_t dividend = std::bit_cast<uint64_t>(static_cast<double>(target));
    const uint64_t divisor = std::bit_cast<uint64_t>(static_cast<double>(amax));
    constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
    const int64_t less = (dividend & kMantissa) < (divisor & kMantissa) ? 1 : 0;
    const int64_t exponent = static_cast<int64_t>(dividend >> 52) - static_cast<int64_t>(divisor >> 52) - less;
    const int64_t bounded = std::min<int64_t>(std::max<int64_t>(exponent, -126), 127);
    scale = std::bit_cast<float>(static_cast<uint32_t>(bounded + 127) << 23);
  } else {
    const double ratio = static_cast<double>(target) / static_cast<double>(amax);
    scale = static_cast<float>(std::min(std::max(ratio, 0x1p-126), 0x1p127));
  }
  const bool usable = (amax > 0) & (amax < std::numeric_limits<float>::infinity());
  return usable ? scale : 1.0f;
}

// --- loops ----------------------------------------------------------------------------------------

template <class F>
void over(int64_t count, int64_t elements_each, const F& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  torch::stable::parallel_for(0, count, grain, run);
}

// The largest of what run(begin, end) returns.
template <class F>
auto largest_over(int64_t n, const F& run) {
  using Found = decltype(run(int64_t{0}, int64_t{0}));
  std::atomic<Found> found{0};
  over(n, 1, [&](int64_t begin, int64_t end) {
    const Found mine = run(begin, end);
    for (Found seen = found; seen < mine && !found.compare_exchange_weak(seen, mine);) {
    }
  });
  return found.load();
}

template <class T>
float amax_of(const T* x, int64_t n) {
  return from_order(largest_over(n, [&](int64_t begin, int64_t end) { return largest(x + begin, end - begin); }));
}

}  // namespace altgrad
