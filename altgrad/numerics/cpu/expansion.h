// COAT's range expansion in loops: Coding.encode and decode of altgrad/optim/state_codec.py with `expand`.
//
// Logarithms and powers are float64 and within some 2^-50, as torch's are. Results are rounded to float32, so one in
// some 2^20 may differ in its last bit. A code differs only where this crosses a threshold.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "grid.h"

namespace altgrad {

// An even number of terms, as two sums that do not wait for each other.
template <int kTerms>
double polynomial(const double (&c)[kTerms], double x) {
#ifdef ALTGRAD_FMA
  const auto joined = [](double a, double b, double c) { return std::fma(a, b, c); };
#else
  const auto joined = [](double a, double b, double c) { return a * b + c; };
#endif
  double even = c[kTerms - 2], odd = c[kTerms - 1];
#pragma GCC unroll 8
  for (int i = kTerms - 4; i >= 0; i -= 2) even = joined(even, x * x, c[i]), odd = joined(odd, x * x, c[i + 1]);
  return joined(odd, x, even);
}

// log2 of a float64 that is positive and normal, by the series of the inverse hyperbolic tangent, m from sqrt(1/2) to
// sqrt(2); of zero some number below -1000.
inline double logarithm(double x) {
  constexpr double kTerms[] = {1, 1. / 3, 1. / 5, 1. / 7, 1. / 9, 1. / 11, 1. / 13, 1. / 15, 1. / 17, 1. / 19};
  constexpr uint64_t kOne = 0x3ff0000000000000u, kRoot = 0x3fe6a09e667f3bcdu, kDigits = 0x000fffffffffffffu;
  const uint64_t moved = std::bit_cast<uint64_t>(x) + (kOne - kRoot);
  const double exponent = std::bit_cast<double>((moved >> 52) | 0x4330000000000000u) - (0x1p52 + 1023);
  const double f = std::bit_cast<double>((moved & kDigits) + kRoot) - 1.0, s = f / (2.0 + f);
  return s * polynomial(kTerms, s * s) * 2.8853900817779268 + exponent;
}

// 2^x for x from -1000 to 1000, by Taylor's series.
inline double exponential_of_two(double x) {
  constexpr double kToWhole = 0x1.8p52, kLog = 0.69314718055994531;
  constexpr double kTerms[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
                               1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
  const double shifted = x + kToWhole, value = polynomial(kTerms, (x - (shifted - kToWhole)) * kLog);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(value) + (std::bit_cast<uint64_t>(shifted) << 52));
}

// Returns the least magnitude that is not zero; amax if all are zero.
inline float least_of(const float* x, int64_t n, float amax) {
  uint32_t found = UINT32_MAX;  // of bits less one, so that zero is above all others
  for (int64_t i = 0; i < n; ++i) found = std::min(found, (std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu) - 1);
  return found == UINT32_MAX ? amax : std::bit_cast<float>(found + 1);
}

// Returns the power that expands the range of a block, amax / least, to `binades`.
inline float expansion_of(float amax, float least, double binades) {
  const double own = std::log2(static_cast<double>(amax) / static_cast<double>(least));
  return own > 0 ? static_cast<float>(binades / own) : 1.0f;
}

// Replaces x by (|x| / amax)^power * largest, with the sign of x.
inline void expand(float* __restrict x, int64_t n, const float amax, const double power, const double largest) {
  constexpr int64_t kTogether = 32;  // in two loops, whose elements wait less for each other
  double exponents[kTogether];
  for (int64_t first = 0; first < n; first += kTogether) {
    const int64_t end = std::min(first + kTogether, n);
    for (int64_t i = first; i < end; ++i) exponents[i - first] = logarithm(std::abs(x[i]) / amax) * power;
    for (int64_t i = first; i < end; ++i) {
      const double share = exponential_of_two(std::max(exponents[i - first], -1000.0));
      x[i] = std::copysign(static_cast<float>(share * largest), x[i]);
    }
  }
}

// Writes (value / largest)^(1 / power) * amax, from the logarithms of value / largest.
inline void contract(const double* __restrict logarithms, int64_t n, const double power, const double amax,
                     float* __restrict out) {
  const double inverse = 1.0 / power;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(exponential_of_two(std::max(logarithms[i] * inverse, -1000.0)) * amax);
  }
}

}  // namespace altgrad
