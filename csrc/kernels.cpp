// Compiled once for each instruction set, with SHARDINIT_ISA naming it (CMakeLists.txt). Everything here has internal
// linkage or is always inlined, so that no code of one set can be linked into another. That is why it calls no function
// template of the standard library: without optimisation those are functions that the linker shares.
#include "kernels.h"

#include <utility>

#include "narrow.h"
#include "simd.h"

namespace shardinit {
namespace {

using Wide = Pack<uint64_t>;  // one block a lane

constexpr int kBatchBlocks = Wide::kLanes;
constexpr int kBatch = 4 * kBatchBlocks;  // elements

// Within a native vector the blocks stand in the order 0, n/2, 1, n/2 + 1, ...: after unpacking even and odd elements
// by 128-bit lanes they then come out in order.
SHARDINIT_HD Wide counters(uint64_t block) {
  constexpr int n = Wide::kNativeLanes;
  Wide counter;
  SHARDINIT_EACH
  {
    for (int i = 0; i < n; ++i) counter.v[u][i] = static_cast<uint64_t>(u * n + (i % 2 ? n / 2 : 0) + i / 2);
    counter.v[u] += block;
  }
  return counter;
}

// A vector's lanes in that order.
template <class V, int... i>
SHARDINIT_HD V block_order(const V& v, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
#if defined(__clang__)
  return __builtin_shufflevector(v, v, ((i % 2 ? n / 2 : 0) + i / 2)...);
#else
  typedef int64_t Index __attribute__((vector_size(kVectorBytes)));
  return __builtin_shuffle(v, Index{((i % 2 ? n / 2 : 0) + i / 2)...});
#endif
}

// Those of blocks with these numbers' low words.
SHARDINIT_HD Wide counters(const uint32_t* lows) {
  constexpr int n = Wide::kNativeLanes;
  typedef uint32_t Half __attribute__((vector_size(kVectorBytes / 2)));
  Wide counter;
  SHARDINIT_EACH
  {
    Half half;
    memcpy(&half, lows + u * n, sizeof(half));
    const auto whole = __builtin_convertvector(half, Wide::Native);
    counter.v[u] = block_order(whole, std::make_integer_sequence<int, n>{});
  }
  return counter;
}

// What a draw's blocks are computed from; all of them share the high word of their number.
template <class Fn>
struct Source {
  const PhiloxKey& key;
  PhiloxHoisted high, low;  // low: of the second plane, where a word has 64 bits

