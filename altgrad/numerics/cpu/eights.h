// Codes of 8 bits, eight at a time in AVX2: the loops of codec.h for formats with a mantissa, rounded to nearest, with
// the same bits. Compilers take 32 of them at a time, as bytes are what the loops begin or end with, and spill registers.

#pragma once

#if defined(__AVX2__) && defined(__FMA__)
#define ALTGRAD_EIGHTS
#include <immintrin.h>

#include <cstdint>

namespace altgrad {

struct Eights {
  static constexpr int64_t kWidth = 8, kPack = 4 * kWidth;
  __m128i shift;
  __m256i low, rebias, magnitude, lowest, to_anchor, offset, exponent, sign, sign_code;
  __m256 two;  // twice the value of a significand of 1 in the binade of the subnormal numbers

  Eights(int shift, uint32_t rebias, int32_t lowest)
      : shift(_mm_cvtsi32_si128(shift)), low(all(1 << 23)), rebias(all(static_cast<int32_t>(rebias))),
        magnitude(all(0x7f << shift)), lowest(all(lowest)), to_anchor(all(shift << 23)), offset(all(lowest >> shift)),
        exponent(all(0x7f800000)), sign(all(INT32_MIN)), sign_code(all(0x80)),
        two(_mm256_castsi256_ps(all(static_cast<int32_t>(rebias + (1u << 23))))) {}

  static __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
  static __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
  static __m256 floats(__m256i x) { return _mm256_castsi256_ps(x); }

  // Of codes that have no sign, or whose numbers have none.
  template <bool kSigned>
  __m256 load(const uint8_t* codes, __m256 scale) const {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m256i wide = _mm256_sll_epi32(kSigned ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed), shift);
    const __m256i size = kSigned ? _mm256_and_si256(wide, magnitude) : wide;
    const __m256 normal = floats(_mm256_add_epi32(size, rebias));
    const __m256 subnormal = _mm256_sub_ps(_mm256_add_ps(normal, normal), two);
    __m256 value = _mm256_blendv_ps(normal, subnormal, floats(_mm256_cmpgt_epi32(low, size)));
    if (kSigned) value = _mm256_or_ps(value, floats(_mm256_and_si256(wide, sign)));
    return _mm256_mul_ps(value, scale);
  }

  // The codes of n numbers, a multiple of 32, none beyond what the scale brings to the largest value.
  template <bool kSigned>
  void store(const float* x, int64_t n, float scale, uint8_t* codes) const {
    const __m256 divisor = _mm256_set1_ps(scale), reciprocal = _mm256_set1_ps(1.0f / scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const auto eight = [&](const float* from) { return coded<kSigned>(_mm256_loadu_ps(from), divisor, reciprocal); };
    for (int64_t i = 0; i < n; i += kPack) {
      const __m256i first = _mm256_packus_epi32(eight(x + i), eight(x + i + kWidth));
      const __m256i second = _mm256_packus_epi32(eight(x + i + 2 * kWidth), eight(x + i + 3 * kWidth));
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
    }
  }

 private:
  template <bool kSigned>
  __m256i coded(__m256 x, __m256 divisor, __m256 reciprocal) const {
    const __m256 quotient = _mm256_mul_ps(x, reciprocal);  // as in FusedDivision
    const __m256 scaled = _mm256_fmadd_ps(_mm256_fnmadd_ps(quotient, divisor, x), reciprocal, quotient);
    const __m256 size = kSigned ? _mm256_andnot_ps(floats(sign), scaled) : scaled;
    const __m256i binade = _mm256_max_epi32(_mm256_and_si256(bits(size), exponent), lowest);
    const __m256i anchor = _mm256_add_epi32(binade, to_anchor);
    const __m256i count = _mm256_sub_epi32(bits(_mm256_add_ps(size, floats(anchor))), anchor);
    const __m256i code = _mm256_add_epi32(count, _mm256_sub_epi32(_mm256_srl_epi32(binade, shift), offset));
    if (!kSigned) return code;
    return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits(scaled), 24), sign_code));
  }
};

}  // namespace altgrad
#endif
