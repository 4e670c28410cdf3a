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
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec.h"
#include "definitions.h"
#include "grid.h"
#include "philox.h"

namespace altgrad {
namespace {

constexpr int64_t kChunk = 512;  // six buffers of so many floats, and seven tensors' share: 26 KiB
constexpr int64_t kLine = 16;  // numbers of four bytes in a line of the caches
static_assert(kChunk % Stream::kRow == 0);

// --- settings: names and places are update_cpu.py's, through definitions.h -------------------------------------------

[[noreturn]] void unknown(const char* setting, int32_t value) {
  throw std::runtime_error(std::string("update_cpu.cpp has no ") + setting + " of number " + std::to_string(value));
}

struct Arm {
  int32_t direction, unit, metric, formula, on_gradient, power, rms, momentum, match_rms, weights, reestimated;
  int64_t scale_rule;

  explicit Arm(const Tensor& settings) : Arm(static_cast<const int32_t*>(settings.const_data_ptr())) {}

  explicit Arm(const int32_t* s) : scale_rule(s[setting::kScaleRule]) {
    direction = s[setting::kDirection], unit = s[setting::kUnit], metric = s[setting::kMetric];
    formula = s[setting::kFormula], on_gradient = s[setting::kOnGradient], power = s[setting::kPower];
    rms = s[setting::kRms], momentum = s[setting::kMomentum], match_rms = s[setting::kMatchRms];
    weights = s[setting::kWeights], reestimated = s[setting::kReestimated];
    if (weights != weights::kMaster && weights != weights::kNearest && weights != weights::kStochastic) {
      unknown("weights", weights);
    }
  }
};

struct Numbers {
  float lr, decay, beta1, beta2, unbias1, unbias2, eps, momentum, max_rungs;

