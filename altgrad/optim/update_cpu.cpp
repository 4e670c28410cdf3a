// What a step does to one weight tensor, on CPU: update.py in loops over what fits into the first cache.
//
// update.py says what is computed and has it in tensor operations; the two agree to rounding, as the sums are taken in
// another order here. That order depends on no number of threads. Parts of a rule are loops of their own over a
// chunk of the tensor, so that which of them a rule has is decided once per chunk, and the compiler vectorizes each.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arm_cpu.h"
#include "coded_adam_cpu.h"
#include "coder.h"
#include "stiffness_cpu.h"

namespace altgrad {
namespace {

// round_to_grid_stochastic of rounding.py.
struct StochasticRounder {
  Spacing spacing;
  float zero;

  explicit StochasticRounder(const Grid& grid) : spacing(grid), zero(grid.zero) {}

  float operator()(float x, float random) const {
    const float magnitude = std::min(absolute(x), spacing.max), step = spacing(magnitude);
    const float steps = magnitude * inverse(step), below = std::floor(steps);
    const float up = random < steps - below ? 1.0f : 0.0f;
    return with_sign_of(std::min((below + up) * step, spacing.max), x) + zero;
  }
};

// Calls run with a function that divides values of a format by their scale. Fused where such instructions exist and no
// step of it leaves the normal numbers.
template <class F>
void with_division(const Grid& grid, float scale, const F& run) {
#ifdef ALTGRAD_FMA
  if (grid.spacing >= 0x1p-70f && grid.max <= 0x1p70f && scale >= 0x1p-40f && scale <= 0x1p40f) {
    run(FusedDivision(scale));
    return;
  }
#endif
  run([scale](float x) { return x / scale; });
}

// coordinate and at_coordinate of coordinate.py.
struct Line {
  Spacing spacing;
  float per_binade;
  int32_t lowest, highest;

  explicit Line(const Grid& grid)
      : spacing(grid), per_binade(0x1p23f / grid.ulps), lowest(exponent_of(grid.spacing)),
        highest(exponent_of(spacing(grid.max))) {}

  float place(float x) const {
    const float step = spacing(x);
    const float binades = static_cast<float>(exponent_of(step) - lowest);
    return with_sign_of(binades * per_binade + absolute(x) * inverse(step), x);
  }
  float at(float place) const {
    const float magnitude = absolute(place);
    const float binade = std::min(std::max(std::floor(magnitude * inverse(per_binade)) - 1.0f, 0.0f), 255.0f);
    const int32_t exponent = std::min(static_cast<int32_t>(binade) + lowest, highest);
    const float binades = static_cast<float>(exponent - lowest);
    const float step = std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    return with_sign_of((magnitude - binades * per_binade) * step, place);
  }
};

// e^x to 2 ulp, without a call, so that loops over it are vectorized: Cephes' expf (S. L. Moshier).
float exponential(float x) {
  const float bounded = std::min(std::max(x, -87.0f), 88.0f);
  const float whole = std::floor(bounded * 1.44269504088896341f + 0.5f);
  const float rest = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float sum = 1.9875691500e-4f * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  const float power = std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
  return (sum * rest * rest + rest + 1.0f) * power;
}

// --- the rule -----------------------------------------------------------------------------------------------

void advance_moments(float* __restrict m, float* __restrict v, const float* __restrict g, int64_t n, const Numbers h) {
  const float rest1 = 1.0f - h.beta1, rest2 = 1.0f - h.beta2;
  for (int64_t i = 0; i < n; ++i) {
    m[i] = m[i] + (g[i] - m[i]) * rest1;
    v[i] = v[i] * h.beta2 + g[i] * g[i] * rest2;
  }
}

float adam_direction(float m, float v, const Numbers& h) {
  return m * h.unbias1 / (std::sqrt(v * h.unbias2) + h.eps);
}

void direct_adam(float* __restrict m, float* __restrict v, const float* __restrict g, float* __restrict step, int64_t n,
                 const Numbers h) {
  const float rest1 = 1.0f - h.beta1, rest2 = 1.0f - h.beta2;
  for (int64_t i = 0; i < n; ++i) {
    m[i] = m[i] + (g[i] - m[i]) * rest1;
    v[i] = v[i] * h.beta2 + g[i] * g[i] * rest2;
    step[i] = adam_direction(m[i], v[i], h);
  }
}

// With the square of the gradient's length under the metric for its second moment.
void direct_riemannian(float* __restrict m, float* __restrict v, const float* __restrict g,
                       const float* __restrict factor, float* __restrict step, int64_t n, const Numbers h) {
  const float rest1 = 1.0f - h.beta1, rest2 = 1.0f - h.beta2;
  for (int64_t i = 0; i < n; ++i) {
    const float length = factor[i] * g[i];
    m[i] = m[i] * h.beta1 + factor[i] * length * rest1;
    v[i] = v[i] * h.beta2 + length * length * rest2;
    step[i] = adam_direction(m[i], v[i], h);
  }
}

void direct_madam(const float* __restrict p, float* __restrict v, const float* __restrict g, float* __restrict step,
                  int64_t n, const Numbers h) {
  const float rest2 = 1.0f - h.beta2;
  for (int64_t i = 0; i < n; ++i) {
    v[i] = v[i] * h.beta2 + g[i] * g[i] * rest2;
    const float ratio = g[i] / std::sqrt(v[i] * h.unbias2);
    const float bounded = ratio != ratio ? 0.0f : std::min(std::max(ratio, -rule::kMadamClip), rule::kMadamClip);
    step[i] = p[i] == 0.0f ? 0.0f : with_sign_of(1.0f, p[i]) * bounded;
  }
}

// The moments of a chunk: where they lie, or decoded, or `apart`, so that nothing becomes of what is done to them.
struct Moments {
  float *m, *v, room_m[kChunk], room_v[kChunk];

