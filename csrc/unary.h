// The steps that may follow a draw: one operation in working precision each, never fused.
#pragma once

#include "numeric.h"

namespace shardinit {

enum class UnaryOp : int { kAdd, kSub, kMul, kDiv, kClampMin, kClampMax, kNeg };
struct Unary {
  UnaryOp op;
  double operand;
};
inline constexpr int kMaxUnary = 32;  // of one piece

template <UnaryOp kOp>
struct UnaryFn {
  template <class T>
  SHARDINIT_HD T operator()(T x, T s) const {
    if constexpr (kOp == UnaryOp::kAdd) return x + s;
    if constexpr (kOp == UnaryOp::kSub) return x - s;
    if constexpr (kOp == UnaryOp::kMul) return x * s;
    if constexpr (kOp == UnaryOp::kDiv) return x / s;
    if constexpr (kOp == UnaryOp::kClampMin) return x < s ? s : x;
    if constexpr (kOp == UnaryOp::kClampMax) return x > s ? s : x;
    if constexpr (kOp == UnaryOp::kNeg) return -x;
  }
};

// Calls body with the operation's function.
template <class Body>
SHARDINIT_HD void with_unary(UnaryOp op, const Body& body) {
  switch (op) {
    case UnaryOp::kAdd:
      return body(UnaryFn<UnaryOp::kAdd>{});
    case UnaryOp::kSub:
      return body(UnaryFn<UnaryOp::kSub>{});
    case UnaryOp::kMul:
      return body(UnaryFn<UnaryOp::kMul>{});
    case UnaryOp::kDiv:
      return body(UnaryFn<UnaryOp::kDiv>{});
    case UnaryOp::kClampMin:
      return body(UnaryFn<UnaryOp::kClampMin>{});
    case UnaryOp::kClampMax:
      return body(UnaryFn<UnaryOp::kClampMax>{});
    case UnaryOp::kNeg:
      return body(UnaryFn<UnaryOp::kNeg>{});
  }
}

}  // namespace shardinit
