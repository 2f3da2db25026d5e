// What a thread holds of the rows it works on, and the softmax taken in one pass: what was summed is scaled down when a
// larger score comes. Source: Milakov & Gimelshein 1805.02867.
#pragma once
#include "elementwise.h"

namespace paceline {
namespace PACELINE_LEVEL {

#if defined(__AMX_BF16__)
constexpr int WIDTH = 32;  // elements of a tile's row
#else
constexpr int WIDTH = LANES;
#endif
constexpr int PIECES = BLOCK / LANES;

struct Shape {
  int head_dim, padded, group;  // padded: head_dim to whole vectors or tiles

  explicit Shape(const Step& s)
      : head_dim(int(s.head_dim)), padded((head_dim + WIDTH - 1) / WIDTH * WIDTH), group(int(s.num_heads / s.num_kv_heads)) {}
};

// 64 positions of a block, of one key head. Null where no row of those at hand sees it.
struct Places {
  const bf16 *keys[BLOCK], *values[BLOCK];
};

// The positions of a block that a row sees, counted from the block's first.
struct Seen {
  int first, last;
};

// A query is one row's query head: number row · group + head.
struct Scratch {
  float *q, *acc;  // [queries, padded]
  float *best;     // [queries]: the largest score so far
  float *total;    // [queries, LANES]: sum of weights
  float *weights;  // [16, 64], of the queries at hand
  uint32_t* keys;  // [padded / 2 pairs, 64]
  bf16* values;    // [64, padded]
  bf16* halves;    // of queries and weights, where products are of bf16
  uint64_t spoilt = 0;  // positions whose value is not finite, where products must not meet it
  int tile_rows = 0;    // that the tiles are configured for
  size_t bytes;

  Scratch(const Shape& s, void* memory) {
    float* at = static_cast<float*>(memory);
    auto take = [&](int count) {
      float* taken = at;
      at += (count + 15) / 16 * 16;
      return taken;
    };
    int queries = TILE_ROWS * s.group;
    q = take(queries * s.padded), acc = take(queries * s.padded);
    best = take(queries), total = take(queries * LANES);
    weights = take(16 * BLOCK);
    keys = reinterpret_cast<uint32_t*>(take(s.padded / 2 * BLOCK));
    values = reinterpret_cast<bf16*>(take(s.padded / 2 * BLOCK));
    halves = reinterpret_cast<bf16*>(take(WIDTH == LANES ? 0 : queries * s.padded + 16 * BLOCK));
    bytes = size_t(reinterpret_cast<char*>(at) - static_cast<char*>(memory));
  }
};

// scores [64] of one query become weights; what was summed is scaled to the new largest score.
static void soften(float* scores, const Seen& seen, const Shape& shape, int query, Scratch* scratch) {
  float *acc = scratch->acc + query * shape.padded, *best = scratch->best + query, *total = scratch->total + query * LANES;
  Floats score[PIECES], top = all(*best);
  Ints index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  for (int i = 0; i < PIECES; i++, index += LANES) {
    score[i] = select((index >= seen.first) & (index < seen.last), load<Floats>(scores + i * LANES), all(-INFINITY));
    top = larger(score[i], top);
  }
  float now = largest(top);
  Floats sums = load<Floats>(total);
  if (now != *best) {
    Floats scale = exponential(all(*best - now));
    sums *= scale;
    for (int d = 0; d < shape.padded; d += LANES) store(acc + d, load<Floats>(acc + d) * scale);
    *best = now;
  }
  for (int i = 0; i < PIECES; i++) {
    Floats weight = exponential(score[i] - all(now));
    sums += weight;
    store(scores + i * LANES, weight);
  }
  store(total, sums);
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
