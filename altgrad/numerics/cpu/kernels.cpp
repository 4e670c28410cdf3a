// The quantizing loops of a training step on CPU, each one pass over its tensor where the mathematics allows it.
//
// operand_definition.py has the same in tensor operations, which define it; every bit agrees, which
// tests and the proof over all float32 inputs check. Compiled for the machine at hand, with fp-contract off.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#include "grid.h"
#include "groups.h"

namespace altgrad {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kStripe = 128, kStrips = 16;  // columns handled together, and parts of the rows, at most
constexpr int64_t kUsualBlock = 32;  // that of the OCP microscaling formats
constexpr int64_t kTogether = 16;  // blocks handled together, if so many elements stay in the first cache:
constexpr int64_t kFirstCache = 1 << 13;
constexpr int64_t kSpan = 1 << 16;  // elements of a tensor that a thread handles at a time

struct Shape {
  int64_t rows, columns;
};

// --- the loops themselves -----------------------------------------------------------------------------

// In all of them x and y do not overlap or are the same, so that no element waits for another. A place is a Scale or
// a Moved.
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

// All elements at one scale, and none beyond the largest value of the format unless `clamps`.
template <class T, class U, class R>
void round_scaled(const T* x, U* y, int64_t n, float scale, bool clamps, const R round) {
  clamps ? round_range(x, y, n, Scale{scale}, round) : round_range(x, y, n, Scale{scale}, round.unclamped());
}

// Every element has a place of its own. `arrange` orders these: where elements are handled in pairs, first those of the
// pairs' first ones.
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

// The scale is taken off again: for what does not fit on a quantization grid divided by it. step: 0 for one scale.
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

// Calls run with pointers of the types of x and y, and the format's rounder.
template <class F>
void dispatch(const Tensor& x, Tensor& y, const Grid& grid, const F& run) {
  with_input(x, [&](const auto* from) {
    with_output(y, [&](auto* to) {
      grid.root == 0 ? run(from, to, Rounder<false>(grid)) : run(from, to, Rounder<true>(grid));
    });
  });
}

// --- one scale per tensor ----------------------------------------------------------------------------

struct Span {
  size_t tensor;
  int64_t begin, count;
};

// A tensor, the place of its operand, and its scale.
struct Range {
  const Tensor* x;
  Tensor* y;
  Grid grid;
  float known = 0;  // the amax that sets the scale, 0 for that of x
  float amax = 0, scale = 1;

  bool is_known() const { return known > 0; }
};

// Both in one pass.
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

// All tensors as if they were one long one, so that small ones keep every thread busy too. Where the scale is known
// beforehand, amax is found on the way. Otherwise it is looked for from the end, which was written last and is in the
// cache, back to the beginning, where rounding finds in the cache what was just read.
void round_tensors(std::span<Range> ranges, int64_t rule) {
  std::vector<Span> spans;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int64_t n = ranges[i].x->numel();
    for (int64_t begin = 0; begin < n; begin += kSpan) spans.push_back({i, begin, std::min(kSpan, n - begin)});
  }
  std::vector<uint32_t> found(spans.size());
  auto each_span = [&](bool backwards, const auto& run) {
    over(spans.size(), kSpan, [&](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; ++at) {
        const int64_t i = backwards ? first + last - 1 - at : at;
        run(spans[i], ranges[spans[i].tensor], found[i]);
      }
    });
  };
  auto gather_amax = [&](bool of_known) {
    for (size_t i = 0; i < spans.size(); ++i) {
      Range& range = ranges[spans[i].tensor];
      if (range.is_known() == of_known) range.amax = from_order(std::max(order(range.amax), found[i]));
    }
  };
  if (!std::all_of(ranges.begin(), ranges.end(), [](const Range& range) { return range.is_known(); })) {
    each_span(true, [](const Span& span, const Range& range, uint32_t& found_here) {
      if (range.is_known()) return;
      with_input(*range.x, [&](const auto* x) { found_here = order(from_order(largest(x + span.begin, span.count))); });
    });
    gather_amax(false);
  }
  for (Range& range : ranges) {
    range.scale = scale_of(range.is_known() ? range.known : range.amax, ScaleRule(rule, range.grid));
  }
  each_span(false, [](const Span& span, const Range& range, uint32_t& found_here) {
    dispatch(*range.x, *range.y, range.grid, [&](const auto* from, auto* to, const auto& round) {
      const auto* x = from + span.begin;
      auto* y = to + span.begin;
      if (range.is_known()) {
        found_here = round_and_find_largest(x, y, span.count, range.scale, round);
      } else {
        round_scaled(x, y, span.count, range.scale, round.saturates(range.amax, range.scale), round);
      }
    });
  });
  gather_amax(true);
}

