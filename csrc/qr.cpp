#include "qr.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "fp_environment.h"

namespace shardinit {
namespace {

constexpr int kPanel = 32;           // columns of a panel, a row of which lies together
constexpr int64_t kChunk = 128;      // rows of two panels that stay in the first cache
constexpr int64_t kGrain = 1 << 18;  // multiplications worth a thread's while

// A vector is only ever a row's part: columns are independent, so its width has no say in the bits.
typedef double Vector2 __attribute__((vector_size(16)));
typedef double Vector4 __attribute__((vector_size(32)));
typedef double Vector8 __attribute__((vector_size(64)));

#define SHARDINIT_INLINE inline __attribute__((always_inline))

template <class V>
SHARDINIT_INLINE V load(const double* from) {
  V value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
SHARDINIT_INLINE void store(double* to, V value) {
  memcpy(to, &value, sizeof value);
}

// Four rows of two vectors: eight sums in registers, whose additions hide each other's latency.
constexpr int kTall = 4;

// sums[p][j] += sum over rows of v[row][p] * c[row][j], for all 32 x 32 of them.
template <class V>
SHARDINIT_INLINE void add_products(const double* v, const double* c, int64_t rows, double* sums) {
  constexpr int kLanes = sizeof(V) / sizeof(double);
  for (int64_t first = 0; first < rows; first += kChunk) {
    const int64_t last = std::min(rows, first + kChunk);
    for (int p = 0; p < kPanel; p += kTall) {
      for (int j = 0; j < kPanel; j += 2 * kLanes) {
        V low[kTall], high[kTall];
#pragma GCC unroll 4
        for (int a = 0; a < kTall; ++a) {
          low[a] = load<V>(sums + (p + a) * kPanel + j);
          high[a] = load<V>(sums + (p + a) * kPanel + j + kLanes);
        }
        for (int64_t row = first; row < last; ++row) {
          const V right = load<V>(c + row * kPanel + j);
          const V far_right = load<V>(c + row * kPanel + j + kLanes);
#pragma GCC unroll 4
          for (int a = 0; a < kTall; ++a) {
            const double left = v[row * kPanel + p + a];
            low[a] = low[a] + left * right;
            high[a] = high[a] + left * far_right;
          }
        }
#pragma GCC unroll 4
        for (int a = 0; a < kTall; ++a) {
          store(sums + (p + a) * kPanel + j, low[a]);
          store(sums + (p + a) * kPanel + j + kLanes, high[a]);
        }
      }
    }
  }
}

// c[row][j] -= sum over p < 32 of v[row][p] * w[p][j].
template <class V>
SHARDINIT_INLINE void subtract_products(const double* v, const double* w, int64_t rows, double* c) {
  constexpr int kLanes = sizeof(V) / sizeof(double);
  int64_t row = 0;
  for (; row + kTall <= rows; row += kTall) {
    for (int j = 0; j < kPanel; j += 2 * kLanes) {
      V low[kTall] = {}, high[kTall] = {};
      for (int p = 0; p < kPanel; ++p) {
        const V right = load<V>(w + p * kPanel + j);
        const V far_right = load<V>(w + p * kPanel + j + kLanes);
#pragma GCC unroll 4
        for (int a = 0; a < kTall; ++a) {
          const double left = v[(row + a) * kPanel + p];
          low[a] = low[a] + left * right;
          high[a] = high[a] + left * far_right;
        }
      }
#pragma GCC unroll 4
      for (int a = 0; a < kTall; ++a) {
        double* at = c + (row + a) * kPanel + j;
        store(at, load<V>(at) - low[a]);
        store(at + kLanes, load<V>(at + kLanes) - high[a]);
      }
    }
  }
  for (; row < rows; ++row) {
    for (int j = 0; j < kPanel; ++j) {
      double sum = 0;
      for (int p = 0; p < kPanel; ++p) sum = sum + v[row * kPanel + p] * w[p * kPanel + j];
      c[row * kPanel + j] = c[row * kPanel + j] - sum;
    }
  }
}

// One reflection of a panel: sums[j] = sum over rows of v[row] * c[row][j], then c[row][j] -= v[row] * (tau * sums[j]).
template <class V>
SHARDINIT_INLINE void reflect(const double* v, double tau, int64_t rows, double* c) {
  constexpr int kLanes = sizeof(V) / sizeof(double);
  for (int j = 0; j < kPanel; j += 4 * kLanes) {
    V sum[4] = {};
    for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int a = 0; a < 4; ++a) sum[a] = sum[a] + v[row * kPanel] * load<V>(c + row * kPanel + j + a * kLanes);
    }
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) sum[a] = tau * sum[a];
    for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int a = 0; a < 4; ++a) {
        double* at = c + row * kPanel + j + a * kLanes;
        store(at, load<V>(at) - v[row * kPanel] * sum[a]);
      }
    }
  }
}