  Moments(const Tensors& t, int64_t first, int64_t n, bool apart = false) {
    m = open(t.m, t.coded_m, first, n, apart, room_m), v = open(t.v, t.coded_v, first, n, apart, room_v);
  }
  void store(const Tensors& t, int64_t first, int64_t n, const Stream& stream) {
    if (t.coded_m) t.coded_m.store(first, n, m, stream);
    if (t.coded_v) t.coded_v.store(first, n, v, stream);
  }

 private:
  static float* open(float* whole, const Codec& coded, int64_t first, int64_t n, bool apart, float* room) {
    if (coded) {
      coded.load(first, n, room);
      return room;
    }
    if (whole == nullptr || !apart) return whole == nullptr ? nullptr : whole + first;
    return std::copy_n(whole + first, n, room) - n;
  }
};

// Advances the moments of a chunk and writes the direction of its step, before the learning rate.
void direct(const Arm& arm, const Numbers& h, const Tensors& t, float* m, float* v, int64_t first, int64_t n,
            const float* factor, float* __restrict step) {
  const float* g = t.g + first;
  float scaled[kChunk];
  const bool squared = arm.metric || arm.power == 2;
  if (factor != nullptr && (arm.metric || arm.on_gradient) && arm.direction != direction::kRiemannAdam) {
    for (int64_t i = 0; i < n; ++i) scaled[i] = (squared ? factor[i] * factor[i] : factor[i]) * g[i];
    g = scaled;
  }
  switch (arm.direction) {
    case direction::kMomentum:
      if (arm.momentum) {
        for (int64_t i = 0; i < n; ++i) m[i] = m[i] * h.momentum + g[i];
        g = m;
      }
      std::copy_n(g, n, step);
      break;
    case direction::kRiemannAdam:
      direct_riemannian(m, v, g, factor, step, n, h);
      break;
    case direction::kMadam:
      direct_madam(t.p + first, v, g, step, n, h);
      break;
    case direction::kAdam:
      direct_adam(m, v, g, step, n, h);
      break;
    default:
      unknown("direction", arm.direction);
  }
  if (factor != nullptr && !arm.on_gradient && !arm.metric) {
    for (int64_t i = 0; i < n; ++i) step[i] = (squared ? factor[i] * factor[i] : factor[i]) * step[i];
  }
}


template <class F>
void move_by_rungs(const Numbers h, float* __restrict p, const float* __restrict step,
                   const float* __restrict random, int64_t n, const Line line, const float scale, const F divided) {
  for (int64_t i = 0; i < n; ++i) {
    const float place = std::nearbyint(line.place(p[i] * scale));
    float wanted = std::min(std::max(-h.lr * step[i], -h.max_rungs), h.max_rungs);
    wanted = wanted + (line.place(p[i] * h.decay * scale) - place);
    p[i] = divided(line.at(place + std::floor(wanted + random[i])));
  }
}

// Moves the weights of a chunk.
void move(const Arm& arm, const Numbers h, float* __restrict p, const float* __restrict step, int64_t first, int64_t n,
          const Grid& grid, const Line line, const float held_scale, const Stream& stream) {
  switch (arm.unit) {
    case unit::kRungs: {
      float random[kChunk];
      stream.uniform(first, n, random);
      with_division(grid, held_scale, [&](const auto divided) {
        move_by_rungs(h, p, step, random, n, line, held_scale, divided);
      });
      break;
    }
    case unit::kLog:
      for (int64_t i = 0; i < n; ++i) p[i] = p[i] * h.decay * exponential(-h.lr * step[i]);
      break;
    case unit::kWeight:
      for (int64_t i = 0; i < n; ++i) p[i] = p[i] * h.decay - h.lr * step[i];
      break;
    default:
      unknown("unit", arm.unit);
  }
}

// A first moment goes along as so many rungs.
void carry(float* __restrict m, const float* __restrict from, const float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) m[i] *= to[i] / from[i];
}

// A step of one tensor.
class Step {
 public:
  Step(const Arm& arm, const Numbers& h, const Tensors& t, int64_t n, const Grid& grid, float* held,
       const Stiffness* stiffness, const Stream& stream)
      : arm_(arm), h_(h), t_(t), n_(n), grid_(grid), line_(grid), held_(held), stiffness_(stiffness),
        stream_(stream) {
#ifdef ALTGRAD_EIGHTS
    if (stiffness == nullptr && !arm.match_rms && !arm.feedback && CodedAdam::takes(arm, t)) coded_.emplace(t_, h_);
#endif
  }

