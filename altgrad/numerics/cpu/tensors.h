// How operators describe scales, tensors of returned scales, and operands with one scale.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "elements.h"
#include "philox.h"

namespace altgrad {

// Returns a small float32 tensor with memory from malloc. torch's allocator asks for aligned memory, and glibc before
// 2.38 does not reuse an aligned block that has something small behind it: memory would grow by megabytes per step.
inline Tensor small_float(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  std::vector<int64_t> strides(sizes.size());
  for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) strides[i] = std::max<int64_t>(1, count);
  void* data = std::malloc(std::max<size_t>(1, count * sizeof(float)));
  if (data == nullptr) throw std::bad_alloc();
  return torch::stable::from_blob(data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Float, &std::free);
}

// How the elements of a tensor share scales. block: elements per block; 0: one scale for all; -1: one per row or
// column; below -1: tiles of -block rows and columns. rows: blocks and scales lie along rows.
struct Scaling {
  int64_t block;
  bool rows;
  int64_t rule;

  bool two_level() const { return rule >= scale_rule::kTwoLevel; }
  // Whether it takes round_groups, with two passes.
  bool in_groups() const { return two_level() || block < -1 || (block > 0 && rule == scale_rule::kFloat32); }
  // Shape of the returned scales: none for one-level blocks, the tensor's scale for two levels.
  std::vector<int64_t> sizes(const Tensor& x) const {
    if (block == 0 || two_level()) return {};
    if (block != -1) return {0};
    return rows ? std::vector<int64_t>{x.size(0), 1} : std::vector<int64_t>{1, x.size(1)};
  }
};

// In block_scales.cpp: writes the operand of x to y, which may be x, and the returned scales to `kept`. Returns the
// amax of x. known: the amax that sets the tensor's scale; 0: the amax of x does. stream: random numbers, from place
// `first` on; null to round to nearest.
float round_groups(const Tensor& x, Tensor& y, const Tensor& constants, const Scaling& scaling, float known,
                   const Stream* stream, int64_t first, float* kept);

constexpr int64_t kSpan = 1 << 16;  // elements that a thread handles at a time

// Rounds x to y and returns the largest magnitude of x as its `order`, in one pass.
template <class T, class U, class R>
uint32_t round_and_find_largest(const T* x, U* y, int64_t n, float scale, const R& round) {
  Order<T> found = 0;
  for (int64_t i = 0; i < n; i += kFirstCache) {
    const int64_t count = std::min(kFirstCache, n - i);
    const Order<T> here = largest(x + i, count);
    found = std::max(found, here);
    round_scaled(x + i, y + i, count, scale, round.saturates(from_order(here), scale), round);
  }
  return order(from_order(found));
}

// Rounds x to y at one scale, which is written to `scale`, and returns the amax of x. known: the amax that sets the
// scale; 0: the amax of x does. If the scale is known beforehand, amax is found while rounding. Otherwise a first pass
// finds amax. It runs from the end, which was written last and is still in the cache, to the beginning, which is then
// in the cache when rounding starts.
inline float round_tensor(const Tensor& x, Tensor& y, const Grid& grid, int64_t rule, float known, float& scale) {
  const int64_t n = x.numel(), spans = (n + kSpan - 1) / kSpan;
  const bool is_known = known > 0;
  std::vector<uint32_t> found(spans);
  auto each_span = [&](bool backwards, const auto& run) {
    over(spans, kSpan, [&](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; ++at) {
        const int64_t i = backwards ? first + last - 1 - at : at;
        run(i * kSpan, std::min(kSpan, n - i * kSpan), found[i]);
      }
    });
  };
  float amax = 0;
  auto gather_amax = [&] {
    for (const uint32_t here : found) amax = from_order(std::max(order(amax), here));
  };
  dispatch(x, y, grid, [&](const auto* from, auto* to, const auto& round) {
    if (!is_known) {
      each_span(true, [&](int64_t begin, int64_t count, uint32_t& found_here) {
        found_here = order(from_order(largest(from + begin, count)));
      });
      gather_amax();
    }
    scale = scale_of(is_known ? known : amax, ScaleRule(rule, grid));
    each_span(false, [&](int64_t begin, int64_t count, uint32_t& found_here) {
      if (is_known) {
        found_here = round_and_find_largest(from + begin, to + begin, count, scale, round);
      } else {
        round_scaled(from + begin, to + begin, count, scale, round.saturates(amax, scale), round);
      }
    });
    if (!is_known) return;
    gather_amax();
    if (is_finite(amax)) return;
    // A known scale must not hide an Inf or NaN: all of such a tensor becomes NaN, as at its own scale.
    scale = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = 0; i < n; ++i) store(to + i, scale);
  });
  return amax;
}

}  // namespace altgrad
