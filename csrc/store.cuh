// What the CUDA kernels write: a block's four values, or one of them, rounded to the tensor's type.
#pragma once

#include "launch.h"

namespace shardinit {

// ---- memory: 64-bit addresses of the global space -----------------------------------------------

__device__ __forceinline__ void store(uint64_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d));
}
__device__ __forceinline__ void store(uint64_t address, uint32_t a, uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(a), "r"(b));
}
__device__ __forceinline__ void store(uint64_t address, uint64_t a, uint64_t b) {
  asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(a), "l"(b));
}
__device__ __forceinline__ void store64(uint64_t address, uint64_t a) {
  asm volatile("st.global.b64 [%0], %1;" ::"l"(address), "l"(a));
}
__device__ __forceinline__ void store32(uint64_t address, uint32_t a) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(a));
}
__device__ __forceinline__ void store16(uint64_t address, uint32_t a) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(static_cast<uint16_t>(a)));
}
__device__ __forceinline__ void store8(uint64_t address, uint32_t a) {
  asm volatile("st.global.b8 [%0], %1;" ::"l"(address), "r"(a));
}

__device__ __forceinline__ uint32_t pattern_of(uint32_t x) { return x; }
__device__ __forceinline__ uint32_t pattern_of(float x) { return bits_of(x); }
__device__ __forceinline__ uint64_t pattern_of(uint64_t x) { return x; }
__device__ __forceinline__ uint64_t pattern_of(double x) { return bits_of(x); }

// fp32 rounded to bf16, two of them in a word, the first one low. Not for NaN, whose pattern would be the processor's.
__device__ __forceinline__ uint32_t brain_pair(float first, float second) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return round_to<BFloat16>(first) | round_to<BFloat16>(second) << 16;
#endif
}

// Four elements side by side, of 2 bytes or 1.
__device__ __forceinline__ void store_narrow(Dtype dtype, uint64_t address, const float x[4]) {
  uint32_t pattern[4];
  for (int k = 0; k < 4; ++k) pattern[k] = narrow(dtype, x[k]);
  if (size_of(dtype) == 2) {
    store(address, pattern[0] | pattern[1] << 16, pattern[2] | pattern[3] << 16);
  } else {
    store32(address, pattern[0] | pattern[1] << 8 | pattern[2] << 16 | pattern[3] << 24);
  }
}

struct Whole {
  template <class T>
  static __device__ __forceinline__ uint32_t size(Dtype) {
    return sizeof(T);
  }
  template <class T>
  static __device__ __forceinline__ void block(Dtype, uint64_t address, const T x[4]) {
    if constexpr (sizeof(T) == 4) {
      store(address, pattern_of(x[0]), pattern_of(x[1]), pattern_of(x[2]), pattern_of(x[3]));
    } else {
      store(address, pattern_of(x[0]), pattern_of(x[1]));
      store(address + 16, pattern_of(x[2]), pattern_of(x[3]));
    }
  }
  template <class T>
  static __device__ __forceinline__ void element(Dtype, uint64_t address, T x) {
    if constexpr (sizeof(T) == 4) {
      store32(address, pattern_of(x));
    } else {
      store64(address, pattern_of(x));
    }
  }
};

struct Brain {
  template <class T>
  static __device__ __forceinline__ uint32_t size(Dtype) {
    return 2;
  }
  static __device__ __forceinline__ void block(Dtype, uint64_t address, const float x[4]) {
    store(address, brain_pair(x[0], x[1]), brain_pair(x[2], x[3]));
  }
  static __device__ __forceinline__ void element(Dtype, uint64_t address, float x) {
    store16(address, brain_pair(x, 0.0f));
  }
};

struct Narrow {
  template <class T>
  static __device__ __forceinline__ uint32_t size(Dtype dtype) {
    return static_cast<uint32_t>(size_of(dtype));
  }
  static __device__ __forceinline__ void block(Dtype dtype, uint64_t address, const float x[4]) {
    store_narrow(dtype, address, x);
  }
  static __device__ __forceinline__ void element(Dtype dtype, uint64_t address, float x) {
    if (size_of(dtype) == 2) {
      store16(address, narrow(dtype, x));
    } else {
      store8(address, narrow(dtype, x));
    }
  }
};

// The low bytes of an integer, as many as the type has.
__device__ __forceinline__ void store_integer(Dtype dtype, uint64_t address, uint64_t x) {
  switch (size_of(dtype)) {
    case 8:
      return store64(address, x);
    case 4:
      return store32(address, static_cast<uint32_t>(x));
    case 2:
      return store16(address, static_cast<uint32_t>(x));
    default:
      return store8(address, static_cast<uint32_t>(x));
  }
}

// Whatever the piece says: for the kernels of grids. A float for a type of integers is a small one; a uint64_t may be
// one for any of them.
struct AnyOutput {
  template <class T>
  static __device__ __forceinline__ uint32_t size(Dtype dtype) {
    return static_cast<uint32_t>(size_of(dtype));
  }
  template <class T>
  static __device__ __forceinline__ void block(Dtype dtype, uint64_t address, const T x[4]) {
    if constexpr (std::is_same_v<T, float>) {
      if (size_of(dtype) < 4) return store_narrow(dtype, address, x);
    }
    if (by_elements<T>(dtype)) {
      for (uint32_t k = 0; k < 4; ++k) element(dtype, address + k * size_of(dtype), x[k]);
      return;
    }
    Whole::block(dtype, address, x);
  }
  template <class T>
  static __device__ __forceinline__ void element(Dtype dtype, uint64_t address, T x) {
    if constexpr (std::is_same_v<T, float>) {
      if (is_integer(dtype)) return store_integer(dtype, address, narrow(dtype, x));
      if (size_of(dtype) < 4) return Narrow::element(dtype, address, x);
    }
    if constexpr (std::is_same_v<T, uint64_t>) {
      if (dtype != Dtype::kBits64) return store_integer(dtype, address, x);
    }
    Whole::element(dtype, address, x);
  }

 private:
  template <class T>
  static __device__ __forceinline__ bool by_elements(Dtype dtype) {
    if (std::is_same_v<T, float>) return is_integer(dtype);
    return std::is_same_v<T, uint64_t> && dtype != Dtype::kBits64;
  }
};

}  // namespace shardinit
