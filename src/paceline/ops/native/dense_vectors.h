// Plain bf16 products in vectors of float32: lanes go along the inner dimension, and are added up at the end.
#pragma once
#include "dense.h"
#include "vectors.h"

namespace paceline {
namespace PACELINE_LEVEL {

constexpr int ACROSS = LANES == 16 ? 4 : 2;  // outputs that share a load of x, as registers allow
constexpr int DOWN = 4;                      // rows of x that share a load of weights

static int64_t padded_inner(const Dense& job) { return (job.inner + LANES - 1) / LANES * LANES; }

static size_t arranged_bytes(const Dense& job) {
  return (size_t(job.rows * padded_inner(job)) * sizeof(float) + 63) / 64 * 64;
}

// float32, zeros behind a row
static void arrange(const Dense& job, int64_t first, int64_t count) {
  for (int64_t row = first * X_ROWS; row < (first + count) * X_ROWS && row < job.rows; row++) {
    float* to = static_cast<float*>(job.arranged) + row * padded_inner(job);
    in_vectors(job.inner, [&](int64_t at, int width) { store(to + at, wide(job.x + row * job.x_stride + at, width)); });
  }
}

template <int OUTPUTS, int ROWS>
static inline void put_sums(const Dense& job, int64_t output, int64_t row) {
  int64_t padded = padded_inner(job);
  const bf16* weights = job.weights + output * job.inner;
  const float* x = static_cast<const float*>(job.arranged) + row * padded;
  Floats sums[OUTPUTS][ROWS] = {};
  in_vectors(job.inner, [&](int64_t k, int width) {
    Floats w[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) w[o] = wide(weights + o * job.inner + k, width);
    for (int m = 0; m < ROWS; m++) {
      Floats value = load<Floats>(x + m * padded + k);
      for (int o = 0; o < OUTPUTS; o++) sums[o][m] = fma(w[o], value, sums[o][m]);
    }
  });
  for (int m = 0; m < ROWS; m++)
    for (int o = 0; o < OUTPUTS; o++) {
      int64_t at = (row + m) * job.out + output + o;
      float y = sum(sums[o][m]);
      if (job.bias) y += wide(job.bias + output + o, 1)[0];
      if (job.residual) y += wide(job.residual + at, 1)[0];
      put(job.y + at, narrow(all(y)), 1);
    }
}

template <int OUTPUTS>
static void put_rows(const Dense& job, int64_t output) {
  int64_t row = 0;
  for (; row + DOWN <= job.rows; row += DOWN) put_sums<OUTPUTS, DOWN>(job, output, row);
  switch (job.rows - row) {
    case 3: put_sums<OUTPUTS, 3>(job, output, row); break;
    case 2: put_sums<OUTPUTS, 2>(job, output, row); break;
    case 1: put_sums<OUTPUTS, 1>(job, output, row); break;
  }
}

static void dense_units(const Dense& job, int64_t first, int64_t count) {
  int64_t output = first * UNIT_ROWS, end = output + count * UNIT_ROWS;
  if (end > job.out) end = job.out;
  for (; output + ACROSS <= end; output += ACROSS) put_rows<ACROSS>(job, output);
  for (; output < end; output++) put_rows<1>(job, output);
}

const DenseKernels dense_kernels = {arranged_bytes, arrange, dense_units};

}  // namespace PACELINE_LEVEL
}  // namespace paceline
