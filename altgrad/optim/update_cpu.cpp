// Steps one weight tensor on a CPU: the rules of update.py as loops over chunks that fit into the L1 cache.
//
// update.py defines what is computed. The loops agree with update.py up to rounding, because they add in another order.
// That order does not depend on the number of threads. Each part of a rule, such as the moments, is a loop of its own
// over a chunk: the settings are tested once per chunk, and the compiler vectorizes each loop.

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
#include "coder.h"

namespace altgrad {
namespace {

// e^x to 2 ulp: Cephes' expf (S. L. Moshier). It is inlined, so the compiler vectorizes loops over it.
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

void direct_adam(const float* __restrict m, const float* __restrict v, float* __restrict step, int64_t n,
                 const Numbers h) {
  for (int64_t i = 0; i < n; ++i) step[i] = adam_direction(m[i], v[i], h);
}

// v averages the squared length of the gradient under the metric.
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

// The moments of a chunk, in float32. If they are stored as codes, these are copies, and `store` encodes them. With
// `apart` all moments are copies, and `t` does not change.
struct Moments {
  float *m, *v, room_m[kChunk], room_v[kChunk];

  Moments(const Tensors& t, int64_t first, int64_t n, bool apart = false)
      : m(open(t.m, t.coded_m, first, n, apart, room_m)), v(open(t.v, t.coded_v, first, n, apart, room_v)) {}

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

// Advances the moments of a chunk and writes the step before the learning rate.
void direct(Arm arm, const Numbers& h, const Tensors& t, float* m, float* v, int64_t first, int64_t n,
            const float* factor, float* __restrict step) {
  const float* g = t.g + first;
  float scaled[kChunk];
  const bool squared = arm[setting::kMetric] || arm[setting::kPower] == 2;
  const auto times_factor = [=](const float* from, float* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = (squared ? factor[i] * factor[i] : factor[i]) * from[i];
  };
  const bool of_update = !arm[setting::kOnGradient] && !arm[setting::kMetric];
  if (factor != nullptr && !of_update && arm[setting::kDirection] != direction::kRiemannAdam) {
    times_factor(g, scaled);
    g = scaled;
  }
  switch (arm[setting::kDirection]) {
    case direction::kMomentum:
      if (arm[setting::kMomentum]) {
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
      advance_moments(m, v, g, n, h);
      direct_adam(m, v, step, n, h);
      break;
    default:
      unknown("direction", arm[setting::kDirection]);
  }
  if (factor != nullptr && of_update) times_factor(step, step);
}

void move_by_rungs(const Numbers h, float* __restrict p, const float* __restrict step,
                   const float* __restrict random, int64_t n, const Line line, const float scale) {
  for (int64_t i = 0; i < n; ++i) {
    const float place = std::nearbyint(line.place(p[i] * scale));
    float wanted = std::min(std::max(-h.lr * step[i], -h.max_rungs), h.max_rungs);
    wanted = wanted + (line.place(p[i] * h.decay * scale) - place);
    p[i] = line.at(place + std::floor(wanted + random[i])) / scale;
  }
}

// Moves the weights of a chunk by `step` times the learning rate, and decays them.
void move(Arm arm, const Numbers h, float* __restrict p, const float* __restrict step, int64_t first, int64_t n,
          const Line line, const float held_scale, const Stream& stream) {
  switch (arm[setting::kUnit]) {
    case unit::kRungs: {
      float random[kChunk];
      stream.uniform(first, n, random);
      move_by_rungs(h, p, step, random, n, line, held_scale);
      break;
    }
    case unit::kLog:
      for (int64_t i = 0; i < n; ++i) p[i] = p[i] * h.decay * exponential(-h.lr * step[i]);
      break;
    case unit::kWeight:
      for (int64_t i = 0; i < n; ++i) p[i] = p[i] * h.decay - h.lr * step[i];
      break;
  }
}

// A step of one tensor; `take` runs it.
class Step {
 public:
  Step(Arm arm, const Numbers& h, const Tensors& t, int64_t n, const Grid& grid, float* held,
       const Stiffness* stiffness, const Stream& stream)
      : arm_(arm), h_(h), t_(t), n_(n), grid_(grid), line_(grid), held_(held), stiffness_(stiffness),
        stream_(stream) {}

  void take() {
    if (t_.coded_m.measures() || t_.coded_v.measures()) measure();
    if (arm_[setting::kMatchRms]) match();
    if (stored()) held_scale_ = scale();
    std::vector<uint32_t> largest_of((n_ + kChunk - 1) / kChunk);
    over_chunks(n_, [&](int64_t chunk, int64_t first, int64_t n) { largest_of[chunk] = finish(first, n); });
    if (stored()) write_back(from_order(*std::max_element(largest_of.begin(), largest_of.end())));
    for (const Codec* codec : {&t_.coded_m, &t_.coded_v}) {
      if (codec->measures()) codec->commit();
    }
  }

 private:
  // Whether weights are stored on the quantization grid.
  bool stored() const { return arm_[setting::kWeights] != weights::kMaster; }
  float scale() const { return scale_of(*held_, ScaleRule(arm_[setting::kScaleRule], grid_)); }

  // Finds the scales of coded moments whose blocks do not divide a chunk, in a pass that changes nothing else.
  void measure() {
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      float factor[kChunk], step[kChunk];
      const Moments moments(t_, first, n, true);
      direct_chunk(moments, first, n, factor, step);
      if (t_.coded_m.measures()) t_.coded_m.measure(first, n, moments.m);
      if (t_.coded_v.measures()) t_.coded_v.measure(first, n, moments.v);
    });
    for (const Codec* codec : {&t_.coded_m, &t_.coded_v}) {
      if (codec->measures()) codec->settle();
    }
  }