  void take() {
    if (t_.coded_m.measures() || t_.coded_v.measures()) measure();
    if (arm_.match_rms) match();
    if (arm_.weights != weights::kMaster) held_scale_ = scale_of(*held_, ScaleRule(arm_.scale_rule, grid_));
    std::vector<uint32_t> largest_of((n_ + kChunk - 1) / kChunk);
    over_chunks(n_, [&](int64_t chunk, int64_t first, int64_t n) { largest_of[chunk] = finish(first, n); });
    if (arm_.weights != weights::kMaster) write_back(from_order(*std::max_element(largest_of.begin(), largest_of.end())));
    for (const Codec* codec : {&t_.coded_m, &t_.coded_v}) {
      if (codec->measures()) codec->commit();
    }
  }

 private:
  // Has the scales of moments that are of more than a chunk.
  void measure() {
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
#ifdef ALTGRAD_EIGHTS
      if (n == kChunk && coded_ && coded_->measure(first)) return;
#endif
      float factor[kChunk], step[kChunk];
      if (stiffness_ != nullptr) (*stiffness_)(t_.p + first, first, n, factor);
      const Moments moments(t_, first, n, true);
      direct(arm_, h_, t_, moments.m, moments.v, first, n, stiffness_ != nullptr ? factor : nullptr, step);
      if (t_.coded_m.measures()) t_.coded_m.measure(first, n, moments.m);
      if (t_.coded_v.measures()) t_.coded_v.measure(first, n, moments.v);
    });
    for (const Codec* codec : {&t_.coded_m, &t_.coded_v}) {
      if (codec->measures()) codec->settle();
    }
  }

  // Advances all moments of a chunk and writes the direction, and the factor if there is a stiffness.
  void advance(const Moments& moments, int64_t first, int64_t n, float* factor, float* step) const {
    if (stiffness_ != nullptr) (*stiffness_)(t_.p + first, first, n, factor);
    if (t_.reference_m != nullptr) {
      advance_moments(t_.reference_m + first, t_.reference_v + first, t_.g + first, n, h_);
    }
    direct(arm_, h_, t_, moments.m, moments.v, first, n, stiffness_ != nullptr ? factor : nullptr, step);
  }

  // Finds what brings the step to the size of AdamW's; so the directions of all chunks come before any weight moves.
  void match() {
    directions_.reset(new float[n_]);
    std::vector<double> own((n_ + kChunk - 1) / kChunk), wanted(own.size());
    over_chunks(n_, [&](int64_t chunk, int64_t first, int64_t n) {
      float factor[kChunk], *step = directions_.get() + first;
      const float* weight = t_.p + first;
      Moments moments(t_, first, n);
      const float* m = t_.reference_m != nullptr ? t_.reference_m + first : moments.m;
      const float* v = t_.reference_v != nullptr ? t_.reference_v + first : moments.v;
      advance(moments, first, n, factor, step);
      own[chunk] = chunk_sum(n, [&](int64_t i) {
        const float moved = arm_.unit == unit::kLog ? step[i] * weight[i] : step[i];
        return moved * moved;
      });
      wanted[chunk] = chunk_sum(n, [&](int64_t i) {
        const float adam = adam_direction(m[i], v[i], h_);
        return adam * adam;
      });
      moments.store(t_, first, n, stream_);
    });
    const float found = static_cast<float>(std::sqrt(total(wanted) / total(own)));
    ratio_ = is_finite(found) ? found : 1.0f;
  }

  // Moves a chunk, and returns its largest weight if someone asks for it.
  uint32_t finish(int64_t first, int64_t n) const {
#ifdef ALTGRAD_EIGHTS
    if (n == kChunk && coded_ && (*coded_)(first)) {
      return arm_.weights == weights::kMaster ? 0u : largest(t_.p + first, n);
    }
#endif
    float factor[kChunk], fresh[kChunk], *weight = t_.p + first, *step = fresh;
    if (directions_ == nullptr) {
      Moments moments(t_, first, n, arm_.feedback);
      advance(moments, first, n, factor, step);
      if (!arm_.feedback) moments.store(t_, first, n, stream_);
    } else {
      step = directions_.get() + first;
      if (arm_.metric) (*stiffness_)(weight, first, n, factor);
      for (int64_t i = 0; i < n; ++i) step[i] *= ratio_;
    }
    move(arm_, h_, weight, step, first, n, grid_, line_, held_scale_, stream_);
    if (arm_.metric && t_.m != nullptr) {
      float there[kChunk];
      (*stiffness_)(weight, first, n, there);
      carry(t_.m + first, factor, there, n);
    }
    return arm_.weights == weights::kMaster ? 0u : largest(weight, n);
  }

  // Puts the weights, the largest of which is ``present``, on the quantization grid, whose scale is changed first where
  // that is due.
  void write_back(float present) {
    float amax = *held_;
    if (arm_.reestimated) {
      if (present > amax * rule::kGrowsAbove) amax = 2.0f * amax;
      if (present < amax * rule::kShrinksBelow) amax = 0.5f * amax;
    }
    if (!(amax > 0)) amax = present;  // of weights that all began at zero
    if (arm_.unit == unit::kRungs && amax == *held_ && present <= amax) return;  // whole rungs at the same scale
    *held_ = amax;
    if (arm_.weights == weights::kStochastic && arm_.unit != unit::kRungs) {
      const StochasticRounder round(grid_);
      round_weights<true>([=](float x, float random) { return round(x, random); });
    } else if (grid_.root == 0) {
      const Rounder<false> round(grid_);
      round_weights<false>([=](float x, float) { return round(x); });
    } else {
      const Rounder<true> round(grid_);
      round_weights<false>([=](float x, float) { return round(x); });
    }
  }

  template <bool kRandom, class F>
  void round_weights(const F& rounded) {
    const float scale = scale_of(*held_, ScaleRule(arm_.scale_rule, grid_));
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      float random[kChunk], wanted[kChunk];
      if constexpr (kRandom) stream_.uniform(first, n, random);
      if (arm_.feedback) std::copy_n(t_.p + first, n, wanted);
      with_division(grid_, scale, [&](const auto divided) {
        round_chunk<kRandom>(t_.p + first, random, n, scale, rounded, divided);
      });
      if (arm_.feedback) feed_back(first, n, wanted, grid_.max / scale);
    });
  }

  // Advances the moments of a chunk and has the momentum make up for what rounding took of `wanted`: _feed_back of
  // update.py. Until now the moments were only looked at.
  void feed_back(int64_t first, int64_t n, const float* __restrict wanted, const float top) const {
    Moments moments(t_, first, n);
    float step[kChunk];
    direct(arm_, h_, t_, moments.m, moments.v, first, n, nullptr, step);
    const float* __restrict written = t_.p + first;
    const bool adam = arm_.direction == direction::kAdam;
    const float beta = adam ? h_.beta1 : h_.momentum, kept = 1.0f - beta, later = h_.lr * h_.unbias_later;
    for (int64_t i = 0; i < n; ++i) {
      const float error = std::max(std::min(wanted[i], top), -top) - written[i];
      const float rate = adam ? later / (std::sqrt(moments.v[i] * h_.unbias2) + h_.eps) : h_.lr;
      const float lost = error * kept / (beta * rate);
      moments.m[i] -= is_finite(lost) ? lost : 0.0f;  // at a rate of zero nothing comes back
    }
    moments.store(t_, first, n, stream_);
  }

  template <bool kRandom, class F, class D>
  static void round_chunk(float* __restrict weight, const float* __restrict random, int64_t n, const float scale,
                          const F round, const D divided) {
    for (int64_t i = 0; i < n; ++i) weight[i] = divided(round(weight[i] * scale, kRandom ? random[i] : 0.0f));
  }

  const Arm arm_;
  const Numbers h_;
  const Tensors t_;
  const int64_t n_;
  const Grid grid_;
  const Line line_;
  float* const held_;
  const Stiffness* const stiffness_;
  const Stream stream_;
  float held_scale_ = 1.0f, ratio_ = 1.0f;
  std::unique_ptr<float[]> directions_;
