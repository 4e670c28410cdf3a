// Operands with a scale per group of any shape, of one or two levels, rounded to nearest or stochastically.
//
// Two passes over groups of `high` rows and `wide` columns make the operands that blocks.h and tensors.h cannot make in
// one pass. operand_definition.py and two_level.py define the results; every bit agrees.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "philox.h"
#include "two_level.h"

namespace altgrad {

// --- rounding an element ---------------------------------------------------------------------------------

template <class R>
struct ToNearest {
  static constexpr bool kDraws = false;
  R round;
  INLINE float operator()(float x, float) const { return round(x); }
};
template <class R>
ToNearest(R) -> ToNearest<R>;  // which Clang does not find by itself before version 17

// Returns the i-th random number if R draws any, without a branch in the loops.
template <class R>
INLINE float drawn(const float* random, int64_t i) {
  if constexpr (R::kDraws) return random[i];
  return 0;
}

template <Scales::Back kBack>
INLINE float taken_back(float value, float back) {
  if constexpr (kBack == Scales::Back::kTimes) return value * back;
  if constexpr (kBack == Scales::Back::kOver) return value / back;
  return value;
}

// --- the groups --------------------------------------------------------------------------------------------

// A matrix in groups of `high` x `wide` elements; groups at its ends may be smaller.
struct Groups {
  int64_t rows, columns, high, wide;

  static constexpr int64_t kUsual = 16;  // block size of NVFP4
  using Usual = std::integral_constant<int64_t, kUsual>;

  int64_t down() const { return (rows + high - 1) / high; }
  int64_t across() const { return (columns + wide - 1) / wide; }