struct Loops {
  void (*add_products)(const double*, const double*, int64_t, double*);
  void (*subtract_products)(const double*, const double*, int64_t, double*);
  void (*reflect)(const double*, double, int64_t, double*);
};

#define SHARDINIT_LOOPS(name, V, target)                                                                            \
  target void add_products_##name(const double* v, const double* c, int64_t rows, double* sums) {                   \
    add_products<V>(v, c, rows, sums);                                                                              \
  }                                                                                                                 \
  target void subtract_products_##name(const double* v, const double* w, int64_t rows, double* c) {                 \
    subtract_products<V>(v, w, rows, c);                                                                            \
  }                                                                                                                 \
  target void reflect_##name(const double* v, double tau, int64_t rows, double* c) { reflect<V>(v, tau, rows, c); } \
  constexpr Loops loops_##name = {add_products_##name, subtract_products_##name, reflect_##name};

SHARDINIT_LOOPS(baseline, Vector2, )
#if defined(__x86_64__)
SHARDINIT_LOOPS(avx2, Vector4, __attribute__((target("avx2"))))
SHARDINIT_LOOPS(avx512, Vector8, __attribute__((target("avx512f"))))
#endif

const Loops& active_loops() {
#if defined(__x86_64__)
  const std::string isa = active_kernels().name;
  if (isa == "avx512") return loops_avx512;
  if (isa == "avx2") return loops_avx2;
#endif
  return loops_baseline;
}

// run(index) for index < count, shared out to threads, each with the default floating-point environment.
void share(int64_t count, int64_t work, int num_threads, const std::function<void(int64_t)>& run) {
  const int64_t most = std::min<int64_t>({num_threads, kMaxThreads, count, 1 + count * work / kGrain});
  const auto part = [&](int64_t thread) {
    const DefaultFpEnvironment environment;
    for (int64_t index = thread; index < count; index += most) run(index);
  };
  std::vector<std::thread> threads;
  for (int64_t thread = 1; thread < most; ++thread) {
    try {
      threads.emplace_back(part, thread);
    } catch (const std::system_error&) {  // no more threads to be had
      part(thread);
    }
  }
  part(0);
  for (auto& thread : threads) thread.join();
}

class Decomposition {
 public:
  Decomposition(double* matrix, int64_t rows, int64_t cols, int num_threads)
      : loops_(active_loops()),
        rows_(rows),
        cols_(cols),
        num_panels_((cols + kPanel - 1) / kPanel),
        num_threads_(num_threads),
        matrix_(matrix),
        panels_(static_cast<size_t>(num_panels_ * rows * kPanel)),
        v_(static_cast<size_t>(rows * kPanel)),
        t_(static_cast<size_t>(num_panels_ * kPanel * kPanel)),
        signs_(static_cast<size_t>(num_panels_ * kPanel)) {}

