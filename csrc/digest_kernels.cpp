// Compiled once for each instruction set, under the rules of kernels.cpp.
#include "digest_kernels.h"

#include "simd.h"

namespace shardinit {
namespace {

// One native vector of 64-bit lanes: the chain of an element is long, but the processor finds enough of them side by
// side in the instructions to come, so that unrolling as in simd.h would only cost registers.
template <int kBytes>
struct Vector {
  typedef uint64_t Native __attribute__((vector_size(kBytes)));
  typedef uint64_t Anywhere __attribute__((vector_size(kBytes), aligned(1), may_alias));
  static constexpr int kLanes = kBytes / 8;
  Native v;
};
using Wide = Vector<kVectorBytes>;

SHARDINIT_HD Wide operator^(const Wide& a, const Wide& b) { return {a.v ^ b.v}; }
SHARDINIT_HD Wide operator&(const Wide& a, const Wide& b) { return {a.v & b.v}; }
SHARDINIT_HD Wide operator^(const Wide& a, uint32_t b) { return {a.v ^ uint64_t{b}}; }
SHARDINIT_HD Wide high_half(const Wide& a) { return {a.v >> 32}; }
SHARDINIT_HD Wide low_half(const Wide& a) { return a; }
SHARDINIT_HD Wide mul_wide(const Wide& a, uint32_t b) {
#if defined(__AVX512F__)
  return {(Wide::Native)_mm512_mul_epu32((__m512i)a.v, _mm512_set1_epi64(b))};
#elif defined(__AVX2__)
  return {(Wide::Native)_mm256_mul_epu32((__m256i)a.v, _mm256_set1_epi64x(b))};
#elif defined(__SSE2__)
  return {(Wide::Native)_mm_mul_epu32((__m128i)a.v, _mm_set1_epi64x(b))};
#else
  return {(a.v & uint64_t{0xffffffff}) * uint64_t{b}};
#endif
}

// Lane i holds base + i * step.
SHARDINIT_HD Wide ramp(uint64_t base, uint64_t step) {
  Wide lanes;
  for (int i = 0; i < Wide::kLanes; ++i) lanes.v[i] = base + step * static_cast<uint64_t>(i);
  return lanes;
}

// What the lanes have added, of which the low halves count.
struct Sums {
  Wide w[4];
};

// The elements that 64-bit lanes hold, number k of each at a time. mask(k): all ones in lanes whose element counts.
template <class T, class Mask>
SHARDINIT_HD void add(Sums* sums, const Wide& loaded, const Wide& products, uint64_t unit, const DigestKey& key,
                      const Mask& mask) {
  constexpr int kInLane = 8 / sizeof(T);
  SHARDINIT_UNROLL
  for (int k = 0; k < kInLane; ++k) {
    Wide x{loaded.v >> (8 * static_cast<int>(sizeof(T)) * k)};
    if (sizeof(T) < 4 && k < kInLane - 1) x.v &= uint64_t{static_cast<T>(~T{0})};
    const auto words = digest_words(Wide{products.v + unit * static_cast<uint64_t>(k)}, x, key);
    SHARDINIT_UNROLL
    for (int j = 0; j < 4; ++j) sums->w[j].v += mask(words.w[j], k).v;
  }
}

template <class T>
void run(const char* elements, size_t n, uint32_t low, uint64_t step, const DigestKey& key, uint32_t out[4]) {
  constexpr size_t kInLane = 8 / sizeof(T);
  constexpr size_t kBatch = Wide::kLanes * kInLane;  // elements of a vector
  constexpr size_t kSmall = 4;
  const uint64_t unit = step * kDigestMul;  // what an element's index adds to the first product
  uint64_t product = uint64_t{low} * kDigestMul;
  if (n > kSmall) {
    Wide products = ramp(product, unit * kInLane);
    Sums sums{};
    for (; n >= kBatch; n -= kBatch, elements += kBatch * sizeof(T)) {
      // Not by memcpy, which GCC 12 does in two halves that the processor then can't forward to one load.
      const Wide loaded{*reinterpret_cast<const Wide::Anywhere*>(elements)};
      add<T>(&sums, loaded, products, unit, key, [](const Wide& words, int) { return words; });
      products.v += unit * kBatch;
    }
    if (n) {
      Wide loaded{};
      memcpy(&loaded, elements, n * sizeof(T));
      const Wide numbers = ramp(0, kInLane);
      add<T>(&sums, loaded, products, unit, key, [&](const Wide& words, int k) {
        return Wide{words.v & (Wide::Native)(numbers.v + static_cast<uint64_t>(k) < uint64_t{n})};
      });
    }
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < Wide::kLanes; ++i) out[k] += static_cast<uint32_t>(sums.w[k].v[i]);
    }
    return;
  }
  for (size_t i = 0; i < n; ++i, product += unit) {
    T x;  // at any address
    memcpy(&x, elements + i * sizeof(T), sizeof(T));
    const auto words = digest_words(product, static_cast<uint32_t>(x), key);
    for (int k = 0; k < 4; ++k) out[k] += words.w[k];
  }
}

}  // namespace

#define SHARDINIT_JOIN(a, b) a##b
#define SHARDINIT_NAME(isa) SHARDINIT_JOIN(digest_run_, isa)

void SHARDINIT_NAME(SHARDINIT_ISA)(const void* elements, uint32_t size, size_t n, uint32_t low, uint64_t step,
                                   const DigestKey& key, uint32_t sum[4]) {
  switch (size) {
    case 1:
      return run<uint8_t>(static_cast<const char*>(elements), n, low, step, key, sum);
    case 2:
      return run<uint16_t>(static_cast<const char*>(elements), n, low, step, key, sum);
    default:
      return run<uint32_t>(static_cast<const char*>(elements), n, low, step, key, sum);
  }
}

}  // namespace shardinit
