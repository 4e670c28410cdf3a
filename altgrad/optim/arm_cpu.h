// Parts of update_cpu.cpp: settings, hyperparameters, tensors, sums in a fixed order, code steps, stiffness.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec.h"
#include "definitions.h"
#include "grid.h"
#include "philox.h"

namespace altgrad {
namespace {

constexpr int64_t kChunk = 512;  // elements: six buffers and the parts of seven tensors take 26 KiB
static_assert(kChunk % Stream::kRow == 0);

// The settings of an arm, indexed by `setting::Name`; update_cpu.py writes them in this order.
using Arm = const int32_t*;

[[noreturn]] void unknown(const char* setting, int32_t value) {
  throw std::runtime_error(std::string("update_cpu.cpp has no ") + setting + " of number " + std::to_string(value));
}

struct Numbers {
  float lr, decay, beta1, beta2, unbias1, unbias2, eps, momentum, max_rungs, unbias_later;

  explicit Numbers(const float* h)
      : lr(h[number::kLr]), decay(h[number::kDecay]), beta1(h[number::kBeta1]), beta2(h[number::kBeta2]),
        unbias1(h[number::kUnbias1]), unbias2(h[number::kUnbias2]), eps(h[number::kEps]),
        momentum(h[number::kMomentum]), max_rungs(h[number::kMaxRungs]), unbias_later(h[number::kUnbiasLater]) {}
};

// The weight p, its gradient g and its moments. The pointer of a missing or coded moment is null.
struct Tensors {
  float* p;
  const float* g;
  float *m = nullptr, *v = nullptr, *reference_m = nullptr, *reference_v = nullptr;  // m: Adam's or the momentum
  Codec coded_m, coded_v;
};

// --- element by element -------------------------------------------------------------------------------------

float with_sign_of(float magnitude, float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (std::bit_cast<uint32_t>(x) & 0x80000000u));
}
float inverse(float power) { return std::bit_cast<float>(0x7f000000u - std::bit_cast<uint32_t>(power)); }  // exact
// sqrt(a^2 + b^2) without overflow or underflow; a, b >= 0, and not both 0.
float hypotenuse(float a, float b) {
  const float large = std::max(a, b), ratio = std::min(a, b) / large;
  return large * std::sqrt(1.0f + ratio * ratio);
}
int32_t exponent_of(float power) { return static_cast<int32_t>(std::bit_cast<uint32_t>(power) >> 23); }

// The number line in code steps: `place` is coordinate and `at` is at_coordinate of coordinate.py.
struct Line {
  Spacing spacing;
  float per_binade;
  int32_t lowest, highest;

  explicit Line(const Grid& grid)
      : spacing(grid), per_binade(0x1p23f / grid.ulps), lowest(exponent_of(grid.spacing)),
        highest(exponent_of(spacing(grid.max))) {}

