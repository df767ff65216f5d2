// Vectors for the CPU kernels: the names of numeric.h over `kUnroll` native vectors at a time. Several independent
// vectors in flight hide the latency of Philox's multiply chain. Only what the compiler's vector extensions lack
// (fma, sqrt, the 32 x 32 multiply) is an intrinsic, so one source serves every instruction set.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "numeric.h"

namespace shardinit {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kUnroll = 4;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kUnroll = 3;
#else
constexpr int kVectorBytes = 16;
constexpr int kUnroll = 2;
#endif

// kBytes makes it another type in each instruction set, so that the linker can't take functions of one for another's.
template <class T, int kBytes = kVectorBytes>
struct Pack {
  typedef T Native __attribute__((vector_size(kBytes)));
  static constexpr int kNativeLanes = kBytes / static_cast<int>(sizeof(T));
  static constexpr int kLanes = kNativeLanes * kUnroll;
  Native v[kUnroll];
};
template <class T>
struct LaneOf<Pack<T>> {
  using F = Pack<FloatOf<T>>;
  using I = Pack<IntOf<T>>;
  using U = Pack<UintOf<T>>;
  static constexpr int kBits = LaneOf<T>::kBits;
};

// A scalar operand takes the vector's type instead of taking part in its deduction.
template <class T>
struct Same {
  using type = T;
};

#define SHARDINIT_EACH _Pragma("GCC unroll 8") for (int u = 0; u < kUnroll; ++u)

#define SHARDINIT_BINARY(op)                                                     \
  template <class T>                                                             \
  SHARDINIT_HD Pack<T> operator op(const Pack<T>& a, const Pack<T>& b) {         \
    Pack<T> r;                                                                   \
    SHARDINIT_EACH                                                               \
    r.v[u] = a.v[u] op b.v[u];                                                   \
    return r;                                                                    \
  }                                                                              \
  template <class T>                                                             \
  SHARDINIT_HD Pack<T> operator op(const Pack<T>& a, typename Same<T>::type b) { \
    Pack<T> r;                                                                   \
    SHARDINIT_EACH                                                               \
    r.v[u] = a.v[u] op b;                                                        \
    return r;                                                                    \
  }
SHARDINIT_BINARY(+)
SHARDINIT_BINARY(-)
SHARDINIT_BINARY(*)
SHARDINIT_BINARY(/)
SHARDINIT_BINARY(&)
SHARDINIT_BINARY(|)
SHARDINIT_BINARY(^)
#undef SHARDINIT_BINARY

// A round key has 32 bits; the upper halves of 64-bit lanes carry nothing.
SHARDINIT_HD Pack<uint64_t> operator^(const Pack<uint64_t>& a, uint32_t b) { return a ^ static_cast<uint64_t>(b); }

// Comparisons give all ones or all zeros in lanes of the same width.
#define SHARDINIT_COMPARE(op)                                                           \
  template <class T>                                                                    \
  SHARDINIT_HD Pack<IntOf<T>> operator op(const Pack<T>& a, typename Same<T>::type b) { \
    Pack<IntOf<T>> r;                                                                   \
    SHARDINIT_EACH                                                                      \
    r.v[u] = (typename Pack<IntOf<T>>::Native)(a.v[u] op b);                            \
    return r;                                                                           \
  }
SHARDINIT_COMPARE(<)
SHARDINIT_COMPARE(>)
SHARDINIT_COMPARE(>=)
#undef SHARDINIT_COMPARE

template <class T>
SHARDINIT_HD Pack<T> operator<<(const Pack<T>& a, int shift) {
  Pack<T> r;
  SHARDINIT_EACH
  r.v[u] = a.v[u] << shift;
  return r;
}
template <class T>
SHARDINIT_HD Pack<T> operator>>(const Pack<T>& a, int shift) {
  Pack<T> r;
  SHARDINIT_EACH
  r.v[u] = a.v[u] >> shift;
  return r;
}
template <class T>
SHARDINIT_HD Pack<T> operator~(const Pack<T>& a) {
  Pack<T> r;
  SHARDINIT_EACH
  r.v[u] = ~a.v[u];
  return r;
}
template <class T>
SHARDINIT_HD Pack<T> operator-(const Pack<T>& a) {
  Pack<T> r;
  SHARDINIT_EACH
  r.v[u] = -a.v[u];
  return r;
}

template <class To, class From>
SHARDINIT_HD Pack<To> reinterpret(const Pack<From>& a) {
  Pack<To> r;
  SHARDINIT_EACH
  r.v[u] = (typename Pack<To>::Native)a.v[u];
  return r;
}
template <class T>
SHARDINIT_HD Pack<UintOf<T>> bits_of(const Pack<T>& a) {
  return reinterpret<UintOf<T>>(a);
}
template <class T>
SHARDINIT_HD Pack<FloatOf<T>> float_of_bits(const Pack<T>& a) {
  return reinterpret<FloatOf<T>>(a);
}
template <class T>
SHARDINIT_HD Pack<IntOf<T>> as_signed(const Pack<T>& a) {
  return reinterpret<IntOf<T>>(a);
}

template <class T>
SHARDINIT_HD Pack<FloatOf<T>> to_float(const Pack<T>& a) {
  Pack<FloatOf<T>> r;
  SHARDINIT_EACH
  r.v[u] = __builtin_convertvector(a.v[u], typename Pack<FloatOf<T>>::Native);
  return r;
}

template <class M, class T>
SHARDINIT_HD Pack<T> select(const Pack<M>& mask, const Pack<T>& yes, const Pack<T>& no) {
  Pack<T> r;
  SHARDINIT_EACH
  r.v[u] = mask.v[u] ? yes.v[u] : no.v[u];
  return r;
}

template <class T, class S>
struct Splat<Pack<T>, S> {
  static SHARDINIT_HD Pack<T> of(S value) {
    Pack<T> r;
    SHARDINIT_EACH
    r.v[u] = static_cast<T>(value) - typename Pack<T>::Native{};  // x - (+0) is x, -0 included
    return r;
  }
};
template <class T, class S>
struct Splat<Pack<T>, Pack<S>> {
  static SHARDINIT_HD Pack<T> of(const Pack<S>& value) { return value; }
};

template <class T>
SHARDINIT_HD Pack<T> at_most(const Pack<T>& x, typename Same<T>::type bound) {
  return select(x > bound, Splat<Pack<T>, T>::of(bound), x);
}
template <class T>
SHARDINIT_HD Pack<T> at_least(const Pack<T>& x, typename Same<T>::type bound) {
  return select(x > bound, x, Splat<Pack<T>, T>::of(bound));
}

template <class M>
SHARDINIT_HD bool any(const Pack<M>& mask) {
  typename Pack<M>::Native all = mask.v[0];
  for (int u = 1; u < kUnroll; ++u) all |= mask.v[u];
  uint64_t words[kVectorBytes / 8];
  memcpy(words, &all, sizeof(words));
  uint64_t set = 0;
  for (uint64_t word : words) set |= word;
  return set != 0;
}

template <class T>
SHARDINIT_HD Pack<T> fma_rn(const Pack<T>& a, const Pack<T>& b, const Pack<T>& c) {
  Pack<T> r;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    SHARDINIT_EACH
    r.v[u] = _mm512_fmadd_ps(a.v[u], b.v[u], c.v[u]);
  } else {
    SHARDINIT_EACH
    r.v[u] = _mm512_fmadd_pd(a.v[u], b.v[u], c.v[u]);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    SHARDINIT_EACH
    r.v[u] = _mm256_fmadd_ps(a.v[u], b.v[u], c.v[u]);
  } else {
    SHARDINIT_EACH
    r.v[u] = _mm256_fmadd_pd(a.v[u], b.v[u], c.v[u]);
  }
#else
  SHARDINIT_EACH
  for (int i = 0; i < Pack<T>::kNativeLanes; ++i) r.v[u][i] = fma_rn(a.v[u][i], b.v[u][i], c.v[u][i]);
#endif
  return r;
}

