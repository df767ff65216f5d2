// On a GPU: sqrt_rn(float) of csrc/numeric.h against the device's own __fsqrt_rn, for every fp32 in [2^-60, 2^60] with
// the hardware's seed, and for every mantissa and parity of the exponent with seeds from 8 units below to 8 above.
//     nvcc -std=c++17 --fmad=false -O3 -arch=native -I csrc -o check_sqrt bench/check_sqrt.cu && ./check_sqrt
#include <cstdio>

#include "numeric.h"

namespace {

__global__ void check_all(uint32_t first, uint32_t count, unsigned long long* wrong) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const float x = __uint_as_float(first + i);
    if (__float_as_uint(shardinit::sqrt_rn(x)) != __float_as_uint(__fsqrt_rn(x))) atomicAdd(wrong, 1ull);
  }
}

__global__ void check_seeds(unsigned long long* wrong) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1u << 24; i += gridDim.x * blockDim.x) {
    const float x = __uint_as_float(0x3f800000u + i);
    const float nearest = static_cast<float>(1.0 / __dsqrt_rn(static_cast<double>(x)));
    for (int ulp = -8; ulp <= 8; ++ulp) {
      const float root = shardinit::sqrt_from_seed(x, __uint_as_float(__float_as_uint(nearest) + ulp));
      if (__float_as_uint(root) != __float_as_uint(__fsqrt_rn(x))) atomicAdd(wrong, 1ull);
    }
  }
}

bool failed(cudaError_t status) {
  if (status != cudaSuccess) std::printf("CUDA: %s\n", cudaGetErrorString(status));
  return status != cudaSuccess;
}

}  // namespace

int main() {
  unsigned long long wrong[2] = {0, 0};
  unsigned long long* counts;
  if (failed(cudaMalloc(&counts, sizeof(wrong)))) return 1;
  if (failed(cudaMemcpy(counts, wrong, sizeof(wrong), cudaMemcpyHostToDevice))) return 1;
  const uint32_t first = (127u - 60) << 23;
  const uint32_t count = (120u << 23) + 1;
  check_all<<<1024, 256>>>(first, count, &counts[0]);
  if (failed(cudaGetLastError())) return 1;
  check_seeds<<<1024, 256>>>(&counts[1]);
  if (failed(cudaGetLastError())) return 1;
  if (failed(cudaMemcpy(wrong, counts, sizeof(wrong), cudaMemcpyDeviceToHost))) return 1;
  std::printf("hardware's seed: %u numbers, %llu wrong; seeds within 8 units: %u pairs, %llu wrong\n", count, wrong[0],
              17u << 24, wrong[1]);
  return wrong[0] || wrong[1];
}