#ifdef ALTGRAD_EIGHTS
  std::optional<CodedAdam> coded_;
#endif
};

// --- the operator -------------------------------------------------------------------------------------------

float* floats_or_null(Tensor& t, const Tensor& coding) {
  return t.numel() == 0 || coding.numel() > 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr());
}
float* data_or_null(Tensor& t) { return t.numel() == 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr()); }
Codec codec_of(const Tensor& p, Tensor& codes, Tensor& scales, Tensor& powers, const Tensor& coding) {
  if (coding.numel() == 0) return {};
  return {coding.const_data_ptr<float>(), p.numel(), p.dim() < 2 ? p.numel() : p.size(p.dim() - 1),
          codes.mutable_data_ptr(), scales.mutable_data_ptr(), data_or_null(powers)};
}

// The float32 values of a weight on the quantization grid that lies in memory as codes, for the length of a step.
class Decoded {
 public:
  Decoded(const Tensor& codes, const Grid& grid, const float* held, int64_t scale_rule)
      : codes_(static_cast<uint8_t*>(codes.mutable_data_ptr())), n_(codes.numel()), coder_(grid), grid_(grid),
        held_(held), rule_(scale_rule, grid), values_(new float[n_]) {
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      with_division(grid_, scale_of(*held_, rule_), [&](const auto divided) {
        decode(codes_ + first, values_.get() + first, n, coder_, divided);
      });
    });
  }
  float* values() { return values_.get(); }

  // Has codes of the values, at the scale that is held now.
  void keep() const {
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      encode(values_.get() + first, codes_ + first, n, coder_, scale_of(*held_, rule_) * weight_grid::kAbove);
    });
  }

 private:
  template <class D>
  static void decode(const uint8_t* __restrict codes, float* __restrict x, int64_t n, const Coder coder,
                     const D divided) {
    for (int64_t i = 0; i < n; ++i) x[i] = divided(coder.decode(codes[i]));
  }
  static void encode(const float* __restrict x, uint8_t* __restrict codes, int64_t n, const Coder coder,
                     const float scale) {
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(coder.encode(x[i] * scale));
  }

  uint8_t* const codes_;
  const int64_t n_;
  const Coder coder_;
  const Grid grid_;
  const float* const held_;
  const ScaleRule rule_;
  const std::unique_ptr<float[]> values_;
};

