// Operands with any groups of elements under a scale, with scales of one or two levels, to nearest or by chance.
//
// For what the loops of kernels.cpp do not do in one pass: two passes, over a grid of groups that are `high` rows and
// `wide` columns large. operand_definition.py and two_level.py define it; every bit agrees.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "grid.h"
#include "philox.h"

namespace altgrad {

// What the elements of a group are multiplied with before they are rounded, and what their values are afterwards: in
// scales of two levels, to which they belong; of one level that is taken off again, divided by.
struct Group {
  float factor, back;
};

// One level, or two: a scale per group in a format of its own, under one of the tensor, that brings amax to one target.
class Scales {
 public:
  enum class Back { kNone, kTimes, kOver };

  Scales(const Tensor& constants, int64_t rule, bool taken_off)
      : grid_(constants), own_(constants.numel() > packed::kSize ? Grid(constants, packed::kSize) : grid_),
        rule_(rule, grid_), two_level_(rule >= scale_rule::kTwoLevel), choice_(rule == scale_rule::kFourOverSix),
        back_(two_level_ ? Back::kTimes : taken_off ? Back::kOver : Back::kNone) {
    target_ = grid_.target;
    lower_ = std::ldexp(1.0, std::ilogb(target_ * (1 - 0x1p-52)));
  }

  const Grid& grid() const { return grid_; }
  bool two_level() const { return two_level_; }
  bool choice() const { return choice_; }
  Back back() const { return back_; }
  float whole() const { return whole_; }

  // The scale of the tensor, of two levels.
  void set_whole(float amax) {
    double top = own_.target;
    if (choice_) top = std::ldexp(1.0, std::ilogb(top * lower_ / target_));
    const bool usable = (amax > 0) & (amax < std::numeric_limits<float>::infinity());
    const double ratio = target_ * top / static_cast<double>(amax);
    const float scale = usable ? static_cast<float>(std::min(std::max(ratio, 0x1p-126), 0x1p127)) : 1.0f;
    whole_ = std::min(std::max(scale, 0x1p-126f * own_.target), 0x1p127f * own_.spacing);
  }

  // Of groups with these amaxes.
  void of(const float* amax, int64_t n, Group* groups) const {
    if (two_level_) {
      at_target(amax, n, target_, groups);
    } else {
      for (int64_t i = 0; i < n; ++i) groups[i].factor = groups[i].back = scale_of(amax[i], rule_);
    }
  }
  // The second choice.
  void lower(const float* amax, int64_t n, Group* groups) const { at_target(amax, n, lower_, groups); }

 private:
  Grid grid_, own_;
  ScaleRule rule_;
  bool two_level_, choice_;
  Back back_;
  double target_, lower_;
  float whole_ = 1;

  void at_target(const float* amax, int64_t n, double target, Group* groups) const {
    own_.root == 0 ? at_target(amax, n, target, groups, Rounder<false>(own_))
                   : at_target(amax, n, target, groups, Rounder<true>(own_));
  }

  template <class R>
  void at_target(const float* amax, int64_t n, double target, Group* groups, const R round) const {
    const double whole = whole_;
    const float top = own_.target, lowest = own_.spacing;
    EACH_ALONE
    for (int64_t i = 0; i < n; ++i) {
      const float wanted = static_cast<float>(static_cast<double>(amax[i]) * whole / target);
      const float bounded = amax[i] < std::numeric_limits<float>::infinity() ? std::min(wanted, top) : top;
      const float scale = std::max(round(bounded), lowest);
      groups[i] = {static_cast<float>(whole / static_cast<double>(scale)), scale};
    }
  }
};

// --- rounding an element ---------------------------------------------------------------------------------

// To one of the two neighbours, up where the random number lies below the share of the way.
struct ByChance {
  static constexpr bool kDraws = true;
  Spacing spacing_of;
  float max, zero;

  explicit ByChance(const Grid& grid) : spacing_of(grid), max(grid.max), zero(grid.zero) {}

