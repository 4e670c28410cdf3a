// sums.py in loops: one pass, where tensor operations take a dozen.
//
// Counts and the largest magnitude agree to the bit; sums are float64 in another order. That order depends on the
// places of the elements, not on the number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <numbers>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "definitions.h"
#include "grid.h"

namespace altgrad {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kChunk = 1024;  // elements handled together: a few buffers of so many floats fit the first cache
constexpr int64_t kSpan = 1 << 14;  // elements per partial sum
constexpr int64_t kLanes = 16;  // concurrent sums: an addition takes four cycles, and a register holds eight

constexpr uint32_t kInfinity = 0x7f800000u;

float finite_or_zero(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>(order(x) < kInfinity ? bits : 0);
}

// Returns the sum of the doubles f(i): kLanes sums, which are then added in order.
template <class F>
double sum(int64_t n, const F& f) {
  double lanes[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += f(i + lane);
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += f(i);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

double square(double x) { return x * x; }

template <class F>
void with_elements(const Tensor& x, const F& run) {
  x.scalar_type() == ScalarType::Float ? run(static_cast<const float*>(x.const_data_ptr()))
                                       : run(static_cast<const bf16*>(x.const_data_ptr()));
}

// Results for a part of a tensor.
template <size_t kCount>
using Found = std::array<double, kCount>;

// Adds the results of run(begin, end) over all spans of n elements, in order. kMaximum: the first number is a maximum.
template <size_t kCount, bool kMaximum, class F>
Found<kCount> joined(int64_t n, int64_t span, const F& run) {
  const int64_t spans = (n + span - 1) / span;
  std::vector<Found<kCount>> parts(spans);
  over(spans, span, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) parts[i] = run(i * span, std::min(n, (i + 1) * span));
  });
  Found<kCount> total{};
  for (const Found<kCount>& part : parts) {
    for (size_t i = 0; i < kCount; ++i) {
      total[i] = kMaximum && i == 0 ? std::max(total[i], part[i]) : total[i] + part[i];
    }
  }
  return total;
}

// Returns the numbers as a tensor.
Tensor packed_numbers(const Tensor& like, std::initializer_list<std::span<const double>> parts) {
  int64_t count = 0;
  for (const auto part : parts) count += static_cast<int64_t>(part.size());
  Tensor result = torch::stable::new_empty(like, {count}, ScalarType::Double);
  double* to = static_cast<double*>(result.mutable_data_ptr());
  for (const auto part : parts) to = std::copy(part.begin(), part.end(), to);
  return result;
}

// --- magnitudes ---------------------------------------------------------------------------------------------

template <class T>
Found<4> magnitudes_of(const T* x, int64_t n) {
  Found<4> found{};
  float values[kChunk];
  for (; n > 0; n -= kChunk, x += kChunk) {
    const int64_t count = std::min(n, kChunk);
    for (int64_t i = 0; i < count; ++i) values[i] = finite_or_zero(load(x[i]));
    uint32_t nonfinite = 0, nonzero = 0;
    for (int64_t i = 0; i < count; ++i) nonfinite += order(load(x[i])) >= kInfinity ? 1 : 0;
    for (int64_t i = 0; i < count; ++i) nonzero += order(values[i]) > 0 ? 1 : 0;
    found[0] = std::max(found[0], static_cast<double>(from_order(largest(values, count))));
    found[1] += nonfinite, found[2] += nonzero;
    found[3] += sum(count, [&](int64_t i) { return square(values[i]); });
  }
  return found;
}

Found<4> magnitudes_of(const Tensor& x) {
  Found<4> found;
  with_elements(x, [&](const auto* from) {
    found = joined<4, true>(x.numel(), kSpan, [&](int64_t begin, int64_t end) {
      return magnitudes_of(from + begin, end - begin);
    });
  });
  return found;
}

Tensor magnitudes(Tensor x) { return packed_numbers(x, {magnitudes_of(torch::stable::contiguous(x))}); }

// --- what rounding does -------------------------------------------------------------------------------------------

// One scale for all, one per element, or one for a row; with the last two the error is divided by the scale.
template <bool kOfRow>
struct OneScale {
  float scale;
  float at(int64_t) const { return scale; }
  float error(float lost, int64_t) const { return kOfRow ? lost / scale : lost; }
  OneScale from(int64_t) const { return *this; }
};
struct Scales {
  const float* scale;
  float at(int64_t i) const { return scale[i]; }
  float error(float lost, int64_t i) const { return lost / scale[i]; }
  Scales from(int64_t i) const { return {scale + i}; }
};

template <class T, class S, class R>
Found<3> rounding_of(const T* x, int64_t n, S scales, uint32_t largest, const R round) {
  Found<3> found{};
  float values[kChunk], scaled[kChunk], rounded[kChunk], errors[kChunk];
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = std::min(n - begin, kChunk);
    const T* from = x + begin;
    const S here = scales.from(begin);
    for (int64_t i = 0; i < count; ++i) values[i] = finite_or_zero(load(from[i]));
    for (int64_t i = 0; i < count; ++i) scaled[i] = values[i] * here.at(i);
    for (int64_t i = 0; i < count; ++i) rounded[i] = round(scaled[i]);
    for (int64_t i = 0; i < count; ++i) errors[i] = here.error(scaled[i] - rounded[i], i);
    uint32_t overflowed = 0, vanished = 0;
    for (int64_t i = 0; i < count; ++i) {
      overflowed += order(scaled[i]) > largest ? 1 : 0;
      vanished += (order(rounded[i]) == 0) & (order(values[i]) != 0) ? 1 : 0;
    }
    found[0] += overflowed, found[1] += vanished;
    found[2] += sum(count, [&](int64_t i) { return square(errors[i]); });
  }
  return found;
}

