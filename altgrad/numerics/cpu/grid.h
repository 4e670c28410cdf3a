// What the C++ loops share: a format, its rounding and its scales, and loops over a tensor's elements.
//
// Unlike rounding.py it reads the spacing of values from the exponent bits; every bit agrees.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "definitions.h"  // Python's numbers, which loops.py writes there

// Put before a loop whose elements are independent of each other, though it may write where it reads.
#ifdef __clang__
#define EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH_ALONE _Pragma("GCC ivdep")
#endif

// Fused multiply-adds are instructions here; Clang does not define what GCC does.
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define ALTGRAD_FMA
#endif

// Put before functions that loops over elements call: GCC would leave some calls, and not vectorize those loops.
#define INLINE [[gnu::always_inline]] inline

namespace altgrad {

using torch::stable::Tensor;

constexpr int64_t kGrain = 1 << 17;  // elements per thread, some 30 us: waking another thread takes about as long

// --- the quantization grid -----------------------------------------------------------------------

// A format's look-up, which constants.py makes; without buckets for a float format.
struct LookUp {
  int32_t first = 0, shift = 0, buckets = 0;
  const float *limits = nullptr, *pairs = nullptr;
};

// A format, read from the tensor that constants.py packs and that must outlive it.
struct Grid {
  float max, ulps, spacing, root, zero, target;
  LookUp look_up;

  // first: index of the format's first constant; packed::kSize for the second format of a tensor.
  explicit Grid(const Tensor& constants, int64_t first = 0) {
    const float* c = constants.const_data_ptr<float>() + first;
    max = c[packed::kMax], ulps = c[packed::kUlps], spacing = c[packed::kSpacing];
    root = c[packed::kRoot], zero = c[packed::kZero], target = c[packed::kTarget];
    const int64_t floats = packed::kSize * (has_scale_format(constants) ? 2 : 1);
    if (first == 0 && constants.numel() > floats) {
      const float* table = c + floats;
      look_up.first = static_cast<int32_t>(table[table::kFirst]);
      look_up.shift = static_cast<int32_t>(table[table::kShift]);
      look_up.buckets = static_cast<int32_t>(table[table::kBuckets]);
      look_up.limits = table + table::kTableNumbers;
      look_up.pairs = look_up.limits + table::kLookup;
    }
  }
  // Whether the constants of the scale's format follow those of the format itself.
  static bool has_scale_format(const Tensor& constants) { return constants.numel() % 2 == 0; }
  // 2^-M, from 2^(23 - M) float32 ulps per spacing.
  float per_binade() const { return ulps * 0x1p-23f; }
  // A normal value's code is its float32 bits, shifted, less an offset.
  int shift() const { return std::ilogb(ulps); }
  uint32_t offset() const { return static_cast<uint32_t>(std::ilogb(spacing) + 23 - shift() + 126) << (23 - shift()); }
  float smallest_normal() const { return spacing * static_cast<float>(1 << (23 - shift())); }
};

inline float absolute(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu); }
inline float power_of_two_below(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000u); }

// grid_spacing of rounding.py at |x|; beyond the largest value, the spacing there.
struct Spacing {
  float max, lowest, per_binade;

  explicit Spacing(const Grid& grid) : max(grid.max), lowest(grid.spacing), per_binade(grid.per_binade()) {}

  INLINE float operator()(float x) const {
    const float found = power_of_two_below(std::min(absolute(x), max)) * per_binade;
    return found > lowest ? found : lowest;
  }
};