  float place(float x) const {
    const float step = spacing(x);
    const float binades = static_cast<float>(exponent_of(step) - lowest);
    return with_sign_of(binades * per_binade + absolute(x) * inverse(step), x);
  }
  float at(float place) const {
    const float magnitude = absolute(place);
    const float binade = std::min(std::max(std::floor(magnitude * inverse(per_binade)) - 1.0f, 0.0f), 255.0f);
    const int32_t exponent = std::min(static_cast<int32_t>(binade) + lowest, highest);
    const float binades = static_cast<float>(exponent - lowest);
    const float step = std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    return with_sign_of((magnitude - binades * per_binade) * step, place);
  }
};

// --- sums ---------------------------------------------------------------------------------------------------

// The sum of value(i) for i < n, in sixteen float lanes, so that the compiler vectorizes it.
template <class F>
double chunk_sum(int64_t n, const F& value) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (; i < n; ++i) lanes[i % kLanes] += value(i);
  double sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

double total(const std::vector<double>& parts) {
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

template <class F>
void over_chunks(int64_t n, const F& run) {
  over((n + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      run(chunk, chunk * kChunk, std::min(kChunk, n - chunk * kChunk));
    }
  });
}

// The sum over chunks of run(first, count), which returns a chunk's sum, divided by n. The order is fixed.
template <class F>
float mean_over_chunks(int64_t n, const F& run) {
  std::vector<double> sums((n + kChunk - 1) / kChunk);
  over_chunks(n, [&](int64_t chunk, int64_t first, int64_t count) { sums[chunk] = run(first, count); });
  return static_cast<float>(total(sums) / static_cast<double>(n));
}

// --- stiffness ----------------------------------------------------------------------------------------------

// `_factor` of update.py without a schedule: the stiffness, divided by its RMS if the arm normalises.
class Stiffness {
 public:
  // constants, of_format: `constants` and `numbers` of stiffness.py's Stiffness; order: shuffle of `permuted` or null.
  Stiffness(Arm arm, const float* weight, int64_t n, float amax, float scale, const Tensor& constants,
            const float* of_format, const int32_t* order)
      : formula_(arm[setting::kFormula]), spacing_(Grid(constants)), scale_(scale) {
    per_binade_ = of_format[stiffness::kPerBinade];
    if (formula_ == formula::kForeign) scale_ = scale_of(amax, ScaleRule(scale_rule::kFloat32, Grid(constants)));
    smallest_normal_ = of_format[stiffness::kSmallestNormal] / scale_;
    floor_ = power_of_two_below(amax) * per_binade_ * stiffness::kFloor;
    largest_ = std::max(amax, stiffness::kTiny), least_share_ = amax > 0 ? 0.0f : 1.0f;
    knee_ = of_format[stiffness::kKnee], slope_ = of_format[stiffness::kSlope];
    const bool scaled = formula_ != formula::kMantissa && formula_ != formula::kSmooth &&
                        formula_ != formula::kProfile && formula_ != formula::kRms;
    float factor = scaled ? 1.0f / scale_ : 1.0f, unit = 1.0f;
    if (formula_ == formula::kProfile) {
      factor = std::min(std::max(std::pow(amax, slope_), stiffness::kSmallest), stiffness::kLargest);
    }
    if (formula_ == formula::kRange) factor *= of_format[stiffness::kPerRange];
    if (formula_ == formula::kMean) {
      mean_ = mean_over_chunks(n, [&](int64_t first, int64_t count) {
        return chunk_sum(count, [&](int64_t i) { return spacing_(weight[first + i] * scale_); });
      });
    }
    if (formula_ == formula::kRms) {
      mean_ = std::max(stiffness::kLeastRms, std::sqrt(mean_over_chunks(n, [&](int64_t first, int64_t count) {
                         return chunk_sum(count, [&](int64_t i) { return weight[first + i] * weight[first + i]; });
                       })));
    }
    if (formula_ == formula::kPermuted) {
      const std::unique_ptr<float[]> spacings(new float[n]);
      shuffled_.reset(new float[n]);
      over(n, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) spacings[i] = spacing_(weight[i] * scale_);
      });
      over(n, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) shuffled_[i] = spacings[order[i]];
      });
    }
    if (arm[setting::kRms]) {
      unit = std::sqrt(mean_over_chunks(n, [&](int64_t first, int64_t count) {
        float found[kChunk];
        evaluate(weight + first, first, count, factor, found);
        return chunk_sum(count, [&](int64_t i) { return found[i] * found[i]; });
      }));
    }
    factor_ = factor / unit;
  }

  void operator()(const float* weight, int64_t first, int64_t n, float* found) const {
    evaluate(weight, first, n, factor_, found);
  }

 private:
  void evaluate(const float* __restrict weight, int64_t first, int64_t n, const float factor,
                float* __restrict found) const {
    switch (formula_) {
      case formula::kMantissa:
        for (int64_t i = 0; i < n; ++i) {
          found[i] = std::max(power_of_two_below(absolute(weight[i])) * per_binade_, floor_) * factor;
        }
        break;
      case formula::kSmooth:
        for (int64_t i = 0; i < n; ++i) {
          found[i] = hypotenuse(absolute(weight[i]), smallest_normal_) * per_binade_ * factor;
        }
        break;
      case formula::kProfile:
        for (int64_t i = 0; i < n; ++i) {
          const float share = std::max(absolute(weight[i]) / largest_, least_share_);
          found[i] = hypotenuse(share, knee_);
        }
        if (slope_ != 1.0f) {  // pow is a call per weight and takes most of the step's time
          for (int64_t i = 0; i < n; ++i) found[i] = std::pow(found[i], slope_);
        }
        for (int64_t i = 0; i < n; ++i) found[i] *= factor;
        break;
      case formula::kMean:
      case formula::kRms:
        std::fill_n(found, n, mean_ * factor);
        break;
      case formula::kPermuted:
        for (int64_t i = 0; i < n; ++i) found[i] = shuffled_[first + i] * factor;
        break;
      case formula::kUlp:
      case formula::kRange:
      case formula::kForeign: {
        const Spacing spacing = spacing_;
        const float scale = scale_;
        for (int64_t i = 0; i < n; ++i) found[i] = spacing(weight[i] * scale) * factor;
        break;
      }
      default:
        unknown("stiffness", formula_);
    }
  }

  int32_t formula_;
  Spacing spacing_;
  float scale_, factor_, per_binade_, smallest_normal_, floor_, mean_ = 0.0f;
  float largest_, least_share_, knee_, slope_;
  std::unique_ptr<float[]> shuffled_;  // for `permuted`: the spacings, shuffled
};

}  // namespace
}  // namespace altgrad