  // Advances the moments of a chunk; writes the stiffness factor, if the arm has one, and the step.
  void direct_chunk(const Moments& moments, int64_t first, int64_t n, float* factor, float* step) const {
    if (stiffness_ != nullptr) (*stiffness_)(t_.p + first, first, n, factor);
    direct(arm_, h_, t_, moments.m, moments.v, first, n, stiffness_ != nullptr ? factor : nullptr, step);
  }

  // As direct_chunk, and advances the reference moments (AdamW's, kept beside the arm's own).
  void advance(const Moments& moments, int64_t first, int64_t n, float* factor, float* step) const {
    if (t_.reference_m != nullptr) {
      advance_moments(t_.reference_m + first, t_.reference_v + first, t_.g + first, n, h_);
    }
    direct_chunk(moments, first, n, factor, step);
  }

  // Sets `ratio_`, RMS of AdamW's step over RMS of this step, and stores the steps of all chunks in `directions_`.
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
        const float moved = arm_[setting::kUnit] == unit::kLog ? step[i] * weight[i] : step[i];
        return moved * moved;
      });
      direct_adam(m, v, factor, n, h_);
      wanted[chunk] = chunk_sum(n, [&](int64_t i) { return factor[i] * factor[i]; });
      moments.store(t_, first, n, stream_);
    });
    const float found = static_cast<float>(std::sqrt(total(wanted) / total(own)));
    ratio_ = is_finite(found) ? found : 1.0f;
  }

  // Moves a chunk. Returns its amax, encoded as `largest` does, if weights are stored on the grid; else 0.
  uint32_t finish(int64_t first, int64_t n) const {
    float factor[kChunk], fresh[kChunk], *weight = t_.p + first, *step = fresh;
    if (directions_ == nullptr) {
      const bool feedback = arm_[setting::kFeedback];
      Moments moments(t_, first, n, feedback);
      advance(moments, first, n, factor, step);
      if (!feedback) moments.store(t_, first, n, stream_);
    } else {
      step = directions_.get() + first;
      if (arm_[setting::kMetric]) (*stiffness_)(weight, first, n, factor);
      for (int64_t i = 0; i < n; ++i) step[i] *= ratio_;
    }
    move(arm_, h_, weight, step, first, n, line_, held_scale_, stream_);
    if (arm_[setting::kMetric] && t_.m != nullptr) {  // transports the first moment: as many code steps as before
      float there[kChunk], *__restrict m = t_.m + first;
      (*stiffness_)(weight, first, n, there);
      for (int64_t i = 0; i < n; ++i) m[i] *= there[i] / factor[i];
    }
    return stored() ? largest(weight, n) : 0u;
  }

  // Rounds the weights to the quantization grid; `present` is their amax. With `held_scale: reestimated`, first doubles
  // or halves the held amax if needed.
  void write_back(float present) {
    float amax = *held_;
    if (arm_[setting::kReestimated]) {
      if (present > amax * rule::kGrowsAbove) amax = 2.0f * amax;
      if (present < amax * rule::kShrinksBelow) amax = 0.5f * amax;
    }
    if (!(amax > 0)) amax = present;  // all weights began at zero
    const bool by_rungs = arm_[setting::kUnit] == unit::kRungs;
    if (by_rungs && amax == *held_ && present <= amax) return;  // whole code steps at the same scale
    *held_ = amax;
    if (arm_[setting::kWeights] == weights::kStochastic && !by_rungs) {
      round_weights<true>(ByChance(grid_));
    } else if (grid_.root == 0) {
      round_weights<false>(Rounder<false>(grid_));
    } else {
      round_weights<false>(Rounder<true>(grid_));
    }
  }

  template <bool kRandom, class R>
  void round_weights(const R& round) {
    const float scale = this->scale();
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      float random[kChunk], wanted[kChunk];
      if constexpr (kRandom) stream_.uniform(first, n, random);
      if (arm_[setting::kFeedback]) std::copy_n(t_.p + first, n, wanted);
      round_chunk<kRandom>(t_.p + first, random, n, scale, round);
      if (arm_[setting::kFeedback]) feed_back(first, n, wanted, grid_.max / scale);
    });
  }

  template <bool kRandom, class R>
  static void round_chunk(float* __restrict weight, const float* __restrict random, int64_t n, const float scale,
                          const R round) {
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (kRandom) {
        weight[i] = round(weight[i] * scale, random[i]) / scale;
      } else {
        weight[i] = round(weight[i] * scale) / scale;
      }
    }
  }

  // _feed_back of update.py: advances the moments of a chunk and subtracts the scaled rounding error of `wanted`.
  // Earlier passes of this step advanced copies of the moments only.
  void feed_back(int64_t first, int64_t n, const float* __restrict wanted, const float top) const {
    Moments moments(t_, first, n);
    float step[kChunk];
    direct(arm_, h_, t_, moments.m, moments.v, first, n, nullptr, step);
    const float* __restrict written = t_.p + first;
    const bool adam = arm_[setting::kDirection] == direction::kAdam;
    const float beta = adam ? h_.beta1 : h_.momentum, kept = 1.0f - beta, later = h_.lr * h_.unbias_later;
    for (int64_t i = 0; i < n; ++i) {
      const float error = std::max(std::min(wanted[i], top), -top) - written[i];
      const float rate = adam ? later / (std::sqrt(moments.v[i] * h_.unbias2) + h_.eps) : h_.lr;
      const float lost = error * kept / (beta * rate);
      moments.m[i] -= is_finite(lost) ? lost : 0.0f;  // a rate of zero: no feedback
    }
    moments.store(t_, first, n, stream_);
  }

  Arm const arm_;
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
};

