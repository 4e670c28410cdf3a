// Codes of 8 bits, eight at a time in AVX2: the loops of codec.h for formats with a mantissa, rounded to nearest, with
// the same bits. Compilers take 32 of them at a time, as bytes are what the loops begin or end with, and spill registers.
//
// Formats of up to 30 binades are read as float16, to which their codes are shifted: its subnormal numbers are theirs.

#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ALTGRAD_EIGHTS
#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <utility>

namespace altgrad {

struct Eights {
  static constexpr int64_t kWidth = 8, kPack = 4 * kWidth;
  static constexpr int kOfHalf = 13;  // bits of mantissa that float32 has and float16 has not
  __m128i shift, to_half;
  __m256i half, lowest, to_anchor, offset, exponent, sign, sign_code;
  float unit;  // what a float16 is multiplied with

  // shift: bits of mantissa that float32 has and the format has not; lowest: bits of its smallest normal number.
  Eights(int shift, int32_t lowest)
      : shift(_mm_cvtsi32_si128(shift)), to_half(_mm_cvtsi32_si128(shift - kOfHalf)),
        half(_mm256_set1_epi16(static_cast<int16_t>(0x8000 | 0x7f << (shift - kOfHalf)))), lowest(all(lowest)),
        to_anchor(all(shift << 23)), offset(_mm256_set1_epi16(static_cast<int16_t>(lowest >> shift))),
        exponent(all(0x7f800000)), sign(all(INT32_MIN)), sign_code(_mm256_set1_epi8(-128)),
        unit(std::bit_cast<float>(lowest) * 0x1p14f) {}

  static __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
  static __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
  static __m256 floats(__m256i x) { return _mm256_castsi256_ps(x); }

  // Twice eight numbers over `unit`, times scale; of codes that have no sign, or whose numbers have none.
  template <bool kSigned>
  void load(const uint8_t* codes, __m256 scale, __m256 (&out)[2]) const {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    __m256i halves = _mm256_sll_epi16(kSigned ? _mm256_cvtepi8_epi16(packed) : _mm256_cvtepu8_epi16(packed), to_half);
    if (kSigned) halves = _mm256_and_si256(halves, half);
    out[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale);
    out[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale);
  }

  // The codes of n numbers, a multiple of 32, none beyond what the scale brings to the largest value.
  template <bool kSigned>
  void store(const float* x, int64_t n, float scale, uint8_t* codes) const {
    const __m256 divisor = _mm256_set1_ps(scale), reciprocal = _mm256_set1_ps(1.0f / scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < n; i += kPack) {
      const auto sixteen = [&](int64_t at) {
        const __m256 low = _mm256_loadu_ps(x + i + at), high = _mm256_loadu_ps(x + i + at + kWidth);
        const __m256i wide = _mm256_packus_epi32(places<kSigned>(low, divisor, reciprocal),
                                                 places<kSigned>(high, divisor, reciprocal));
        return std::pair(_mm256_sub_epi16(wide, offset), _mm256_packs_epi32(bits(low), bits(high)));
      };
      const auto [first, first_signs] = sixteen(0);
      const auto [second, second_signs] = sixteen(2 * kWidth);
      __m256i bytes = _mm256_packus_epi16(first, second);
      if (kSigned) {  // which saturation keeps
        const __m256i signs = _mm256_packs_epi16(first_signs, second_signs);
        bytes = _mm256_or_si256(bytes, _mm256_and_si256(signs, sign_code));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
  }

 private:
  // The codes of magnitudes of x, more by `offset`.
  template <bool kSigned>
  __m256i places(__m256 x, __m256 divisor, __m256 reciprocal) const {
    const __m256 quotient = _mm256_mul_ps(x, reciprocal);  // as in FusedDivision
    const __m256 scaled = _mm256_fmadd_ps(_mm256_fnmadd_ps(quotient, divisor, x), reciprocal, quotient);
    const __m256 size = kSigned ? _mm256_andnot_ps(floats(sign), scaled) : scaled;
    const __m256i binade = _mm256_max_epi32(_mm256_and_si256(bits(size), exponent), lowest);
    const __m256i anchor = _mm256_add_epi32(binade, to_anchor);
    const __m256i sum = bits(_mm256_add_ps(size, floats(anchor)));
    return _mm256_add_epi32(sum, _mm256_sub_epi32(_mm256_srl_epi32(binade, shift), anchor));
  }
};

}  // namespace altgrad
#endif
