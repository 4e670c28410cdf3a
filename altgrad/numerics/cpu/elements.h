// The innermost loops, which round elements whose scales are known, and the choice of their types.

#pragma once

#include <type_traits>

#include "grid.h"

namespace altgrad {

using torch::headeronly::ScalarType;

constexpr int64_t kFirstCache = 1 << 13;  // elements that fit the first cache

// In these loops x and y are the same or do not overlap, so elements are independent. A place is a Scale or a Moved.
template <class T, class U, class R, class P>
void round_range(const T* x, U* y, int64_t n, P place, const R round) {
  if constexpr (kPairs<T, U>) {
    EACH_ALONE
    for (int64_t i = 0; i < n / 2; ++i) store_pair(y + 2 * i, round.pair(load_pair(x + 2 * i), place, place));
    if (n % 2 != 0) store_exact(y + n - 1, round(load(x[n - 1]), place));
  } else {
    EACH_ALONE
    for (int64_t i = 0; i < n; ++i) store_exact(y + i, round(load(x[i]), place));
  }
}

// Rounds at one scale. clamps: whether some element may be beyond the largest value of the format.
template <class T, class U, class R>
void round_scaled(const T* x, U* y, int64_t n, float scale, bool clamps, const R round) {
  clamps ? round_range(x, y, n, Scale{scale}, round) : round_range(x, y, n, Scale{scale}, round.unclamped());
}

// Each element has its own place. `arrange` orders the places: for elements handled in pairs, the places of all first
// elements come before those of all second ones.
template <class T, class U, class R, class P>
void round_each(const T* x, U* y, int64_t n, const P* places, const R round) {
  if constexpr (kPairs<T, U>) {
    const P* second = places + (n + 1) / 2;
    EACH_ALONE
    for (int64_t i = 0; i < n / 2; ++i) store_pair(y + 2 * i, round.pair(load_pair(x + 2 * i), places[i], second[i]));
    if (n % 2 != 0) store_exact(y + n - 1, round(load(x[n - 1]), places[n / 2]));
  } else {
    EACH_ALONE
    for (int64_t i = 0; i < n; ++i) store_exact(y + i, round(load(x[i]), places[i]));
  }
}

template <class T, class U, class P>
void arrange(const P* places, int64_t n, P* arranged) {
  for (int64_t i = 0; i < n; ++i) arranged[kPairs<T, U> ? i / 2 + i % 2 * ((n + 1) / 2) : i] = places[i];
}

// Rounds, then divides each value by its scale again, where a Moved is not possible. step: 0 for one scale, else 1.
template <class T, class U, class R>
void round_unscaled(const T* x, U* y, int64_t n, const float* scale, int64_t step, const R round) {
  for (int64_t i = 0; i < n; ++i, scale += step) store(y + i, round(load(x[i]), Scale{*scale}) * (1 / *scale));
}

// --- types --------------------------------------------------------------------------------------------

template <class F>
void with_input(const Tensor& x, const F& run) {
  x.scalar_type() == ScalarType::Float ? run(static_cast<const float*>(x.const_data_ptr()))
                                       : run(static_cast<const bf16*>(x.const_data_ptr()));
}

template <class F>
void with_output(Tensor& y, const F& run) {
  y.scalar_type() == ScalarType::Float ? run(static_cast<float*>(y.mutable_data_ptr()))
                                       : run(static_cast<bf16*>(y.mutable_data_ptr()));
}

// Calls run with typed pointers to x and y, and the format's rounder.
template <class F>
void dispatch(const Tensor& x, Tensor& y, const Grid& grid, const F& run) {
  with_input(x, [&](const auto* from) {
    with_output(y, [&](auto* to) {
      with_rounder(grid, [&](const auto& round) { run(from, to, round); });
    });
  });
}

}  // namespace altgrad