void arm_step(Tensor p, Tensor g, Tensor m, Tensor v, Tensor reference_m, Tensor reference_v, Tensor held,
              Tensor settings, Tensor numbers, Tensor constants, Tensor remembered, Tensor stiff_constants,
              Tensor stiff_numbers, Tensor order, Tensor m_scale, Tensor v_scale, Tensor m_power, Tensor v_power,
              Tensor m_coding, Tensor v_coding, int64_t seed, int64_t tensor, int64_t step) {
  const int64_t n = p.numel();
  if (n == 0) return;
  const Arm arm(settings);
  const Numbers h(numbers);
  const Grid grid(constants);
  std::optional<Decoded> decoded;
  if (p.scalar_type() == torch::headeronly::ScalarType::Byte) {
    decoded.emplace(p, grid, data_or_null(held), arm.scale_rule);
  }
  const Tensors t{decoded ? decoded->values() : data_or_null(p),
                  floats_or_null(m, m_coding),
                  floats_or_null(v, v_coding),
                  data_or_null(reference_m),
                  data_or_null(reference_v),
                  g.const_data_ptr<float>(),
                  codec_of(p, m, m_scale, m_power, m_coding),
                  codec_of(p, v, v_scale, v_power, v_coding)};
  std::unique_ptr<Stiffness> stiffness;
  if (arm.formula != formula::kNone) {
    const float known = remembered.numel() == 1 ? *remembered.const_data_ptr<float>() : 0.0f;
    const bool needs_own = !(known > 0) || arm.formula == formula::kForeign || arm.formula == formula::kMantissa ||
                           arm.formula == formula::kProfile;
    const float own = needs_own ? amax_of(t.p, n) : 0.0f;
    const float scale = scale_of(known > 0 ? known : own, ScaleRule(arm.scale_rule, grid));
    const int32_t* shuffle = order.numel() == 0 ? nullptr : static_cast<const int32_t*>(order.const_data_ptr());
    stiffness = std::make_unique<Stiffness>(arm, t.p, n, own, scale, stiff_constants, stiff_numbers, shuffle);
  }
  const Stream stream{static_cast<uint32_t>(seed), static_cast<uint32_t>(tensor), static_cast<uint32_t>(step)};
  Step(arm, h, t, n, grid, data_or_null(held), stiffness.get(), stream).take();
  if (decoded) decoded->keep();
}

// Steps of weights whose moments are codes, all in one format, by an arm that looks at no quantization grid.
void arm_steps(std::vector<Tensor> p, std::vector<Tensor> g, std::vector<Tensor> m, std::vector<Tensor> v,
               std::vector<Tensor> m_scale, std::vector<Tensor> v_scale, std::vector<Tensor> m_power,
               std::vector<Tensor> v_power, Tensor settings, Tensor numbers, Tensor constants, Tensor nothing,
               Tensor m_coding, Tensor v_coding, int64_t seed, Tensor places, int64_t step) {
  const int64_t* tensor = places.const_data_ptr<int64_t>();
  for (size_t i = 0; i < p.size(); ++i) {
    arm_step(p[i], g[i], m[i], v[i], nothing, nothing, nothing, settings, numbers, constants, nothing, nothing, nothing,
             nothing, m_scale[i], v_scale[i], m_power[i], v_power[i], m_coding, v_coding, seed, tensor[i], step);
  }
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("arm_step", TORCH_BOX(&altgrad::arm_step));
  m.impl("arm_steps", TORCH_BOX(&altgrad::arm_steps));
}