  explicit Numbers(const Tensor& packed) {
    const float* h = packed.const_data_ptr<float>();
    lr = h[number::kLr], decay = h[number::kDecay], beta1 = h[number::kBeta1], beta2 = h[number::kBeta2];
    unbias1 = h[number::kUnbias1], unbias2 = h[number::kUnbias2], eps = h[number::kEps];
    momentum = h[number::kMomentum], max_rungs = h[number::kMaxRungs];
  }
};

// --- element by element -------------------------------------------------------------------------------------

float with_sign_of(float magnitude, float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (std::bit_cast<uint32_t>(x) & 0x80000000u));
}
float inverse(float power) { return std::bit_cast<float>(0x7f000000u - std::bit_cast<uint32_t>(power)); }  // exact
// Of two numbers that are not negative, one of them above zero; squares nothing that leaves the range.
float hypotenuse(float a, float b) {
  const float large = std::max(a, b), ratio = std::min(a, b) / large;
  return large * std::sqrt(1.0f + ratio * ratio);
}
int32_t exponent_of(float power) { return static_cast<int32_t>(std::bit_cast<uint32_t>(power) >> 23); }

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
#ifdef __FP_FAST_FMAF
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

// --- sums ---------------------------------------------------------------------------------------------------

// The sum of value(i) over a chunk, in sixteen lanes.
template <class F>
double chunk_sum(int64_t n, const F& value) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (; i < n; ++i) lanes[i % kLanes] += value(i);
  double sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

double total(const std::vector<double>& parts) {
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

template <class F>
void over_chunks(int64_t n, const F& run) {
  over((n + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      run(chunk, chunk * kChunk, std::min(kChunk, n - chunk * kChunk));
    }
  });
}

// The mean of what run(first, count) returns for each chunk, always added up in the same order.
template <class F>
float mean_over_chunks(int64_t n, const F& run) {
  std::vector<double> sums((n + kChunk - 1) / kChunk);
  over_chunks(n, [&](int64_t chunk, int64_t first, int64_t count) { sums[chunk] = run(first, count); });
  return static_cast<float>(total(sums) / static_cast<double>(n));
}

// --- stiffness ----------------------------------------------------------------------------------------------

// The factor of update.py without a schedule: stiffness over that of the tensor.
class Stiffness {
 public:
  Stiffness(const Arm& arm, const float* weight, int64_t n, float amax, float scale, const Tensor& constants,
            const Tensor& numbers, const int32_t* order)
      : formula_(arm.formula), spacing_(Grid(constants)), scale_(scale) {
    const float* of_format = numbers.const_data_ptr<float>();
    per_binade_ = of_format[stiffness::kPerBinade];
    if (formula_ == formula::kForeign) scale_ = scale_of(amax, ScaleRule(scale_rule::kFloat32, Grid(constants)));
    smallest_normal_ = of_format[stiffness::kSmallestNormal] / scale_;
    floor_ = power_of_two_below(amax) * per_binade_ * stiffness::kFloor;
    largest_ = std::max(amax, stiffness::kTiny), least_share_ = amax > 0 ? 0.0f : 1.0f;
    knee_ = of_format[stiffness::kKnee], slope_ = of_format[stiffness::kSlope];
    const bool scaled = formula_ != formula::kMantissa && formula_ != formula::kSmooth &&
                        formula_ != formula::kProfile && formula_ != formula::kRms;
    float factor = scaled ? 1.0f / scale_ : 1.0f, unit = 1.0f;
    if (formula_ == formula::kProfile) {
      factor = std::min(std::max(std::pow(amax, slope_), stiffness::kSmallest), stiffness::kLargest);
    }
    if (formula_ == formula::kRange) factor *= of_format[stiffness::kPerRange];
    if (formula_ == formula::kMean) {
      mean_ = mean_over_chunks(n, [&](int64_t first, int64_t count) {
        return chunk_sum(count, [&](int64_t i) { return spacing_(weight[first + i] * scale_); });
      });
    }
    if (formula_ == formula::kRms) {
      mean_ = std::max(stiffness::kLeastRms, std::sqrt(mean_over_chunks(n, [&](int64_t first, int64_t count) {
                         return chunk_sum(count, [&](int64_t i) { return weight[first + i] * weight[first + i]; });
                       })));
    }
    const bool permuted = formula_ == formula::kPermuted;
    if (permuted) find_exponents(weight, order, n);
    if (arm.rms) {
      unit = std::sqrt(mean_over_chunks(n, [&](int64_t first, int64_t count) {
        float found[kChunk];
        if (permuted) shuffle(first, count);
        evaluate(weight + first, first, count, factor, found);
        return chunk_sum(count, [&](int64_t i) { return found[i] * found[i]; });
      }));
    } else if (permuted) {
      over_chunks(n, [&](int64_t, int64_t first, int64_t count) { shuffle(first, count); });
    }
    factor_ = factor / unit;
  }

  void operator()(const float* weight, int64_t first, int64_t n, float* found) const {
    evaluate(weight, first, n, factor_, found);
  }

 private:
  void evaluate(const float* __restrict weight, int64_t first, int64_t n, const float factor,
                float* __restrict found) const {
    switch (formula_) {
      case formula::kMantissa:
        for (int64_t i = 0; i < n; ++i) {
          found[i] = std::max(power_of_two_below(absolute(weight[i])) * per_binade_, floor_) * factor;
        }
        break;
      case formula::kSmooth:
        for (int64_t i = 0; i < n; ++i) {
          found[i] = hypotenuse(absolute(weight[i]), smallest_normal_) * per_binade_ * factor;
        }
        break;
      case formula::kProfile:
        for (int64_t i = 0; i < n; ++i) {
          const float share = std::max(absolute(weight[i]) / largest_, least_share_);
          found[i] = hypotenuse(share, knee_);
        }
        if (slope_ != 1.0f) {  // a call per weight, and so most of the time of a step
          for (int64_t i = 0; i < n; ++i) found[i] = std::pow(found[i], slope_);
        }
        for (int64_t i = 0; i < n; ++i) found[i] *= factor;
        break;
      case formula::kMean:
      case formula::kRms:
        std::fill_n(found, n, mean_ * factor);
        break;
      case formula::kPermuted: {
        const uint8_t* exponents = shuffled_.get() + first;
        for (int64_t i = 0; i < n; ++i) {
          found[i] = std::bit_cast<float>(static_cast<uint32_t>(exponents[i]) << 23) * factor;
        }
        break;
      }
      case formula::kUlp:
      case formula::kRange:
      case formula::kForeign: {
        const Spacing spacing = spacing_;
        const float scale = scale_;
        for (int64_t i = 0; i < n; ++i) found[i] = spacing(weight[i] * scale) * factor;
        break;
      }
      default:
        unknown("stiffness", formula_);
    }
  }

