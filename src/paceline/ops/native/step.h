// What a decoder layer computes beside its matrix products, row by row: norm, activation, attention over a block cache.
// bf16 in and out, float32 inside. Kernels are compiled once for each instruction set; a row's bits are its own affair.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

using bf16 = uint16_t;

constexpr int BLOCK = 64;  // positions of a cache's block

struct Norm {
  const bf16* x;       // [rows, width]
  const void* weight;  // [width]
  bool wide;           // float32 weights (the product is not rounded before them), else bf16
  float eps;
  const bf16* residual;  // [rows, width] or null: added to the result
  bf16* y;               // [rows, width]
  int64_t rows, width;
};

struct Gated {
  const bf16* x;  // [rows, 2 width]: gate and up side by side
  bf16* y;        // [rows, width]
  bool gelu;      // tanh form; else SiLU
  int64_t rows, width;
};

constexpr int64_t CHUNK = 128;  // numbers of a row whose largest is found together

struct Maxima {
  const bf16* x;  // [rows, width]
  float* y;       // [rows, chunks]
  int64_t width, chunks;
};

// One sequence's cache: row t of it lies at slot t, slot s in block blocks[s / 64]: [kv heads, 64, head_dim].
struct Sequence {
  bf16 *keys, *values;   // of layer 0, block 0
  int64_t layer_stride;  // elements
  const int64_t* blocks;
  int64_t length;  // committed rows
};

// A row sees the committed positions and its path behind them, itself last.
struct Row {
  int64_t sequence, position, slot;
  int64_t path;  // where its path's slots begin in Step::slots, of positions from `length` on; −1: slots are positions
};

struct Step {
  const Sequence* sequences;
  const Row* rows;  // of a sequence together
  const int64_t* slots;
  int64_t num_rows, num_heads, num_kv_heads, head_dim;
};

struct Attention {
  const Step* step;
  int64_t layer, window;  // window: positions that a row sees at most
  float scale, eps;
  const void *q_norm, *k_norm;  // [head_dim] or null
  bool wide;                    // float32 norm weights, else bf16
  const float *cos, *sin;       // [rows, head_dim]
  const bf16* qkv;              // [rows, heads + 2 kv_heads, head_dim]
  bf16* out;                    // [rows, heads, head_dim]
};

// A run of rows of one sequence that a thread works on together, for one key head.
struct Tile {
  int64_t first, rows;
};
constexpr int TILE_ROWS = 8;

struct StepKernels {
  void (*norm)(const Norm&, int64_t first, int64_t rows);
  void (*gated)(const Gated&, int64_t first, int64_t rows);
  void (*maxima)(const Maxima&, int64_t first, int64_t chunks);
  void (*write)(const Attention&, int64_t row);  // its keys (normed, turned) and values into the cache
  size_t (*scratch)(const Step&);                // bytes that `attend` needs, of a multiple of 64
  void (*attend)(const Attention&, const Tile&, int64_t kv_head, void* scratch);
};

namespace portable { extern const StepKernels step_kernels; }
namespace avx2 { extern const StepKernels step_kernels; }
namespace avx512 { extern const StepKernels step_kernels; }
namespace amx { extern const StepKernels step_kernels; }

}  // namespace paceline
