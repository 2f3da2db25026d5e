// Norm and gated activation of rows.
#pragma once
#include "vectors.h"

namespace paceline {
namespace PACELINE_LEVEL {

// 1 / rms, the squares summed in one order
static inline Floats inverse_rms(const bf16* x, int64_t width, float eps) {
  Floats squares = {};
  in_vectors(width, [&](int64_t at, int count) {
    Floats value = wide(x + at, count);
    squares = fma(value, value, squares);
  });
  return all(1.f / sqrtf(sum(squares) / float(width) + eps));
}

static inline Floats normed(Floats x, Floats inverse, const bf16* weight, int count) {
  return rounded(rounded(x * inverse) * wide(weight, count));
}

static inline Floats normed(Floats x, Floats inverse, const float* weight, int count) {
  return rounded(x * inverse * wide(weight, count));
}

template <typename Weight>
static void norm_row(const Norm& job, int64_t row) {
  const bf16* x = job.x + row * job.width;
  const bf16* residual = job.residual ? job.residual + row * job.width : nullptr;
  const Weight* weight = static_cast<const Weight*>(job.weight);
  Floats inverse = inverse_rms(x, job.width, job.eps);
  in_vectors(job.width, [&](int64_t at, int count) {
    Floats y = normed(wide(x + at, count), inverse, weight + at, count);
    if (residual) y += wide(residual + at, count);
    put(job.y + row * job.width + at, narrow(y), count);
  });
}

static void norm_rows(const Norm& job, int64_t first, int64_t rows) {
  for (int64_t row = first; row < first + rows; row++) job.wide ? norm_row<float>(job, row) : norm_row<bf16>(job, row);
}

// x / (1 + e^−x); for GELU's tanh form x / (1 + e^−2u), which is ½ x (1 + tanh u) without its cancellation
static inline Floats active(Floats x, bool gelu) {
  constexpr float twice_root = 1.59576912160573071f;  // 2 √(2/π)
  Floats inner = gelu ? twice_root * fma(0.044715f * x, x * x, x) : x;
  return x / (1.f + exponential(-inner));
}

static void gated_rows(const Gated& job, int64_t first, int64_t rows) {
  for (int64_t row = first; row < first + rows; row++) {
    const bf16* gate = job.x + row * 2 * job.width;
    in_vectors(job.width, [&](int64_t at, int count) {
      Floats y = active(wide(gate + at, count), job.gelu) * wide(gate + job.width + at, count);
      put(job.y + row * job.width + at, narrow(y), count);
    });
  }
}

// The largest of a chunk's numbers; NaN if they hold one.
static inline float largest_of(const bf16* x, int64_t count) {
  Floats top = all(-INFINITY), odd = {};
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    Floats value = wide(x + at);
    top = larger(value, top), odd = select(value != value, value, odd);
  }
  float best = largest(top), strange = sum(odd);
  for (; at < count; at++) {
    uint32_t bits = uint32_t(x[at]) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    best = value > best ? value : best, strange += value != value ? value : 0.f;
  }
  return strange != strange ? strange : best;
}

static void maxima_of(const Maxima& job, int64_t first, int64_t chunks) {
  for (int64_t i = first; i < first + chunks; i++) {
    int64_t at = i % job.chunks * CHUNK, left = job.width - at;
    job.y[i] = largest_of(job.x + i / job.chunks * job.width + at, left < CHUNK ? left : CHUNK);
  }
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
