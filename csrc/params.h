// A fill's parameters made ready for its elements. Run under the default floating-point environment (fp_environment.h).
#pragma once

#include "fill.h"
#include "narrow.h"

namespace shardinit {

// Whether the type has a value below b, as uniform needs one.
bool has_value_below(Dtype dtype, double b);

// x rounded to fp32. Out of line, so that the rounding can't leave its caller's floating-point environment.
double to_float32(double x);

// -ln(1 - p) for 0 < p < 1.
double geometric_rate(double p);

// The largest value of the type below b.
template <class T>
T uniform_top(Dtype dtype, T b);
template <>
float uniform_top(Dtype dtype, float b);
template <>
double uniform_top(Dtype dtype, double b);

}  // namespace shardinit
