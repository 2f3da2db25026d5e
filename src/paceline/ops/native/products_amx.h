// A block's products in matrix units (TDPBF16PS): up to 16 queries times 64 positions at once. Queries and weights are
// taken as the sum of two bf16 numbers each, which keeps 16 bits of them.
#pragma once
#include "softmax.h"
#include "tiles.h"

namespace paceline {
namespace PACELINE_LEVEL {

// Tiles 0 … 5: sums, queries and weights, `rows` high; 6, 7: keys or values.
static inline void configure(int rows, Scratch* scratch) {
  if (scratch->tile_rows == rows) return;
  scratch->tile_rows = rows;
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.rows[tile] = uint8_t(tile > 5 ? 16 : rows), config.row_bytes[tile] = 64;
  configure(config);
}

static inline void end_products() { _tile_release(); }

// value = first + second, but for 2^-17 of it
static inline void halve(Floats value, bf16* first, bf16* second) {
  store(first, narrow(value));
  store(second, narrow(value - rounded(value)));
}

static inline bf16* second_queries(const Shape& shape, const Scratch& scratch) {
  return scratch.halves + TILE_ROWS * shape.group * shape.padded;
}

static inline void begin_products(const Shape& shape, int queries, Scratch* scratch) {
  bf16* second = second_queries(shape, *scratch);
  for (int i = 0; i < queries * shape.padded; i += LANES) halve(load<Floats>(scratch->q + i), scratch->halves + i, second + i);
}

// Pairs of positions side by side, [32, padded, 2]. A value that is not finite is left out, and its position noted: zero
// weights would not keep it from the rows that may not see it.
static void prepare_values(Places* places, const Shape& shape, Scratch* scratch) {
  alignas(64) static const bf16 nothing[1024] = {};
  scratch->spoilt = 0;
  for (int pair = 0; pair < BLOCK / 2; pair++) {
    uint32_t* to = reinterpret_cast<uint32_t*>(scratch->values) + pair * shape.padded;
    Words words[2];
    for (int d = 0; d < shape.padded; d += LANES) {
      int count = shape.head_dim - d < LANES ? shape.head_dim - d : LANES;
      for (int side = 0; side < 2; side++) {
        const bf16* value = places->values[2 * pair + side];
        alignas(64) bf16 padded[LANES] = {};
        if (value && count > 0 && count < LANES) memcpy(padded, value + d, size_t(count) * sizeof(bf16));
        words[side] = widened(load<Halves>(!value || count <= 0 ? nothing : count < LANES ? padded : value + d));
        Words bad = (Words)((words[side] & 0x7f80) == 0x7f80);
        if (_mm512_test_epi32_mask((__m512i)bad, (__m512i)bad)) scratch->spoilt |= uint64_t(1) << (2 * pair + side);
        words[side] &= ~bad;
      }
      store(to + d, words[0] | words[1] << 16);
    }
  }
  settle();
}

// weights [count, 64] of scores: queries from `query` on, by 64 keys
static inline void multiply_keys(int query, const Shape& shape, const Scratch& scratch) {
  const bf16 *first = scratch.halves + query * shape.padded, *second = second_queries(shape, scratch) + query * shape.padded;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < shape.padded; d += 32) {
    const uint32_t* keys = scratch.keys + d / 2 * BLOCK;
    _tile_loadd(4, first + d, shape.padded * 2);
    _tile_loadd(5, second + d, shape.padded * 2);
    _tile_loadd(6, keys, BLOCK * 4);
    _tile_loadd(7, keys + 16, BLOCK * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, keys + 32, BLOCK * 4);
    _tile_loadd(7, keys + 48, BLOCK * 4);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scratch.weights, BLOCK * 4);
  _tile_stored(1, scratch.weights + 16, BLOCK * 4);
  _tile_stored(2, scratch.weights + 32, BLOCK * 4);
  _tile_stored(3, scratch.weights + 48, BLOCK * 4);
  settle();
}

// acc [count, padded] += weights · values
static inline void add_values(int query, const Shape& shape, const bf16* first, const bf16* second, Scratch* scratch) {
  float* acc = scratch->acc + query * shape.padded;
  const uint32_t* values = reinterpret_cast<const uint32_t*>(scratch->values);
  _tile_loadd(2, first, BLOCK * 2);
  _tile_loadd(3, second, BLOCK * 2);
  _tile_loadd(4, first + 32, BLOCK * 2);
  _tile_loadd(5, second + 32, BLOCK * 2);
  for (int d = 0; d < shape.padded; d += 32) {
    _tile_loadd(0, acc + d, shape.padded * 4);
    _tile_loadd(1, acc + d + 16, shape.padded * 4);
    _tile_loadd(6, values + d, shape.padded * 4);
    _tile_loadd(7, values + d + 16, shape.padded * 4);
    _tile_dpbf16ps(0, 2, 6);
    _tile_dpbf16ps(1, 2, 7);
    _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(1, 3, 7);
    _tile_loadd(6, values + 16 * shape.padded + d, shape.padded * 4);
    _tile_loadd(7, values + 16 * shape.padded + d + 16, shape.padded * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, acc + d, shape.padded * 4);
    _tile_stored(1, acc + d + 16, shape.padded * 4);
  }
  settle();
}

static void add_block(const Places&, const Seen* seen, int first_row, int rows, const Shape& shape, Scratch* scratch) {
  bf16 *first = second_queries(shape, *scratch) + TILE_ROWS * shape.group * shape.padded, *second = first + 16 * BLOCK;
  int last = (first_row + rows) * shape.group;
  for (int query = first_row * shape.group, count; query < last; query += count) {
    count = last - query < 16 ? last - query : 16;
    configure(count, scratch);
    settle();
    multiply_keys(query, shape, *scratch);
    for (int i = 0; i < count; i++) {
      const Seen& own = seen[(query + i) / shape.group];
      float* weights = scratch->weights + i * BLOCK;
      soften(weights, own, shape, query + i, scratch);
      for (int t = 0; t < BLOCK; t += LANES) halve(load<Floats>(weights + t), first + i * BLOCK + t, second + i * BLOCK + t);
      uint64_t visible = (own.last < BLOCK ? (uint64_t(1) << own.last) - 1 : ~uint64_t(0)) >> own.first << own.first;
      if (visible & scratch->spoilt) store(scratch->total + (query + i) * LANES, all(NAN));
    }
    settle();
    add_values(query, shape, first, second, scratch);
  }
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
