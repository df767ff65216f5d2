// fma for hosts without the instruction (the x86-64 baseline): exact, in terms of IEEE add and multiply or integers.
// libm's is not used: its speed and, on some platforms, its correctness depend on the machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace shardinit {

// The product is exact in fp64 (48 bits). The sum is rounded to odd in fp64, which makes the second rounding, to fp32,
// the only one that counts (Boldo & Melquiond, IEEE Transactions on Computers 57, 2008).
inline __attribute__((always_inline)) float soft_fma(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  const double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);  // exact: TwoSum
  uint64_t bits;
  uint64_t error_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&error_bits, &error, 8);
  // An inexact even sum moves by one unit towards the exact value, which makes it odd.
  const uint64_t away = (bits ^ error_bits) >> 63;  // the exact value is nearer to zero
  const uint64_t inexact_even = static_cast<uint64_t>(error != 0.0) & (~bits & 1);
  bits += inexact_even * (1 - 2 * away);
  double odd;
  memcpy(&odd, &bits, 8);
  return static_cast<float>(odd);
}

// fp64 has no wider type to lean on, so the sum is formed in integers. Finite operands only.
double soft_fma(double a, double b, double c);

}  // namespace shardinit