  bool run(const KeepGoing& keep_going) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t col = 0; col < cols_; ++col) {
        panel(col / kPanel)[row * kPanel + col % kPanel] = matrix_[row * cols_ + col];
      }
    }
    for (int64_t number = 0; number < num_panels_; ++number) {
      if (!keep_going()) return false;
      reflect_panel(number);
      set_block_factor(number);
      apply(number, number + 1, true);
    }
    for (int64_t number = num_panels_ - 1; number >= 0; --number) {
      if (!keep_going()) return false;
      std::copy(panel(number) + number * kPanel * kPanel, panel(number) + rows_ * kPanel,
                v_.begin() + number * kPanel * kPanel);
      set_identity(number);
      apply(number, number, false);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t col = 0; col < cols_; ++col) {
        matrix_[row * cols_ + col] =
            panel(col / kPanel)[row * kPanel + col % kPanel] * signs_[static_cast<size_t>(col)];
      }
    }
    return true;
  }

 private:
  double* panel(int64_t number) { return panels_.data() + number * rows_ * kPanel; }
  double* block_factor(int64_t number) { return t_.data() + number * kPanel * kPanel; }
  int width(int64_t number) const { return static_cast<int>(std::min<int64_t>(kPanel, cols_ - number * kPanel)); }

  // Finds a panel's reflections: into v_ the vectors, with zeros above the diagonal and ones on it, from row
  // number * kPanel on; into the panel itself the same, for the way back; tau to the diagonal of its block factor.
  void reflect_panel(int64_t number) {
    double* a = panel(number);
    const int64_t first = number * kPanel;
    std::fill(v_.begin() + first * kPanel, v_.end(), 0.0);
    for (int c = 0; c < width(number); ++c) {
      const int64_t k = first + c;
      double* v = v_.data() + c;
      double squares = 0;
      for (int64_t row = k + 1; row < rows_; ++row) squares = squares + a[row * kPanel + c] * a[row * kPanel + c];
      double beta = a[k * kPanel + c];
      v[k * kPanel] = 1;
      if (squares != 0) {
        const double alpha = beta;
        const double norm = std::sqrt(alpha * alpha + squares);
        beta = alpha > 0 ? -norm : norm;
        const double tau = (beta - alpha) / beta;
        const double scale = alpha - beta;
        for (int64_t row = k + 1; row < rows_; ++row) v[row * kPanel] = a[row * kPanel + c] / scale;
        loops_.reflect(v + k * kPanel, tau, rows_ - k, a + k * kPanel);
        block_factor(number)[c * kPanel + c] = tau;
      }
      signs_[static_cast<size_t>(k)] = beta > 0 ? 1 : beta < 0 ? -1 : 0;
    }
    std::copy(v_.begin() + first * kPanel, v_.end(), a + first * kPanel);
  }

  void set_block_factor(int64_t number) {
    double* t = block_factor(number);
    double products[kPanel * kPanel] = {};
    const double* v = v_.data() + number * kPanel * kPanel;
    loops_.add_products(v, v, rows_ - number * kPanel, products);
    for (int c = 0; c < width(number); ++c) {
      for (int r = 0; r < c; ++r) {
        double sum = 0;
        for (int q = r; q < c; ++q) sum = sum + t[r * kPanel + q] * products[q * kPanel + c];
        t[r * kPanel + c] = -t[c * kPanel + c] * sum;
      }
    }
  }

  void set_identity(int64_t number) {
    double* a = panel(number);
    std::fill(a, a + rows_ * kPanel, 0.0);
    for (int c = 0; c < width(number); ++c) a[(number * kPanel + c) * kPanel + c] = 1;
  }

  // The block reflection of a panel, or its transpose, to the panels from `begin` on.
  void apply(int64_t number, int64_t begin, bool transposed) {
    const int64_t first = number * kPanel, rows = rows_ - first;
    const double* v = v_.data() + first * kPanel;
    const double* t = block_factor(number);
    share(num_panels_ - begin, rows * kPanel * kPanel * 2, num_threads_, [&](int64_t index) {
      double* c = panel(begin + index) + first * kPanel;
      double sums[kPanel * kPanel] = {};
      double w[kPanel * kPanel];
      loops_.add_products(v, c, rows, sums);
      for (int p = 0; p < kPanel; ++p) {
        for (int j = 0; j < kPanel; ++j) {
          double sum = 0;
          for (int q = transposed ? 0 : p; q < (transposed ? p + 1 : kPanel); ++q) {
            sum = sum + t[transposed ? q * kPanel + p : p * kPanel + q] * sums[q * kPanel + j];
          }
          w[p * kPanel + j] = sum;
        }
      }
      loops_.subtract_products(v, w, rows, c);
    });
  }

  const Loops& loops_;
  const int64_t rows_, cols_, num_panels_;
  const int num_threads_;
  double* const matrix_;
  std::vector<double> panels_, v_, t_, signs_;
};

}  // namespace

bool orthonormalise(double* matrix, int64_t rows, int64_t cols, int num_threads, const KeepGoing& keep_going) {
  const DefaultFpEnvironment environment;
  return Decomposition(matrix, rows, cols, num_threads).run(keep_going);
}

}  // namespace shardinit
