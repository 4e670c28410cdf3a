// The stiffness of a tensor's weights, in loops: stiffness.py.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>

#include "arm_cpu.h"

namespace altgrad {
namespace {

// The factor of update.py without a schedule: stiffness over that of the tensor.
class Stiffness {
 public:
  Stiffness(const Arm& arm, const float* weight, int64_t n, float amax, float scale, const Tensor& constants,
            const Tensor& numbers, const int32_t* order)
      : formula_(arm.formula), spacing_(Grid(constants)), scale_(scale) {
    const float* of_format = numbers.const_data_ptr<float>();
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
    const bool permuted = formula_ == formula::kPermuted;
    if (permuted) find_exponents(weight, order, n);
    if (arm.rms) {
      unit = std::sqrt(mean_over_chunks(n, [&](int64_t first, int64_t count) {
        float found[kChunk];
        if (permuted) shuffle(first, count);
        evaluate(weight + first, first, count, factor, found);
        return chunk_sum(count, [&](int64_t i) { return found[i] * found[i]; });
      }));
    } else if (permuted) {
      over_chunks(n, [&](int64_t, int64_t first, int64_t count) { shuffle(first, count); });
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
        if (slope_ != 1.0f) {  // a call per weight, and so most of the time of a step
          for (int64_t i = 0; i < n; ++i) found[i] = std::pow(found[i], slope_);
        }
        for (int64_t i = 0; i < n; ++i) found[i] *= factor;
        break;
      case formula::kMean:
      case formula::kRms:
        std::fill_n(found, n, mean_ * factor);
        break;
      case formula::kPermuted: {
        const uint8_t* exponents = shuffled_.get() + first;
        for (int64_t i = 0; i < n; ++i) {
          found[i] = std::bit_cast<float>(static_cast<uint32_t>(exponents[i]) << 23) * factor;
        }
        break;
      }
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

  // A spacing is a power of two, and its exponent a byte: what is read here and there stays in the second cache.
  void find_exponents(const float* weight, const int32_t* order, int64_t n) {
    order_ = order;
    exponents_.reset(new uint8_t[n]);
    shuffled_.reset(new uint8_t[n]);
    over(n, 1, [&](int64_t begin, int64_t end) {
      exponents_of(weight + begin, exponents_.get() + begin, end - begin, spacing_, scale_);
    });
  }

  void shuffle(int64_t first, int64_t n) const {
    gather(exponents_.get(), order_ + first, shuffled_.get() + first, n);
  }

  static void exponents_of(const float* __restrict weight, uint8_t* __restrict exponents, int64_t n,
                           const Spacing spacing, const float scale) {
    for (int64_t i = 0; i < n; ++i) exponents[i] = static_cast<uint8_t>(exponent_of(spacing(weight[i] * scale)));
  }

  static void gather(const uint8_t* __restrict from, const int32_t* __restrict order, uint8_t* __restrict to,
                     int64_t n) {
    for (int64_t first = 0; first < n; first += kLine) {
      // Read once, so it need not take the place of what is read often.
      __builtin_prefetch(order + first + kChunk, 0, 0);
      for (int64_t i = first; i < std::min(first + kLine, n); ++i) to[i] = from[order[i]];
    }
  }

  int32_t formula_;
  Spacing spacing_;
  float scale_, factor_, per_binade_, smallest_normal_, floor_, mean_ = 0.0f;
  float largest_, least_share_, knee_, slope_;
  const int32_t* order_ = nullptr;
  std::unique_ptr<uint8_t[]> exponents_, shuffled_;
};

}  // namespace
}  // namespace altgrad
