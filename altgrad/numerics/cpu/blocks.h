// Operands rounded to nearest with a scale per row or column, or a power-of-two scale per block of either, in one pass
// where that is possible.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "elements.h"

namespace altgrad {

constexpr int64_t kStripe = 128, kStrips = 16;  // most columns handled together, and most parts of the rows
constexpr int64_t kUsualBlock = 32;  // block size of the OCP microscaling formats
constexpr int64_t kTogether = 16;  // most blocks handled together; their elements fit the first cache

struct Shape {
  int64_t rows, columns;
};

// Rounds blocks of `length` neighbours, a few at a time: they are still in the first cache when read again, and their
// scales are computed independently. Writes the scales to `scales`; if null, divides each value by its scale again.
// L: int64_t, or a length that the compiler knows.
template <class T, class U, class R, class L>
void round_blocks(const T* x, U* y, int64_t blocks, const L length, float* scales, const ScaleRule& rule,
                  const R round) {
  float amax[kTogether], scale[kTogether];
  const int64_t together = std::clamp<int64_t>(kFirstCache / length, 1, kTogether);
  for (int64_t first = 0; first < blocks; first += together) {
    const int64_t count = std::min(together, blocks - first);
    const T* from = x + first * length;
    U* to = y + first * length;
    for (int64_t i = 0; i < count; ++i) amax[i] = from_order(largest(from + i * length, length));
    for (int64_t i = 0; i < count; ++i) scale[i] = scale_of(amax[i], rule);
    bool unusual = false;
    for (int64_t i = 0; i < count; ++i) {
      unusual |= scales != nullptr ? round.saturates(amax[i], scale[i]) : !round.can_move(amax[i], scale[i]);
    }
    if (scales != nullptr) std::copy_n(scale, count, scales + first);
    for (int64_t i = 0; i < count; ++i, from += length, to += length) {
      if (scales != nullptr) {
        round_scaled(from, to, length, scale[i], unusual, round);
      } else if (unusual) {
        round_unscaled(from, to, length, scale + i, 0, round);
      } else {
        round_range(from, to, length, round.moved(scale[i]), round.unclamped());
      }
    }
  }
}

// Blocks along rows. A row is one block, or several of which the last may be shorter.
template <class T, class U, class R>
void round_rows(const T* x, U* y, Shape shape, int64_t length, float* scales, const ScaleRule& rule,
                const R& round) {
  const int64_t whole = shape.columns / length, rest = shape.columns % length;
  if (rest == 0) {
    over(shape.rows * whole, length, [&](int64_t begin, int64_t end) {
      float* to_scales = scales == nullptr ? nullptr : scales + begin;
      const int64_t offset = begin * length;
      auto run = [&](auto known) {
        round_blocks(x + offset, y + offset, end - begin, known, to_scales, rule, round);
      };
      length == kUsualBlock ? run(std::integral_constant<int64_t, kUsualBlock>{}) : run(length);
    });
    return;
  }
  over(shape.rows, shape.columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = row * shape.columns, last = offset + whole * length;
      round_blocks(x + offset, y + offset, whole, length, nullptr, rule, round);
      round_blocks(x + last, y + last, 1, rest, nullptr, rule, round);
    }
  });
}

// One scale per column. A first pass over strips of rows finds the scales, a second one rounds.
template <class T, class U, class R>
void round_columns(const T* x, U* y, Shape shape, float* scales, const ScaleRule& rule, const R& round) {
  const int64_t columns = shape.columns, elements = shape.rows * columns;
  const int64_t strips = std::clamp<int64_t>(elements / kGrain, 1, kStrips);
  const int64_t rows = (shape.rows + strips - 1) / strips;
  std::vector<Order<T>> found(strips * columns);
  over(strips, rows * columns, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t first = std::min(strip * rows, shape.rows), count = std::min(rows, shape.rows - first);
      find_largest_of_columns(x + first * columns, count, columns, columns, found.data() + strip * columns);
    }
  });
  bool clamps = false;
  std::vector<Scale> natural(columns), places(columns);
  for (int64_t i = 0; i < columns; ++i) {
    Order<T> largest_here = 0;
    for (int64_t strip = 0; strip < strips; ++strip) {
      largest_here = std::max(largest_here, found[strip * columns + i]);
    }
    const float amax = from_order(largest_here);
    natural[i].factor = scales[i] = scale_of(amax, rule);
    clamps |= round.saturates(amax, scales[i]);
  }
  arrange<T, U>(natural.data(), columns, places.data());
  over(shape.rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * columns;
      U* to = y + row * columns;
      clamps ? round_each(from, to, columns, places.data(), round)
             : round_each(from, to, columns, places.data(), round.unclamped());
    }
  });
}

// One scale per block of a column; divides each value by its scale again. Works in tiles as high as a block.
template <class T, class U, class R>
void round_blocks_of_columns(const T* x, U* y, Shape shape, int64_t block, const ScaleRule& rule,
                             const R& round) {
  const int64_t stripes = (shape.columns + kStripe - 1) / kStripe, strips = (shape.rows + block - 1) / block;
  over(strips * stripes, block * kStripe, [&](int64_t begin, int64_t end) {
    Order<T> found[kStripe];
    float scale[kStripe];
    Moved natural[kStripe], places[kStripe];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t top = tile / stripes * block, left = tile % stripes * kStripe;
      const int64_t rows = std::min(block, shape.rows - top), n = std::min(kStripe, shape.columns - left);
      const T* from = x + top * shape.columns + left;
      U* to = y + top * shape.columns + left;
      find_largest_of_columns(from, rows, n, shape.columns, found);
      for (int64_t i = 0; i < n; ++i) scale[i] = scale_of(from_order(found[i]), rule);
      bool usual = true;
      for (int64_t i = 0; i < n; ++i) usual &= round.can_move(from_order(found[i]), scale[i]);
      for (int64_t i = 0; i < n; ++i) natural[i] = round.moved(scale[i]);
      arrange<T, U>(natural, n, places);
      for (int64_t row = 0; row < rows; ++row, from += shape.columns, to += shape.columns) {
        usual ? round_each(from, to, n, places, round.unclamped()) : round_unscaled(from, to, n, scale, 1, round);
      }
    }
  });
}

}  // namespace altgrad
