// COAT's range expansion in loops: Coding.encode and decode of altgrad/optim/coded.py with `expand`.
//
// Logarithms and powers are of float64 and within some 2^-50, as those of torch are. What is made of them is rounded to
// float32, so that one in some 2^20 may differ in its last bit, and a code only where that crosses a threshold.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace altgrad {

// log2 of a float64 that is positive and normal, by the series of the inverse hyperbolic tangent, m from sqrt(1/2) to
// sqrt(2); of zero some number below -1000.
inline double logarithm(double x) {
  constexpr uint64_t kOne = 0x3ff0000000000000u, kRoot = 0x3fe6a09e667f3bcdu, kDigits = 0x000fffffffffffffu;
  const uint64_t moved = std::bit_cast<uint64_t>(x) + (kOne - kRoot);
  const double exponent = std::bit_cast<double>((moved >> 52) | 0x4330000000000000u) - (0x1p52 + 1023);
  const double f = std::bit_cast<double>((moved & kDigits) + kRoot) - 1.0;
  const double s = f / (2.0 + f), square = s * s;
  double sum = 1.0 / 21;
  for (int i = 19; i > 0; i -= 2) sum = sum * square + 1.0 / i;
  return s * sum * 2.8853900817779268 + exponent;
}

// 2^x for x from -1000 to 1000, by Taylor's series.
inline double exponential_of_two(double x) {
  constexpr double kToWhole = 0x1.8p52, kLog = 0.69314718055994531;
  const double shifted = x + kToWhole, y = (x - (shifted - kToWhole)) * kLog;
  double sum = 1.0 / 14 * y + 1.0;  // (1 + y/1 (1 + y/2 (1 + ...)))
  for (int i = 13; i > 0; --i) sum = sum * y * (1.0 / i) + 1.0;
  return std::bit_cast<double>(std::bit_cast<uint64_t>(sum) + (std::bit_cast<uint64_t>(shifted) << 52));
}

// The power that brings the range of a block to `binades`.
inline float expansion_of(const float* x, int64_t n, float amax, double binades) {
  float least = amax;
  for (int64_t i = 0; i < n; ++i) least = std::min(least, x[i] != 0 ? std::abs(x[i]) : amax);
  const double own = std::log2(static_cast<double>(amax) / static_cast<double>(least));
  return own > 0 ? static_cast<float>(binades / own) : 1.0f;
}

// (|x| / amax)^power * largest, with the sign of x.
inline void expand(float* __restrict x, int64_t n, const float amax, const double power, const double largest) {
  for (int64_t i = 0; i < n; ++i) {
    const double exponent = std::max(logarithm(std::abs(x[i]) / amax) * power, -1000.0);
    x[i] = std::copysign(static_cast<float>(exponential_of_two(exponent) * largest), x[i]);
  }
}

// Of logarithms of values over the largest: (value / largest)^(1 / power) * amax.
inline void contract(const double* __restrict logarithms, int64_t n, const double power, const double amax,
                     float* __restrict out) {
  const double inverse = 1.0 / power;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(exponential_of_two(std::max(logarithms[i] * inverse, -1000.0)) * amax);
  }
}

}  // namespace altgrad