// x (rows, columns); scales: one, one per row, or one per element.
template <class T, class R>
Found<3> rounding_by(const Tensor& x, const T* from, std::span<const float> scales, uint32_t largest, const R& round) {
  const int64_t n = x.numel(), columns = x.size(1), count = static_cast<int64_t>(scales.size());
  if (count == 1) {
    return joined<3, false>(n, kSpan, [&](int64_t begin, int64_t end) {
      return rounding_of(from + begin, end - begin, OneScale<false>{scales[0]}, largest, round);
    });
  }
  if (count == n && columns != 1) {
    return joined<3, false>(n, kSpan, [&](int64_t begin, int64_t end) {
      return rounding_of(from + begin, end - begin, Scales{scales.data() + begin}, largest, round);
    });
  }
  return joined<3, false>(x.size(0), std::max<int64_t>(1, kSpan / columns), [&](int64_t begin, int64_t end) {
    Found<3> found{};
    for (int64_t row = begin; row < end; ++row) {
      const auto of_row = rounding_of(from + row * columns, columns, OneScale<true>{scales[row]}, largest, round);
      for (size_t i = 0; i < found.size(); ++i) found[i] += of_row[i];
    }
    return found;
  });
}

Found<3> rounding_of(const Tensor& x, const Grid& grid, std::span<const float> scales) {
  const uint32_t largest = order(grid.max * rounding::kOverflowSlack);
  Found<3> found;
  with_elements(x, [&](const auto* from) {
    found = grid.root == 0 ? rounding_by(x, from, scales, largest, Rounder<false>(grid))
                           : rounding_by(x, from, scales, largest, Rounder<true>(grid));
  });
  return found;
}

Tensor rounding_sums(Tensor x, Tensor constants, Tensor scale) {
  scale = torch::stable::contiguous(scale);
  const std::span<const float> scales(scale.const_data_ptr<float>(), scale.numel());
  return packed_numbers(x, {rounding_of(torch::stable::contiguous(x), Grid(constants), scales)});
}

// Returns the magnitudes, the scale, which the remembered amax or else x sets, and rounding_sums.
Tensor one_scale_sums(Tensor x, Tensor constants, Tensor remembered, int64_t rule) {
  x = torch::stable::contiguous(x);
  const Grid grid(constants);
  const Found<4> seen = magnitudes_of(x);
  const float known = remembered.numel() == 1 ? *remembered.const_data_ptr<float>() : 0.0f;
  const float scale = scale_of(known > 0 ? known : static_cast<float>(seen[0]), ScaleRule(rule, grid));
  const double taken[] = {scale};
  return packed_numbers(x, {seen, taken, rounding_of(x, grid, {&scale, 1})});
}

// --- moments ------------------------------------------------------------------------------------------------------

template <class T, class F>
double sum_over(const T* from, int64_t n, const F& f) {
  return joined<1, false>(n, kSpan, [&](int64_t begin, int64_t end) {
    return Found<1>{sum(end - begin, [&](int64_t i) { return f(static_cast<double>(load(from[begin + i]))); })};
  })[0];
}

Tensor central_moments(Tensor x) {
  x = torch::stable::contiguous(x);
  const int64_t n = x.numel();
  const double count = static_cast<double>(n);
  Found<2> moments;
  with_elements(x, [&](const auto* from) {
    const double mean = sum_over(from, n, [](double value) { return value; }) / count;
    moments[0] = sum_over(from, n, [&](double value) { return square(value - mean); }) / count;
    moments[1] = sum_over(from, n, [&](double value) { return square(square(value - mean)); }) / count;
  });
  return packed_numbers(x, {moments});
}

// --- what a step did ----------------------------------------------------------------------------------------------

constexpr int64_t kMostBinades = 32;
constexpr size_t kGap = 4, kBinades = 5;  // places of the numbers: four counts, the gap, two by binade
using Step = Found<kBinades + 2 * kMostBinades>;

