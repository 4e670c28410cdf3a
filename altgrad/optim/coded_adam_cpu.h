// AdamW's step on moments that are codes, eight weights at a time.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "arm_cpu.h"

#ifdef ALTGRAD_EIGHTS
namespace altgrad {
namespace {

// A whole chunk in one pass from codes to new moments and the largest of each block, and one back: what Moments,
// direct_adam and move of update_cpu.cpp do, with the same bits.
class CodedAdam {
 public:
  CodedAdam(const Tensors& t, const Numbers& h)
      : t_(t), h_(h), m_(t.coded_m.eights()), v_(t.coded_v.eights()),
        unit_(std::min(t.coded_m.unit(), t.coded_v.unit())) {}

  static bool takes(const Arm& arm, const Tensors& t) {
    return arm.direction == direction::kAdam && arm.unit == unit::kWeight && t.reference_m == nullptr && t.coded_m &&
           t.coded_v && t.coded_m.in_eights(true) && t.coded_v.in_eights(false);
  }

  // Whether it has seen what a step makes of the moments of the chunk.
  bool measure(int64_t first) const {
    if (!in_eights_at(first)) return false;
    for (int64_t at = first; at < first + kChunk; at += unit_) {
      float largest_m, largest_v;
      if (t_.coded_v.root()) {
        advance<true, false>(at, nullptr, nullptr, largest_m, largest_v);
      } else {
        advance<false, false>(at, nullptr, nullptr, largest_m, largest_v);
      }
      measured(t_.coded_m, at, largest_m), measured(t_.coded_v, at, largest_v);
    }
    return true;
  }

  // Whether it has taken the step of the chunk.
  bool operator()(int64_t first) const {
    if (!in_eights_at(first)) return false;
    alignas(32) float m[kChunk], v[kChunk];
    float largest_m[kChunk / Eights::kPack], largest_v[kChunk / Eights::kPack];
    for (int64_t at = 0; at < kChunk; at += unit_) {
      const int64_t place = at / unit_;
      if (t_.coded_v.root()) {
        advance<true, true>(first + at, m + at, v + at, largest_m[place], largest_v[place]);
      } else {
        advance<false, true>(first + at, m + at, v + at, largest_m[place], largest_v[place]);
      }
    }
    store<true>(t_.coded_m, m_, first, m, largest_m);
    store<false>(t_.coded_v, v_, first, v, largest_v);
    return true;
  }

 private:
  bool in_eights_at(int64_t first) const {
    for (int64_t at = first; at < first + kChunk; at += unit_) {
      if (!t_.coded_m.in_eights_at(at) || !t_.coded_v.in_eights_at(at)) return false;
    }
    return true;
  }

  static void measured(const Codec& codec, int64_t at, float largest) {
    if (codec.measures()) codec.measure_block(codec.block_of(at), std::bit_cast<uint32_t>(largest), UINT32_MAX);
  }

  // Without `kSteps` nothing is written but the largest moments, which are no roots then.
  template <bool kRoot, bool kSteps>
  void advance(int64_t first, float* m, float* v, float& largest_m, float& largest_v) const {
    const auto all = [](float x) { return _mm256_set1_ps(x); };
    const __m256 scale_m = all(t_.coded_m.scale_of(first) * m_.unit);
    const __m256 scale_v = all(t_.coded_v.scale_of(first) * v_.unit);
    const __m256 rest1 = all(1.0f - h_.beta1), rest2 = all(1.0f - h_.beta2), beta2 = all(h_.beta2), eps = all(h_.eps);
    const __m256 unbias1 = all(h_.unbias1), unbias2 = all(h_.unbias2), decay = all(h_.decay), lr = all(h_.lr);
    const __m256i magnitude = Eights::all(INT32_MAX);
    __m256i found_m = _mm256_setzero_si256(), found_v = found_m;
    // Here, as bytes that are written could be anything's.
    const Eights of_m = m_, of_v = v_;
    const uint8_t *codes_m = t_.coded_m.codes_at(first), *codes_v = t_.coded_v.codes_at(first);
    const float* gradient = t_.g + first;
    const int64_t n = unit_;
    float* p = t_.p + first;
    for (int64_t i = 0; i < n; i += 2 * Eights::kWidth) {
      __m256 old_m[2], old_v[2];
      of_m.load<true>(codes_m + i, scale_m, old_m);
      of_v.load<false>(codes_v + i, scale_v, old_v);
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t at = i + half * Eights::kWidth;
        const __m256 g = _mm256_loadu_ps(gradient + at), was_m = old_m[half];
        const __m256 was_v = kRoot ? _mm256_mul_ps(old_v[half], old_v[half]) : old_v[half];
        const __m256 new_m = _mm256_add_ps(was_m, _mm256_mul_ps(_mm256_sub_ps(g, was_m), rest1));
        __m256 new_v = _mm256_add_ps(_mm256_mul_ps(was_v, beta2), _mm256_mul_ps(_mm256_mul_ps(g, g), rest2));
        found_m = _mm256_max_epi32(found_m, _mm256_and_si256(Eights::bits(new_m), magnitude));
        if constexpr (!kSteps) {
          found_v = _mm256_max_epi32(found_v, Eights::bits(new_v));
          continue;
        }
        const __m256 below = _mm256_add_ps(_mm256_sqrt_ps(_mm256_mul_ps(new_v, unbias2)), eps);
        const __m256 step = _mm256_div_ps(_mm256_mul_ps(new_m, unbias1), below);
        const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(p + at), decay);
        _mm256_storeu_ps(p + at, _mm256_sub_ps(kept, _mm256_mul_ps(lr, step)));
        if (kRoot) new_v = _mm256_sqrt_ps(_mm256_min_ps(new_v, all(std::numeric_limits<float>::max())));
        _mm256_store_ps(m + at, new_m);
        _mm256_store_ps(v + at, new_v);
        found_v = _mm256_max_epi32(found_v, Eights::bits(new_v));
      }
    }
    largest_m = largest_of(found_m), largest_v = largest_of(found_v);
  }

  template <bool kSigned>
  void store(const Codec& codec, const Eights& eights, int64_t first, float* x, const float* largest) const {
    for (int64_t at = 0; at < kChunk; at += codec.unit()) {
      const float* own = largest + at / unit_;
      codec.store_unit<kSigned>(eights, first + at, x + at, *std::max_element(own, own + codec.unit() / unit_));
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

}  // namespace
}  // namespace altgrad
#endif
