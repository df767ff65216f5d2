// Rounding of fp32 to the narrow types, to nearest even, in integers: it must not depend on what the host or GPU
// offers.
#pragma once

#include "numeric.h"

namespace shardinit {

// A type of kExponentBits and kMantissaBits whose largest finite pattern is kMax; kOverflow is what lies beyond. kNan
// is what every NaN becomes.
struct BFloat16 {
  using Storage = uint16_t;
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static constexpr uint32_t kMax = 0x7f7f, kOverflow = 0x7f80, kNan = 0x7fc0;
};
struct Float16 {
  using Storage = uint16_t;
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static constexpr uint32_t kMax = 0x7bff, kOverflow = 0x7c00, kNan = 0x7e00;
};
struct Float8E5M2 {
  using Storage = uint8_t;
  static constexpr int kExponentBits = 5, kMantissaBits = 2;
  static constexpr uint32_t kMax = 0x7b, kOverflow = 0x7c, kNan = 0x7e;
};
struct Float8E4M3 {
  using Storage = uint8_t;
  static constexpr int kExponentBits = 4, kMantissaBits = 3;
  static constexpr uint32_t kMax = 0x7e, kOverflow = 0x7e, kNan = 0x7f;  // saturates
};

// Returns the pattern in the low bits.
template <class Type>
SHARDINIT_HD uint32_t round_to(float x) {
  constexpr int kDropped = 23 - Type::kMantissaBits;
  constexpr int kBias = (1 << (Type::kExponentBits - 1)) - 1;
  constexpr int kSignShift = Type::kExponentBits + Type::kMantissaBits;
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 31) << kSignShift;
  // Normal: rebias, then round half to even by adding just under half, and one more where the kept bit is odd. A carry
  // moves into the exponent, and on to infinity, by itself.
  const uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
  const uint32_t normal = (rebased + ((1u << (kDropped - 1)) - 1) + ((rebased >> kDropped) & 1)) >> kDropped;
  uint32_t result = normal;
  if constexpr (Type::kExponentBits < 8) {
    // Subnormal: adding a power of two whose unit is the type's smallest value lets the fp32 adder do the rounding.
    constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23;
    constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
    const uint32_t subnormal = bits_of(float_of_bits(magnitude) + float_of_bits(kMagic)) - kMagic;
    result = magnitude < kLeastNormal ? subnormal : normal;
    result = magnitude >= 0x7f800000u ? Type::kOverflow : result;  // rebasing is no use for infinity
  }
  result = result > Type::kMax ? Type::kOverflow : result;
  return magnitude > 0x7f800000u ? Type::kNan : result | sign;
}

}  // namespace shardinit
