// What PTX instructions do, one operand at a time, written from the text of the PTX ISA: the tests compare the interpreter
// with it. C++17, compiled without contraction of multiplications and additions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;
using u128 = unsigned __int128;
using s128 = __int128;

template <class To, class From>
To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline u32 bits(f32 x) { return cast_bits<u32>(x); }
inline u64 bits(f64 x) { return cast_bits<u64>(x); }

// Results of arithmetic: a NaN is the canonical one.
inline f32 result(f32 x) { return x != x ? cast_bits<f32>(0x7fffffffu) : x; }
inline f64 result(f64 x) { return x != x ? cast_bits<f64>(u64{0x7fffffffffffffff}) : x; }

template <class F>
F ptx_min(F a, F b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class F>
F ptx_max(F a, F b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
inline f32 ptx_copysign(f32 a, f32 b) { return cast_bits<f32>((bits(a) & 0x80000000u) | (bits(b) & 0x7fffffffu)); }
inline f64 ptx_copysign(f64 a, f64 b) {
  return cast_bits<f64>((bits(a) >> 63 << 63) | (bits(b) & 0x7fffffffffffffffu));
}
template <class F>
bool unordered(F a, F b) {
  return a != a || b != b;
}

// Division rounds towards zero; the quotient of the least value by -1 wraps.
template <class I>
I ptx_div(I a, I b) {
  return static_cast<I>(static_cast<s128>(a) / static_cast<s128>(b));
}
template <class I>
I ptx_rem(I a, I b) {
  return static_cast<I>(static_cast<s128>(a) % static_cast<s128>(b));
}

template <class I>
I clamp_to(s128 x) {
  if (x < static_cast<s128>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  if (x > static_cast<s128>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return static_cast<I>(x);
}

// Float to integer. rounded: already integral.
template <class I, class F>
I to_integer(F x, F rounded) {
  constexpr int kBits = 8 * sizeof(I);
  if (x != x) return sizeof(F) == 8 || kBits == 64 ? static_cast<I>(u64{1} << (kBits - 1)) : I{0};
  const f64 wide = rounded;
  if (wide >= 0x1p100) return std::numeric_limits<I>::max();
  if (wide <= -0x1p100) return std::numeric_limits<I>::min();
  return clamp_to<I>(static_cast<s128>(wide));
}

// Float32 to a narrower format, by scaling to its unit: exact but for the one rounding.
inline u16 to_narrow(f32 x, int mantissa_bits, int least_exponent, f64 largest, u16 infinity) {
  if (x != x) return 0x7fff;
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const f64 size = std::fabs(static_cast<f64>(x));
  if (size > 1e300) return sign | infinity;
  int exponent = size == 0 ? least_exponent : std::ilogb(size);
  if (exponent < least_exponent) exponent = least_exponent;
  const f64 units = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));  // to even
  if (std::ldexp(units, exponent - mantissa_bits) > largest) return sign | infinity;
  // 2^mantissa_bits units are the exponent's first value, also after a carry.
  const u64 pattern = (static_cast<u64>(exponent - least_exponent) << mantissa_bits) + static_cast<u64>(units);
  return sign | static_cast<u16>(pattern);
}
inline u16 to_bf16(f32 x) { return to_narrow(x, 7, -126, 0x1.fep127, 0x7f80); }
inline u16 to_f16(f32 x) { return to_narrow(x, 10, -14, 65504, 0x7c00); }
inline f32 from_narrow(u16 x, int mantissa_bits, int least_exponent) {
  const int exponent_mask = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = x >> mantissa_bits & exponent_mask;
  const int mantissa = x & ((1 << mantissa_bits) - 1);
  f64 size;
  if (exponent == exponent_mask) {
    size = mantissa ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    size = std::ldexp(mantissa, least_exponent - mantissa_bits);
  } else {
    size = std::ldexp(mantissa + (1 << mantissa_bits), least_exponent - mantissa_bits + exponent - 1);
  }
  return result(static_cast<f32>(x & 0x8000 ? -size : size));
}

inline u32 bit(u64 x, int at) { return x >> at & 1; }

inline u32 ptx_shf(u32 a, u32 b, u32 c, bool left, bool wrap) {
  const u32 n = wrap ? c & 31 : (c < 32 ? c : 32);
  u32 d = 0;
  for (int i = 0; i < 32; ++i) {  // bit i of the word comes from bit i - n (left) or i + n (right) of b:a
    const int from = left ? 32 + i - static_cast<int>(n) : i + static_cast<int>(n);
    d |= (from < 32 ? bit(a, from) : bit(b, from - 32)) << i;
  }
  return d;
}

template <class T>
T ptx_bfe(T a, u32 b, u32 c) {
  constexpr int kMsb = 8 * sizeof(T) - 1;
  const int pos = b & 0xff, len = c & 0xff;
  const bool is_unsigned = std::numeric_limits<T>::min() == 0;
  const u32 sbit = is_unsigned || len == 0 ? 0 : bit(static_cast<u64>(a), pos + len - 1 < kMsb ? pos + len - 1 : kMsb);
  u64 d = 0;
  for (int i = 0; i <= kMsb; ++i) {
    d |= static_cast<u64>(i < len && pos + i <= kMsb ? bit(static_cast<u64>(a), pos + i) : sbit) << i;
  }
  return static_cast<T>(d);
}

template <class T>
T ptx_bfi(T a, T b, u32 c, u32 d) {
  constexpr int kMsb = 8 * sizeof(T) - 1;
  const int pos = c & 0xff, len = d & 0xff;
  T f = b;
  for (int i = 0; i < len && pos + i <= kMsb; ++i) {
    f = static_cast<T>((f & ~(T{1} << (pos + i))) | (static_cast<T>(bit(a, i)) << (pos + i)));
  }
  return f;
}

inline u32 ptx_prmt(u32 a, u32 b, u32 c) {
  u8 bytes[8];
  memcpy(bytes, &a, 4);
  memcpy(bytes + 4, &b, 4);
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    const int control = c >> (4 * i) & 0xf;
    u32 byte = bytes[control & 7];
    if (control & 8) byte = byte & 0x80 ? 0xff : 0;
    d |= byte << (8 * i);
  }
  return d;
}

inline u32 ptx_lop3(u32 a, u32 b, u32 c, int table) {
  u32 d = 0;
  for (int i = 0; i < 32; ++i) {
    d |= static_cast<u32>(table >> (bit(a, i) * 4 + bit(b, i) * 2 + bit(c, i)) & 1) << i;
  }
  return d;
}

template <class T>
u32 ptx_popc(T a) {
  u32 d = 0;
  for (; a; a &= a - 1) ++d;
  return d;
}
template <class T>
u32 ptx_clz(T a) {
  u32 d = 0;
  for (int i = 8 * sizeof(T) - 1; i >= 0 && !bit(a, i); --i) ++d;
  return d;
}
template <class T>
T ptx_brev(T a) {
  T d = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) d = static_cast<T>(d << 1 | bit(a, i));
  return d;
}

template <class T>
T ptx_shl(T a, u32 n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
}
template <class T>
T ptx_shr(T a, u32 n) {
  const u32 last = 8 * sizeof(T) - 1;
  if (n > last) return std::numeric_limits<T>::min() == 0 ? T{0} : static_cast<T>(a >> last);
  return static_cast<T>(a >> n);
}

template <class F>
bool is_subnormal(F x) {
  return std::fpclassify(x) == FP_SUBNORMAL;
}

// The seed of a square root, shifted by some units; correctly rounded before that.
inline f32 ptx_rsqrt(f32 x, int shift) {
  if (x != x || x < 0) return result(cast_bits<f32>(0x7fffffffu));
  if (x == 0) return std::signbit(x) ? -HUGE_VALF : HUGE_VALF;
  if (std::isinf(x)) return 0;
  return cast_bits<f32>(bits(static_cast<f32>(1.0L / sqrtl(x))) + static_cast<u32>(shift));
}