// --- a scale per row or column, or per block of either ------------------------------------------------

// Some neighbouring blocks at a time, which are in the first cache when they are read again and whose scales do not
// wait for each other. Without `scales` the scale is taken off again, as block scales are. L: int64_t, or a length
// that the compiler knows.
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

// Scales along rows: a row is one block, or some and perhaps a shorter one.
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

// A scale per column: in strips of rows, first to find the scales and then to round.
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

// A scale per block of a column, which is taken off again: in tiles as high as a block.
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

// --- the operators ----------------------------------------------------------------------------------

// A small float32 tensor, from malloc rather than from torch's allocator. That asks for aligned memory, and before
// 2.38 glibc does not use an aligned block again if something small has been put behind it: steps would grow by
// megabytes each.
Tensor small_float(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  std::vector<int64_t> strides(sizes.size());
  for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) strides[i] = std::max<int64_t>(1, count);
  void* data = std::malloc(std::max<size_t>(1, count * sizeof(float)));
  if (data == nullptr) throw std::bad_alloc();
  return torch::stable::from_blob(data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Float, &std::free);
}

// What is remembered of a tensor: amax of earlier steps, the newest first, 0 for a step that has not been.
struct History {
  float* entries;
  int64_t length;

  explicit History(Tensor& history)
      : entries(static_cast<float*>(history.mutable_data_ptr())), length(history.numel()) {}

  // The amax that sets the scale, 0 if there is none.
  float known(bool newest) const {
    if (newest) return entries[0];
    float found = 0;
    for (int64_t i = 0; i < length; ++i) found = std::isfinite(entries[i]) ? std::max(found, entries[i]) : found;
    return found;
  }
  void learn(int64_t what, float amax) {
    if (what == learns::kEach) std::copy_backward(entries, entries + length - 1, entries + length);
    if (what == learns::kEach || (what == learns::kFirst && entries[0] == 0)) entries[0] = amax;
  }
};

// How tensors are scaled. block: elements per block, 0 for one scale, -1 for a scale per row.
struct Scaling {
  int64_t block;
  bool rows;  // blocks and scales lie along rows, not columns
  int64_t rule;

  std::vector<int64_t> sizes(const Tensor& x) const {
    if (block == 0) return {};
    if (block > 0) return {0};
    return rows ? std::vector<int64_t>{x.size(0), 1} : std::vector<int64_t>{1, x.size(1)};
  }
  int64_t count(const Tensor& x) const { return block == 0 ? 1 : block > 0 ? 0 : x.size(rows ? 0 : 1); }
};

// Writes the operand of a tensor with several scales into values, which may be that tensor.
void round_parts(const Tensor& from, Tensor& values, const Grid& grid, const Scaling& scaling, float* scales) {
  const Shape shape{from.size(0), from.size(1)};
  const auto [block, rows, number] = scaling;
  const ScaleRule rule(number, grid);
  dispatch(from, values, grid, [&](const auto* x, auto* y, const auto& round) {
    const int64_t length = block > 0 ? block : std::max<int64_t>(1, shape.columns);
    float* to = block > 0 ? nullptr : scales;
    rows        ? round_rows(x, y, shape, length, to, rule, round)
    : block > 0 ? round_blocks_of_columns(x, y, shape, block, rule, round)
                : round_columns(x, y, shape, to, rule, round);
  });
}

// Writes the operands of xs into ys, which may be the same, and their scales where these go, one tensor's behind the
// other's. histories: those that set the tensors' one scale, or none at all. learns: what they keep of their tensor.
struct Call {
  Scaling scaling;
  bool newest;
  int64_t learns;

  void quantize(std::span<const Tensor> xs, std::span<Tensor> ys, std::span<const Tensor> constants,
                std::span<Tensor> histories, float* scales) const {
    if (scaling.block != 0) {
      for (size_t i = 0; i < xs.size(); scales += scaling.count(xs[i]), ++i) {
        round_parts(xs[i], ys[i], Grid(constants[i]), scaling, scales);
      }
      return;
    }
    std::vector<Range> ranges;
    for (size_t i = 0; i < xs.size(); ++i) ranges.push_back({&xs[i], &ys[i], Grid(constants[i])});
    for (size_t i = 0; i < histories.size(); ++i) ranges[i].known = History(histories[i]).known(newest);
    round_tensors(ranges, scaling.rule);
    for (size_t i = 0; i < histories.size(); ++i) History(histories[i]).learn(learns, ranges[i].amax);
    for (const Range& range : ranges) *scales++ = range.scale;
  }