// --- the operator -------------------------------------------------------------------------------------------

float* floats(Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// The float32 values of a weight stored as codes, for the duration of a step.
class Decoded {
 public:
  Decoded(const Tensor& codes, const Grid& grid, const float* held, int64_t scale_rule)
      : codes_(static_cast<uint8_t*>(codes.mutable_data_ptr())), n_(codes.numel()), coder_(grid), held_(held),
        rule_(scale_rule, grid), values_(new float[n_]) {
    const float scale = scale_of(*held_, rule_);
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      decode(codes_ + first, values_.get() + first, n, coder_, scale);
    });
  }
  float* values() { return values_.get(); }

  // Encodes the values again, at the current held scale.
  void keep() const {
    const float scale = scale_of(*held_, rule_) * weight_grid::kAbove;
    over_chunks(n_, [&](int64_t, int64_t first, int64_t n) {
      encode(values_.get() + first, codes_ + first, n, coder_, scale);
    });
  }

 private:
  static void decode(const uint8_t* __restrict codes, float* __restrict x, int64_t n, const Coder coder,
                     const float scale) {
    for (int64_t i = 0; i < n; ++i) x[i] = coder.decode(codes[i]) / scale;
  }
  static void encode(const float* __restrict x, uint8_t* __restrict codes, int64_t n, const Coder coder,
                     const float scale) {
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(coder.encode(x[i] * scale));
  }

  uint8_t* const codes_;
  const int64_t n_;
  const Coder coder_;
  const float* const held_;
  const ScaleRule rule_;
  const std::unique_ptr<float[]> values_;
};

