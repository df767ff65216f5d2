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

  static PhiloxKey of(uint64_t key) {
    PhiloxKey result;
    uint32_t k0 = static_cast<uint32_t>(key);
    uint32_t k1 = static_cast<uint32_t>(key >> 32);
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

// W is uint32_t, or a vector of 64-bit lanes whose upper halves carry no meaning, in and out.
template <class W>
SHARDINIT_HD Words4<W> philox4x32(W c0, W c1, W c2, W c3, const PhiloxKey& key) {
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto p0 = mul_wide(c0, kPhiloxMul0);
    const auto p1 = mul_wide(c2, kPhiloxMul1);
    c0 = high_half(p1) ^ c1 ^ key.k0[round];
    c1 = low_half(p1);
    c2 = high_half(p0) ^ c3 ^ key.k1[round];
    c3 = low_half(p0);
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace shardinit
