// The CUDA kernels of digests. What an element adds stands in digest.h, which the CPU shares.
#include <stdexcept>
#include <string>

#include "digest_cuda.h"

namespace shardinit {
namespace {

__device__ __forceinline__ uint32_t load8(uint64_t address) {
  uint32_t x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(address));
  return x;
}
__device__ __forceinline__ uint32_t load16(uint64_t address) {
  uint16_t x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(address));
  return x;
}
__device__ __forceinline__ uint32_t load32(uint64_t address) {
  uint32_t x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(address));
  return x;
}
__device__ __forceinline__ uint32_t load_element(uint64_t address, uint32_t size) {
  return size == 1 ? load8(address) : size == 2 ? load16(address) : load32(address);
}
__device__ __forceinline__ void load_block(uint64_t address, uint32_t x[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(address));
}
__device__ __forceinline__ void store_slot(uint64_t address, const DigestSum& sum) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(sum.w[0]), "r"(sum.w[1]), "r"(sum.w[2]),
               "r"(sum.w[3]));
}

// Adds words, with the key of their index's high half at hand.
struct Adder {
  uint32_t high = 0;
  DigestKey key = DigestKey::of(0);
  DigestSum sum{};

  __device__ __forceinline__ void take_key(uint64_t index) {
    const auto now = static_cast<uint32_t>(index >> 32);
    if (now != high) {
      high = now;
      key = DigestKey::of(now);
    }
  }
  // An index that take_key was called for, or that shares its high half.
  __device__ __forceinline__ void add(uint64_t index, uint32_t x) {
    sum.add(digest_words(mul_wide(static_cast<uint32_t>(index), kDigestMul), x, key).w);
  }
};

// The last piece that begins at or before a span.
template <class Batch>
__device__ __forceinline__ const typename Batch::Piece& piece_of(const Batch& batch, uint64_t span) {
  uint32_t low = 0;
  for (uint32_t high = batch.header.num_pieces; high - low > 1;) {
    const uint32_t middle = (low + high) / 2;
    (batch.pieces[middle].first_span <= span ? low : high) = middle;
  }
  return batch.pieces[low];
}

// For each of this warp's spans body(piece, units before it in the piece, its lane's sum), then the lane's slot.
template <class Batch, class Body>
__device__ __forceinline__ void for_spans(const Batch& batch, const Body& body) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t warps = blockDim.x / kWarpThreads;
  for (uint64_t span = uint64_t{blockIdx.x} * warps + threadIdx.x / kWarpThreads; span < batch.header.total;
       span += uint64_t{gridDim.x} * warps) {
    const auto& piece = piece_of(batch, span);
    Adder adder;
    body(piece, (span - piece.first_span) * batch.header.span + lane, batch.header.span / kWarpThreads, &adder);
    store_slot(batch.header.slots + (span * kWarpThreads + lane) * 16, adder.sum);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    shardinit_digest_run(const __grid_constant__ DigestRunBatch batch) {
  for_spans(batch, [](const DigestRunPiece& piece, uint64_t block, uint32_t turns, Adder* adder) {
    const uint32_t size = piece.size;
    const uint32_t in_block = 16 / size;
    const uint64_t stop = (piece.end + in_block - 1) / in_block;
#pragma unroll 1
    for (; turns && block < stop; --turns, block += kWarpThreads) {
      const uint64_t address = piece.origin + block * 16;
      const uint64_t element = block * in_block;
      const uint64_t index = piece.first + element;
      if (element >= piece.begin && element + in_block <= piece.end && index >> 32 == (index + in_block - 1) >> 32) {
        uint32_t x[4];
        load_block(address, x);
        adder->take_key(index);
        if (size == 4) {
#pragma unroll
          for (uint32_t k = 0; k < 4; ++k) adder->add(index + k, x[k]);
        } else if (size == 2) {
#pragma unroll
          for (uint32_t k = 0; k < 8; ++k) adder->add(index + k, x[k / 2] >> (16 * (k % 2)) & 0xffffu);
        } else {
#pragma unroll
          for (uint32_t k = 0; k < 16; ++k) adder->add(index + k, x[k / 4] >> (8 * (k % 4)) & 0xffu);
        }
      } else {
#pragma unroll 1
        for (uint32_t k = 0; k < in_block; ++k) {
          if (element + k >= piece.begin && element + k < piece.end) {
            adder->take_key(index + k);
            adder->add(index + k, load_element(address + k * size, size));
          }
        }
      }
    }
  });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    shardinit_digest_grid(const __grid_constant__ DigestGridBatch batch) {
  for_spans(batch, [&](const DigestGridPiece& piece, uint64_t element, uint32_t turns, Adder* adder) {
    const uint32_t part = min(piece.size, 4u);
    const uint32_t words = piece.size / part;
#pragma unroll 1
    for (; turns && element < piece.numel; --turns, element += kWarpThreads) {
      const Row at = row_of(batch.axes + piece.first_axis, static_cast<int>(piece.num_axes), piece.first, element);
      const uint64_t address = piece.data + static_cast<uint64_t>(at.memory) * piece.size;
#pragma unroll 1
      for (uint32_t word = 0; word < words; ++word) {
        adder->take_key(at.first * words + word);
        adder->add(at.first * words + word, load_element(address + word * 4, part));
      }
    }
  });
}

namespace {

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that it is not found again by whoever calls CUDA next
  throw std::runtime_error(what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

}  // namespace

// The caller has made `device` the current one, as torch.cuda.device does.
DigestSlots digest_cuda(const DigestPiece* pieces, size_t num_pieces, int device, void* stream,
                        uint32_t num_multiprocessors, uint64_t slots) {
  return plan_digest(pieces, num_pieces, num_multiprocessors, slots, [&](const DigestLaunch& launch) {
    void* arguments[] = {const_cast<void*>(launch.parameters)};
    const void* const function = launch.is_run ? reinterpret_cast<const void*>(&shardinit_digest_run)
                                               : reinterpret_cast<const void*>(&shardinit_digest_grid);
    check(
        cudaLaunchKernel(function, dim3(launch.grid), dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)),
        std::string("launching shardinit_digest_") + (launch.is_run ? "run" : "grid") +
            " on cuda:" + std::to_string(device) + ", " + std::to_string(launch.grid) + " x " +
            std::to_string(kThreads) + " threads");
  });
}

}  // namespace shardinit
