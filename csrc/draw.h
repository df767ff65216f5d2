// A distribution with its parameters made ready, and the function from words to values that goes with it.
#pragma once

#include "stream.h"
#include "transform.h"

namespace shardinit {

// Python passes all but the last; set_draw chooses between the two ways of a truncated normal.
enum class Distribution : int {
  kConstant,
  kUniform,
  kNormal,
  kTruncNormal,
  kBits,
  kExponential,
  kCauchy,
  kBernoulli,
  kRandom,
  kTruncNormalNarrow
};

struct BernoulliParams {
  uint32_t threshold;  // words below it give 1; p = 0 and p = 1 are constants
};
struct RandomParams {
  uint64_t low;   // two's complement
  uint64_t span;  // high - low, at least 1
};

// In working precision T.
template <class T>
struct Draw {
  Distribution distribution;
  Stream stream;
  union {
    T constant;
    UniformParams<T> uniform;
    NormalParams<T> normal;
    TruncNormalWide<T> trunc_normal;
    TruncNormalNarrow<T> trunc_normal_narrow;
    BernoulliParams bernoulli;
    RandomParams random;
  };
};

// A function maps the words (p, q) of elements (2j, 2j + 1) to their values, for scalars and vectors alike. kPlane is
// where the words come from; 64-bit words have their high halves there and their low ones in the plane after it.
template <class T, bool kScaled = false>
struct UniformFn {
  using Params = UniformParams<T>;
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlaneWord;
  Params p;
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    return {uniform_transform<kScaled>(a, p), uniform_transform<kScaled>(b, p)};
  }
};

template <class T>
struct NormalFn {
  using Params = NormalParams<T>;
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlanePair;
  Params p;
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    using F = FloatOf<U>;
    const Pair<F> z = normal_pair(a, b);
    return {fma_rn(z.even, splat<F>(p.std), splat<F>(p.mean)), fma_rn(z.odd, splat<F>(p.std), splat<F>(p.mean))};
  }
};

// kCentral: no word of the draw reaches the tails of the quantile.
template <class T, bool kCentral>
struct TruncNormalWideFn {
  using Params = TruncNormalWide<T>;
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlaneWord;
  const Params& p;
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    return {trunc_normal<kCentral>(a, p), trunc_normal<kCentral>(b, p)};
  }
};

template <class T>
struct TruncNormalNarrowFn {
  using Params = TruncNormalNarrow<T>;
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlaneWord;
  const Params& p;
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    return {trunc_normal(a, p), trunc_normal(b, p)};
  }
};

// A draw without parameters of one word: Transform maps it to the value.
template <class T, class Transform>
struct PlainFn {
  struct Params {};
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlaneWord;
  Params p;
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    return {Transform{}(a), Transform{}(b)};
  }
};
struct StandardExponential {
  template <class U>
  SHARDINIT_HD FloatOf<U> operator()(U word) const {
    return standard_exponential(word);
  }
};
struct StandardCauchy {
  template <class U>
  SHARDINIT_HD FloatOf<U> operator()(U word) const {
    return standard_cauchy(word);
  }
};
template <class T>
using ExponentialFn = PlainFn<T, StandardExponential>;
template <class T>
using CauchyFn = PlainFn<T, StandardCauchy>;

// The high 32 bits of a word decide, so that every type has the same ones.
template <class T>
struct BernoulliFn {
  using Params = BernoulliParams;
  using Word = UintOf<T>;
  static constexpr uint64_t kPlane = kPlaneWord;
  Params p;
  template <class U>
  SHARDINIT_HD FloatOf<U> one(U word) const {
    using F = FloatOf<U>;
    const auto below = (word >> (sizeof(T) == 8 ? 32 : 0)) < Word{p.threshold};
    return select(below, splat<F>(T(1)), splat<F>(T(0)));
  }
  template <class U>
  SHARDINIT_HD Pair<FloatOf<U>> operator()(U a, U b) const {
    return {one(a), one(b)};
  }
};

// low + (word * span) / 2^64, in two's complement.
struct RandomFn {
  using Params = RandomParams;
  using Word = uint64_t;
  static constexpr uint64_t kPlane = kPlaneWord;
  Params p;
  template <class U>
  SHARDINIT_HD U one(U word) const {
    // The high half of the 128-bit product, from four products of 32 bits.
    const U mask = splat<U>(uint64_t{0xffffffff});
    const auto above = static_cast<uint32_t>(p.span >> 32);
    const auto below = static_cast<uint32_t>(p.span);
    const auto low_by_below = mul_wide(low_half(word), below);
    const auto high_by_below = mul_wide(high_half(word), below);
    const auto low_by_above = mul_wide(low_half(word), above);
    const auto high_by_above = mul_wide(high_half(word), above);
    const U middle = (low_by_below >> 32) + (high_by_below & mask) + (low_by_above & mask);
    return high_by_above + (high_by_below >> 32) + (low_by_above >> 32) + (middle >> 32) + splat<U>(p.low);
  }
  template <class U>
  SHARDINIT_HD Pair<U> operator()(U a, U b) const {
    return {one(a), one(b)};
  }
};

template <class W>
struct BitsFn {
  struct Params {};
  using Word = W;
  static constexpr uint64_t kPlane = kPlaneWord;
  Params p;
  template <class U>
  SHARDINIT_HD Pair<U> operator()(U p, U q) const {
    return {p, q};
  }
};

}  // namespace shardinit