  // A spacing is a power of two, and its exponent a byte: what is read here and there stays in the second cache.
  void find_exponents(const float* weight, const int32_t* order, int64_t n) {
    order_ = order;
    exponents_.reset(new uint8_t[n]);
    shuffled_.reset(new uint8_t[n]);
    over(n, 1, [&](int64_t begin, int64_t end) {
      exponents_of(weight + begin, exponents_.get() + begin, end - begin, spacing_, scale_);
    });
  }

  void shuffle(int64_t first, int64_t n) const {
    gather(exponents_.get(), order_ + first, shuffled_.get() + first, n);
  }

  static void exponents_of(const float* __restrict weight, uint8_t* __restrict exponents, int64_t n,
                           const Spacing spacing, const float scale) {
    for (int64_t i = 0; i < n; ++i) exponents[i] = static_cast<uint8_t>(exponent_of(spacing(weight[i] * scale)));
  }

  static void gather(const uint8_t* __restrict from, const int32_t* __restrict order, uint8_t* __restrict to,
                     int64_t n) {
    for (int64_t first = 0; first < n; first += kLine) {
      // Read once, so it need not take the place of what is read often.
      __builtin_prefetch(order + first + kChunk, 0, 0);
      for (int64_t i = first; i < std::min(first + kLine, n); ++i) to[i] = from[order[i]];
    }
  }

  int32_t formula_;
  Spacing spacing_;
  float scale_, factor_, per_binade_, smallest_normal_, floor_, mean_ = 0.0f;
  float largest_, least_share_, knee_, slope_;
  const int32_t* order_ = nullptr;
  std::unique_ptr<uint8_t[]> exponents_, shuffled_;
};

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

struct Tensors {
  float *p, *m, *v, *reference_m, *reference_v;  // m also the momentum; null where the arm has none, or codes of it
  const float* g;
  Codec coded_m, coded_v;
};

// The moments of a chunk: where they lie, or decoded.
struct Moments {
  float *m, *v, room_m[kChunk], room_v[kChunk];

  Moments(const Tensors& t, int64_t first, int64_t n) {
    m = open(t.m, t.coded_m, first, n, room_m), v = open(t.v, t.coded_v, first, n, room_v);
  }
  void store(const Tensors& t, int64_t first, int64_t n, const Stream& stream) {
    if (t.coded_m) t.coded_m.store(first, n, m, stream);
    if (t.coded_v) t.coded_v.store(first, n, v, stream);
  }