// a * b + c, where a * b is exact, so that a fused operation gives the same.
inline float exact_product_plus(float a, float b, float c) {
#ifdef ALTGRAD_FMA
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// How an element is scaled. Scale: it is multiplied by `factor`. Moved: the format's values are divided by the scale, a
// power of two, and `lowest` has the bits of their smallest normal value.
struct Scale {
  float factor;
};
struct Moved {
  uint32_t lowest;
};

// Rounds to nearest even with saturation. kAlternating: the format has no mantissa, so the even code alternates with
// the exponent. kClamps: elements may be above the largest value.
template <bool kAlternating, bool kClamps = true>
struct Rounder {
  float max, anchor_per_binade;
  uint32_t lowest, sign, odd;

  explicit Rounder(const Grid& g)
      : max(g.max), anchor_per_binade(kAnchor * g.per_binade()),
        lowest(std::bit_cast<uint32_t>(g.smallest_normal())), sign(std::bit_cast<uint32_t>(g.zero)),
        odd((g.root < 0 ? 1u << 23 : 0) ^ lowest) {}

  Rounder<kAlternating, false> unclamped() const { return Rounder<kAlternating, false>(*this); }

  // Whether an element of at most amax may come out above the largest value. Scales are rounded, by less than half a
  // spacing.
  bool saturates(float amax, float scale) const { return !(amax * scale <= max * (1 + 0x1p-22f)); }

  // Whether elements of at most amax come out the same if the format's values are divided by scale, without clamping:
  // the scale is a power of two that brings nothing beyond the largest value, and neither the smallest normal value nor
  // the anchors leave float32.
  bool can_move(float amax, float scale) const {
    const float smallest = std::bit_cast<float>(lowest) * (1 / scale);
    const bool power_of_two = (std::bit_cast<uint32_t>(scale) & 0x7fffffu) == 0;
    const bool in_float32 = (smallest >= std::numeric_limits<float>::min()) & (amax <= 0x1p100f);
    return power_of_two & in_float32 & !saturates(amax, scale);
  }
  Moved moved(float scale) const { return {std::bit_cast<uint32_t>(std::bit_cast<float>(lowest) * (1 / scale))}; }

  INLINE float operator()(float x) const { return (*this)(x, Scale{1}); }

  template <class P>
  INLINE float operator()(float x, P place) const {
    return std::bit_cast<float>(nearest(x, place) | (std::bit_cast<uint32_t>(x) & sign));
  }

  // Rounds two bfloat16 in a word, which must hold the results.
  template <class P>
  INLINE uint32_t pair(uint32_t x, P low_place, P high_place) const {
    const uint32_t low = nearest(std::bit_cast<float>(x << 16), low_place);
    const uint32_t high = nearest(std::bit_cast<float>(x & 0xffff0000u), high_place);
    return (high | (low >> 16)) | (x & (sign | (sign >> 16)));
  }

 private:
  template <bool, bool>
  friend struct Rounder;
  static constexpr float kAnchor = 0x1.8p23f;

  template <bool kOther>
  explicit Rounder(const Rounder<kAlternating, kOther>& r)
      : max(r.max), anchor_per_binade(r.anchor_per_binade), lowest(r.lowest), sign(r.sign), odd(r.odd) {}

  // Returns the bits of the result, except for the sign of a zero.
  INLINE uint32_t nearest(float x, Scale scale) const {
    x *= scale.factor;
    if constexpr (kClamps) {  // NaN stays
      x = x > max ? max : x;
      x = x < -max ? -max : x;
    }
    return nearest(x, Moved{lowest});
  }

  INLINE uint32_t nearest(float x, Moved grid) const {
    const float binade = std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(x) & 0x7f800000u, grid.lowest));
    // The anchor is 1.5 * 2^23 spacings of the values, so its ulp is that spacing.
    float anchors = anchor_per_binade;
    if constexpr (kAlternating) {  // one spacing more where the even code is below
      constexpr uint32_t kOdd = 1u << 23;
      const bool flipped = ((grid.lowest ^ odd) & kOdd) != 0;
      const float of_odd = flipped ? kAnchor : kAnchor + 1, of_even = flipped ? kAnchor + 1 : kAnchor;
      anchors = (std::bit_cast<uint32_t>(binade) & kOdd) != 0 ? of_odd : of_even;
    }
    const float sum = exact_product_plus(binade, anchors, x);
    return std::bit_cast<uint32_t>(exact_product_plus(-binade, anchors, sum));
  }
};

// Rounds by a look-up, saturating. It has the interface of Rounder; values are never moved to the scale.
struct TableRounder {
  LookUp table;
  int32_t last, mask;

  explicit TableRounder(const Grid& g)
      : table(g.look_up), last(table.first + table.buckets - 1), mask((1 << table.shift) - 1) {}

  TableRounder unclamped() const { return *this; }
  bool saturates(float, float) const { return false; }
  bool can_move(float, float) const { return false; }
  Moved moved(float) const { return {}; }

  INLINE float operator()(float x) const {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    const int32_t key = static_cast<int32_t>((magnitude + static_cast<uint32_t>(mask)) >> table.shift);
    const int32_t behind = static_cast<int32_t>(bits) >> 31 & table.buckets;
    const int32_t bucket = std::min(std::max(key, table.first), last) - table.first + behind;
    const int32_t second = magnitude >= std::bit_cast<uint32_t>(table.limits[bucket]) ? 1 : 0;
    const float found = table.pairs[2 * bucket + second];
    return magnitude > 0x7f800000u ? x : found;
  }
  INLINE float operator()(float x, Scale scale) const { return (*this)(x * scale.factor); }
  INLINE float operator()(float x, Moved) const { return (*this)(x); }

  template <class P>
  INLINE uint32_t pair(uint32_t x, P low_place, P high_place) const {
    const uint32_t low = std::bit_cast<uint32_t>((*this)(std::bit_cast<float>(x << 16), low_place));
    const uint32_t high = std::bit_cast<uint32_t>((*this)(std::bit_cast<float>(x & 0xffff0000u), high_place));
    return (high & 0xffff0000u) | (low >> 16);
  }
};

// Calls run with the format's rounder.
template <class F>
auto with_rounder(const Grid& grid, const F& run) {
  if (grid.look_up.buckets > 0) return run(TableRounder(grid));
  return grid.root == 0 ? run(Rounder<false>(grid)) : run(Rounder<true>(grid));
}

// --- reading and writing -------------------------------------------------------------------------

using bf16 = uint16_t;

