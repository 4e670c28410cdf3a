// The operators for groups of any shape, by any rule and rounding, and for MS-EDEN: what those of kernels.cpp do not do.
// A source of its own, so that the two are compiled at the same time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "groups.h"
#include "ms_eden.h"
#include "tensors.h"

namespace altgrad {
namespace {

// Of one tensor. known: amax that sets the tensor's scale, 0 for that of x. stream: of random numbers, three, or empty for
// rounding to nearest; first: place of the first element in it.
Tensor quantize_groups_into(Tensor x, Tensor values, Tensor constants, Tensor known, Tensor stream, int64_t first,
                            int64_t block, int64_t dim, int64_t rule) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const bool one = block == 0, of_rows = block == -1, along_rows = dim != 0;
  const int64_t side = std::abs(block);
  const int64_t high = one ? rows : of_rows ? (along_rows ? 1 : rows) : block < 0 || !along_rows ? side : 1;
  const int64_t wide = one ? columns : of_rows ? (along_rows ? columns : 1) : block < 0 || along_rows ? side : 1;
  const Groups groups{rows, columns, std::clamp<int64_t>(high, 1, std::max<int64_t>(1, rows)),
                      std::clamp<int64_t>(wide, 1, std::max<int64_t>(1, columns))};
  Scales scales(constants, rule, !one && !of_rows);
  const bool keeps_whole = one || scales.two_level();
  std::vector<int64_t> sizes{0};
  if (keeps_whole) sizes = {};
  if (of_rows && !keeps_whole) sizes = along_rows ? std::vector<int64_t>{rows, 1} : std::vector<int64_t>{1, columns};
  Tensor found = small_float(sizes);
  float* to_scales = static_cast<float*>(found.mutable_data_ptr());
  std::vector<float> amaxes(std::max<int64_t>(1, groups.down() * groups.across()), 0.0f);
  const float remembered = *known.const_data_ptr<float>();
  with_input(x, [&](const auto* from) { group_amaxes(from, groups, amaxes.data()); });
  auto scaling_amax = [&](float own) { return remembered > 0 && is_finite(own) ? remembered : own; };
  if (one) amaxes[0] = scaling_amax(amaxes[0]);
  if (scales.two_level()) {
    uint32_t whole = 0;
    for (const float amax : amaxes) whole = std::max(whole, order(amax));
    scales.set_whole(scaling_amax(from_order(whole)));
    *to_scales = scales.whole();
  } else if (one) {
    *to_scales = scale_of(amaxes[0], ScaleRule(rule, scales.grid()));
  }
  float* factors = of_rows && !keeps_whole ? to_scales : nullptr;
  const bool by_chance = stream.numel() > 0;
  const Stream counter = by_chance ? Stream::of(stream.const_data_ptr<int64_t>()) : Stream{};
  with_input(x, [&](const auto* from) {
    with_output(values, [&](auto* to) {
      auto run = [&](const auto& round, const auto& nearest) {
        auto go = [&](auto back) {
          round_groups<decltype(back)::value>(from, to, groups, amaxes.data(), scales, by_chance ? &counter : nullptr,
                                              first, factors, round, nearest);
        };
        using Back = Scales::Back;
        scales.back() == Back::kTimes  ? go(std::integral_constant<Back, Back::kTimes>{})
        : scales.back() == Back::kOver ? go(std::integral_constant<Back, Back::kOver>{})
                                       : go(std::integral_constant<Back, Back::kNone>{});
      };
      auto with_nearest = [&](const auto& nearest) {
        by_chance ? run(ByChance(scales.grid()), nearest) : run(ToNearest{nearest}, nearest);
      };
      scales.grid().root == 0 ? with_nearest(Rounder<false>(scales.grid())) : with_nearest(Rounder<true>(scales.grid()));
    });
  });
  return found;
}

Tensor quantize_groups_in_place(Tensor values, Tensor constants, Tensor known, Tensor stream, int64_t first,
                                int64_t block, int64_t dim, int64_t rule) {
  return quantize_groups_into(values, values, constants, known, stream, first, block, dim, rule);
}

// Of rotated x with some 128 rows, in blocks along them; first: place of the first block in the stream.
Tensor ms_eden_into(Tensor x, Tensor values, Tensor constants, Tensor stream, int64_t first, int64_t block, double clip,
                    double room) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const Groups groups{x.size(0), x.size(1), block, 1};
  std::vector<float> amaxes(groups.down() * groups.across());
  Scales scales(constants, scale_rule::kTwoLevel, false);
  scales.clip(clip, room);
  const Stream counter = Stream::of(stream.const_data_ptr<int64_t>());
  Tensor found = small_float({});
  with_input(x, [&](const auto* from) {
    group_amaxes(from, groups, amaxes.data());
    uint32_t whole = 0;
    for (const float amax : amaxes) whole = std::max(whole, order(amax));
    scales.set_whole(from_order(whole));
    with_output(values, [&](auto* to) {
      auto run = [&](const auto& round) {
        round_ms_eden(from, to, groups, amaxes.data(), scales, counter, first, round);
      };
      scales.grid().root == 0 ? run(Rounder<false>(scales.grid())) : run(Rounder<true>(scales.grid()));
    });
  });
  *static_cast<float*>(found.mutable_data_ptr()) = scales.whole();
  return found;
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("quantize_groups_into", TORCH_BOX(&altgrad::quantize_groups_into));
  m.impl("quantize_groups_in_place", TORCH_BOX(&altgrad::quantize_groups_in_place));
  m.impl("ms_eden_into", TORCH_BOX(&altgrad::ms_eden_into));
}
