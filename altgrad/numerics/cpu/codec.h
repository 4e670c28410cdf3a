// A moment as codes and scales, in loops: altgrad/optim/state_codec.py, with the same bits.
//
// A block may reach beyond a chunk, such as a whole tensor or row. A pass of its own then measures its magnitudes, and
// its old scale stays until all codes have been stored.
//
// Codes of formats come from the bits of a float32. Codes of maps come from a table, indexed by upper bits of the
// float32; an entry covers one threshold at most. For moments whose range is expanded the table has the logarithms of
// the codes' values. state_codec.py packs header, values and table.

#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "definitions.h"
#include "expansion.h"
#include "philox.h"

namespace altgrad {

// Bits of the largest and least magnitudes of blocks that reach beyond a chunk; the scales and powers from them.
struct Measured {
  std::vector<std::atomic<uint32_t>> largest, least;  // least: bits - 1, so that zero is above all others
  std::vector<float> scales, powers;

  explicit Measured(int64_t blocks) : largest(blocks), least(blocks), scales(blocks), powers(blocks) {
    for (std::atomic<uint32_t>& each : least) each = UINT32_MAX;
  }
};

class Codec {
 public:
  Codec() = default;
  // n, row: numbers of elements in the moment and in one row. powers: one per block if ranges are expanded, or null.
  Codec(const float* packed, int64_t n, int64_t row, void* codes, void* scales, float* powers)
      : codes_(static_cast<uint8_t*>(codes)), scales_(scales), powers_(powers), values_(packed + codec::kHeader) {
    const auto whole = [packed](int place) { return static_cast<int32_t>(packed[place]); };
    mapped_ = whole(codec::kMapped), packed_ = whole(codec::kBits) <= 4, root_ = whole(codec::kRoot);
    stochastic_ = whole(codec::kStochastic), power_of_two_ = whole(codec::kPowerOfTwo), block_ = whole(codec::kBlock);
    if (block_ == codec::kRow) block_ = row;
    const int64_t blocks = block_ == codec::kTensor ? 1 : (n + block_ - 1) / block_;
    if (block_ == codec::kTensor) block_ = kEndless;
    if (codec::kChunk % block_ != 0) measured_ = std::make_shared<Measured>(blocks);
    shift_ = 23 - whole(codec::kMantissaBits), first_normal_ = 1u << whole(codec::kMantissaBits);
    rebias_ = static_cast<uint32_t>(127 - whole(codec::kBias)) << 23;
    sign_code_ = static_cast<uint32_t>(whole(codec::kSignCode)), sign_shift_ = 32 - whole(codec::kBits);
    negative_zero_ = whole(codec::kNegativeZero);
    largest_ = packed[codec::kLargest], spacing_ = packed[codec::kSpacing], max_ = packed[codec::kMax];
    stream_ = static_cast<uint32_t>(whole(codec::kStream)) << 29;
    lowest_ = static_cast<uint32_t>(whole(codec::kLowest)) << 23, entry_ = whole(codec::kEntry);
    entries_ = static_cast<uint32_t>(whole(codec::kEntries));
    table_ = reinterpret_cast<const uint32_t*>(values_ + (int64_t{1} << whole(codec::kBits)));
    if (powers_ != nullptr) binades_ = std::log2(static_cast<double>(largest_) / static_cast<double>(spacing_));
  }

  explicit operator bool() const { return codes_ != nullptr; }

  // If true, call `measure` with all numbers, then `settle`, `store` for all numbers, and `commit`.
  bool measures() const { return measured_ != nullptr; }

  void measure(int64_t first, int64_t n, const float* x) const {
    over_blocks(first, n, [&](int64_t block, int64_t begin, int64_t count) {
      uint32_t largest = 0, least = UINT32_MAX;
      for (int64_t i = begin; i < begin + count; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & kMagnitude;
        largest = std::max(largest, bits), least = std::min(least, bits - 1);
      }
      std::atomic<uint32_t> &most = measured_->largest[block], &fewest = measured_->least[block];
      for (uint32_t was = most; was < largest && !most.compare_exchange_weak(was, largest);) continue;
      for (uint32_t was = fewest; was > least && !fewest.compare_exchange_weak(was, least);) continue;
    });
  }

