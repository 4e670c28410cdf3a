// What the loops of a step share: an arm's settings, the numbers of a step, the tensors, and sums in one order.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec.h"
#include "definitions.h"
#include "grid.h"
#include "philox.h"

namespace altgrad {
namespace {

constexpr int64_t kChunk = 512;  // six buffers of so many floats, and seven tensors' share: 26 KiB
constexpr int64_t kLine = 16;  // numbers of four bytes in a line of the caches
static_assert(kChunk % Stream::kRow == 0);

// --- settings: names and places are update_cpu.py's, through definitions.h -------------------------------------------

[[noreturn]] void unknown(const char* setting, int32_t value) {
  throw std::runtime_error(std::string("update_cpu.cpp has no ") + setting + " of number " + std::to_string(value));
}

struct Arm {
  int32_t direction, unit, metric, formula, on_gradient, power, rms, momentum, match_rms, weights, reestimated, feedback;
  int64_t scale_rule;

  explicit Arm(const Tensor& settings) : Arm(static_cast<const int32_t*>(settings.const_data_ptr())) {}

  explicit Arm(const int32_t* s) : scale_rule(s[setting::kScaleRule]) {
    direction = s[setting::kDirection], unit = s[setting::kUnit], metric = s[setting::kMetric];
    formula = s[setting::kFormula], on_gradient = s[setting::kOnGradient], power = s[setting::kPower];
    rms = s[setting::kRms], momentum = s[setting::kMomentum], match_rms = s[setting::kMatchRms];
    weights = s[setting::kWeights], reestimated = s[setting::kReestimated];
    feedback = s[setting::kFeedback];
    if (weights != weights::kMaster && weights != weights::kNearest && weights != weights::kStochastic) {
      unknown("weights", weights);
    }
  }
};

struct Numbers {
  float lr, decay, beta1, beta2, unbias1, unbias2, eps, momentum, max_rungs, unbias_later;

  explicit Numbers(const Tensor& packed) {
    const float* h = packed.const_data_ptr<float>();
    lr = h[number::kLr], decay = h[number::kDecay], beta1 = h[number::kBeta1], beta2 = h[number::kBeta2];
    unbias1 = h[number::kUnbias1], unbias2 = h[number::kUnbias2], eps = h[number::kEps];
    momentum = h[number::kMomentum], max_rungs = h[number::kMaxRungs];
    unbias_later = h[number::kUnbiasLater];
  }
};

struct Tensors {
  float *p, *m, *v, *reference_m, *reference_v;  // m also the momentum; null where the arm has none, or codes of it
  const float* g;
  Codec coded_m, coded_v;
};

// --- element by element -------------------------------------------------------------------------------------

float with_sign_of(float magnitude, float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (std::bit_cast<uint32_t>(x) & 0x80000000u));
}
float inverse(float power) { return std::bit_cast<float>(0x7f000000u - std::bit_cast<uint32_t>(power)); }  // exact
// Of two numbers that are not negative, one of them above zero; squares nothing that leaves the range.
float hypotenuse(float a, float b) {
  const float large = std::max(a, b), ratio = std::min(a, b) / large;
  return large * std::sqrt(1.0f + ratio * ratio);
}
int32_t exponent_of(float power) { return static_cast<int32_t>(std::bit_cast<uint32_t>(power) >> 23); }

// --- sums ---------------------------------------------------------------------------------------------------

// The sum of value(i) over a chunk, in sixteen lanes.
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

// The mean of what run(first, count) returns for each chunk, always added up in the same order.
template <class F>
float mean_over_chunks(int64_t n, const F& run) {
  std::vector<double> sums((n + kChunk - 1) / kChunk);
  over_chunks(n, [&](int64_t chunk, int64_t first, int64_t count) { sums[chunk] = run(first, count); });
  return static_cast<float>(total(sums) / static_cast<double>(n));
}

}  // namespace
}  // namespace altgrad