  Source(const Stream& stream, uint64_t block) : key(stream.key), high(hoist(stream, Fn::kPlane, block)), low(high) {
    if (sizeof(typename Fn::Word) == 8) low = hoist(stream, Fn::kPlane + 1, block);
  }
  template <class W>
  SHARDINIT_HD Words4<W> high_words(W block) const {
    return philox4x32(block, high, key);
  }
  template <class W>
  SHARDINIT_HD Words4<W> low_words(W block) const {
    return philox4x32(block, low, key);
  }
};

// The low halves of two vectors of words, side by side: lane 2i is even's, lane 2i + 1 odd's.
SHARDINIT_HD Pack<uint32_t> join_words(const Wide& even, const Wide& odd) {
  return reinterpret<uint32_t>((even & uint64_t{0xffffffff}) | (odd << 32));
}

// Elements 4k and 4k + 1 (kHalf = 0) or 4k + 2 and 4k + 3 (kHalf = 1) of two vectors, alternately: each 128-bit lane is
// unpacked by itself.
template <int kHalf, class V, int... i>
SHARDINIT_HD V unpack(const V& even, const V& odd, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
#if defined(__clang__)
  return __builtin_shufflevector(even, odd, (i / 4 * 4 + i % 4 / 2 + 2 * kHalf + (i % 2 ? n : 0))...);
#else
  typedef int32_t Index __attribute__((vector_size(kVectorBytes)));
  return __builtin_shuffle(even, odd, Index{(i / 4 * 4 + i % 4 / 2 + 2 * kHalf + (i % 2 ? n : 0))...});
#endif
}

template <class T>
SHARDINIT_HD void store_interleaved(const Pack<T>& even, const Pack<T>& odd, T* out) {
  static_assert(sizeof(T) == 4, "a 128-bit lane holds a block");
  constexpr int n = Pack<T>::kNativeLanes;
  using Lanes = std::make_integer_sequence<int, n>;
  SHARDINIT_EACH
  {
    const auto first = unpack<0>(even.v[u], odd.v[u], Lanes{});
    const auto second = unpack<1>(even.v[u], odd.v[u], Lanes{});
    memcpy(out + 2 * n * u, &first, sizeof(first));
    memcpy(out + 2 * n * u + n, &second, sizeof(second));
  }
}

template <class Fn, class T>
SHARDINIT_HD void batch32(const Source<Fn>& source, const Fn& fn, const Wide& blocks, T* out) {
  const auto words = source.high_words(blocks);
  const auto pair = fn(join_words(words.w[0], words.w[2]), join_words(words.w[1], words.w[3]));
  store_interleaved(pair.even, pair.odd, out);
}

template <class Fn, class T>
SHARDINIT_HD void block32(const Source<Fn>& source, const Fn& fn, uint64_t block, T* out) {
  const auto words = source.high_words(static_cast<uint32_t>(block));
  for (int j = 0; j < 4; j += 2) {
    const auto pair = fn(words.w[j], words.w[j + 1]);
    out[j] = pair.even;
    out[j + 1] = pair.odd;
  }
}

template <class Fn, class T>
SHARDINIT_HD void batch64(const Source<Fn>& source, const Fn& fn, const Wide& blocks, T* out) {
  const auto high = source.high_words(blocks);
  const auto low = source.low_words(blocks);
  T lanes[4][Wide::kLanes];
  for (int j = 0; j < 4; j += 2) {
    const auto pair = fn((high.w[j] << 32) | (low.w[j] & uint64_t{0xffffffff}),
                         (high.w[j + 1] << 32) | (low.w[j + 1] & uint64_t{0xffffffff}));
    store(lanes[j], pair.even);
    store(lanes[j + 1], pair.odd);
  }
  constexpr int n = Wide::kNativeLanes;
  for (int u = 0; u < kUnroll; ++u) {
    for (int i = 0; i < n; ++i) {
      const int from = u * n + i;
      const int to = u * n + (i % 2 ? n / 2 : 0) + i / 2;
      for (int j = 0; j < 4; ++j) out[4 * to + j] = lanes[j][from];
    }
  }
}

template <class Fn, class T>
SHARDINIT_HD void block64(const Source<Fn>& source, const Fn& fn, uint64_t block, T* out) {
  const auto high = source.high_words(static_cast<uint32_t>(block));
  const auto low = source.low_words(static_cast<uint32_t>(block));
  for (int j = 0; j < 4; j += 2) {
    const auto pair = fn((static_cast<uint64_t>(high.w[j]) << 32) | low.w[j],
                         (static_cast<uint64_t>(high.w[j + 1]) << 32) | low.w[j + 1]);
    out[j] = pair.even;
    out[j + 1] = pair.odd;
  }
}

template <class Fn, class T>
SHARDINIT_HD void block_of(const Source<Fn>& source, const Fn& fn, uint64_t block, T* out) {
  if constexpr (sizeof(T) == 4) {
    block32(source, fn, block, out);
  } else {
    block64(source, fn, block, out);
  }
}
template <class Fn, class T>
SHARDINIT_HD void batch_of(const Source<Fn>& source, const Fn& fn, const Wide& blocks, T* out) {
  if constexpr (sizeof(T) == 4) {
    batch32(source, fn, blocks, out);
  } else {
    batch64(source, fn, blocks, out);
  }
}

// What is left of a batch is worth one from here on; less is done block by block.
constexpr size_t kSmall = kBatch / 4;

// Whole batches where there are any, single blocks at a ragged start and for what a batch would mostly waste.
template <class Fn, class T>
void run_of_high_word(const Stream& stream, const Fn& fn, uint64_t first, size_t n, T* out) {
  const Source<Fn> source(stream, first / 4);
  uint64_t block = first / 4;
  const size_t skip = first % 4;
  T buffer[kBatch];
  if (skip && n) {
    block_of(source, fn, block, buffer);
    const size_t taken = n < 4 - skip ? n : 4 - skip;
    memcpy(out, buffer + skip, taken * sizeof(T));
    out += taken;
    n -= taken;
    ++block;
  }
  for (; n >= kBatch; n -= kBatch, out += kBatch, block += kBatchBlocks) {
    batch_of(source, fn, counters(block), out);
  }
  if (n > kSmall) {
    batch_of(source, fn, counters(block), buffer);
    memcpy(out, buffer, n * sizeof(T));
    return;
  }
  for (; n; ++block) {
    block_of(source, fn, block, buffer);
    const size_t taken = n < 4 ? n : 4;
    memcpy(out, buffer, taken * sizeof(T));
    out += taken;
    n -= taken;
  }
}

// n / 4 blocks whose numbers have one high word.
template <class Fn, class T>
void run_of_blocks(const Stream& stream, const Fn& fn, Elements which, size_t n, T* out) {
  const Source<Fn> source(stream, which.first / 4);
  const uint32_t* lows = which.lows;
  for (; n >= kBatch; n -= kBatch, out += kBatch, lows += kBatchBlocks) {
    batch_of(source, fn, counters(lows), out);
  }
  if (n > kSmall) {
    uint32_t padded[kBatchBlocks] = {};
    memcpy(padded, lows, n / 4 * sizeof(uint32_t));
    T buffer[kBatch];
    batch_of(source, fn, counters(padded), buffer);
    memcpy(out, buffer, n * sizeof(T));
    return;
  }
  for (; n; n -= 4, out += 4, ++lows) block_of(source, fn, *lows, out);
}

template <class Fn, class T>
void run(const Stream& stream, const Fn& fn, Elements which, size_t n, T* out) {
  if (which.lows) return run_of_blocks(stream, fn, which, n, out);
  uint64_t first = which.first;
  while (n) {
    const uint64_t left = 4 * (kBlocksPerHighWord - first / 4 % kBlocksPerHighWord) - first % 4;
    const size_t count = n < left ? n : left;
    run_of_high_word(stream, fn, first, count, out);
    first += count;
    out += count;
    n -= count;
  }
}

// Calls body(fn) with the function of the draw's distribution; constants are the caller's.
template <class T, class Body>
void with_function(const Draw<T>& draw, const Body& body) {
  switch (draw.distribution) {
    case Distribution::kUniform:
      if (draw.uniform.scaled != 0) return body(UniformFn<T, true>{draw.uniform});
      return body(UniformFn<T>{draw.uniform});
    case Distribution::kNormal:
      return body(NormalFn<T>{draw.normal});
    case Distribution::kTruncNormal:
      return body(TruncNormalWideFn<T, false>{draw.trunc_normal});
    case Distribution::kTruncNormalNarrow:
      return body(TruncNormalNarrowFn<T>{draw.trunc_normal_narrow});
    case Distribution::kExponential:
      return body(ExponentialFn<T>{});
    case Distribution::kCauchy:
      return body(CauchyFn<T>{});
    case Distribution::kBernoulli:
      return body(BernoulliFn<T>{draw.bernoulli});
    default:
      return;
  }
}

template <class T>
void draw_values(const Draw<T>& draw, Elements which, size_t n, T* out) {
  if (draw.distribution == Distribution::kConstant) {
    for (size_t i = 0; i < n; ++i) out[i] = draw.constant;
    return;
  }
  with_function(draw, [&](const auto& fn) { run(draw.stream, fn, which, n, out); });
}

template <class T>
void bits(const Stream& stream, Elements which, size_t n, T* out) {
  run(stream, BitsFn<T>{}, which, n, out);
}

void integers(const Stream& stream, const RandomParams& params, Elements which, size_t n, uint64_t* out) {
  run(stream, RandomFn{params}, which, n, out);
}

template <class T>
void to_reals(const uint64_t* from, size_t n, T* out) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<T>(static_cast<int64_t>(from[i]));
}

// In whole vectors; the rest of the last one is of no use to anyone.
template <class T>
void unary(const Unary* ops, int num_ops, T* x, size_t n) {
  constexpr size_t kLanes = Pack<T>::kLanes;
  const size_t whole = n / kLanes * kLanes;
  T rest[kLanes] = {};
  memcpy(rest, x + whole, (n - whole) * sizeof(T));
  for (int k = 0; k < num_ops; ++k) {
    const T s = static_cast<T>(ops[k].operand);
    with_unary(ops[k].op, [&](const auto& fn) {
      for (size_t i = 0; i < whole; i += kLanes) store(x + i, fn(load<T>(x + i), s));
      if (n != whole) store(rest, fn(load<T>(rest), s));
    });
  }
  memcpy(x + whole, rest, (n - whole) * sizeof(T));
  if (num_ops) {
    for (size_t i = 0; i < n; ++i) x[i] = canonical_nan(x[i]);
  }
}

template <class Integer>
void truncate_to(const float* x, size_t n, void* out) {
  for (size_t i = 0; i < n; ++i) static_cast<Integer*>(out)[i] = static_cast<Integer>(static_cast<int32_t>(x[i]));
}
template <class Integer>
void truncate_to(const uint64_t* x, size_t n, void* out) {
  for (size_t i = 0; i < n; ++i) static_cast<Integer*>(out)[i] = static_cast<Integer>(x[i]);
}

// As integers of the type's size: the low bits.
template <class From>
void truncate(Dtype dtype, const From* x, size_t n, void* out) {
  switch (dtype) {
    case Dtype::kBits8:
      return truncate_to<uint8_t>(x, n, out);
    case Dtype::kBits16:
      return truncate_to<uint16_t>(x, n, out);
    case Dtype::kBits32:
      return truncate_to<uint32_t>(x, n, out);
    case Dtype::kBits64:
      return truncate_to<uint64_t>(x, n, out);
    default:
      return;
  }
}

template <class Type>
void narrow_to(const float* x, size_t n, void* out) {
  auto* to = static_cast<typename Type::Storage*>(out);
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<typename Type::Storage>(round_to<Type>(x[i]));
}

void narrow(Dtype dtype, const float* x, size_t n, void* out) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return narrow_to<BFloat16>(x, n, out);
    case Dtype::kFloat16:
      return narrow_to<Float16>(x, n, out);
    case Dtype::kFloat8E4M3:
      return narrow_to<Float8E4M3>(x, n, out);
    case Dtype::kFloat8E5M2:
      return narrow_to<Float8E5M2>(x, n, out);
    default:
      return;
  }
}

