// Products with bf16 weights as a checkpoint holds them, row after row: y = x · Wᵀ + bias + residual, rounded once.
//
// Sums are float32, in an order that each level has for itself; an element's follows from its own rows of x and W alone.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

using bf16 = uint16_t;

constexpr int UNIT_ROWS = 32;    // outputs that are computed together
constexpr int X_ROWS = 16;       // rows of x that are arranged together
constexpr int DENSE_ROWS = 256;  // rows of x in one pass over the weights: bounds what is arranged

struct Dense {
  const bf16* weights;  // [out, inner]
  int64_t out, inner;
  const bf16* x;  // [rows, inner], rows `x_stride` elements apart
  int64_t x_stride, rows;
  const bf16 *bias, *residual;  // [out], [rows, out]; null: none
  bf16* y;                      // [rows, out]
  void* arranged;               // x in the level's own order, aligned to 64 bytes
};

struct DenseKernels {
  size_t (*bytes)(const Dense&);                                // of `arranged`, a multiple of 64
  void (*arrange)(const Dense&, int64_t first, int64_t count);  // blocks of X_ROWS rows of x
  void (*units)(const Dense&, int64_t first, int64_t count);    // units of UNIT_ROWS outputs
};

namespace portable { extern const DenseKernels dense_kernels; }
namespace avx2 { extern const DenseKernels dense_kernels; }
namespace avx512 { extern const DenseKernels dense_kernels; }
namespace amx { extern const DenseKernels dense_kernels; }

}  // namespace paceline
