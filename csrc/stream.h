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

// The parts of a stream's words that the blocks of a plane share while the high word of their number stays the same.
SHARDINIT_HD PhiloxHoisted hoist(const Stream& stream, uint64_t plane, uint64_t block) {
  const uint64_t number = (plane << kPlaneShift) + block;
  return PhiloxHoisted::of(high_half(number), stream.id_low, stream.id_high, stream.key);
}
inline constexpr uint64_t kBlocksPerHighWord = uint64_t{1} << 32;

}  // namespace shardinit