void transform(const Piece& piece, const uint64_t* p, const uint64_t* q, size_t n, double* even, double* odd) {
  if (piece.is_double) {
    with_function(piece.draw64, [&](const auto& fn) {
      for (size_t i = 0; i < n; ++i) {
        const auto pair = fn(p[i], q[i]);
        even[i] = pair.even;
        odd[i] = pair.odd;
      }
    });
  } else {
    with_function(piece.draw32, [&](const auto& fn) {
      for (size_t i = 0; i < n; ++i) {
        const auto pair = fn(static_cast<uint32_t>(p[i]), static_cast<uint32_t>(q[i]));
        even[i] = pair.even;
        odd[i] = pair.odd;
      }
    });
  }
}

}  // namespace

#define SHARDINIT_JOIN(a, b) a##b
#define SHARDINIT_NAME(isa) SHARDINIT_JOIN(kernels_, isa)
#define SHARDINIT_QUOTE(x) #x
#define SHARDINIT_STRING(x) SHARDINIT_QUOTE(x)

const Kernels& SHARDINIT_NAME(SHARDINIT_ISA)() {
  static const Kernels kernels = {SHARDINIT_STRING(SHARDINIT_ISA),
                                  draw_values<float>,
                                  draw_values<double>,
                                  bits<uint32_t>,
                                  bits<uint64_t>,
                                  unary<float>,
                                  unary<double>,
                                  integers,
                                  to_reals<float>,
                                  to_reals<double>,
                                  truncate<float>,
                                  truncate<uint64_t>,
                                  narrow,
                                  transform};
  return kernels;
}

}  // namespace shardinit