template <class T>
SHARDINIT_HD Pack<T> sqrt_rn(const Pack<T>& a) {
  Pack<T> r;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    SHARDINIT_EACH
    r.v[u] = _mm512_sqrt_ps(a.v[u]);
  } else {
    SHARDINIT_EACH
    r.v[u] = _mm512_sqrt_pd(a.v[u]);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    SHARDINIT_EACH
    r.v[u] = _mm256_sqrt_ps(a.v[u]);
  } else {
    SHARDINIT_EACH
    r.v[u] = _mm256_sqrt_pd(a.v[u]);
  }
#else
  SHARDINIT_EACH
  for (int i = 0; i < Pack<T>::kNativeLanes; ++i) r.v[u][i] = sqrt_rn(a.v[u][i]);
#endif
  return r;
}

// Only the low halves of a's lanes count.
SHARDINIT_HD Pack<uint64_t> mul_wide(const Pack<uint64_t>& a, uint32_t b) {
  Pack<uint64_t> r;
#if defined(__AVX512F__)
  SHARDINIT_EACH
  r.v[u] = (Pack<uint64_t>::Native)_mm512_mul_epu32((__m512i)a.v[u], _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  SHARDINIT_EACH
  r.v[u] = (Pack<uint64_t>::Native)_mm256_mul_epu32((__m256i)a.v[u], _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  SHARDINIT_EACH
  r.v[u] = (Pack<uint64_t>::Native)_mm_mul_epu32((__m128i)a.v[u], _mm_set1_epi64x(b));
#else
  SHARDINIT_EACH
  r.v[u] = (a.v[u] & uint64_t{0xffffffff}) * uint64_t{b};
#endif
  return r;
}
SHARDINIT_HD Pack<uint64_t> high_half(const Pack<uint64_t>& p) { return p >> 32; }
SHARDINIT_HD Pack<uint64_t> low_half(const Pack<uint64_t>& p) { return p; }

template <class T>
SHARDINIT_HD Pack<T> load(const T* from) {
  Pack<T> r;
  memcpy(&r, from, sizeof(r));
  return r;
}
template <class T>
SHARDINIT_HD void store(T* to, const Pack<T>& a) {
  memcpy(to, &a, sizeof(a));
}

}  // namespace shardinit
