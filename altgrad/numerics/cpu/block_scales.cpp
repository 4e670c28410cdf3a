// Operands with a scale per group of any shape, by any rule, to nearest or stochastically; the operator of MS-EDEN.
//
// This is a source of its own, so that it and kernels.cpp are compiled at the same time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "block_scales.h"
#include "ms_eden.h"
#include "tensors.h"

namespace altgrad {
namespace {

Groups groups_of(int64_t rows, int64_t columns, const Scaling& scaling) {
  const int64_t block = scaling.block, side = std::abs(block);
  int64_t high = rows, wide = columns;
  if (block == -1) {
    (scaling.rows ? high : wide) = 1;
  } else if (block != 0) {
    high = block < 0 || !scaling.rows ? side : 1;
    wide = block < 0 || scaling.rows ? side : 1;
  }
  return {rows, columns, std::clamp<int64_t>(high, 1, std::max<int64_t>(1, rows)),
          std::clamp<int64_t>(wide, 1, std::max<int64_t>(1, columns))};
}

float largest_of(const std::vector<float>& amaxes) {
  uint32_t largest = 0;
  for (const float amax : amaxes) largest = std::max(largest, order(amax));
  return from_order(largest);
}

}  // namespace

float round_groups(const Tensor& x, Tensor& y, const Tensor& constants, const Scaling& scaling, float known,
                   const Stream* stream, int64_t first, float* kept) {
  const Groups groups = groups_of(x.size(0), x.size(1), scaling);
  const bool one = scaling.block == 0, of_rows = scaling.block == -1;
  Scales scales(constants, scaling.rule, !one && !of_rows);
  std::vector<float> amaxes(std::max<int64_t>(1, groups.down() * groups.across()), 0.0f);
  with_input(x, [&](const auto* from) { group_amaxes(from, groups, amaxes.data()); });
  const float amax = largest_of(amaxes);
  const float sets_scale = known > 0 && is_finite(amax) ? known : amax;
  if (scales.two_level()) {
    scales.set_whole(sets_scale);
    *kept = scales.whole();
  } else if (one) {
    amaxes[0] = sets_scale;
    *kept = scale_of(sets_scale, ScaleRule(scaling.rule, scales.grid()));
  }
  float* factors = of_rows && !scales.two_level() ? kept : nullptr;
  with_input(x, [&](const auto* from) {
    with_output(y, [&](auto* to) {
      auto run = [&](const auto& round, const auto& nearest) {
        auto go = [&](auto back) {
          round_groups<decltype(back)::value>(from, to, groups, amaxes.data(), scales, stream, first, factors, round,
                                              nearest);
        };
        using Back = Scales::Back;
        scales.back() == Back::kTimes  ? go(std::integral_constant<Back, Back::kTimes>{})
        : scales.back() == Back::kOver ? go(std::integral_constant<Back, Back::kOver>{})
                                       : go(std::integral_constant<Back, Back::kNone>{});
      };
      auto with_nearest = [&](const auto& nearest) {
        stream != nullptr ? run(ByChance(scales.grid()), nearest) : run(ToNearest{nearest}, nearest);
      };
      with_rounder(scales.grid(), with_nearest);
    });
  });
  return amax;
}

namespace {

// x: rotated, with a multiple of 128 rows; blocks lie along columns. first: place of the first block in the stream.
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
    scales.set_whole(largest_of(amaxes));
    with_output(values, [&](auto* to) {
      auto run = [&](const auto& round) {
        round_ms_eden(from, to, groups, amaxes.data(), scales, counter, first, round);
      };
      with_rounder(scales.grid(), run);
    });
  });
  *static_cast<float*>(found.mutable_data_ptr()) = scales.whole();
  return found;
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("ms_eden_into", TORCH_BOX(&altgrad::ms_eden_into));
}
