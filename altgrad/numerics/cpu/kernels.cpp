// The operators of a training step on a CPU: their arguments, and the loops that they run.
//
// operand_definition.py defines them in tensor operations; every bit agrees, which tests and the proof over all float32
// inputs check. loops.py compiles this source for its machine, with fp-contract off.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "coder.h"
#include "hadamard.h"
#include "tensors.h"

namespace altgrad {
namespace {

// The amax of a tensor in earlier steps, newest first, 0 for a step that has not happened.
struct History {
  float* entries;
  int64_t length;

  explicit History(Tensor& history)
      : entries(static_cast<float*>(history.mutable_data_ptr())), length(history.numel()) {}

  // Returns the amax that sets the scale, 0 if there is none.
  float known(bool newest) const {
    if (newest) return entries[0];
    float found = 0;
    for (int64_t i = 0; i < length; ++i) found = is_finite(entries[i]) ? std::max(found, entries[i]) : found;
    return found;
  }
  void learn(int64_t what, float amax) {
    if (!is_finite(amax)) return;
    if (what == learns::kEach) std::copy_backward(entries, entries + length - 1, entries + length);
    if (what == learns::kEach || (what == learns::kFirst && entries[0] == 0)) entries[0] = amax;
  }
};

// Writes the operand of `from`, which has several scales, to `values`, which may be the same tensor.
void round_parts(const Tensor& from, Tensor& values, const Grid& grid, const Scaling& scaling, float* scales) {
  const Shape shape{from.size(0), from.size(1)};
  const int64_t block = scaling.block;
  const bool rows = scaling.rows;
  const ScaleRule rule(scaling.rule, grid);
  dispatch(from, values, grid, [&](const auto* x, auto* y, const auto& round) {
    const int64_t length = block > 0 ? block : std::max<int64_t>(1, shape.columns);
    float* to = block > 0 ? nullptr : scales;
    rows        ? round_rows(x, y, shape, length, to, rule, round)
    : block > 0 ? round_blocks_of_columns(x, y, shape, block, rule, round)
                : round_columns(x, y, shape, to, rule, round);
  });
}

// Writes the operand of x to `values`, which may be x, and returns its scales. histories: what sets the scale, or
// empty. learns: which amax a history stores. streams: random numbers from place `first` on; empty to round to nearest.
//
// The operators take numbers, tensors and lists of them: torch 2.13 leaks a string or an optional tensor at each call
// of a stable operator.
Tensor quantize_into(Tensor x, Tensor values, Tensor constants, std::vector<Tensor> histories,
                     std::vector<Tensor> streams, int64_t first, bool newest, int64_t learns, int64_t block,
                     int64_t dim, int64_t rule) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const Scaling scaling{block, dim != 0, rule};
  Tensor scales = small_float(scaling.sizes(x));
  float* to = static_cast<float*>(scales.mutable_data_ptr());
  const bool nearest = streams.empty(), one_scale = block == 0;
  if (nearest && !one_scale && !scaling.in_groups()) {
    round_parts(x, values, Grid(constants), scaling, to);
    return scales;
  }
  const float known = histories.empty() ? 0.0f : History(histories[0]).known(newest);
  const Stream stream = nearest ? Stream{} : Stream::of(streams[0].const_data_ptr<int64_t>());
  const float amax = nearest && one_scale
                         ? round_tensor(x, values, Grid(constants), rule, known, *to)
                         : round_groups(x, values, constants, scaling, known, nearest ? nullptr : &stream, first, to);
  if (!histories.empty()) History(histories[0]).learn(learns, amax);
  return scales;
}

Tensor quantize_in_place(Tensor values, Tensor constants, std::vector<Tensor> histories, std::vector<Tensor> streams,
                         int64_t first, bool newest, int64_t learns, int64_t block, int64_t dim, int64_t rule) {
  return quantize_into(values, values, constants, histories, streams, first, newest, learns, block, dim, rule);
}

Tensor rotate_rows(Tensor x, Tensor signs) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const int64_t rows = x.size(0), columns = x.size(1), size = signs.numel();
  Tensor y = torch::stable::new_empty(x, {(rows + size - 1) / size * size, columns}, ScalarType::Float);
  with_input(x, [&](const auto* from) {
    auto run = [&](const auto known) {
      rotate(from, rows, columns, signs.const_data_ptr<float>(), known, static_cast<float*>(y.mutable_data_ptr()));
    };
    size == 16    ? run(std::integral_constant<int64_t, 16>{})
    : size == 128 ? run(std::integral_constant<int64_t, 128>{})
                  : run(size);
  });
  return y;
}

// `first` and `count` must be multiples of Stream::kRow.
Tensor random_signs(Tensor stream, int64_t first, int64_t count) {
  Tensor signs = torch::stable::new_empty(stream, {count}, ScalarType::Float);
  const Stream counter = Stream::of(stream.const_data_ptr<int64_t>());
  counter.signs(first, count, static_cast<float*>(signs.mutable_data_ptr()));
  return signs;
}

// x: float32.
Tensor round_values(Tensor x, Tensor constants) {
  x = torch::stable::contiguous(x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  const float* from = x.const_data_ptr<float>();
  float* to = static_cast<float*>(y.mutable_data_ptr());
  with_rounder(Grid(constants), [&](const auto& round) {
    over(x.numel(), 1, [&](int64_t begin, int64_t end) {
      round_range(from + begin, to + begin, end - begin, Scale{1}, round);
    });
  });
  return y;
}

Tensor encode_operand(Tensor values, Tensor constants) {
  values = torch::stable::contiguous(values);
  Tensor codes = torch::stable::new_empty(values, values.sizes(), ScalarType::Byte);
  const Coder coder{Grid(constants)};
  uint8_t* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
  with_input(values, [&](const auto* from) {
    over(values.numel(), 1,
         [&](int64_t begin, int64_t end) { encode_range(from + begin, to + begin, end - begin, coder); });
  });
  return codes;
}

Tensor decode_operand(Tensor codes, Tensor constants, ScalarType dtype) {
  codes = torch::stable::contiguous(codes);
  Tensor values = torch::stable::new_empty(codes, codes.sizes(), dtype);
  const Coder coder{Grid(constants)};
  const uint8_t* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  with_output(values, [&](auto* to) {
    over(codes.numel(), 1,
         [&](int64_t begin, int64_t end) { decode_range(from + begin, to + begin, end - begin, coder); });
  });
  return values;
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("quantize_into", TORCH_BOX(&altgrad::quantize_into));
  m.impl("quantize_in_place", TORCH_BOX(&altgrad::quantize_in_place));
  m.impl("random_signs", TORCH_BOX(&altgrad::random_signs));
  m.impl("rotate_rows", TORCH_BOX(&altgrad::rotate_rows));
  m.impl("round_values", TORCH_BOX(&altgrad::round_values));
  m.impl("encode_operand", TORCH_BOX(&altgrad::encode_operand));
  m.impl("decode_operand", TORCH_BOX(&altgrad::decode_operand));
}
