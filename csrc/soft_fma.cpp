#include "soft_fma.h"

namespace shardinit {
namespace {

using u128 = unsigned __int128;

// |x| = significand * 2^exponent, with the significand's top bit at kTop. x is finite and not zero.
struct Magnitude {
  u128 significand;
  int exponent;
};

constexpr int kTop = 125;  // a sum of two such significands fits in 128 bits

int top_bit(u128 x) {
  const uint64_t high = static_cast<uint64_t>(x >> 64);
  return high ? 127 - __builtin_clzll(high) : 63 - __builtin_clzll(static_cast<uint64_t>(x));
}

Magnitude normalised(u128 significand, int exponent) {
  const int shift = kTop - top_bit(significand);
  return {significand << shift, exponent - shift};
}

uint64_t bits_of_double(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
}

void split(double x, uint64_t* significand, int* exponent) {
  const uint64_t bits = bits_of_double(x);
  const int biased = static_cast<int>((bits >> 52) & 0x7ff);
  const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
  *significand = biased ? fraction | (uint64_t{1} << 52) : fraction;
  *exponent = (biased ? biased : 1) - 1075;
}

// What is shifted out survives as a sticky lowest bit, so that rounding still sees it.
u128 shift_right_sticky(u128 x, int shift) {
  if (shift >= 128) return x != 0;
  if (shift == 0) return x;
  return (x >> shift) | static_cast<u128>((x << (128 - shift)) != 0);
}

double round_to_double(bool negative, u128 x, int exponent) {
  const int top = top_bit(x) + exponent;
  const int kept = top >= -1022 ? 53 : 53 - (-1022 - top);
  const int shift = top - exponent + 1 - kept;  // positive: the significand has far more than 53 bits
  uint64_t rounded = 0;
  if (shift < 128) {
    const u128 rest = x & ((static_cast<u128>(1) << shift) - 1);
    const u128 half = static_cast<u128>(1) << (shift - 1);
    rounded = static_cast<uint64_t>(x >> shift);
    rounded += rest > half || (rest == half && (rounded & 1));
  }
  // A carry out of the significand moves into the exponent field by itself.
  uint64_t bits = top >= -1022 ? (static_cast<uint64_t>(top + 1022) << 52) + rounded : rounded;
  if (top > 1023 || bits > 0x7ff0000000000000u) bits = 0x7ff0000000000000u;
  bits |= static_cast<uint64_t>(negative) << 63;
  double result;
  memcpy(&result, &bits, 8);
  return result;
}

}  // namespace

double soft_fma(double a, double b, double c) {
  if (a == 0.0 || b == 0.0) return a * b + c;
  if (c == 0.0) return a * b;  // one rounding, and the sign of an underflow is the product's
  uint64_t ma, mb, mc;
  int ea, eb, ec;
  split(a, &ma, &ea);
  split(b, &mb, &eb);
  split(c, &mc, &ec);
  const bool product_negative = (bits_of_double(a) ^ bits_of_double(b)) >> 63;
  const bool addend_negative = bits_of_double(c) >> 63;
  Magnitude product = normalised(static_cast<u128>(ma) * mb, ea + eb);
  Magnitude addend = normalised(mc, ec);
  // Low bits are zero (20 of the product's, 73 of the addend's), so a shift that loses bits is too long for the
  // subtraction below to cancel more than the leading bit.
  const int exponent = product.exponent > addend.exponent ? product.exponent : addend.exponent;
  product.significand = shift_right_sticky(product.significand, exponent - product.exponent);
  addend.significand = shift_right_sticky(addend.significand, exponent - addend.exponent);
  if (product_negative == addend_negative) {
    return round_to_double(product_negative, product.significand + addend.significand, exponent);
  }
  if (product.significand == addend.significand) return 0.0;
  return product.significand > addend.significand
             ? round_to_double(product_negative, product.significand - addend.significand, exponent)
             : round_to_double(addend_negative, addend.significand - product.significand, exponent);
}

}  // namespace shardinit
