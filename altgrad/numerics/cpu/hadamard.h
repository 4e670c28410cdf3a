// rotate_rows of operand.py in loops.

#pragma once

#include <algorithm>
#include <cmath>

#include "grid.h"

namespace altgrad {

// Rotates each `size` neighbouring rows, in stripes of columns that fit the first cache. Missing rows count as zeros.
// L: int64_t, or a size that the compiler knows.
template <class T, class L>
void rotate(const T* x, int64_t rows, int64_t columns, const float* signs, const L size, float* y) {
  constexpr int64_t kRoom = 1 << 11;
  const int64_t strips = (rows + size - 1) / size, stripes = (columns + kRoom / size - 1) / (kRoom / size);
  const float factor = std::ldexp(1.0f, -(std::ilogb(static_cast<float>(size)) / 2));
  over(strips * stripes, kRoom, [&](int64_t begin, int64_t end) {
    const int64_t stripe = kRoom / size;
    float block[kRoom];
    for (int64_t at = begin; at < end; ++at) {
      const int64_t top = at / stripes * size, left = at % stripes * stripe, n = std::min(stripe, columns - left);
      for (int64_t i = 0; i < size; ++i) {
        float* row = block + i * stripe;
        const float sign = signs[i];
        if (top + i >= rows) {
          std::fill_n(row, n, 0.0f * sign);
          continue;
        }
        const T* line = x + (top + i) * columns + left;
        EACH_ALONE
        for (int64_t j = 0; j < n; ++j) row[j] = load(line[j]) * sign;
      }
      for (int64_t step = 1; step < size; step *= 2) {
        for (int64_t i = 0; i < size; ++i) {
          if ((i & step) != 0) continue;
          float *low = block + i * stripe, *high = low + step * stripe;
          EACH_ALONE
          for (int64_t j = 0; j < n; ++j) {
            const float a = low[j], b = high[j];
            low[j] = a + b, high[j] = a - b;
          }
        }
      }
      for (int64_t i = 0; i < size; ++i) {
        const float* row = block + i * stripe;
        float* line = y + (top + i) * columns + left;
        EACH_ALONE
        for (int64_t j = 0; j < n; ++j) line[j] = row[j] * factor;
      }
    }
  });
}

}  // namespace altgrad
