// Plain bf16 products in matrix units (TDPBF16PS): 16 outputs' weights are a tile just as they lie in memory, and 16 rows
// of x, pairs of elements side by side, are the other. A column of the sums belongs to one row of x.
#pragma once
#include "dense.h"
#include "tiles.h"
#include "vectors.h"

namespace paceline {
namespace PACELINE_LEVEL {

constexpr int WIDE = 32, TILE_WORDS = 256;  // inner elements of a tile; its 32-bit words

static int64_t steps_of(const Dense& job) { return (job.inner + WIDE - 1) / WIDE; }

static size_t arranged_bytes(const Dense& job) {
  return size_t((job.rows + X_ROWS - 1) / X_ROWS * steps_of(job)) * TILE_WORDS * 4;
}

// [blocks, steps, 16 pairs, 16 rows] words; zeros where there is nothing
static void arrange(const Dense& job, int64_t first, int64_t count) {
  uint32_t* to = static_cast<uint32_t*>(job.arranged) + first * steps_of(job) * TILE_WORDS;
  for (int64_t block = first; block < first + count; block++)
    for (int64_t k = 0; k < job.inner; k += WIDE, to += TILE_WORDS) {
      Words rows[LANES] = {};
      int64_t elements = job.inner - k < WIDE ? job.inner - k : WIDE;
      for (int64_t i = 0; i < X_ROWS && block * X_ROWS + i < job.rows; i++)
        memcpy(&rows[i], job.x + (block * X_ROWS + i) * job.x_stride + k, size_t(elements) * 2);
      transpose(rows);
      memcpy(to, rows, sizeof rows);
    }
}

// Tiles 0 … 3: sums of both halves of the unit with a block of x, and with the next; 4, 5: weights; 6, 7: x.
static void configure_unit(int first, int second) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    bool upper = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = uint8_t(tile > 5 ? 16 : upper ? second : first);
    config.row_bytes[tile] = 64;
  }
  configure(config);
}

struct Halves32 {
  const bf16 *first, *second;  // of 16 outputs each
  int64_t stride;              // bytes from one output's weights to the next
};

template <bool TWO>
static inline void multiply_step(const Halves32& w, const uint32_t* x, const uint32_t* next) {
  _tile_loadd(6, x, 64);
  _tile_loadd(4, w.first, w.stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, w.second, w.stride);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (TWO) {
    _tile_loadd(7, next, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Memory shall have ready what the next unit begins with here.
static inline void ask_for(const bf16* weights, int64_t inner) {
  for (int i = 0; i < UNIT_ROWS; i++) _mm_prefetch(reinterpret_cast<const char*>(weights + i * inner), _MM_HINT_T1);
}

// sums [32 outputs, 32 rows] of one or two blocks of x
template <bool TWO>
static void multiply_unit(const Dense& job, Halves32 w, const Halves32& tail, const uint32_t* x, bool ahead, float* sums) {
  int64_t steps = steps_of(job), whole = job.inner / WIDE;
  const uint32_t* next = x + steps * TILE_WORDS;
  settle();
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (TWO) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < whole; k++, x += TILE_WORDS, next += TILE_WORDS, w.first += WIDE, w.second += WIDE) {
    if (ahead) ask_for(w.first + UNIT_ROWS * job.inner, job.inner);
    multiply_step<TWO>(w, x, next);
  }
  if (whole < steps) multiply_step<TWO>(tail, x, next);
  constexpr size_t row = 2 * X_ROWS * sizeof(float);
  _tile_stored(0, sums, row);
  _tile_stored(2, sums + 16 * 2 * X_ROWS, row);
  if constexpr (TWO) {
    _tile_stored(1, sums + X_ROWS, row);
    _tile_stored(3, sums + 16 * 2 * X_ROWS + X_ROWS, row);
  }
  settle();
}

// 16 outputs of 16 rows: sums are `2 · X_ROWS` floats apart by output
static void put_block(const Dense& job, const float* sums, int64_t row, int64_t output, int outputs) {
  Words columns[LANES];
  for (int i = 0; i < LANES; i++) columns[i] = load<Words>(sums + i * 2 * X_ROWS);
  transpose(columns);
  Floats bias = job.bias ? wide(job.bias + output, outputs) : Floats{};
  for (int64_t i = 0; i < X_ROWS && row + i < job.rows; i++) {
    int64_t at = (row + i) * job.out + output;
    Floats y = as_floats(columns[i]) + bias;
    if (job.residual) y += wide(job.residual + at, outputs);
    put(job.y + at, narrow(y), outputs);
  }
}

static void dense_unit(const Dense& job, int64_t unit, bool ahead) {
  int64_t output = unit * UNIT_ROWS, left = job.out - output < UNIT_ROWS ? job.out - output : UNIT_ROWS;
  int64_t lower = left < 16 ? left : 16, upper = left > 16 ? left - 16 : lower;  // no upper half: the lower one again
  const bf16* from = job.weights + output * job.inner;
  Halves32 w = {from, left > 16 ? from + 16 * job.inner : from, job.inner * 2};
  alignas(64) bf16 rest[UNIT_ROWS][WIDE];
  Halves32 tail = {rest[0], left > 16 ? rest[16] : rest[0], WIDE * 2};
  if (int64_t elements = job.inner % WIDE) {
    memset(rest, 0, sizeof rest);
    for (int64_t i = 0; i < left; i++) memcpy(rest[i], from + (i + 1) * job.inner - elements, size_t(elements) * 2);
  }
  alignas(64) float sums[UNIT_ROWS * 2 * X_ROWS] = {};
  configure_unit(int(lower), int(upper));
  const uint32_t* x = static_cast<const uint32_t*>(job.arranged);
  int64_t block = steps_of(job) * TILE_WORDS;
  for (int64_t row = 0; row < job.rows; row += 2 * X_ROWS, x += 2 * block) {
    bool two = job.rows - row > X_ROWS;
    if (two) multiply_unit<true>(job, w, tail, x, ahead && !row, sums);
    else multiply_unit<false>(job, w, tail, x, ahead && !row, sums);
    for (int side = 0; side < (two ? 2 : 1); side++) {
      put_block(job, sums + side * X_ROWS, row + side * X_ROWS, output, int(lower));
      if (left > 16) put_block(job, sums + 16 * 2 * X_ROWS + side * X_ROWS, row + side * X_ROWS, output + 16, int(upper));
    }
  }
  _tile_release();
}

static void dense_units(const Dense& job, int64_t first, int64_t count) {
  for (int64_t unit = first; unit < first + count; unit++) dense_unit(job, unit, (unit + 2) * UNIT_ROWS <= job.out);
}

const DenseKernels dense_kernels = {arranged_bytes, arrange, dense_units};

}  // namespace PACELINE_LEVEL
}  // namespace paceline
