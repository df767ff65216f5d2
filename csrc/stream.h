// Which words belong to an element: docs/stream.md, section 1.
#pragma once

#include "philox.h"

namespace shardinit {

inline constexpr int kStreamVersion = 1;

// A counter's block number is plane * 2^61 + index / 4.
inline constexpr int kPlaneShift = 61;
inline constexpr uint64_t kPlaneWord = 0;     // one-word draws
inline constexpr uint64_t kPlaneWordLow = 1;  // low halves of 64-bit ones
inline constexpr uint64_t kPlanePair = 2;     // the pairs of the normals
inline constexpr uint64_t kPlanePairLow = 3;

struct Stream {
  PhiloxKey key;
  uint32_t id_low;
  uint32_t id_high;

  static Stream of(uint64_t seed, uint64_t tensor_id) {
    return {PhiloxKey::of(seed), static_cast<uint32_t>(tensor_id), static_cast<uint32_t>(tensor_id >> 32)};
  }
};

// The four words of a block. W as in philox4x32; counter is W's 64-bit block number, plane included.
template <class W, class Counter>
SHARDINIT_HD Words4<W> words_of_block(const Stream& stream, Counter counter) {
  return philox4x32(low_half(counter), high_half(counter), splat<W>(stream.id_low), splat<W>(stream.id_high),
                    stream.key);
}

}  // namespace shardinit