  void settle() const {
    for (size_t i = 0; i < measured_->scales.size(); ++i) {
      const auto magnitude = [this](uint32_t bits) {
        return root_ ? std::sqrt(std::min(std::bit_cast<float>(bits), kMost)) : std::bit_cast<float>(bits);
      };
      const float largest = magnitude(measured_->largest[i]);
      const float amax = std::max(std::min(largest, kMost), codec::kLeastAmax);
      const float least = measured_->least[i] == UINT32_MAX ? amax : magnitude(measured_->least[i] + 1);
      measured_->largest[i] = std::bit_cast<uint32_t>(largest);
      measured_->scales[i] = scale_for(amax), measured_->powers[i] = expansion_of(amax, least, binades_);
    }
  }
  void commit() const {
    for (size_t i = 0; i < measured_->scales.size(); ++i) keep(i, measured_->scales[i], measured_->powers[i]);
  }

  // Writes the values of n codes from place `first` on, where a chunk begins.
  void load(int64_t first, int64_t n, float* __restrict out) const {
    const uint8_t* codes = codes_ + first;
    uint8_t unpacked[kRoom];
    if (packed_) {
      for (int64_t i = 0; i < n; ++i) {
        const uint8_t pair = codes_[(first + i) / 2];
        unpacked[i] = i % 2 == 0 ? pair >> 4 : pair & 15;
      }
      codes = unpacked;
    }
    over_blocks(first, n, [&](int64_t block, int64_t begin, int64_t count) {
      const float scale = scale_at(block);
      if (mapped_) {
        for (int64_t i = begin; i < begin + count; ++i) out[i] = values_[codes[i]] * scale;
      } else if (powers_ != nullptr) {
        decode_expanded(codes + begin, count, scale, powers_[block], out + begin);
      } else {
        decode(codes + begin, count, scale, out + begin);
      }
    });
    if (root_) {
      for (int64_t i = 0; i < n; ++i) out[i] *= out[i];
    }
  }

  // Stores the codes of n numbers from place `first` on, and overwrites x.
  void store(int64_t first, int64_t n, float* __restrict x, const Stream& stream) const {
    float random[kRoom];
    if (stochastic_) Stream{stream.seed, stream.tensor + stream_, stream.step}.uniform(first, n, random);
    uint8_t unpacked[kRoom], *codes = packed_ ? unpacked : codes_ + first;
    if (root_) {
      for (int64_t i = 0; i < n; ++i) x[i] = std::sqrt(std::min(x[i], kMost));
    }
    over_blocks(first, n, [&](int64_t block, int64_t begin, int64_t count) {
      uint32_t found = measured_ ? measured_->largest[block].load() : 0;
      for (int64_t i = begin; !measured_ && i < begin + count; ++i) {
        found = std::max(found, std::bit_cast<uint32_t>(x[i]) & kMagnitude);
      }
      encode_block(block, x + begin, random + begin, count, std::bit_cast<float>(found), codes + begin);
    });
    if (packed_) {
      if (n % 2 == 1) unpacked[n] = 0;
      for (int64_t i = 0; i < n; i += 2) codes_[(first + i) / 2] = static_cast<uint8_t>(codes[i] << 4 | codes[i + 1]);
    }
  }

 private:
  static constexpr int64_t kRoom = 512 + Stream::kRow;
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  static constexpr float kMost = std::numeric_limits<float>::max();
  static constexpr int64_t kEndless = int64_t{1} << 40;  // a block of a whole tensor

  // Calls run(block, begin, length) for the part of each block in a chunk; `begin` counts from the chunk's start.
  template <class F>
  void over_blocks(int64_t first, int64_t n, const F& run) const {
    for (int64_t begin = 0; begin < n;) {
      const int64_t block = (first + begin) / block_, end = std::min((block + 1) * block_ - first, n);
      run(block, begin, end - begin);
      begin = end;
    }
  }