// Lists have only the tensors that exist, in these orders. moments: m (or the momentum), v, reference m and v. scales:
// scale and power of each coded moment. codings: from state_codec.packed for m and v, an empty tensor if not coded.
// held: the amax that the step sets. known: the amax that sets the scale for the stiffness. stiffness: constants,
// numbers, shuffle.
void arm_step(Tensor p, Tensor g, std::vector<Tensor> moments, std::vector<Tensor> scales,
              std::vector<Tensor> codings, Tensor settings, Tensor numbers, Tensor constants,
              std::vector<Tensor> held, std::vector<Tensor> known, std::vector<Tensor> stiffness, int64_t seed,
              int64_t tensor, int64_t step) {
  const int64_t n = p.numel(), row = p.dim() < 2 ? n : p.size(p.dim() - 1);
  if (n == 0) return;
  const Arm arm = static_cast<const int32_t*>(settings.const_data_ptr());
  const Grid grid(constants);
  float* const held_amax = held.empty() ? nullptr : floats(held[0]);
  std::optional<Decoded> decoded;
  if (p.scalar_type() == torch::headeronly::ScalarType::Byte) {
    decoded.emplace(p, grid, held_amax, arm[setting::kScaleRule]);
  }
  Tensors t{decoded ? decoded->values() : floats(p), g.const_data_ptr<float>()};
  auto moment = moments.begin(), scale = scales.begin(), coding = codings.begin();
  const auto take = [&](float*& values, Codec& codec) {
    if (coding->numel() == 0) {
      values = floats(*moment);
    } else {
      float* const powers = scale[1].numel() == 0 ? nullptr : floats(scale[1]);
      const float* const packed = coding->const_data_ptr<float>();
      codec = Codec(packed, n, row, moment->mutable_data_ptr(), scale->mutable_data_ptr(), powers);
      scale += 2;
    }
    ++moment, ++coding;
  };
  if (arm[setting::kFirst]) take(t.m, t.coded_m);
  if (arm[setting::kSecond]) take(t.v, t.coded_v);
  if (arm[setting::kReference]) t.reference_m = floats(moment[0]), t.reference_v = floats(moment[1]);
  std::unique_ptr<Stiffness> factor;
  if (const int32_t formula = arm[setting::kFormula]; formula != formula::kNone) {
    const float amax = known.empty() ? 0.0f : *known[0].const_data_ptr<float>();
    const bool needs_own = !(amax > 0) || formula == formula::kForeign || formula == formula::kMantissa ||
                           formula == formula::kProfile;
    const float own = needs_own ? amax_of(t.p, n) : 0.0f;
    const float scale = scale_of(amax > 0 ? amax : own, ScaleRule(arm[setting::kScaleRule], grid));
    const auto* shuffle = stiffness.size() < 3 ? nullptr : static_cast<const int32_t*>(stiffness[2].const_data_ptr());
    factor = std::make_unique<Stiffness>(arm, t.p, n, own, scale, stiffness[0], stiffness[1].const_data_ptr<float>(),
                                         shuffle);
  }
  const Stream stream{static_cast<uint32_t>(seed), static_cast<uint32_t>(tensor), static_cast<uint32_t>(step)};
  Step(arm, Numbers(numbers.const_data_ptr<float>()), t, n, grid, held_amax, factor.get(), stream).take();
  if (decoded) decoded->keep();
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) {
  m.impl("arm_step", TORCH_BOX(&altgrad::arm_step));
}
