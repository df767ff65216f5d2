// From words to values, for one element or a vector of them. Orders of operation and constants: docs/stream.md.
// F is float or double or a vector of them, U the unsigned integer of the same width.
#pragma once

#include <type_traits>

#include "numeric.h"

namespace shardinit {

// ---- logarithm: x = m * 2^n with 1 <= m < 2, for normal x > 0 -----------------------------------

template <class F>
struct Split {
  F t;         // m - 2, in [-1, 0)
  F scaled_n;  // (n + kMore) * 2^23, for double 2^52: as it stands in x, and a product less
};

template <int kMore = 0, class F>
SHARDINIT_HD Split<F> split_exponent(F x) {
  using U = UintOf<F>;
  constexpr bool kIs32 = LaneOf<F>::kBits == 32;
  using Word = std::conditional_t<kIs32, uint32_t, uint64_t>;
  using Real = FloatOf<Word>;
  constexpr int kMantissaBits = kIs32 ? 23 : 52;
  constexpr Word kBias = ((Word{1} << (kIs32 ? 7 : 10)) - 1 - kMore) << kMantissaBits;
  constexpr Word kExponent = ~((Word{1} << kMantissaBits) - 1);
  const U exponent = (bits_of(x) - splat<U>(kBias)) & splat<U>(kExponent);
  const F mantissa = float_of_bits(bits_of(x) - exponent);  // m * 2^-kMore
  const F t = kMore ? fma_rn(mantissa, splat<F>(Real{1 << kMore}), splat<F>(Real{-2})) : mantissa - splat<F>(Real{2});
  return {t, to_float(as_signed(exponent))};
}

// t * P(t) = -2 ln(1 + t/2) for t in [-1, 0).
template <class F>
SHARDINIT_HD F minus_two_log(F t) {
  if constexpr (LaneOf<F>::kBits == 32) {
    return t * horner(t, 0x1.2e25b8p-7f, 0x1.12a94cp-6f, 0x1.8ede74p-6f, -0x1.4b19eap-9f, 0x1.164ac2p-5f,
                      -0x1.53e0b6p-4f, 0x1.00048p-2f, -0x1.fffffcp-1f);
  } else {
    return t * horner(t, 0x1.1b110ea9c68afp-16, 0x1.3d17b3ba2cb15p-13, 0x1.518675382d2f2p-11, 0x1.c05951947f8a6p-10,
                      0x1.9ee6515d05228p-9, 0x1.1aba9c59aaa96p-8, 0x1.25ac947e4458cp-8, 0x1.d8b975f896337p-9,
                      0x1.2cc1627a30f52p-9, 0x1.26952c431af3ep-10, 0x1.01c9a171f4181p-11, 0x1.add7b7a459952p-15,
                      0x1.e0aeb9cae6928p-13, -0x1.c07e9e867cc5fp-12, 0x1.003b6c5b36e39p-10, -0x1.248f3b149e7ap-9,
                      0x1.5555719fea81ap-8, -0x1.999998ebe0221p-7, 0x1.0000000142462p-5, -0x1.5555555552ef9p-4,
                      0x1.000000000000dp-2, -0x1p-0);
  }
}

// Half of it, to the same bits: halving every coefficient is exact, and a product less.
template <class F>
SHARDINIT_HD F minus_log(F t) {
  return t * horner(t, 0x1.2e25b8p-8f, 0x1.12a94cp-7f, 0x1.8ede74p-7f, -0x1.4b19eap-10f, 0x1.164ac2p-6f,
                    -0x1.53e0b6p-5f, 0x1.00048p-3f, -0x1.fffffcp-2f);
}

// n * -2 ln 2 + c
template <class F>
SHARDINIT_HD F add_minus_two_log_of_power(F scaled_n, F c) {
  if constexpr (LaneOf<F>::kBits == 32) {
    return fma_rn(scaled_n, splat<F>(-0x1.62e43p+0f * 0x1p-23f), c);
  } else {
    return fma_rn(scaled_n, splat<F>(-0x1.62e42fefa39efp+0 * 0x1p-52), c);
  }
}

// ---- uniform ------------------------------------------------------------------------------------

template <class T>
struct UniformParams {
  T low;
  T scaled;  // b - a times the unit of u; 0 where that is not exact
  T top;     // the largest value of the tensor's type below b; +inf where a == b
  T width;   // b - a
};

template <class T>
inline constexpr T kUniformUnit = sizeof(T) == 4 ? T(0x1p-24) : T(0x1p-53);

// kScaled: with p.scaled, a product less for the same bits.
template <bool kScaled, class U, class T>
SHARDINIT_HD FloatOf<U> uniform_transform(U word, const UniformParams<T>& p) {
  using F = FloatOf<U>;
  F u = to_float(as_signed(word >> (sizeof(T) == 4 ? 8 : 11)));
  if constexpr (!kScaled) u = u * splat<F>(kUniformUnit<T>);
  return at_most(fma_rn(u, splat<F>(kScaled ? p.scaled : p.width), splat<F>(p.low)), p.top);
}

// ---- normal -------------------------------------------------------------------------------------

template <class T>
struct NormalParams {
  T std;
  T mean;
};

template <class F>
struct Pair {
  F even;
  F odd;
};

// -2 ln((p + 1/2) / 2^bits)
template <class U>
SHARDINIT_HD FloatOf<U> minus_two_log_of(U p) {
  using F = FloatOf<U>;
  // w is 2 v below a half and 2 v - 2 from there on (v = (p + 1/2) / 2^bits), so neither end loses precision.
  F w;
  if constexpr (LaneOf<U>::kBits == 32) {
    w = fma_rn(to_float(as_signed(p)), splat<F>(0x1p-31f), splat<F>(0x1p-32f));
  } else {
    w = fma_rn(to_float(as_signed(p)), splat<F>(0x1p-63), splat<F>(0x1p-64));
  }
  const auto upper = as_signed(p) < 0;
  const Split<F> low = split_exponent(w);
  const F t = select(upper, w, low.t);
  const F log = minus_two_log(t);
  return select(upper, log, add_minus_two_log_of_power(low.scaled_n, log));
}

// sin(pi/4 a) / a and cos(pi/4 a) for x = a^2, a in [-1, 1].
template <class F>
SHARDINIT_HD F angle_sine(F x) {
  if constexpr (LaneOf<F>::kBits == 32) {
    return horner(x, -0x1.2f5992p-15f, 0x1.466b2p-9f, -0x1.4abbecp-4f, 0x1.921fb6p-1f);
  } else {
    return horner(x, 0x1.add9d45ae8195p-47, 0x1.e06afd55415bp-38, -0x1.e2fa787f268fep-30, 0x1.50782aae65ef4p-22,
                  -0x1.32d2ccde1222cp-15, 0x1.466bc67753d55p-9, -0x1.4abbce625be01p-4, 0x1.921fb54442d18p-1);
  }
}
template <class F>
SHARDINIT_HD F angle_cosine(F x) {
  if constexpr (LaneOf<F>::kBits == 32) {
    return horner(x, -0x1.4dfd3ap-12f, 0x1.03acccp-6f, -0x1.3bd37ep-2f, 0x1.fffffep-1f);
  } else {
    return horner(x, -0x1.163e74e54412p-49, -0x1.a90992955d2e9p-42, 0x1.f9bbb9d5f3e32p-34, -0x1.a6d1dd1388cd3p-26,
                  0x1.e1f506733340fp-19, -0x1.55d3c7e3bfb74p-12, 0x1.03c1f081b5a56p-6, -0x1.3bd3cc9be45dep-2, 0x1p+0);
  }
}

// Box and Muller's pair of standard normals, the radius from p and the angle from q.
template <class U>
SHARDINIT_HD Pair<FloatOf<U>> normal_pair(U p, U q) {
  using F = FloatOf<U>;
  constexpr bool kIs32 = LaneOf<U>::kBits == 32;
  F a;
  if constexpr (kIs32) {
    a = to_float(as_signed(q << 2)) * splat<F>(0x1p-31f);
  } else {
    a = to_float(as_signed(q << 2)) * splat<F>(0x1p-63);
  }
  const F r = sqrt_rn(minus_two_log_of(p));
  const F x = a * a;
  const F sine = angle_sine(x) * a;
  F cosine = angle_cosine(x);
  cosine =
      float_of_bits(bits_of(cosine) ^ (q & splat<U>(kIs32 ? uint64_t{0x80000000u} : uint64_t{0x8000000000000000u})));
  const auto swap = as_signed(q << 1) < 0;
  return {r * select(swap, sine, cosine), r * select(swap, cosine, sine)};
}

// ---- truncated normal ---------------------------------------------------------------------------

template <class T>
struct TruncNormalWide {
  T std, mean, a, b;
  T mass, center;             // the interval's probability; probability of its middle less 1/2
  T lower, upper, tail_mass;  // probabilities below a, above b and between, times 2^scale
  T scale;                    // 0 or 64: keeps far tails out of fp32's subnormals
  T unscale;                  // 2^-scale
};

template <class T>
inline constexpr int kNarrowTerms = sizeof(T) == 4 ? 12 : 32;

template <class T>
struct TruncNormalNarrow {
  T a, b;
  T width;                        // b - a
  T series_width, series_center;  // tau = (v - 1/2) * series_width + series_center
  T series[kNarrowTerms<T>];      // (value - a) / (b - a) = 1/2 + tau * polynomial(tau), lowest power first
};

// v - 1/2 for v = (word + 1/2) / 2^bits
template <class U>
SHARDINIT_HD FloatOf<U> centered(U word) {
  using F = FloatOf<U>;
  if constexpr (LaneOf<U>::kBits == 32) {
    return fma_rn(to_float(as_signed(word ^ splat<U>(0x80000000u))), splat<F>(0x1p-32f), splat<F>(0x1p-33f));
  } else {
    return fma_rn(to_float(as_signed(word ^ splat<U>(0x8000000000000000u))), splat<F>(0x1p-64), splat<F>(0x1p-65));
  }
}

template <class F, class T>
SHARDINIT_HD F clamp_value(F value, T a, T b) {
  return at_most(at_least(value, a), b);
}

// Over a narrow interval the density is nearly flat, and a polynomial in v anchored at a leaves no error that could
// pile up at the ends.
template <class U, class T>
SHARDINIT_HD FloatOf<U> trunc_normal(U word, const TruncNormalNarrow<T>& p) {
  using F = FloatOf<U>;
  constexpr int kTerms = kNarrowTerms<T>;
  const F tau = fma_rn(centered(word), splat<F>(p.series_width), splat<F>(p.series_center));
  F y = splat<F>(p.series[kTerms - 1]);
  SHARDINIT_UNROLL
  for (int k = kTerms - 2; k >= 0; --k) y = fma_rn(y, tau, splat<F>(p.series[k]));
  y = fma_rn(tau, y, splat<F>(T(0.5)));
  return clamp_value(fma_rn(y, splat<F>(p.width), splat<F>(p.a)), p.a, p.b);
}

// The coefficient of each lane's row. A lambda would not always be inlined: see kernels.cpp.
template <class F, class M>
SHARDINIT_HD F pick_row(M middle, M far, float near_one, float middle_one, float far_one) {
  return select(middle, splat<F>(near_one), select(far, splat<F>(middle_one), splat<F>(far_one)));
}

// (z / c) of the standard normal quantile z, where c = P - 1/2, as a function of W = -ln(4 P (1 - P)). kCentral leaves
// out what only W >= kTailFrom needs.
inline constexpr float kTailFrom = 5.0f;
template <bool kCentral, class F>
SHARDINIT_HD F quantile_ratio(F w) {
  F ratio = horner(w - splat<F>(2.5f), 0x1.61e7b8p-24f, 0x1.0807eap-20f, -0x1.4fadep-17f, -0x1.a5eb4ap-17f,
                   0x1.44398cp-11f, -0x1.d0b796p-9f, -0x1.833496p-7f, 0x1.652c74p-1f, 0x1.0fc8bep+2f);
  if constexpr (kCentral) return ratio;
  const auto tail = w >= kTailFrom;
  if (any(tail)) {
    const auto middle = w < 16.0f;
    const auto far = w < 40.0f;
    const F r = sqrt_rn(select(tail, w, splat<F>(kTailFrom))) -
                pick_row<F>(middle, far, 0x1.8f1bbcp+1f, 0x1.4a62c2p+2f, 0x1.05316p+3f);
    // A row that needs one coefficient less has a zero there, which changes no bit.
    const F outer = horner(r, pick_row<F>(middle, far, -0x1.32624p-11f, 0.0f, 0.0f),
                           pick_row<F>(middle, far, -0x1.11f0a2p-12f, -0x1.861d8p-19f, -0x1.15fe62p-23f),
                           pick_row<F>(middle, far, 0x1.fa104ap-9f, 0x1.63a002p-17f, -0x1.9d6934p-22f),
                           pick_row<F>(middle, far, -0x1.f48cd6p-8f, -0x1.6b87dep-15f, -0x1.89281ap-21f),
                           pick_row<F>(middle, far, 0x1.64ee5p-7f, 0x1.6efefcp-13f, 0x1.81eb1ep-18f),
                           pick_row<F>(middle, far, -0x1.f2db3ep-7f, -0x1.fa794ep-12f, 0x1.d0783p-15f),
                           pick_row<F>(middle, far, 0x1.4bfe1ap-6f, -0x1.58a7bap-11f, -0x1.5679dcp-10f),
                           pick_row<F>(middle, far, 0x1.6b5944p+1f, 0x1.6dbefp+1f, 0x1.6cbceep+1f),
                           pick_row<F>(middle, far, 0x1.0b1faep+3f, 0x1.c5cd5p+3f, 0x1.6be06ap+4f));
    ratio = select(tail, outer, ratio);
  }
  return ratio;
}

// The probability of the nearer tail, from the word's own end so that it keeps relative precision.
template <class U, class M, class T>
SHARDINIT_HD FloatOf<U> nearer_tail(U word, M below, T mass, const TruncNormalWide<T>& p) {
  using F = FloatOf<U>;
  const F x = to_float(select(below, word, ~word));
  constexpr bool kIs32 = LaneOf<U>::kBits == 32;
  const F u = fma_rn(x, splat<F>(kIs32 ? T(0x1p-32) : T(0x1p-64)), splat<F>(kIs32 ? T(0x1p-33) : T(0x1p-65)));
  return fma_rn(u, splat<F>(mass), select(below, splat<F>(p.lower), splat<F>(p.upper)));
}

template <class U>
struct Quantile {
  FloatOf<U> c, w;  // as in quantile_ratio
};
// kCentral: p.scale is 0.
template <bool kCentral, class U>
SHARDINIT_HD Quantile<U> quantile_of(U word, const TruncNormalWide<float>& p) {
  using F = FloatOf<U>;
  const F c = fma_rn(centered(word), splat<F>(p.mass), splat<F>(p.center));
  const F t = nearer_tail(word, c < 0.0f, p.tail_mass, p);
  const F t4 = t * splat<F>(4.0f);
  const F e = fma_rn(-t4, kCentral ? t : t * splat<F>(p.unscale), t4);
  const Split<F> split = split_exponent<1>(e);
  const F n = kCentral ? split.scaled_n : split.scaled_n - splat<F>(p.scale * 0x1p23f);
  return {c, fma_rn(n, splat<F>(-0x1.62e43p-1f * 0x1p-23f), minus_log(split.t))};
}

template <bool kCentral, class U>
SHARDINIT_HD FloatOf<U> trunc_normal(U word, const TruncNormalWide<float>& p) {
  using F = FloatOf<U>;
  const Quantile<U> q = quantile_of<kCentral>(word, p);
  const F z = q.c * quantile_ratio<kCentral>(q.w);
  return clamp_value(fma_rn(z, splat<F>(p.std), splat<F>(p.mean)), p.a, p.b);
}

// The standard normal quantile of P = 1/2 + c, where t is the probability of the nearer tail. Algorithm AS 241, PPND16
// (Wichura, Applied Statistics 37, 1988).
template <class F>
SHARDINIT_HD F quantile_ppnd16(F c, F t) {
  const auto below = c < 0.0;
  const F size = select(below, -c, c);
  const F r = fma_rn(-c, c, splat<F>(0.180625));
  F z = c * (horner(r, 2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
                    13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080) /
             horner(r, 5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
                    5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0));
  const auto outer = size > 0.425;
  if (any(outer)) {
    const Split<F> split = split_exponent(t);
    const F log = add_minus_two_log_of_power(split.scaled_n + splat<F>(0x1p52), minus_two_log(split.t));
    const F root = sqrt_rn(log * splat<F>(0.5));
    F y = root - splat<F>(1.6);
    F tail =
        horner(y, 7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
               3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734) /
        horner(y, 1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966,
               0.148103976427480074590, 0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0);
    const auto far = root > 5.0;
    if (any(far)) {
      y = root - splat<F>(5.0);
      const F far_tail = horner(y, 2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
                                0.0265321895265761230930, 0.296560571828504891230, 1.78482653991729133580,
                                5.46378491116411436990, 6.65790464350110377720) /
                         horner(y, 2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
                                7.86869131145613259100e-4, 0.0148753612908506148525, 0.136929880922735805310,
                                0.599832206555887937690, 1.0);
      tail = select(far, far_tail, tail);
    }
    z = select(outer, select(below, -tail, tail), z);
  }
  return z;
}

template <bool kCentral, class U>
SHARDINIT_HD FloatOf<U> trunc_normal(U word, const TruncNormalWide<double>& p) {
  using F = FloatOf<U>;
  const F c = fma_rn(centered(word), splat<F>(p.mass), splat<F>(p.center));
  const F z = quantile_ppnd16(c, nearer_tail(word, c < 0.0, p.tail_mass, p));
  return clamp_value(fma_rn(z, splat<F>(p.std), splat<F>(p.mean)), p.a, p.b);
}

// ---- exponential and Cauchy, both standard ------------------------------------------------------

// -ln((word + 1/2) / 2^bits), by the way of a normal's radius.
template <class U>
SHARDINIT_HD FloatOf<U> standard_exponential(U word) {
  using F = FloatOf<U>;
  using Real = FloatOf<std::conditional_t<LaneOf<U>::kBits == 32, uint32_t, uint64_t>>;
  return minus_two_log_of(word) * splat<F>(Real(0.5));
}

// tan(pi (v - 1/2)), v = (word + 1/2) / 2^bits, from sine and cosine of the angle to the nearer of the middle and the
// ends, which keeps relative precision at all three.
template <class U>
SHARDINIT_HD FloatOf<U> standard_cauchy(U word) {
  using F = FloatOf<U>;
  constexpr bool kIs32 = LaneOf<U>::kBits == 32;
  using Real = FloatOf<std::conditional_t<kIs32, uint32_t, uint64_t>>;
  const F c = centered(word);
  const auto below = c < Real(0);
  const F u = fma_rn(to_float(select(below, word, ~word)), splat<F>(kIs32 ? Real(0x1p-32) : Real(0x1p-64)),
                     splat<F>(kIs32 ? Real(0x1p-33) : Real(0x1p-65)));
  const F size = select(below, -c, c);
  const auto outer = size > Real(0.25);
  const F a = select(outer, u, size) * splat<F>(Real(4));
  const F x = a * a;
  const F sine = angle_sine(x) * a;
  const F cosine = angle_cosine(x);
  const F tangent = select(outer, cosine, sine) / select(outer, sine, cosine);
  return select(below, -tangent, tangent);
}

}  // namespace shardinit