  void decode(const uint8_t* __restrict codes, int64_t n, const float scale, float* __restrict out) const {
    const uint32_t sign_code = sign_code_, first_normal = first_normal_, rebias = rebias_;
    const int shift = shift_, sign_shift = sign_shift_;
    const float spacing = spacing_;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t code = codes[i], magnitude = code & ~sign_code;
      const uint32_t normal = (magnitude << shift) + rebias;
      const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * spacing);
      const uint32_t value = (magnitude < first_normal ? subnormal : normal) | ((code & sign_code) << sign_shift);
      out[i] = std::bit_cast<float>(value) * scale;
    }
  }

  void decode_expanded(const uint8_t* codes, int64_t n, float amax, float power, float* __restrict out) const {
    const double* of_codes = reinterpret_cast<const double*>(table_);
    double logarithms[kRoom];
    for (int64_t i = 0; i < n; ++i) logarithms[i] = of_codes[codes[i]];
    contract(logarithms, n, power, amax, out);
    for (int64_t i = 0; i < n; ++i) {
      out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(out[i]) | (codes[i] & sign_code_) << sign_shift_);
    }
  }

  // Codes are made as numbers of 32 bits, and narrowed by a loop of their own: in one loop with floats, compilers take
  // 32 elements at a time, and have no registers for them.
  template <class D>
  void encode(const float* x, const float* random, int64_t n, const D divided, uint8_t* __restrict codes) const {
    uint32_t wide[kRoom];
    if (mapped_) {
      look_up(x, n, divided, wide);
    } else if (stochastic_) {
      round<true, false, true>(x, random, n, divided, wide);
    } else if (shift_ == 23) {
      round<false, true, true>(x, random, n, divided, wide);
    } else if (sign_code_ != 0) {
      round<false, false, true>(x, random, n, divided, wide);
    } else {
      round<false, false, false>(x, random, n, divided, wide);
    }
    if (!negative_zero_ && sign_code_ != 0) {
      for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i] == sign_code_ ? 0 : wide[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
    }
  }

  // A code is the number of spacings in its binade, and 2^M more for each binade from the lowest up. Without mantissa
  // even codes alternate with the binade, and the lowest exponent bit, less the offset, tells which they are.
  template <bool kStochastic, bool kAlternating, bool kSigned, class D>
  void round(const float* __restrict x, const float* __restrict random, int64_t n, const D divided,
             uint32_t* __restrict codes) const {
    const int shift = shift_, sign_shift = sign_shift_;
    const uint32_t sign_code = sign_code_, rebias = rebias_, to_anchor = static_cast<uint32_t>(shift) << 23;
    const int32_t lowest = lowest_normal();
    const uint32_t offset = to_anchor + (static_cast<uint32_t>(lowest) >> shift);
    const int32_t max = std::bit_cast<int32_t>(max_);
    const float half = 0.5f * spacing_;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t scaled = std::bit_cast<uint32_t>(divided(x[i]));
      const int32_t bits = std::min(static_cast<int32_t>(kSigned ? scaled & kMagnitude : scaled), max);
      const float magnitude = std::bit_cast<float>(bits);
      uint32_t code;
      if constexpr (kAlternating && !kStochastic) {
        const uint32_t place = static_cast<uint32_t>(bits) - rebias;
        const uint32_t normal = (place + 0x3fffffu + ((place >> 23) & 1u)) >> 23;
        code = bits < lowest ? (magnitude > half ? 1u : 0u) : normal;
      } else {
        const uint32_t binade = static_cast<uint32_t>(std::max(bits & 0x7f800000, lowest));
        const float anchor = std::bit_cast<float>(binade + to_anchor);
        uint32_t sum = std::bit_cast<uint32_t>(magnitude + anchor);
        if constexpr (kStochastic) {
          const float below = anchor - std::bit_cast<float>(sum);  // minus the rounded magnitude
          const float over = magnitude + below, step = std::bit_cast<float>(binade - ((23u - shift) << 23));
          const float rest = over < 0.0f ? over + step : over;
          sum += (random[i] * step < rest ? 1u : 0u) - (over < 0.0f ? 1u : 0u);
        }
        code = (binade >> shift) + sum - binade - offset;
      }
      codes[i] = kSigned ? code | ((scaled >> sign_shift) & sign_code) : code;
    }
  }

  // A table entry is a code and an addend. Added to the lower bits, it carries into the code if these reach the
  // threshold. Below zero codes fall as the magnitude grows, so the bits are inverted.
  template <class D>
  void look_up(const float* __restrict x, int64_t n, const D divided, uint32_t* __restrict codes) const {
    constexpr int32_t kOne = 0x3f800000;
    const int32_t lowest = static_cast<int32_t>(lowest_), entries = static_cast<int32_t>(entries_);
    const uint32_t rest = (1u << entry_) - 1u;
    const int entry = entry_;
    int32_t places[kRoom];
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = std::bit_cast<int32_t>(divided(x[i])), sign = bits >> 31;
      const int32_t bounded = std::min(std::max(bits & static_cast<int32_t>(kMagnitude), lowest), kOne);
      places[i] = ((bounded - lowest) >> entry) + (sign & entries);
      codes[i] = static_cast<uint32_t>(bounded ^ sign) & rest;
    }
    for (int64_t i = 0; i < n; ++i) codes[i] = (table_[places[i]] + codes[i]) >> entry;
  }

  int32_t lowest_normal() const {
    return std::bit_cast<int32_t>(spacing_ * static_cast<float>(static_cast<int32_t>(first_normal_)));
  }

  // Writes the codes of a block, or of a part of a measured block. largest: its largest magnitude; may be infinite.
  void encode_block(int64_t block, float* x, const float* random, int64_t n, float largest, uint8_t* codes) const {
    if (!(largest <= kMost)) {
      for (int64_t i = 0; i < n; ++i) x[i] = std::max(std::min(x[i], kMost), -kMost);
    }
    if (powers_ != nullptr) {
      float amax = std::max(std::min(largest, kMost), codec::kLeastAmax), power;
      if (measured_) {
        power = measured_->powers[block];
      } else {
        keep(block, amax, power = expansion_of(amax, least_of(x, n, amax), binades_));
      }
      expand(x, n, amax, power, largest_);
      return encode(x, random, n, [](float y) { return y; }, codes);
    }
    const float scale = new_scale(block, std::min(largest, kMost));
    encode(x, random, n, [scale](float y) { return y / scale; }, codes);
  }

  // Returns the scale of a block. Stores it too, unless the block is measured and its old scale still needed.
  float new_scale(int64_t block, float largest) const {
    if (measured_) return measured_->scales[block];
    const float scale = scale_for(std::max(largest, codec::kLeastAmax));
    keep(block, scale, 1.0f);
    return scale;
  }
  float scale_for(float amax) const {
    if (powers_ != nullptr) return amax;
    return power_of_two_ ? power_above(amax) : amax / largest_;
  }

  // The power of two at or above amax / largest.
  float power_above(float amax) const {
    const auto a = std::bit_cast<uint32_t>(amax), t = std::bit_cast<uint32_t>(largest_);
    const int32_t beyond = (a & 0x7fffffu) > (t & 0x7fffffu) ? 1 : 0;
    const int32_t exponent = static_cast<int32_t>(a >> 23) - static_cast<int32_t>(t >> 23) + beyond;
    return std::bit_cast<float>(static_cast<uint32_t>(std::min(std::max(exponent, -126), 126) + 127) << 23);
  }

  float scale_at(int64_t block) const {
    if (power_of_two_) return std::bit_cast<float>(static_cast<uint32_t>(static_cast<uint8_t*>(scales_)[block]) << 23);
    return static_cast<float*>(scales_)[block];
  }
  void keep(int64_t block, float scale, float power) const {
    if (power_of_two_) {
      static_cast<uint8_t*>(scales_)[block] = static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
    } else {
      static_cast<float*>(scales_)[block] = scale;
    }
    if (powers_ != nullptr) powers_[block] = power;
  }

  uint8_t* codes_ = nullptr;
  void* scales_ = nullptr;
  float* powers_ = nullptr;
  std::shared_ptr<Measured> measured_;
  double binades_ = 0;
  int64_t block_ = 1;
  const float* values_ = nullptr;
  const uint32_t* table_ = nullptr;
  bool mapped_ = false, packed_ = false, root_ = false, stochastic_ = false, power_of_two_ = false;
  bool negative_zero_ = false;
  int shift_ = 0, sign_shift_ = 0, entry_ = 0;
  uint32_t first_normal_ = 0, rebias_ = 0, sign_code_ = 0, stream_ = 0, lowest_ = 0, entries_ = 0;
  float largest_ = 1, spacing_ = 1, max_ = 1;
};

}  // namespace altgrad
