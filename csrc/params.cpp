// What a fill computes once: docs/stream.md, sections 4 and 6.1. Plain fp64 operations in the order written there; no
// libm.
#include "params.h"

#include "elementary.h"

namespace shardinit {
namespace {

constexpr int kSeriesTerms = 40;

// exp(-y) for 0 <= y <= 700
double exp_neg(double y) {
  const double n = static_cast<double>(static_cast<int64_t>(y * 0x1.71547652b82fep+0 + 0.5));
  const double r = (y - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  double s = 1.0;
  for (int k = 17; k >= 1; --k) s = 1.0 - s * (r / static_cast<double>(k));
  const double power = float_of_bits(static_cast<uint64_t>(1023 - static_cast<int64_t>(n)) << 52);
  return s * power;
}

// P(Z > x) for x >= 0: a power series near 0, a continued fraction from 1 on.
double tail(double x) {
  if (x > 37.0) return 0.0;
  const double phi = exp_neg(x * x * 0.5) * 0x1.9884533d43651p-2;  // 1 / sqrt(2 pi)
  if (x < 1.0) {
    double term = x;
    double sum = x;
    for (int k = 1; k <= 40; ++k) {
      term = term * (x * x) / static_cast<double>(2 * k + 1);
      sum = sum + term;
    }
    return 0.5 - phi * sum;
  }
  double fraction = x;
  for (int k = x < 2.0 ? 400 : 100; k >= 1; --k) fraction = x + static_cast<double>(k) / fraction;
  return phi / fraction;
}

double magnitude(double x) { return x < 0.0 ? -x : x; }

// The series of s, with v the cumulative probability over the interval: see the page.
struct NarrowSeries {
  double center, width;
  double y[kNarrowTerms<double>];
};

NarrowSeries narrow_series(double middle, double half) {
  constexpr int kTerms = kNarrowTerms<double>;
  const double a = middle * half;
  const double b = half * half * 0.5;
  double g[kSeriesTerms];
  g[0] = 1.0;
  g[1] = -a;
  for (int k = 2; k < kSeriesTerms; ++k) g[k] = -(a * g[k - 1] + 2.0 * b * g[k - 2]) / static_cast<double>(k);
  double plus = 0.0;
  double minus = 0.0;
  for (int k = kSeriesTerms - 1; k >= 0; --k) {
    const double term = g[k] / static_cast<double>(k + 1);
    plus = plus + term;
    minus = k % 2 == 0 ? minus - term : minus + term;
  }
  NarrowSeries series;
  series.center = (plus + minus) * 0.5;
  series.width = plus - minus;

  double u[kTerms];
  double s[kTerms + 1];
  double v[kTerms];
  u[0] = 1.0;
  s[0] = 0.0;
  for (int k = 0; k + 1 < kTerms; ++k) {
    s[k + 1] = u[k] / static_cast<double>(k + 1);
    v[k] = 0.0;
    for (int j = 0; j <= k; ++j) v[k] = v[k] + u[j] * u[k - j];
    double c = 0.0;
    for (int j = 0; j <= k; ++j) c = c + s[j] * v[k - j];
    u[k + 1] = (a * v[k] + 2.0 * b * c) / static_cast<double>(k + 1);
  }
  s[kTerms] = u[kTerms - 1] / static_cast<double>(kTerms);
  for (int k = 0; k < kTerms; ++k) series.y[k] = s[k + 1] * 0.5;
  return series;
}

template <class T>
void set_trunc_normal(Draw<T>* draw, T std, T mean, T a, T b) {
  const double alpha = (static_cast<double>(a) - static_cast<double>(mean)) / static_cast<double>(std);
  const double beta = (static_cast<double>(b) - static_cast<double>(mean)) / static_cast<double>(std);
  const double middle = (alpha + beta) * 0.5;
  const double half = (beta - alpha) * 0.5;
  if (half <= 0.125 && magnitude(middle) * half <= 0.25) {
    const NarrowSeries series = narrow_series(middle, half);
    draw->distribution = Distribution::kTruncNormalNarrow;
    TruncNormalNarrow<T>& p = draw->trunc_normal_narrow;
    p.a = a;
    p.b = b;
    p.width = b - a;
    p.series_center = static_cast<T>(series.center);
    p.series_width = static_cast<T>(series.width);
    for (int k = 0; k < kNarrowTerms<T>; ++k) p.series[k] = static_cast<T>(series.y[k]);
    return;
  }
  TruncNormalWide<T>& p = draw->trunc_normal;
  p.std = std;
  p.mean = mean;
  p.a = a;
  p.b = b;
  const double tail_a = tail(magnitude(alpha));
  const double tail_b = tail(magnitude(beta));
  const double below = alpha <= 0.0 ? tail_a : 1.0 - tail_a;
  const double above = beta >= 0.0 ? tail_b : 1.0 - tail_b;
  double mass;
  double nearest;
  if (alpha > 0.0) {
    mass = tail_a - tail_b;
    nearest = tail_a;
  } else if (beta < 0.0) {
    mass = tail_b - tail_a;
    nearest = tail_b;
  } else {
    mass = (0.5 - tail_a) + (0.5 - tail_b);
    nearest = 0.5;
  }
  const bool far = sizeof(T) == 4 && nearest < 0x1p-20;
  const double power = far ? 0x1p64 : 1.0;
  p.mass = static_cast<T>(mass);
  p.center = static_cast<T>((below - above) * 0.5);
  p.lower = static_cast<T>(below * power);
  p.upper = static_cast<T>(above * power);
  p.tail_mass = static_cast<T>(mass * power);
  p.scale = far ? T(64) : T(0);
  p.unscale = static_cast<T>(1.0 / power);
}

// The largest value of the type below b, in working precision; the callers refuse a b that has none.
template <class T>
T next_below(T b) {
  using Bits = UintOf<T>;
  if (b == 0) return float_of_bits(static_cast<Bits>((Bits{1} << (sizeof(T) * 8 - 1)) | 1));
  const Bits bits = bits_of(b);
  return float_of_bits(static_cast<Bits>(b > 0 ? bits - 1 : bits + 1));
}

template <class Type>
float narrow_value(uint32_t pattern) {
  if constexpr (Type::kExponentBits == 8) return float_of_bits(pattern << 16);
  constexpr int kBias = (1 << (Type::kExponentBits - 1)) - 1;
  const uint32_t exponent = pattern >> Type::kMantissaBits;
  const uint32_t mantissa = pattern & ((1u << Type::kMantissaBits) - 1);
  const float scale =
      float_of_bits(static_cast<uint32_t>((exponent ? exponent : 1) - kBias + 127 - Type::kMantissaBits) << 23);
  return static_cast<float>(exponent ? mantissa + (1u << Type::kMantissaBits) : mantissa) * scale;
}

template <class Type>
float top_below(float b) {
  constexpr uint32_t kSign = 1u << (Type::kExponentBits + Type::kMantissaBits);
  const float largest = narrow_value<Type>(Type::kMax);
  if (b > largest) return largest;
  uint32_t pattern = round_to<Type>(b);
  const auto value_of = [&](uint32_t x) {
    if ((x & ~kSign) == Type::kOverflow && Type::kOverflow != Type::kMax) return -__builtin_inff();  // b <= largest
    const float size = narrow_value<Type>(x & ~kSign);
    return x & kSign ? -size : size;
  };
  if (value_of(pattern) >= b) {
    // One step down: zero goes to the least negative value.
    pattern = (pattern & ~kSign) == 0 ? kSign | 1 : pattern & kSign ? pattern + 1 : pattern - 1;
  }
  return value_of(pattern);
}

// An integer in [-2^63, 2^64], in two's complement.
uint64_t integer_of(double x) {
  if (x < 0) return ~static_cast<uint64_t>(-x) + 1;
  return x < 0x1p64 ? static_cast<uint64_t>(x) : 0;
}

}  // namespace

bool has_value_below(Dtype dtype, double b) { return dtype != Dtype::kFloat8E4M3 || b > -448.0; }

// u = 1 - p is rounded, and ln(u) / (u - 1) hides that: it varies slowly where u is near 1 (Goldberg, ACM Computing
// Surveys 23(1), 1991, theorem 4).
double geometric_rate(double p) {
  const double u = 1.0 - p;
  return u == 1.0 ? p : p * log_rn(u) / (u - 1.0);
}

double to_float32(double x) { return static_cast<float>(x); }

template <>
float uniform_top(Dtype dtype, float b) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return top_below<BFloat16>(b);
    case Dtype::kFloat16:
      return top_below<Float16>(b);
    case Dtype::kFloat8E4M3:
      return top_below<Float8E4M3>(b);
    case Dtype::kFloat8E5M2:
      return top_below<Float8E5M2>(b);
    default:
      return next_below(b);
  }
}
template <>
double uniform_top(Dtype, double b) {
  return next_below(b);
}

