// What an element adds to a tensor's digest (docs/stream.md, section 10). Shared by the CPU kernels and CUDA.
#pragma once

#include "keep_going.h"
#include "philox.h"
#include "region.h"

namespace shardinit {

inline constexpr uint32_t kDigestMul = 0xD256D193u;          // Philox2x32's
inline constexpr uint64_t kDigestKey = 0x3120747365676964u;  // "digest 1", little-endian
inline constexpr int kDigestRounds = 7;

// The round keys of all words whose index has this high half.
struct DigestKey {
  uint32_t k[4];

  static SHARDINIT_HD DigestKey of(uint32_t high) {
    const auto block = philox4x32<uint32_t>(high, 0, 0, 0, PhiloxKey::of(kDigestKey));
    return {{block.w[0], block.w[1], block.w[2], block.w[3]}};
  }
};

// The four words that the word x adds. first_product: the low half of its index times kDigestMul, which a vector gets
// by addition. W is uint32_t, or a vector of 64-bit lanes whose upper halves carry no meaning, in and out.
template <class P, class W>
SHARDINIT_HD Words4<W> digest_words(const P& first_product, const W& x, const DigestKey& key) {
  Words4<W> out;
  W low = low_half(first_product);
  W u = high_half(first_product) ^ x ^ key.k[0];
  SHARDINIT_UNROLL
  for (int round = 1; round < kDigestRounds; ++round) {
    const auto product = mul_wide(u, kDigestMul);
    u = high_half(product) ^ low ^ key.k[round % 4];
    low = low_half(product);
    if (round >= kDigestRounds - 4) out.w[round - (kDigestRounds - 4)] = u;
  }
  return out;
}

// The digest of some elements: it adds up.
struct DigestSum {
  uint32_t w[4] = {};

  SHARDINIT_HD void add(const uint32_t other[4]) {
    for (int k = 0; k < 4; ++k) w[k] += other[k];
  }
};

// Elements of one tensor. Elements of 8 and 16 bytes are 2 and 4 words.
struct DigestPiece {
  const void* data;  // of the grid's first element
  uint32_t size;     // bytes of an element: 1, 2, 4, 8 or 16
  Grid grid;
};

// sums[k] is what pieces[k] adds up to, by up to num_threads threads. False where keep_going stopped it.
bool digest_cpu(const DigestPiece* pieces, size_t num_pieces, int num_threads, const KeepGoing& keep_going,
                DigestSum* sums);

}  // namespace shardinit
