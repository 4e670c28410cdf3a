// encode_operand and decode_operand of operand.py in loops: values to codes of one byte, and back.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "grid.h"

namespace altgrad {

// Converts between codes and float32 bits without branches, so that the loops are vectorized.
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
    const float below = std::min(smallest_normal, magnitude);  // a conversion that overflows differs between processors
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(below * per_code));
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

}  // namespace altgrad