 private:
  static float* open(float* whole, const Codec& coded, int64_t first, int64_t n, float* room) {
    if (!coded) return whole == nullptr ? nullptr : whole + first;
    coded.load(first, n, room);
    return room;
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

#ifdef ALTGRAD_EIGHTS
// A whole chunk of AdamW's step, whose moments are codes, in one pass from codes to new moments and the largest of each
// block, and one back: what Moments, direct_adam and move do, with the same bits.
class CodedAdam {
 public:
  CodedAdam(const Tensors& t, const Numbers& h)
      : t_(t), h_(h), m_(t.coded_m.eights()), v_(t.coded_v.eights()),
        unit_(std::min(t.coded_m.block(), t.coded_v.block())) {}

  static bool takes(const Arm& arm, const Tensors& t) {
    return arm.direction == direction::kAdam && arm.unit == unit::kWeight && t.reference_m == nullptr && t.coded_m &&
           t.coded_v && t.coded_m.in_eights(true) && t.coded_v.in_eights(false);
  }

  void operator()(int64_t first) const {
    alignas(32) float m[kChunk], v[kChunk];
    float largest_m[kChunk / Eights::kPack], largest_v[kChunk / Eights::kPack];
    for (int64_t at = 0; at < kChunk; at += unit_) {
      const int64_t place = at / unit_;
      if (t_.coded_v.root()) {
        advance<true>(first + at, m + at, v + at, largest_m[place], largest_v[place]);
      } else {
        advance<false>(first + at, m + at, v + at, largest_m[place], largest_v[place]);
      }
    }
    store<true>(t_.coded_m, m_, first, m, largest_m);
    store<false>(t_.coded_v, v_, first, v, largest_v);
  }

 private:
  template <bool kRoot>
  void advance(int64_t first, float* m, float* v, float& largest_m, float& largest_v) const {
    const auto all = [](float x) { return _mm256_set1_ps(x); };
    const __m256 scale_m = all(t_.coded_m.scale_of(first)), scale_v = all(t_.coded_v.scale_of(first));
    const __m256 rest1 = all(1.0f - h_.beta1), rest2 = all(1.0f - h_.beta2), beta2 = all(h_.beta2), eps = all(h_.eps);
    const __m256 unbias1 = all(h_.unbias1), unbias2 = all(h_.unbias2), decay = all(h_.decay), lr = all(h_.lr);
    const __m256i magnitude = Eights::all(INT32_MAX);
    __m256i found_m = _mm256_setzero_si256(), found_v = found_m;
    float* p = t_.p + first;
    for (int64_t i = 0; i < unit_; i += Eights::kWidth) {
      const __m256 g = _mm256_loadu_ps(t_.g + first + i);
      const __m256 old_m = m_.load<true>(t_.coded_m.codes_at(first + i), scale_m);
      __m256 old_v = v_.load<false>(t_.coded_v.codes_at(first + i), scale_v);
      if (kRoot) old_v = _mm256_mul_ps(old_v, old_v);
      const __m256 new_m = _mm256_add_ps(old_m, _mm256_mul_ps(_mm256_sub_ps(g, old_m), rest1));
      __m256 new_v = _mm256_add_ps(_mm256_mul_ps(old_v, beta2), _mm256_mul_ps(_mm256_mul_ps(g, g), rest2));
      const __m256 below = _mm256_add_ps(_mm256_sqrt_ps(_mm256_mul_ps(new_v, unbias2)), eps);
      const __m256 step = _mm256_div_ps(_mm256_mul_ps(new_m, unbias1), below);
      const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(p + i), decay);
      _mm256_storeu_ps(p + i, _mm256_sub_ps(kept, _mm256_mul_ps(lr, step)));
      if (kRoot) new_v = _mm256_sqrt_ps(_mm256_min_ps(new_v, all(std::numeric_limits<float>::max())));
      _mm256_store_ps(m + i, new_m);
      _mm256_store_ps(v + i, new_v);
      found_m = _mm256_max_epi32(found_m, _mm256_and_si256(Eights::bits(new_m), magnitude));
      found_v = _mm256_max_epi32(found_v, Eights::bits(new_v));
    }
    largest_m = largest_of(found_m), largest_v = largest_of(found_v);
  }

  template <bool kSigned>
  void store(const Codec& codec, const Eights& eights, int64_t first, float* x, const float* largest) const {
    for (int64_t at = 0; at < kChunk; at += codec.block()) {
      const float* own = largest + at / unit_;
      codec.store_block<kSigned>(eights, first + at, x + at, *std::max_element(own, own + codec.block() / unit_));
    }
  }

  static float largest_of(__m256i found) {
    int32_t lanes[Eights::kWidth];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), found);
    return std::bit_cast<float>(*std::max_element(lanes, lanes + Eights::kWidth));
  }

