// Scales of groups of elements, of one level or two: scaling.py and two_level.py in loops.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "grid.h"

namespace altgrad {

// For each group: `factor` multiplies its elements before rounding. Rounded values are then multiplied by `back` (two
// levels), divided by it (one level that values do not keep), or left as they are.
struct Factors {
  std::vector<float> factor, back;

  explicit Factors(int64_t n) : factor(n), back(n) {}
};

// Computes scales of one level, or of two: a scale per group in its own format, under a float32 scale of the tensor.
class Scales {
 public:
  enum class Back { kNone, kTimes, kOver };

  Scales(const Tensor& constants, int64_t rule, bool taken_off)
      : grid_(constants), own_(Grid::has_scale_format(constants) ? Grid(constants, packed::kSize) : grid_),
        rule_(rule, grid_), two_level_(rule >= scale_rule::kTwoLevel), choice_(rule == scale_rule::kFourOverSix),
        back_(two_level_ ? Back::kTimes : taken_off ? Back::kOver : Back::kNone) {
    target_ = grid_.target, top_ = own_.target;
    lower_ = std::ldexp(1.0, std::ilogb(target_ * (1 - 0x1p-52)));
  }

  // For MS-EDEN: lets a block's largest magnitude exceed the largest value, and leaves room above the block scales.
  void clip(double clip, double room) {
    target_ /= clip, top_ = std::ldexp(1.0, std::ilogb(top_ * (1 - 0x1p-52))) * room;
  }

  const Grid& grid() const { return grid_; }
  const Grid& own() const { return own_; }
  bool two_level() const { return two_level_; }
  bool choice() const { return choice_; }
  Back back() const { return back_; }
  float whole() const { return whole_; }

  // Sets the scale of the tensor, for two levels.
  void set_whole(float amax) {
    double top = top_;
    if (choice_) top = std::ldexp(1.0, std::ilogb(top * lower_ / target_));
    const float scale = scale_of(amax, ScaleRule(target_ * top));
    whole_ = std::min(std::max(scale, 0x1p-126f * own_.target), 0x1p127f * own_.spacing);
  }

  // Computes the factors of groups with these amaxes.
  void of(const float* amax, Factors& factors) const {
    if (two_level_) {
      at_target(amax, target_, factors);
    } else {
      for (float& factor : factors.factor) factor = scale_of(*amax++, rule_);
      factors.back = factors.factor;
    }
  }
  // Computes the second choice of 4/6.
  void lower(const float* amax, Factors& factors) const { at_target(amax, lower_, factors); }

 private:
  Grid grid_, own_;
  ScaleRule rule_;
  bool two_level_, choice_;
  Back back_;
  double target_, lower_, top_;
  float whole_ = 1;

  void at_target(const float* amax, double target, Factors& factors) const {
    const int64_t n = static_cast<int64_t>(factors.factor.size());
    float *factor = factors.factor.data(), *back = factors.back.data();
    own_.root == 0 ? at_target(amax, n, target, factor, back, Rounder<false>(own_))
                   : at_target(amax, n, target, factor, back, Rounder<true>(own_));
  }

  template <class R>
  void at_target(const float* amax, int64_t n, double target, float* factor, float* back, const R round) const {
    const double whole = whole_;
    const float top = own_.target, lowest = own_.spacing;
    EACH_ALONE
    for (int64_t i = 0; i < n; ++i) {
      const float wanted = static_cast<float>(static_cast<double>(amax[i]) * whole / target);
      const float scale = std::max(round(std::min(wanted, top)), lowest);  // NaN stays
      factor[i] = static_cast<float>(whole / static_cast<double>(scale)), back[i] = scale;
    }
  }
};

}  // namespace altgrad