  Tensor quantize(const Tensor& x, Tensor& y, const Tensor& constants, std::vector<Tensor>& histories) const {
    Tensor scales = small_float(scaling.sizes(x));
    quantize({&x, 1}, {&y, 1}, {&constants, 1}, histories, static_cast<float*>(scales.mutable_data_ptr()));
    return scales;
  }
};

// The operators. (Numbers, tensors and lists of them: torch 2.13 leaks a string or an optional tensor at each call of a
// stable operator.)
Tensor quantize_in_place(Tensor values, Tensor constants, std::vector<Tensor> histories, bool newest, int64_t learns,
                         int64_t block, int64_t dim, int64_t rule) {
  return Call{{block, dim != 0, rule}, newest, learns}.quantize(values, values, constants, histories);
}

Tensor quantize_into(Tensor x, Tensor values, Tensor constants, std::vector<Tensor> histories, bool newest,
                     int64_t learns, int64_t block, int64_t dim, int64_t rule) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  return Call{{block, dim != 0, rule}, newest, learns}.quantize(x, values, constants, histories);
}

// Several at once; their scales in a row.
Tensor quantize_each_into(std::vector<Tensor> xs, std::vector<Tensor> values, std::vector<Tensor> constants,
                          std::vector<Tensor> histories, bool newest, int64_t learns, int64_t block, int64_t dim,
                          int64_t rule) {
  const Scaling scaling{block, dim != 0, rule};
  int64_t count = 0;
  for (Tensor& x : xs) {
    if (!x.is_contiguous()) x = torch::stable::contiguous(x);
    count += scaling.count(x);
  }
  Tensor scales = small_float({count});
  float* to_scales = static_cast<float*>(scales.mutable_data_ptr());
  Call{scaling, newest, learns}.quantize(xs, values, constants, histories, to_scales);
  return scales;
}

// Groups of any shape, by any rule and rounding, of one tensor: what the operators above do not do. known: amax that sets
// the tensor's scale, 0 for that of x. stream: of random numbers, three, or empty for rounding to nearest; first: place
// of the first element in it.
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
  if (one && remembered > 0) amaxes[0] = remembered;
  if (scales.two_level()) {
    uint32_t whole = 0;
    for (const float amax : amaxes) whole = std::max(whole, order(amax));
    scales.set_whole(remembered > 0 ? remembered : from_order(whole));
    *to_scales = scales.whole();
  } else if (one) {
    *to_scales = scale_of(amaxes[0], ScaleRule(rule, scales.grid()));
  }
  float* factors = of_rows && !keeps_whole ? to_scales : nullptr;
  const bool by_chance = stream.numel() > 0;
  const int64_t* numbers = by_chance ? stream.const_data_ptr<int64_t>() : nullptr;
  const Stream counter = by_chance ? Stream{static_cast<uint32_t>(numbers[0]), static_cast<uint32_t>(numbers[1]),
                                            static_cast<uint32_t>(numbers[2])}
                                   : Stream{};
  with_input(x, [&](const auto* from) {
    with_output(values, [&](auto* to) {
      auto run = [&](const auto& round) {
        auto go = [&](auto back) {
          round_groups<decltype(back)::value>(from, to, groups, amaxes.data(), scales, by_chance ? &counter : nullptr,
                                              first, factors, round);
        };
        using Back = Scales::Back;
        scales.back() == Back::kTimes  ? go(std::integral_constant<Back, Back::kTimes>{})
        : scales.back() == Back::kOver ? go(std::integral_constant<Back, Back::kOver>{})
                                       : go(std::integral_constant<Back, Back::kNone>{});
      };
      if (by_chance) {
        run(ByChance(scales.grid()));
      } else if (scales.grid().root == 0) {
        run(ToNearest<Rounder<false>>{Rounder<false>(scales.grid())});
      } else {
        run(ToNearest<Rounder<true>>{Rounder<true>(scales.grid())});
      }
    });
  });
  return found;
}

