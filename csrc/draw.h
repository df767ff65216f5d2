// A distribution with its parameters made ready, and the function from words to values that goes with it.
#pragma once

#include "stream.h"
#include "transform.h"

namespace shardinit {

// Python passes the first five; set_draw chooses between the two ways of a truncated normal.
enum class Distribution : int { kConstant, kUniform, kNormal, kTruncNormal, kBits, kTruncNormalNarrow };

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