// A step's tensors from a place on. A single scale fills a buffer, which is read again for every chunk.
struct Weights {
  const float *old, *now, *wanted, *grad, *before, *after;
  bool one_before, one_after;

  Weights from(int64_t i) const {
    return {old + i, now + i, wanted + i, grad + i, before + (one_before ? 0 : i), after + (one_after ? 0 : i),
            one_before, one_after};
  }
};

struct Binades {
  int64_t lowest, highest;
  int64_t size() const { return highest - lowest + 1; }
  int64_t of(float x) const {
    return std::clamp(static_cast<int64_t>(order(x) >> 23) - 127, lowest, highest) - lowest;
  }
};

template <class R>
void add_chunk(Step& found, const Weights& w, int64_t n, const Spacing& spacing, float refinement, Binades binades,
               const R& round) {
  float held[kChunk], after[kChunk], moved[kChunk], gap[kChunk], rungs[kChunk], shifted[kChunk];
  for (int64_t i = 0; i < n; ++i) held[i] = round(w.old[i] * w.before[i]);
  for (int64_t i = 0; i < n; ++i) after[i] = round(w.now[i] * w.after[i]);
  for (int64_t i = 0; i < n; ++i) moved[i] = after[i] / w.after[i] - held[i] / w.before[i];
  for (int64_t i = 0; i < n; ++i) {
    const float ulp = spacing(w.old[i] * w.before[i]) * refinement / w.before[i];
    gap[i] = absolute((w.wanted[i] - w.old[i]) - moved[i]) / ulp;
    rungs[i] = absolute(w.now[i] - w.old[i]) / ulp;
  }
  for (int64_t i = 0; i < n; ++i) {  // times the power of two nearest to the ratio of the scales
    shifted[i] = held[i] * power_of_two_below(w.after[i] / w.before[i] * std::numbers::sqrt2_v<float>);
  }
  uint32_t wanted = 0, stalled = 0, flips = 0, descending = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int meant = w.wanted[i] != w.old[i], flipped = shifted[i] != after[i];
    const int down = ((w.grad[i] > 0) & (moved[i] < 0)) | ((w.grad[i] < 0) & (moved[i] > 0));
    wanted += meant, stalled += meant & (flipped ^ 1), flips += flipped, descending += flipped & down;
  }
  found[0] += wanted, found[1] += stalled, found[2] += flips, found[3] += descending;
  found[kGap] += sum(n, [&](int64_t i) { return static_cast<double>(gap[i]); });
  double* counts = found.data() + kBinades;
  double* totals = counts + binades.size();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = binades.of(w.old[i]);
    counts[place] += 1, totals[place] += rungs[i];
  }
}

Tensor update_sums(Tensor old, Tensor now, Tensor wanted, Tensor grad, Tensor before, Tensor after, Tensor constants,
                   int64_t refinement, int64_t lowest, int64_t highest) {
  const Binades binades{lowest, highest};
  if (binades.size() > kMostBinades) throw std::runtime_error("update_sums: too many binades");
  for (Tensor* t : {&old, &now, &wanted, &grad, &before, &after}) *t = torch::stable::contiguous(*t);
  const auto data = [](const Tensor& t) { return t.const_data_ptr<float>(); };
  const bool one_before = before.numel() == 1, one_after = after.numel() == 1;
  float first[kChunk], second[kChunk];
  if (one_before) std::fill_n(first, kChunk, *data(before));
  if (one_after) std::fill_n(second, kChunk, *data(after));
  const Weights all{data(old), data(now), data(wanted), data(grad), one_before ? first : data(before),
                    one_after ? second : data(after), one_before, one_after};
  const Grid grid(constants);
  const Spacing spacing(grid);
  const auto by = [&](const auto& round) {
    return joined<std::tuple_size_v<Step>, false>(old.numel(), kSpan, [&](int64_t begin, int64_t end) {
      Step found{};
      for (int64_t i = begin; i < end; i += kChunk) {
        const int64_t count = std::min(kChunk, end - i);
        add_chunk(found, all.from(i), count, spacing, static_cast<float>(refinement), binades, round);
      }
      return found;
    });
  };
  const Step found = grid.root == 0 ? by(Rounder<false>(grid)) : by(Rounder<true>(grid));
  return packed_numbers(old, {std::span(found).first(kBinades + 2 * binades.size())});
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("magnitudes", TORCH_BOX(&altgrad::magnitudes));
  m.impl("rounding_sums", TORCH_BOX(&altgrad::rounding_sums));
  m.impl("one_scale_sums", TORCH_BOX(&altgrad::one_scale_sums));
  m.impl("central_moments", TORCH_BOX(&altgrad::central_moments));
  m.impl("update_sums", TORCH_BOX(&altgrad::update_sums));
}
