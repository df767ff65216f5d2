// The steps that may follow a draw: one operation in working precision each, never fused. A draw of the stream that is
// another one with steps after it (log_normal, geometric) comes as that (draws.py).
#pragma once

#include "elementary.h"

namespace shardinit {

enum class UnaryOp : int { kAdd, kSub, kMul, kDiv, kClampMin, kClampMax, kNeg, kExp, kLog, kSqrt, kErfinv, kRoundUp };
struct Unary {
  UnaryOp op;
  double operand;
};
inline constexpr int kDrawUnary = 3;               // those of a draw itself
inline constexpr int kMaxUnary = 32 + kDrawUnary;  // of one piece

template <UnaryOp kOp>
struct UnaryFn {
  // T is S or a vector of it.
  template <class T, class S>
  SHARDINIT_HD T operator()(T x, S s) const {
    if constexpr (kOp == UnaryOp::kAdd) return x + s;
    if constexpr (kOp == UnaryOp::kSub) return x - s;
    if constexpr (kOp == UnaryOp::kMul) return x * s;
    if constexpr (kOp == UnaryOp::kDiv) return x / s;
    if constexpr (kOp == UnaryOp::kClampMin) return select(x < s, splat<T>(s), x);
    if constexpr (kOp == UnaryOp::kClampMax) return select(x > s, splat<T>(s), x);
    if constexpr (kOp == UnaryOp::kNeg) return -x;
    if constexpr (kOp == UnaryOp::kExp) return exp_rn(x);
    if constexpr (kOp == UnaryOp::kLog) return log_rn(x);
    if constexpr (kOp == UnaryOp::kSqrt) return square_root(x);
    if constexpr (kOp == UnaryOp::kErfinv) return erfinv_rn(x);
    if constexpr (kOp == UnaryOp::kRoundUp) return round_up(x);
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
    case UnaryOp::kExp:
      return body(UnaryFn<UnaryOp::kExp>{});
    case UnaryOp::kLog:
      return body(UnaryFn<UnaryOp::kLog>{});
    case UnaryOp::kSqrt:
      return body(UnaryFn<UnaryOp::kSqrt>{});
    case UnaryOp::kErfinv:
      return body(UnaryFn<UnaryOp::kErfinv>{});
    case UnaryOp::kRoundUp:
      return body(UnaryFn<UnaryOp::kRoundUp>{});
  }
}

}  // namespace shardinit