  float operator()(float x, float random) const {
    const float magnitude = std::min(absolute(x), max);
    const float spacing = spacing_of(magnitude);
    const float steps = magnitude / spacing, below = std::floor(steps);
    const float up = random < steps - below ? 1.0f : 0.0f;
    const float rounded = std::min((below + up) * spacing, max);
    const float found = std::copysign(rounded, x) + zero;
    return x != x ? x : found;
  }
};

template <class R>
struct ToNearest {
  static constexpr bool kDraws = false;
  R round;
  float operator()(float x, float) const { return round(x); }
};

// Numbers are there if they are asked for: without a branch in the loops.
template <class R>
float drawn(const float* random, int64_t i) {
  if constexpr (R::kDraws) return random[i];
  return 0;
}

template <Scales::Back kBack>
float taken_back(float value, float back) {
  if constexpr (kBack == Scales::Back::kTimes) return value * back;
  if constexpr (kBack == Scales::Back::kOver) return value / back;
  return value;
}

// All of one group, or each column with its own.
template <Scales::Back kBack, class T, class U, class R>
void round_group(const T* x, U* y, int64_t n, Group group, const float* random, const R round) {
  EACH_ALONE
  for (int64_t i = 0; i < n; ++i) {
    store(y + i, taken_back<kBack>(round(load(x[i]) * group.factor, drawn<R>(random, i)), group.back));
  }
}

template <Scales::Back kBack, class T, class U, class R>
void round_columns_of(const T* x, U* y, int64_t n, const float* factor, const float* back, const float* random,
                      const R round) {
  EACH_ALONE
  for (int64_t i = 0; i < n; ++i) {
    store(y + i, taken_back<kBack>(round(load(x[i]) * factor[i], drawn<R>(random, i)), back[i]));
  }
}

// --- the whole operand ---------------------------------------------------------------------------------

// Groups of `high` x `wide` elements of a matrix; those at its ends may be smaller.
struct Groups {
  int64_t rows, columns, high, wide;

  int64_t down() const { return (rows + high - 1) / high; }
  int64_t across() const { return (columns + wide - 1) / wide; }
};

template <class T>
void group_amaxes(const T* x, const Groups& g, float* amaxes) {
  const int64_t across = g.across();
  over(g.down(), g.high * g.columns, [&](int64_t begin, int64_t end) {
    std::vector<Order<T>> found(g.columns);
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t top = strip * g.high, rows = std::min(g.high, g.rows - top);
      const T* from = x + top * g.columns;
      float* to = amaxes + strip * across;
      if (rows > 1) {
        find_largest_of_columns(from, rows, g.columns, g.columns, found.data());
        for (int64_t i = 0; i < across; ++i) {
          const int64_t left = i * g.wide, n = std::min(g.wide, g.columns - left);
          to[i] = from_order(*std::max_element(found.begin() + left, found.begin() + left + n));
        }
      } else {
        for (int64_t i = 0; i < across; ++i) {
          const int64_t left = i * g.wide;
          to[i] = from_order(largest(from + left, std::min(g.wide, g.columns - left)));
        }
      }
    }
  });
}

// Sums of neighbours as a tree: both halves of the next power of two are added, and so on.
inline void add_halves(float* x, int64_t n, int64_t step, int64_t count) {
  for (int64_t half = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))) / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half && i + half < n; ++i) {
      float* low = x + i * step;
      const float* high = x + (i + half) * step;
      EACH_ALONE
      for (int64_t j = 0; j < count; ++j) low[j] += high[j];
    }
    n = std::min(n, half);
  }
}

template <class T, class R, class S>
void square_errors(const T* x, float* errors, int64_t n, const float* factor, const float* back, const S step,
                   const R round) {
  EACH_ALONE
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = load(x[i]) * factor[i * step];
    const float off = (round(scaled) - scaled) * back[i * step];
    errors[i] = off * off;
  }
}

