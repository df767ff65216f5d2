// exp, log, sqrt, the inverse error function and rounding up, for every value of their arguments and for vectors as for
// one element: docs/stream.md, section 11. No libm has a say.
#pragma once

#include "transform.h"

namespace shardinit {

// The word type and constants of F's precision.
template <class F>
struct Precision {
  static constexpr bool kIs32 = LaneOf<F>::kBits == 32;
  using Word = std::conditional_t<kIs32, uint32_t, uint64_t>;
  using Real = FloatOf<Word>;
  static constexpr int kMantissaBits = kIs32 ? 23 : 52;
  static constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
  static constexpr Real kInfinity = static_cast<Real>(__builtin_inf());
  static constexpr Real kNaN = static_cast<Real>(__builtin_nan(""));
  static constexpr Real kTwoToMantissa = kIs32 ? Real(0x1p23) : Real(0x1p52);
  // Adding it rounds to an integer, which then stands in the low bits.
  static constexpr Real kToInteger = kTwoToMantissa * Real(1.5);
};

// 2^n for an integer n well inside the normal range.
template <class F>
SHARDINIT_HD F power_of_two(F n) {
  using P = Precision<F>;
  constexpr typename P::Real kBias = P::kIs32 ? 127 : 1023;
  return float_of_bits(bits_of(n + splat<F>(P::kToInteger + kBias)) << P::kMantissaBits);
}

template <class F>
SHARDINIT_HD F exp_rn(F x) {
  using P = Precision<F>;
  using Real = typename P::Real;
  constexpr Real kLowest = P::kIs32 ? Real(-104) : Real(-746);  // below it the result is 0, above the other infinite
  constexpr Real kHighest = P::kIs32 ? Real(89) : Real(710);
  const F at = select(x > kHighest, splat<F>(kHighest), select(x > kLowest, x, splat<F>(kLowest)));
  F n, r, tail;
  if constexpr (P::kIs32) {
    n = fma_rn(at, splat<F>(0x1.715476p+0f), splat<F>(P::kToInteger)) - splat<F>(P::kToInteger);
    r = fma_rn(n, splat<F>(0x1.05c61p-29f), fma_rn(n, splat<F>(-0x1.62e43p-1f), at));
    tail = horner(r, 0x1.694c86p-10f, 0x1.12397cp-7f, 0x1.555a26p-5f, 0x1.555492p-3f, 0x1.fffffap-2f);
  } else {
    n = fma_rn(at, splat<F>(0x1.71547652b82fep+0), splat<F>(P::kToInteger)) - splat<F>(P::kToInteger);
    r = fma_rn(n, splat<F>(-0x1.abc9e3b39803fp-56), fma_rn(n, splat<F>(-0x1.62e42fefa39efp-1), at));
    tail = horner(r, 0x1.1eed0108bb41fp-29, 0x1.af6e53ea7a68ap-26, 0x1.27e533a40fbe2p-22, 0x1.71ddee8a25276p-19,
                  0x1.a01a017d475cep-16, 0x1.a01a01b43cdcep-13, 0x1.6c16c16c1e5bep-10, 0x1.111111110ea08p-7,
                  0x1.5555555555544p-5, 0x1.555555555555cp-3, 0x1p-1);
  }
  const F y = fma_rn(r * r, tail, r) + splat<F>(Real(1));
  // In two steps, each power inside the range: the first is exact, the second rounds once, subnormals included.
  const F half = fma_rn(n, splat<F>(Real(0.5)), splat<F>(P::kToInteger)) - splat<F>(P::kToInteger);
  const F scaled = y * power_of_two(half) * power_of_two(n - half);
  const auto is_nan = (bits_of(x) & splat<UintOf<F>>(P::kSign - 1)) > bits_of(P::kInfinity);
  return select(is_nan, x, scaled);
}

template <class F>
SHARDINIT_HD F log_rn(F x) {
  using P = Precision<F>;
  using Real = typename P::Real;
  using Word = typename P::Word;
  using U = UintOf<F>;
  constexpr Real kLeastNormal = P::kIs32 ? Real(0x1p-126f) : Real(0x1p-1022);
  constexpr Real kToNormal = P::kTwoToMantissa * 2;
  constexpr Real kShift = P::kMantissaBits + 1;
  constexpr Word kTwoThirds = P::kIs32 ? Word{0x3f2aaaab} : static_cast<Word>(0x3fe5555555555555u);
  constexpr Word kExponent = ~((Word{1} << P::kMantissaBits) - 1);
  const auto subnormal = x < kLeastNormal;
  const F normal = select(subnormal, x * splat<F>(kToNormal), x);
  // normal = m * 2^n with m from 2/3 to 4/3
  const U exponent = (bits_of(normal) - splat<U>(kTwoThirds)) & splat<U>(kExponent);
  const F f = float_of_bits(bits_of(normal) - exponent) - splat<F>(Real(1));
  const F n = to_float(as_signed(exponent)) * splat<F>(Real(1) / P::kTwoToMantissa) -
              select(subnormal, splat<F>(kShift), splat<F>(Real(0)));
  F result;
  if constexpr (P::kIs32) {
    const F series = horner(f, -0x1.063f0ep-3f, 0x1.1ef05ap-3f, -0x1.f3e856p-4f, 0x1.1eb72ap-3f, -0x1.5595c2p-3f,
                            0x1.99d27ap-3f, -0x1.ffff2p-3f, 0x1.5555p-2f, -0x1p-1f);
    result = fma_rn(n, splat<F>(0x1.62e43p-1f), fma_rn(f * f, series, f));
  } else {
    const F series =
        horner(f, -0x1.53d846f3c11ebp-4, 0x1.5c77e2e3c05f7p-4, -0x1.3c4ba7aa8606ap-5, 0x1.55ae875cbc0ccp-5,
               -0x1.d6580efcd41d1p-5, 0x1.efd9db93d40dfp-5, -0x1.fe7ab9b5ade5dp-5, 0x1.10679896499f1p-4,
               -0x1.249eb9d80d058p-4, 0x1.3b1de0a4658dp-4, -0x1.5554d23248dc6p-4, 0x1.745cb3a61edf1p-4,
               -0x1.99999cfe26f56p-4, 0x1.c71c74200829p-4, -0x1.fffffff2be104p-4, 0x1.249249208207ep-3,
               -0x1.5555555562bdfp-3, 0x1.99999999a092fp-3, -0x1.fffffffffff5dp-3, 0x1.5555555555534p-2, -0x1p-1);
    result = fma_rn(n, splat<F>(0x1.62e42fefa39efp-1), fma_rn(f * f, series, f));
  }
  // Infinity and NaN are their own logarithms; that of 0 is 0 - infinity.
  result = select(x < P::kInfinity, result, x);
  return select(x > Real(0), result, select(x < Real(0), splat<F>(P::kNaN), x - splat<F>(P::kInfinity)));
}

template <class F>
SHARDINIT_HD F erfinv_rn(F x) {
  using P = Precision<F>;
  using Real = typename P::Real;
  const F size = float_of_bits(bits_of(x) & splat<UintOf<F>>(P::kSign - 1));
  F result;
  if constexpr (P::kIs32) {
    // W = -ln(1 - x^2); the quantile of P = (1 + x) / 2 is c * ratio with c = x / 2, and erfinv that over sqrt(2).
    const Split<F> split = split_exponent<1>(fma_rn(-x, x, splat<F>(1.0f)));
    const F w = fma_rn(split.scaled_n, splat<F>(-0x1.62e43p-1f * 0x1p-23f), minus_log(split.t));
    result = x * (quantile_ratio<false>(w) * splat<F>(0x1.6a09e6p-2f));
  } else {
    const F z = quantile_ppnd16(x * splat<F>(0.5), (splat<F>(1.0) - size) * splat<F>(0.5));
    result = z * splat<F>(0x1.6a09e667f3bcdp-1);
  }
  return select(size < Real(1), result, select(size > Real(1), splat<F>(P::kNaN), x * splat<F>(P::kInfinity)));
}

// Correctly rounded, of any number; sqrt_rn is for those that draws have.
template <class F>
SHARDINIT_HD F square_root(F x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(F) == 4) return __fsqrt_rn(x);
#endif
  return sqrt_rn(x);
}

// The least integer that is not below x >= 0.
template <class F>
SHARDINIT_HD F round_up(F x) {
  using P = Precision<F>;
  const F nearest = (x + splat<F>(P::kTwoToMantissa)) - splat<F>(P::kTwoToMantissa);
  const F up = select(x - nearest > typename P::Real(0), nearest + splat<F>(typename P::Real(1)), nearest);
  return select(x < P::kTwoToMantissa, up, x);
}

}  // namespace shardinit