  const Tensors& t_;
  const Numbers& h_;
  const Eights m_, v_;
  const int64_t unit_;
};
#endif

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
        stream_(stream) {}

  void take() {
    if (arm_.match_rms) match();
    if (arm_.weights != weights::kMaster) held_scale_ = scale_of(*held_, ScaleRule(arm_.scale_rule, grid_));
    std::vector<uint32_t> largest_of((n_ + kChunk - 1) / kChunk);
    over_chunks(n_, [&](int64_t chunk, int64_t first, int64_t n) { largest_of[chunk] = finish(first, n); });
    if (arm_.weights != weights::kMaster) write_back(from_order(*std::ranges::max_element(largest_of)));
  }

 private:
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
    ratio_ = std::isfinite(found) ? found : 1.0f;
  }

  // Moves a chunk, and returns its largest weight if someone asks for it.
  uint32_t finish(int64_t first, int64_t n) const {
#ifdef ALTGRAD_EIGHTS
    if (n == kChunk && stiffness_ == nullptr && directions_ == nullptr && CodedAdam::takes(arm_, t_)) {
      CodedAdam(t_, h_)(first);
      return arm_.weights == weights::kMaster ? 0u : largest(t_.p + first, n);
    }
#endif
    float factor[kChunk], fresh[kChunk], *weight = t_.p + first, *step = fresh;
    if (directions_ == nullptr) {
      Moments moments(t_, first, n);
      advance(moments, first, n, factor, step);
      moments.store(t_, first, n, stream_);
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
      float random[kChunk];
      if constexpr (kRandom) stream_.uniform(first, n, random);
      with_division(grid_, scale, [&](const auto divided) {
        round_chunk<kRandom>(t_.p + first, random, n, scale, rounded, divided);
      });
    });
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
};

// --- the operator -------------------------------------------------------------------------------------------

Codec codec_of(Tensor& codes, Tensor& scales, const Tensor& coding, int64_t n) {
  if (coding.numel() == 0) return {};
  return {coding.const_data_ptr<float>(), codes.mutable_data_ptr(), scales.mutable_data_ptr(), n};
}
float* floats_or_null(Tensor& t, const Tensor& coding) {
  return t.numel() == 0 || coding.numel() > 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr());
}
float* data_or_null(Tensor& t) { return t.numel() == 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr()); }

void arm_step(Tensor p, Tensor g, Tensor m, Tensor v, Tensor reference_m, Tensor reference_v, Tensor held,
              Tensor settings, Tensor numbers, Tensor constants, Tensor remembered, Tensor stiff_constants,
              Tensor stiff_numbers, Tensor order, Tensor m_scale, Tensor v_scale, Tensor m_coding, Tensor v_coding,
              int64_t seed, int64_t tensor, int64_t step) {
  const int64_t n = p.numel();
  if (n == 0) return;
  const Arm arm(settings);
  const Numbers h(numbers);
  const Grid grid(constants);
  const Tensors t{data_or_null(p),
                  floats_or_null(m, m_coding),
                  floats_or_null(v, v_coding),
                  data_or_null(reference_m),
                  data_or_null(reference_v),
                  g.const_data_ptr<float>(),
                  codec_of(m, m_scale, m_coding, n),
                  codec_of(v, v_scale, v_coding, n)};
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
}

}  // namespace
}  // namespace altgrad

STABLE_TORCH_LIBRARY_IMPL(altgrad, CPU, m) { m.impl("arm_step", TORCH_BOX(&altgrad::arm_step)); }