Tensor quantize_groups_in_place(Tensor values, Tensor constants, Tensor known, Tensor stream, int64_t first,
                                int64_t block, int64_t dim, int64_t rule) {
  return quantize_groups_into(values, values, constants, known, stream, first, block, dim, rule);
}

// hadamard.py: 16 rows at a time, in stripes of columns that stay in the first cache.
Tensor rotate_rows(Tensor x) {
  constexpr int64_t kSize = std::size(hadamard::kSigns);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const int64_t rows = x.size(0), columns = x.size(1), strips = (rows + kSize - 1) / kSize;
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  Tensor y = torch::stable::new_empty(x, {strips * kSize, columns}, ScalarType::Float);
  float* to = static_cast<float*>(y.mutable_data_ptr());
  with_input(x, [&](const auto* from) {
    over(strips * stripes, kSize * kStripe, [&](int64_t begin, int64_t end) {
      float block[kSize][kStripe];
      for (int64_t at = begin; at < end; ++at) {
        const int64_t top = at / stripes * kSize, left = at % stripes * kStripe;
        const int64_t n = std::min(kStripe, columns - left);
        for (int64_t i = 0; i < kSize; ++i) {
          const bool there = top + i < rows;
          const auto* line = from + (there ? (top + i) * columns + left : 0);
          const float sign = there ? hadamard::kSigns[i] : 0.0f;
          EACH_ALONE
          for (int64_t j = 0; j < n; ++j) block[i][j] = there ? load(line[j]) * sign : 0.0f;
        }
        for (int64_t step = 1; step < kSize; step *= 2) {
          for (int64_t i = 0; i < kSize; ++i) {
            if ((i & step) != 0) continue;
            float *low = block[i], *high = block[i + step];
            EACH_ALONE
            for (int64_t j = 0; j < n; ++j) {
              const float a = low[j], b = high[j];
              low[j] = a + b, high[j] = a - b;
            }
          }
        }
        for (int64_t i = 0; i < kSize; ++i) {
          float* line = to + (top + i) * columns + left;
          EACH_ALONE
          for (int64_t j = 0; j < n; ++j) line[j] = block[i][j] * 0.25f;
        }
      }
    });
  });
  return y;
}

// --- one byte per value -----------------------------------------------------------------------------

// Between code and float32 bits, without a branch, so that the loops over them are vectorized.
struct Coder {
  uint32_t shift, offset, normal_from;
  float smallest_normal, spacing, per_code;

  explicit Coder(const Grid& g)
      : shift(g.shift()), offset(g.offset()), normal_from(1u << (23 - g.shift())),
        smallest_normal(g.smallest_normal()), spacing(g.spacing), per_code(1 / g.spacing) {}

  uint32_t encode(float x) const {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t absolute = bits & 0x7fffffffu;
    const float magnitude = std::bit_cast<float>(absolute);
    const uint32_t normal = (absolute >> shift) - offset;
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(magnitude * per_code));
    uint32_t code = magnitude < smallest_normal ? subnormal : normal;
    const uint32_t sign = (bits >> 24) & 0x80u;
    code |= code == 0 ? 0u : sign;
    return absolute > 0x7f800000u ? codes::kNanCode : code;
  }

  float decode(uint32_t code) const {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t normal = (magnitude + offset) << shift;
    const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * spacing);
    uint32_t value = magnitude < normal_from ? subnormal : normal;
    value |= (code & 0x80u) << 24;
    value = code == codes::kNanCode ? 0x7fc00000u : value;
    return std::bit_cast<float>(value);
  }
};

template <class T>
void encode_range(const T* __restrict x, uint8_t* __restrict codes, int64_t n, const Coder coder) {
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(coder.encode(load(x[i])));
}

template <class U>
void decode_range(const uint8_t* __restrict codes, U* __restrict y, int64_t n, const Coder coder) {
  for (int64_t i = 0; i < n; ++i) store_exact(y + i, coder.decode(codes[i]));
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
  m.impl("quantize_each_into", TORCH_BOX(&altgrad::quantize_each_into));
  m.impl("quantize_groups_into", TORCH_BOX(&altgrad::quantize_groups_into));
  m.impl("quantize_groups_in_place", TORCH_BOX(&altgrad::quantize_groups_in_place));
  m.impl("rotate_rows", TORCH_BOX(&altgrad::rotate_rows));
  m.impl("encode_operand", TORCH_BOX(&altgrad::encode_operand));
  m.impl("decode_operand", TORCH_BOX(&altgrad::decode_operand));
}