  // Calls run(group, first column, number of columns) for each group of a row; kUsual columns are a constant.
  template <class F>
  void each(const F& run) const {
    auto each_of = [&](const auto length) {
      const int64_t whole = columns / length;
      for (int64_t i = 0; i < whole; ++i) run(i, i * length, length);
      if (whole * length < columns) run(whole, whole * length, columns - whole * length);
    };
    wide == kUsual ? each_of(Usual{}) : each_of(wide);
  }
};

// Reduces 16 neighbours with `join`: both halves, then both halves of the result, and so on.
template <class N, class F>
N halved(const N* x, const F& join) {
  typedef N Half __attribute__((vector_size(8 * sizeof(N))));
  Half low, high;
  std::memcpy(&low, x, sizeof low), std::memcpy(&high, x + 8, sizeof high);
  low = join(low, high);
  low = join(low, __builtin_shufflevector(low, low, 4, 5, 6, 7, 0, 1, 2, 3));
  low = join(low, __builtin_shufflevector(low, low, 2, 3, 0, 1, 6, 7, 4, 5));
  return join(low, __builtin_shufflevector(low, low, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

template <class T>
float amax_of_group(const T* x, int64_t n) {
  return from_order(largest(x, n));
}
inline float amax_of_group(const float* x, Groups::Usual) {
  int32_t bits[Groups::kUsual];
  for (int i = 0; i < Groups::kUsual; ++i) bits[i] = std::bit_cast<int32_t>(absolute(x[i]));
  return std::bit_cast<float>(halved(bits, [](auto a, auto b) { return a > b ? a : b; }));
}

template <class T>
void group_amaxes(const T* x, const Groups& g, float* amaxes) {
  const int64_t across = g.across();
  over(g.down(), g.high * g.columns, [&](int64_t begin, int64_t end) {
    std::vector<Order<T>> found(g.columns);
    std::vector<float> line(g.columns);
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t top = strip * g.high, rows = std::min(g.high, g.rows - top);
      const T* from = x + top * g.columns;
      float* to = amaxes + strip * across;
      auto gather = [&](const auto* values) {
        g.each([&](int64_t i, int64_t left, const auto n) { to[i] = amax_of_group(values + left, n); });
      };
      if (rows == 1) {
        gather(from);
        continue;
      }
      find_largest_of_columns(from, rows, g.columns, g.columns, found.data());
      float* values = g.wide == 1 ? to : line.data();
      for (int64_t i = 0; i < g.columns; ++i) values[i] = from_order(found[i]);
      if (g.wide > 1) gather(values);
    }
  });
}

// --- rounding a row ----------------------------------------------------------------------------------------

// These are not inlined, so that each has enough registers.

template <Scales::Back kBack, class T, class U, class R>
[[gnu::noinline]] void round_row(const T* x, U* y, const Groups g, const float* factor, const float* back,
                                 const float* random, const R round) {
  if (g.wide == 1) {
    EACH_ALONE
    for (int64_t i = 0; i < g.columns; ++i) {
      store(y + i, taken_back<kBack>(round(load(x[i]) * factor[i], drawn<R>(random, i)), back[i]));
    }
    return;
  }
  g.each([=](int64_t group, int64_t left, const auto n) {
    const float factor_here = factor[group], back_here = back[group];
    EACH_ALONE
    for (int64_t i = left; i < left + n; ++i) {
      store(y + i, taken_back<kBack>(round(load(x[i]) * factor_here, drawn<R>(random, i)), back_here));
    }
  });
}

template <class T, class R>
[[gnu::noinline]] void square_errors(const T* x, float* errors, const Groups g, const float* factor, const float* back,
                                     const R round) {
  auto error = [=](T element, float factor, float back) {
    const float scaled = load(element) * factor, off = (round(scaled) - scaled) * back;
    return off * off;
  };
  if (g.wide == 1) {
    EACH_ALONE
    for (int64_t i = 0; i < g.columns; ++i) errors[i] = error(x[i], factor[i], back[i]);
    return;
  }
  g.each([=](int64_t group, int64_t left, const auto n) {
    const float factor_here = factor[group], back_here = back[group];
    EACH_ALONE
    for (int64_t i = left; i < left + n; ++i) errors[i] = error(x[i], factor_here, back_here);
  });
}

// Adds neighbours as a tree: both halves of the next power of two, and so on.
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
inline float sum_of_group(float* x, int64_t n) {
  add_halves(x, n, 1, 1);
  return *x;
}
inline float sum_of_group(float* x, Groups::Usual) {
  return halved(x, [](auto a, auto b) { return a + b; });
}

// 4/6: chooses one of two scales for each group of a strip, by the squared error.
template <class T, class R>
class Choice {
 public:
  Choice(const Groups& g, const Scales& scales, const R& round)
      : g_(g), scales_(scales), round_(round), errors_(g.high * g.columns), first_(g.across()), second_(g.across()),
        lower_(g.across()) {}

  void operator()(const T* x, int64_t rows, const float* amaxes, Factors& factors) {
    scales_.lower(amaxes, lower_);
    measure(x, rows, factors, first_);
    measure(x, rows, lower_, second_);
    for (size_t i = 0; i < first_.size(); ++i) {
      const bool nearer = second_[i] < first_[i];
      factors.factor[i] = nearer ? lower_.factor[i] : factors.factor[i];
      factors.back[i] = nearer ? lower_.back[i] : factors.back[i];
    }
  }

 private:
  Groups g_;
  const Scales& scales_;
  R round_;
  std::vector<float> errors_, first_, second_;
  Factors lower_;

  void measure(const T* x, int64_t rows, const Factors& tried, std::vector<float>& sums) {
    float* errors = errors_.data();
    for (int64_t row = 0, at = 0; row < rows; ++row, at += g_.columns) {
      square_errors(x + at, errors + at, g_, tried.factor.data(), tried.back.data(), round_);
    }
    add_halves(errors, rows, g_.columns, g_.columns);
    g_.each([&](int64_t i, int64_t left, const auto n) { sums[i] = sum_of_group(errors + left, n); });
  }
};

// --- the whole operand ---------------------------------------------------------------------------------

// Draws the random numbers for a part of a row; without a stream, none.
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

template <Scales::Back kBack, class T, class U, class R, class N>
void round_groups(const T* x, U* y, const Groups& g, const float* amaxes, const Scales& scales, const Stream* stream,
                  int64_t first, float* kept, const R& round, const N& nearest) {
  const int64_t across = g.across();
  over(g.down(), g.high * g.columns, [&](int64_t begin, int64_t end) {
    Factors factors(across);
    Choice<T, N> choose(g, scales, nearest);
    Numbers numbers(stream, first);
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t top = strip * g.high, rows = std::min(g.high, g.rows - top);
      scales.of(amaxes + strip * across, factors);
      if (scales.choice()) choose(x + top * g.columns, rows, amaxes + strip * across, factors);
      if (kept != nullptr) std::copy(factors.factor.begin(), factors.factor.end(), kept + strip * across);
      for (int64_t row = top; row < top + rows; ++row) {
        const int64_t at = row * g.columns;
        round_row<kBack>(x + at, y + at, g, factors.factor.data(), factors.back.data(), numbers.at(at, g.columns),
                         round);
      }
    }
  });
}

}  // namespace altgrad