template <class T>
static Draw<T> make_draw(Dtype dtype, Distribution distribution, const double raw[4], const Stream& stream) {
  // -0 counts as +0.
  T p[4];
  for (int k = 0; k < 4; ++k) p[k] = static_cast<T>(raw[k]) + T(0);
  Draw<T> draw{};
  draw.distribution = distribution;
  draw.stream = stream;
  switch (distribution) {
    case Distribution::kConstant:
      draw.constant = canonical_nan(static_cast<T>(raw[0]));  // a constant keeps its sign
      break;
    case Distribution::kUniform:
      draw.uniform.low = p[0];
      draw.uniform.width = p[1] - p[0];
      draw.uniform.scaled = draw.uniform.width * kUniformUnit<T>;
      if (draw.uniform.scaled / kUniformUnit<T> != draw.uniform.width) draw.uniform.scaled = T(0);
      draw.uniform.top = p[0] == p[1] ? static_cast<T>(__builtin_inf()) : uniform_top<T>(dtype, p[1]);
      break;
    case Distribution::kNormal:
      draw.normal.std = p[0];
      draw.normal.mean = p[1];
      break;
    case Distribution::kTruncNormal:
      if (p[2] == p[3]) {
        draw.distribution = Distribution::kConstant;
        draw.constant = p[2];
      } else {
        set_trunc_normal<T>(&draw, p[0], p[1], p[2], p[3]);
      }
      break;
    case Distribution::kBernoulli:
      if (raw[0] <= 0 || raw[0] >= 0x1p32) {
        draw.distribution = Distribution::kConstant;
        draw.constant = raw[0] > 0 ? T(1) : T(0);
      } else {
        draw.bernoulli.threshold = static_cast<uint32_t>(raw[0]);
      }
      break;
    case Distribution::kRandom:
      draw.random.low = integer_of(raw[0]);
      draw.random.span = integer_of(raw[1]) - draw.random.low;
      break;
    case Distribution::kBits:
    case Distribution::kExponential:
    case Distribution::kCauchy:
    case Distribution::kTruncNormalNarrow:  // set_trunc_normal chooses it
      break;
  }
  return draw;
}

void set_draw(Piece* piece, Distribution distribution, const double p[4], uint64_t seed, uint64_t tensor_id) {
  const Stream stream = Stream::of(seed, tensor_id);
  piece->is_double = piece->dtype == Dtype::kFloat64;
  if (piece->is_double) {
    piece->draw64 = make_draw<double>(piece->dtype, distribution, p, stream);
  } else {
    // A draw that steps follow is not the value yet: it stays below b as fp32, and only the last result is rounded.
    const Dtype drawn = piece->num_unary ? Dtype::kFloat32 : piece->dtype;
    piece->draw32 = make_draw<float>(drawn, distribution, p, stream);
  }
}

}  // namespace shardinit
