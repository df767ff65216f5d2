// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC'11).
#pragma once

#include "numeric.h"

namespace shardinit {

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u;
inline constexpr uint32_t kPhiloxStep1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

// The key of each round: computed once a fill, since it is the same for every block.
struct PhiloxKey {
  uint32_t k0[kPhiloxRounds];
  uint32_t k1[kPhiloxRounds];

  static SHARDINIT_HD PhiloxKey of(uint64_t key) {
    PhiloxKey result;
    uint32_t k0 = static_cast<uint32_t>(key);
    uint32_t k1 = static_cast<uint32_t>(key >> 32);
    SHARDINIT_UNROLL
    for (int round = 0; round < kPhiloxRounds; ++round) {
      result.k0[round] = k0;
      result.k1[round] = k1;
      k0 += kPhiloxStep0;
      k1 += kPhiloxStep1;
    }
    return result;
  }
};

template <class W>
struct Words4 {
  W w[4];
};

// Rounds kFirst and after. W is uint32_t, or a vector of 64-bit lanes whose upper halves carry no meaning, in and out.
template <int kFirst, class W>
SHARDINIT_HD Words4<W> philox_rounds(W c0, W c1, W c2, W c3, const PhiloxKey& key) {
  SHARDINIT_UNROLL
  for (int round = kFirst; round < kPhiloxRounds; ++round) {
    const auto p0 = mul_wide(c0, kPhiloxMul0);
    const auto p1 = mul_wide(c2, kPhiloxMul1);
    c0 = high_half(p1) ^ c1 ^ key.k0[round];
    c1 = low_half(p1);
    c2 = high_half(p0) ^ c3 ^ key.k1[round];
    c3 = low_half(p0);
  }
  return {{c0, c1, c2, c3}};
}

template <class W>
SHARDINIT_HD Words4<W> philox4x32(W c0, W c1, W c2, W c3, const PhiloxKey& key) {
  return philox_rounds<0>(c0, c1, c2, c3, key);
}

// What rounds 0 to 2 compute of c1, c2 and c3 alone, done once for all blocks that share them: saves two products and
// three xors a block.
struct PhiloxHoisted {
  uint32_t x[4];

  static SHARDINIT_HD PhiloxHoisted of(uint32_t c1, uint32_t c2, uint32_t c3, const PhiloxKey& key) {
    const uint64_t p1 = mul_wide(c2, kPhiloxMul1);
    const uint64_t p0 = mul_wide(high_half(p1) ^ c1 ^ key.k0[0], kPhiloxMul0);
    return {{c3 ^ key.k1[0], low_half(p1) ^ key.k0[1], high_half(p0) ^ key.k1[1], low_half(p0) ^ key.k1[2]}};
  }
};

template <class W>
SHARDINIT_HD Words4<W> philox4x32(W c0, const PhiloxHoisted& hoisted, const PhiloxKey& key) {
  auto p0 = mul_wide(c0, kPhiloxMul0);
  auto p1 = mul_wide(high_half(p0) ^ hoisted.x[0], kPhiloxMul1);
  c0 = high_half(p1) ^ hoisted.x[1];
  const W c1 = low_half(p1);
  const W c2 = low_half(p0) ^ hoisted.x[2];
  p0 = mul_wide(c0, kPhiloxMul0);
  p1 = mul_wide(c2, kPhiloxMul1);
  return philox_rounds<3>(high_half(p1) ^ c1 ^ key.k0[2], low_half(p1), high_half(p0) ^ hoisted.x[3], low_half(p0),
                          key);
}

}  // namespace shardinit
