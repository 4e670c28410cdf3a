// ms_eden.py in loops.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "block_scales.h"

namespace altgrad {

// Writes the MS-EDEN values of x, which is rotated, to y. Groups are `high` rows of one column. Sums are over 128 rows,
// in stripes of columns that fit the first cache.
template <class T, class U, class R>
void round_ms_eden(const T* x, U* y, const Groups& g, const float* amaxes, const Scales& scales, const Stream& stream,
                   int64_t first, const R round) {
  constexpr int64_t kSize = 128, kStripe = 16;
  const int64_t columns = g.columns, high = g.high, blocks = kSize / high;
  const ByChance by_chance(scales.own());
  over(g.rows / kSize, kSize * columns, [&](int64_t begin, int64_t end) {
    std::vector<Factors> factors(blocks, Factors(columns));
    std::vector<float> random(blocks * columns);
    Numbers numbers(&stream, first);
    float q[kSize * kStripe], squares[kSize * kStripe], along[kSize * kStripe], longer[kStripe], drawn[kStripe];
    for (int64_t strip = begin; strip < end; ++strip) {
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t place = (strip * blocks + i) * columns;
        scales.of(amaxes + place, factors[i]);
        std::copy_n(numbers.at(place, columns), columns, random.data() + i * columns);
      }
      for (int64_t left = 0; left < columns; left += kStripe) {
        const int64_t n = std::min(kStripe, columns - left), corner = strip * kSize * columns + left;
        for (int64_t row = 0; row < kSize; ++row) {
          const T* from = x + corner + row * columns;
          const float* factor = factors[row / high].factor.data() + left;
          const int64_t at = row * kStripe;
          EACH_ALONE
          for (int64_t j = 0; j < n; ++j) {
            const float scaled = load(from[j]) * factor[j], rounded = round(scaled);
            q[at + j] = rounded, squares[at + j] = scaled * scaled, along[at + j] = scaled * rounded;
          }
        }
        add_halves(squares, kSize, kStripe, n);
        add_halves(along, kSize, kStripe, n);
        for (int64_t j = 0; j < n; ++j) {
          const bool usable = along[j] > 0 && is_finite(squares[j]);
          longer[j] = usable ? static_cast<float>(static_cast<double>(squares[j]) / along[j]) : 1.0f;
        }
        for (int64_t i = 0; i < blocks; ++i) {
          const float *back = factors[i].back.data() + left, *numbers_here = random.data() + i * columns + left;
          EACH_ALONE
          for (int64_t j = 0; j < n; ++j) drawn[j] = by_chance(back[j] * longer[j], numbers_here[j]);
          for (int64_t row = i * high; row < (i + 1) * high; ++row) {
            U* to = y + corner + row * columns;
            EACH_ALONE
            for (int64_t j = 0; j < n; ++j) store(to + j, q[row * kStripe + j] * drawn[j]);
          }
        }
      }
    }
  });
}

}  // namespace altgrad