inline float load(float x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Values of a format that bfloat16 holds are exact, and so is a quiet NaN.
inline void store_exact(float* to, float x) { *to = x; }
inline void store_exact(bf16* to, float x) { *to = static_cast<bf16>(std::bit_cast<uint32_t>(x) >> 16); }

// To nearest even.
inline void store(float* to, float x) { *to = x; }
INLINE void store(bf16* to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *to = static_cast<bf16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Two neighbours in a word.
template <class T, class U>
constexpr bool kPairs = std::is_same_v<T, bf16> && std::is_same_v<U, bf16>;
inline uint32_t load_pair(const bf16* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}
inline void store_pair(bf16* to, uint32_t pair) { std::memcpy(to, &pair, sizeof pair); }

// Returns |x| as an unsigned number of its own width, which is monotone in |x|, with NaN above infinity.
inline uint32_t order(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
inline uint16_t order(bf16 x) { return x & 0x7fffu; }
inline uint32_t order(uint32_t x) { return x; }  // is one already
// Clang 14 takes std::isfinite(NaN) for true in loops for ARM's SVE.
inline bool is_finite(float x) { return order(x) < 0x7f800000u; }
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

template <class T>
void find_largest_of_columns(const T* x, int64_t rows, int64_t columns, int64_t stride, Order<T>* found) {
  std::fill_n(found, columns, Order<T>{0});
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    EACH_ALONE
    for (int64_t i = 0; i < columns; ++i) found[i] = std::max(found[i], order(x[i]));
  }
}

// --- scales --------------------------------------------------------------------------------------

// How amax becomes a scale: the ratio as float32, or a power of two. The power's exponent is the exponent of the target
// less that of amax, and one less if the mantissa of amax is beyond a limit. Rules differ only in the limit, so loops
// over scales do not branch on them.
struct ScaleRule {
  bool float32;
  double target;
  int64_t exponent = 0, limit = 0;

  explicit ScaleRule(double target) : float32(true), target(target) {}
  ScaleRule(int64_t rule, const Grid& grid) : float32(rule == scale_rule::kFloat32), target(grid.target) {
    const uint64_t bits = std::bit_cast<uint64_t>(target);
    exponent = static_cast<int64_t>(bits >> 52);
    // Rule even: amax plus half a spacing reaches the next power of two, whose mantissa is even.
    const double half_spacing = std::ldexp(Spacing(grid)(grid.target), static_cast<int>(1022 - exponent));
    limit = rule == scale_rule::kCeil    ? 0
            : rule == scale_rule::kRceil ? static_cast<int64_t>(bits & kMantissa)
            : rule == scale_rule::kEven  ? static_cast<int64_t>((1 - half_spacing) * (kMantissa + 1)) - 1
                                         : static_cast<int64_t>(kMantissa);
  }

  static constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
};

// compute_scale of scaling.py, without a branch on amax, so that loops are vectorized.
INLINE float scale_of(float amax, const ScaleRule& rule) {
  float scale;
  if (!rule.float32) {
    const uint64_t bits = std::bit_cast<uint64_t>(static_cast<double>(amax));
    const int64_t beyond = static_cast<int64_t>(bits & ScaleRule::kMantissa) > rule.limit ? 1 : 0;
    const int64_t exponent = rule.exponent - static_cast<int64_t>(bits >> 52) - beyond;
    const int64_t bounded = std::min<int64_t>(std::max<int64_t>(exponent, -126), 127);
    scale = std::bit_cast<float>(static_cast<uint32_t>(bounded + 127) << 23);
  } else {
    const double ratio = rule.target / static_cast<double>(amax);
    scale = static_cast<float>(std::min(std::max(ratio, 0x1p-126), 0x1p127));
  }
  const bool usable = (amax > 0) & (amax < std::numeric_limits<float>::infinity());
  const float other = amax <= 0 ? 1.0f : std::numeric_limits<float>::quiet_NaN();
  return usable ? scale : other;
}

// --- loops ----------------------------------------------------------------------------------------

template <class F>
void over(int64_t count, int64_t elements_each, const F& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  torch::stable::parallel_for(0, count, grain, run);
}

// Returns the largest result of run(begin, end).
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

// Rounds stochastically: |x| goes up if the random number is below its distance from the lower value, in spacings. |x|
// is first clamped to the largest value. NaN stays NaN.
struct ByChance {
  static constexpr bool kDraws = true;
  float max, zero;
  uint32_t lowest, mantissa;  // bits of the smallest normal value; M in a float32's exponent field

  explicit ByChance(const Grid& grid)
      : max(grid.max), zero(grid.zero), lowest(std::bit_cast<uint32_t>(grid.smallest_normal())),
        mantissa(static_cast<uint32_t>(23 - grid.shift()) << 23) {}

  INLINE float operator()(float x, float random) const {
    constexpr uint32_t kOneOver = 254u << 23;  // minus the bits of a power of two: bits of its reciprocal
    const float magnitude = std::min(absolute(x), max);
    const uint32_t spacing = std::max(std::bit_cast<uint32_t>(magnitude) & 0x7f800000u, lowest) - mantissa;
    const float steps = magnitude * std::bit_cast<float>(kOneOver - spacing), below = std::floor(steps);
    const float up = random < steps - below ? 1.0f : 0.0f;
    return std::copysign((below + up) * std::bit_cast<float>(spacing), x) + zero;
  }
};

}  // namespace altgrad
