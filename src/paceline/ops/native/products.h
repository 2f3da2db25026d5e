// A block's products in multiplications and additions of float32, at levels that have no better.
#pragma once
#include "softmax.h"

namespace paceline {
namespace PACELINE_LEVEL {

constexpr int MOST = 4;                       // query heads that share a load
constexpr int VECTORS = LANES == 16 ? 4 : 2;  // sums of a query head, as registers allow

static inline void begin_products(const Shape&, int, Scratch*) {}

static inline void end_products() {}

// Whole vectors are read: a width that is none of them is copied.
static inline void prepare_values(Places* places, const Shape& shape, Scratch* scratch) {
  if (shape.padded == shape.head_dim) return;
  bf16* to = scratch->values;
  for (int t = 0; t < BLOCK && places->values[t]; t++, to += shape.padded) {
    memset(to, 0, size_t(shape.padded) * sizeof(bf16));
    memcpy(to, places->values[t], size_t(shape.head_dim) * sizeof(bf16));
    places->values[t] = to;
  }
}

// scores [M, 64] = q · keys, element by element
template <int M>
static void multiply_keys(const float* q, const uint32_t* keys, const Shape& shape, float* scores) {
  for (int t = 0; t < BLOCK; t += VECTORS * LANES) {
    Floats sums[M][VECTORS] = {};
    for (int p = 0; p < shape.head_dim / 2; p++)
      for (int v = 0; v < VECTORS; v++) {
        Words pairs = load<Words>(keys + p * BLOCK + t + v * LANES);
        Floats even = as_floats(pairs << 16), odd = as_floats(pairs & 0xffff0000u);
        for (int m = 0; m < M; m++) {
          sums[m][v] = fma(even, all(q[m * shape.padded + 2 * p]), sums[m][v]);
          sums[m][v] = fma(odd, all(q[m * shape.padded + 2 * p + 1]), sums[m][v]);
        }
      }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < VECTORS; v++) store(scores + m * BLOCK + t + v * LANES, sums[m][v]);
  }
}

template <int M, int WIDE>
static inline void add_columns(const float* weights, const Places& places, int first, int last, int stride, int d, float* acc) {
  Floats sums[M][WIDE];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < WIDE; v++) sums[m][v] = load<Floats>(acc + m * stride + d + v * LANES);
  for (int t = first; t < last; t++)
    for (int v = 0; v < WIDE; v++) {
      Floats value = wide(places.values[t] + d + v * LANES);
      for (int m = 0; m < M; m++) sums[m][v] = fma(value, all(weights[m * BLOCK + t]), sums[m][v]);
    }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < WIDE; v++) store(acc + m * stride + d + v * LANES, sums[m][v]);
}

// acc [M, padded] += weights · values, position by position from `first` to `last`
template <int M>
static void add_values(const float* weights, const Places& places, int first, int last, const Shape& shape, float* acc) {
  int d = 0;
  for (; d + VECTORS * LANES <= shape.padded; d += VECTORS * LANES)
    add_columns<M, VECTORS>(weights, places, first, last, shape.padded, d, acc);
  for (; d < shape.padded; d += LANES) add_columns<M, 1>(weights, places, first, last, shape.padded, d, acc);
}

#define PACELINE_FOR_HEADS(count, call, ...)     \
  switch (count) {                               \
    case 1: call<1>(__VA_ARGS__); break;         \
    case 2: call<2>(__VA_ARGS__); break;         \
    case 3: call<3>(__VA_ARGS__); break;         \
    default: call<MOST>(__VA_ARGS__);            \
  }


static void add_block(const Places& places, const Seen* seen, int first_row, int rows, const Shape& shape, Scratch* scratch) {
  int parts = (shape.group + MOST - 1) / MOST, step = (shape.group + parts - 1) / parts;
  for (int row = first_row; row < first_row + rows; row++)
    for (int g = 0; g < shape.group; g += step) {
      int count = shape.group - g < step ? shape.group - g : step, query = row * shape.group + g;
      const float* q = scratch->q + query * shape.padded;
      float *weights = scratch->weights, *acc = scratch->acc + query * shape.padded;
      PACELINE_FOR_HEADS(count, multiply_keys, q, scratch->keys, shape, weights)
      for (int m = 0; m < count; m++) soften(weights + m * BLOCK, seen[row], shape, query + m, scratch);
      PACELINE_FOR_HEADS(count, add_values, weights, places, seen[row].first, seen[row].last, shape, acc)
    }
}
#undef PACELINE_FOR_HEADS

}  // namespace PACELINE_LEVEL
}  // namespace paceline