// One strip of groups, whose scales are chosen between two by the squared error.
template <class T, class R>
void choose_groups(const T* x, int64_t rows, const Groups& g, const Scales& scales, const float* amaxes, Group* groups,
                   const R& round, std::vector<float>& errors, std::vector<Group>& others) {
  const int64_t across = g.across();
  const std::integral_constant<int64_t, 0> for_all{};
  const std::integral_constant<int64_t, 1> one_each{};
  std::vector<float> factor(across), back(across);
  errors.resize(2 * rows * g.columns);
  others.resize(across);
  scales.lower(amaxes, across, others.data());
  for (int choice = 0; choice < 2; ++choice) {
    const Group* tried = choice == 0 ? groups : others.data();
    float* error = errors.data() + choice * rows * g.columns;
    for (int64_t i = 0; i < across; ++i) factor[i] = tried[i].factor, back[i] = tried[i].back;
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + row * g.columns;
      float* to = error + row * g.columns;
      if (g.wide == 1) {
        square_errors(from, to, g.columns, factor.data(), back.data(), one_each, round);
        continue;
      }
      for (int64_t i = 0, left = 0; i < across; ++i, left += g.wide) {
        const int64_t n = std::min(g.wide, g.columns - left);
        square_errors(from + left, to + left, n, &factor[i], &back[i], for_all, round);
      }
    }
    add_halves(error, rows, g.columns, g.columns);
    if (g.wide > 1) {
      for (int64_t i = 0; i < across; ++i) {
        const int64_t left = i * g.wide;
        add_halves(error + left, std::min(g.wide, g.columns - left), 1, 1);
      }
    }
  }
  const float *first = errors.data(), *second = errors.data() + rows * g.columns;
  for (int64_t i = 0; i < across; ++i) {
    if (second[i * g.wide] < first[i * g.wide]) groups[i] = others[i];
  }
}

// Random numbers of a part of a row.
class Numbers {
 public:
  Numbers(const Stream* stream, int64_t first) : stream_(stream), first_(first) {}

  const float* at(int64_t place, int64_t n) {
    if (stream_ == nullptr) return nullptr;
    const int64_t start = first_ + place, skipped = start % Stream::kRow;
    buffer_.resize(n + 2 * Stream::kRow);
    stream_->uniform(start - skipped, n + skipped, buffer_.data());
    return buffer_.data() + skipped;
  }

 private:
  const Stream* stream_;
  int64_t first_;
  std::vector<float> buffer_;
};

template <Scales::Back kBack, class T, class U, class R>
void round_groups(const T* x, U* y, const Groups& g, const float* amaxes, const Scales& scales, const Stream* stream,
                  int64_t first, float* factors, const R& round) {
  const int64_t across = g.across();
  over(g.down(), g.high * g.columns, [&](int64_t begin, int64_t end) {
    std::vector<Group> groups(across), others;
    std::vector<float> errors, factor(g.wide == 1 ? across : 0), back(g.wide == 1 ? across : 0);
    Numbers numbers(stream, first);
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t top = strip * g.high, rows = std::min(g.high, g.rows - top);
      scales.of(amaxes + strip * across, across, groups.data());
      if (scales.choice()) {
        auto nearest = [&](const auto& rounder) {
          choose_groups(x + top * g.columns, rows, g, scales, amaxes + strip * across, groups.data(), rounder, errors,
                        others);
        };
        scales.grid().root == 0 ? nearest(Rounder<false>(scales.grid())) : nearest(Rounder<true>(scales.grid()));
      }
      if (factors != nullptr) {
        for (int64_t i = 0; i < across; ++i) factors[strip * across + i] = groups[i].factor;
      }
      if (g.wide == 1) {
        for (int64_t i = 0; i < across; ++i) factor[i] = groups[i].factor, back[i] = groups[i].back;
      }
      for (int64_t row = top; row < top + rows; ++row) {
        const int64_t place = row * g.columns;
        const float* random = numbers.at(place, g.columns);
        if (g.wide == 1) {
          round_columns_of<kBack>(x + place, y + place, g.columns, factor.data(), back.data(), random, round);
          continue;
        }
        for (int64_t i = 0; i < across; ++i) {
          const int64_t left = i * g.wide, n = std::min(g.wide, g.columns - left);
          round_group<kBack>(x + place + left, y + place + left, n, groups[i],
                             random == nullptr ? nullptr : random + left, round);
        }
      }
    }
  });
}

}  // namespace altgrad
