// The arithmetic that decides bits, for one element. simd.h overloads the same names for vectors, so that philox.h and
// transform.h are written once and serve the scalar, the SIMD and the CUDA code.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SHARDINIT_HD __host__ __device__ __forceinline__
#define SHARDINIT_UNROLL _Pragma("unroll")
#define SHARDINIT_ROLLED _Pragma("unroll 1")
#else
#define SHARDINIT_HD inline __attribute__((always_inline))
#define SHARDINIT_UNROLL _Pragma("GCC unroll 32")
#define SHARDINIT_ROLLED
#endif

#if !defined(__CUDA_ARCH__) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
#include "soft_fma.h"
#define SHARDINIT_SOFT_FMA 1
#endif

namespace shardinit {

// Which types go together. LaneOf<X>::F is X's float type, and so on; simd.h adds the vectors.
template <class X>
struct LaneOf;
struct Lane32 {
  using F = float;
  using I = int32_t;
  using U = uint32_t;
  static constexpr int kBits = 32;
};
struct Lane64 {
  using F = double;
  using I = int64_t;
  using U = uint64_t;
  static constexpr int kBits = 64;
};
template <>
struct LaneOf<float> : Lane32 {};
template <>
struct LaneOf<int32_t> : Lane32 {};
template <>
struct LaneOf<uint32_t> : Lane32 {};
template <>
struct LaneOf<double> : Lane64 {};
template <>
struct LaneOf<int64_t> : Lane64 {};
template <>
struct LaneOf<uint64_t> : Lane64 {};
template <class X>
using FloatOf = typename LaneOf<X>::F;
template <class X>
using IntOf = typename LaneOf<X>::I;
template <class X>
using UintOf = typename LaneOf<X>::U;

SHARDINIT_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(SHARDINIT_SOFT_FMA)
  return soft_fma(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SHARDINIT_HD double fma_rn(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#elif defined(SHARDINIT_SOFT_FMA)
  return soft_fma(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// The square root of a number in [2^-60, 2^60], correctly rounded from any seed within 8 units of 1/sqrt(a): tried for
// every mantissa, both parities of the exponent and every seed (tests/test_ptx_sqrt.py; on a GPU, bench/check_sqrt.cu).
SHARDINIT_HD float sqrt_from_seed(float a, float seed) {
  float root = a * seed;
  float half = seed * 0.5f;
  const float e = fma_rn(-root, half, 0.5f);
  root = fma_rn(root, e, root);
  half = fma_rn(half, e, half);
  return fma_rn(fma_rn(-root, root, a), half, root);
}

// On a GPU only for numbers in [2^-60, 2^60]: nvcc's own costs eight instructions more for those that we do not need.
// What the hardware's approximation gives does not matter, and its .ftz, which saves four more, has nothing to flush.
SHARDINIT_HD float sqrt_rn(float a) {
#if defined(__CUDA_ARCH__)
  float seed;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(a));
  return sqrt_from_seed(a, seed);
#else
  return __builtin_sqrtf(a);
#endif
}

SHARDINIT_HD double sqrt_rn(double a) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(a);
#else
  return __builtin_sqrt(a);
#endif
}

// Integer to float of the same width, rounded to nearest even.
SHARDINIT_HD float to_float(int32_t i) { return static_cast<float>(i); }
SHARDINIT_HD float to_float(uint32_t i) { return static_cast<float>(i); }
SHARDINIT_HD double to_float(int64_t i) { return static_cast<double>(i); }
SHARDINIT_HD double to_float(uint64_t i) { return static_cast<double>(i); }

template <class To, class From>
SHARDINIT_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
SHARDINIT_HD uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
SHARDINIT_HD uint64_t bits_of(double x) { return bit_cast<uint64_t>(x); }
SHARDINIT_HD float float_of_bits(uint32_t x) { return bit_cast<float>(x); }
SHARDINIT_HD double float_of_bits(uint64_t x) { return bit_cast<double>(x); }
SHARDINIT_HD int32_t as_signed(uint32_t x) { return static_cast<int32_t>(x); }
SHARDINIT_HD int64_t as_signed(uint64_t x) { return static_cast<int64_t>(x); }

// Processors differ in the NaN that an operation makes (x86-64: negative, aarch64: positive), so it becomes this one.
SHARDINIT_HD float canonical_nan(float x) {
  return (bits_of(x) & 0x7fffffffu) > 0x7f800000u ? float_of_bits(0x7fc00000u) : x;
}
SHARDINIT_HD double canonical_nan(double x) {
  return (bits_of(x) & 0x7fffffffffffffffu) > 0x7ff0000000000000u ? float_of_bits(uint64_t{0x7ff8000000000000u}) : x;
}

template <class T>
SHARDINIT_HD T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

SHARDINIT_HD bool any(bool condition) { return condition; }

// x, but at most or at least the bound. No NaN; a bound of zero is +0, and an x of -0 stays under an upper one and
// becomes +0 under a lower one, as a GPU's own minimum and maximum have it, which put -0 below +0.
SHARDINIT_HD float at_most(float x, float bound) {
#if defined(__CUDA_ARCH__)
  return fminf(x, bound);
#else
  return x > bound ? bound : x;
#endif
}
SHARDINIT_HD double at_most(double x, double bound) {
#if defined(__CUDA_ARCH__)
  return fmin(x, bound);
#else
  return x > bound ? bound : x;
#endif
}
SHARDINIT_HD float at_least(float x, float bound) {
#if defined(__CUDA_ARCH__)
  return fmaxf(x, bound);
#else
  return x > bound ? x : bound;
#endif
}
SHARDINIT_HD double at_least(double x, double bound) {
#if defined(__CUDA_ARCH__)
  return fmax(x, bound);
#else
  return x > bound ? x : bound;
#endif
}

// A constant in every lane.
template <class T, class S>
struct Splat {
  static SHARDINIT_HD T of(S value) { return static_cast<T>(value); }
};
template <class T, class S>
SHARDINIT_HD T splat(S value) {
  return Splat<T, S>::of(value);
}

// 32 x 32 -> 64 bits, and its halves.
SHARDINIT_HD uint64_t mul_wide(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; }
SHARDINIT_HD uint32_t high_half(uint64_t p) { return static_cast<uint32_t>(p >> 32); }
SHARDINIT_HD uint32_t low_half(uint64_t p) { return static_cast<uint32_t>(p); }

// c[0] x^n + ... : coefficients from the highest power down, one fma each.
template <class F, class C>
SHARDINIT_HD F horner(F, C c) {
  return splat<F>(c);
}
template <class F, class C, class... Rest>
SHARDINIT_HD F horner_from(F r, F x, C c, Rest... rest) {
  r = fma_rn(r, x, splat<F>(c));
  if constexpr (sizeof...(rest) == 0) {
    return r;
  } else {
    return horner_from(r, x, rest...);
  }
}
template <class F, class C, class... Rest>
SHARDINIT_HD F horner(F x, C c, Rest... rest) {
  return horner_from(splat<F>(c), x, rest...);
}

}  // namespace shardinit
