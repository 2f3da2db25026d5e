// Attention of rows over a block cache: every row walks its own keys in position order, 64 aligned positions at a time.
//
// A block's keys are transposed once for all rows that see the same ones; scores then stand in the lanes. The softmax is
// taken in one pass (Milakov & Gimelshein 1805.02867): what was summed is scaled down when a larger score comes. Which
// keys a row sees, and so the order of its sums, follows from its position and its path alone. What it may not see is
// neither multiplied nor added, be it NaN.
#pragma once
#include "elementwise.h"

namespace paceline {
namespace PACELINE_LEVEL {

constexpr int MOST = 4;                           // query heads that share a load
constexpr int VECTORS = LANES == 16 ? 4 : 2;      // sums of a query head, as registers allow
constexpr int PIECES = BLOCK / LANES;

struct Shape {
  int head_dim, padded, group;  // padded: head_dim to whole vectors

  explicit Shape(const Step& s)
      : head_dim(int(s.head_dim)), padded((head_dim + LANES - 1) / LANES * LANES), group(int(s.num_heads / s.num_kv_heads)) {}
};

// The part of a thread's memory that one row needs, for all query heads of a key head.
struct RowState {
  float *q, *acc;  // [group, padded]
  float *best;     // [group]: the largest score so far
  float *total;    // [group, LANES]: sum of weights
};

struct Scratch {
  RowState rows[TILE_ROWS];
  float* weights;       // [group, 64]
  uint32_t* keys;       // [head_dim / 2 pairs, 64]
  bf16* padded_values;  // [64, padded]

  Scratch(const Shape& s, void* memory) {
    float* at = static_cast<float*>(memory);
    auto take = [&](int count) {
      float* taken = at;
      at += (count + 15) / 16 * 16;
      return taken;
    };
    for (RowState& row : rows) row = {take(s.group * s.padded), take(s.group * s.padded), take(s.group), take(s.group * LANES)};
    weights = take(s.group * BLOCK);
    keys = reinterpret_cast<uint32_t*>(take(s.padded / 2 * BLOCK));
    padded_values = reinterpret_cast<bf16*>(take(s.padded * BLOCK / 2));
    bytes = size_t(reinterpret_cast<char*>(at) - static_cast<char*>(memory));
  }
  size_t bytes;
};

static size_t scratch_bytes(const Step& step) {
  return Scratch(Shape(step), reinterpret_cast<void*>(64)).bytes;  // where it lies does not matter
}

// x normed (where weights are given), turned by its row's angle, times scale: [head_dim]
static void turned(const Attention& a, const bf16* x, const void* norm, int64_t row, float scale, float* out) {
  int width = int(a.step->head_dim), half = width / 2;
  Floats inverse = norm ? inverse_rms(x, width, a.eps) : all(1.f);
  alignas(64) float in[1024];
  in_vectors(width, [&](int64_t at, int count) {
    Floats value = wide(x + at, count);
    if (norm && a.wide) value = normed(value, inverse, static_cast<const float*>(norm) + at, count);
    else if (norm) value = normed(value, inverse, static_cast<const bf16*>(norm) + at, count);
    memcpy(in + at, &value, sizeof(float) * size_t(count));
  });
  const float *cos = a.cos + row * width, *sin = a.sin + row * width;
  for (int i = 0; i < half; i++) {
    out[i] = (in[i] * cos[i] - in[i + half] * sin[i]) * scale;
    out[i + half] = (in[i + half] * cos[i + half] + in[i] * sin[i + half]) * scale;
  }
}

static void write_row(const Attention& a, int64_t row) {
  const Step& s = *a.step;
  const Sequence& sequence = s.sequences[s.rows[row].sequence];
  int64_t slot = s.rows[row].slot, width = s.head_dim;
  int64_t at = a.layer * sequence.layer_stride + (sequence.blocks[slot / BLOCK] * s.num_kv_heads * BLOCK + slot % BLOCK) * width;
  const bf16* k = a.qkv + (row * (s.num_heads + 2 * s.num_kv_heads) + s.num_heads) * width;
  for (int64_t head = 0; head < s.num_kv_heads; head++, k += width, at += BLOCK * width) {
    alignas(64) float out[1024];
    turned(a, k, a.k_norm, row, 1.f, out);
    in_vectors(width, [&](int64_t i, int count) { put(sequence.keys + at + i, narrow(wide(out + i, count)), count); });
    memcpy(sequence.values + at, k + s.num_kv_heads * width, size_t(width) * sizeof(bf16));
  }
}

// 64 positions of a block, of one key head. Null where no row of those at hand sees it.
struct Places {
  const bf16 *keys[BLOCK], *values[BLOCK];
};

static Places places_of(const Attention& a, const Row& row, int64_t kv_head, int64_t block, int count) {
  const Step& s = *a.step;
  const Sequence& sequence = s.sequences[row.sequence];
  Places found = {};
  for (int t = 0; t < count; t++) {
    int64_t position = block * BLOCK + t, slot = position;
    if (row.path >= 0 && position >= sequence.length) slot = s.slots[row.path + position - sequence.length];
    int64_t rows = (sequence.blocks[slot / BLOCK] * s.num_kv_heads + kv_head) * BLOCK + slot % BLOCK;
    int64_t at = a.layer * sequence.layer_stride + rows * s.head_dim;
    found.keys[t] = sequence.keys + at, found.values[t] = sequence.values + at;
  }
  return found;
}

// keys [pairs of elements, 64 positions]
static void transpose_keys(const Places& places, const Shape& shape, uint32_t* keys) {
  int pairs = shape.head_dim / 2, p = 0;
  alignas(64) static const bf16 nothing[1024] = {};
  for (; p + LANES <= pairs; p += LANES)
    for (int t = 0; t < BLOCK; t += LANES) {
      Words rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = load<Words>((places.keys[t + i] ? places.keys[t + i] : nothing) + 2 * p);
      transpose(rows);
      for (int i = 0; i < LANES; i++) store(keys + (p + i) * BLOCK + t, rows[i]);
    }
  for (; p < pairs; p++)
    for (int t = 0; t < BLOCK; t++) memcpy(keys + p * BLOCK + t, (places.keys[t] ? places.keys[t] : nothing) + 2 * p, 4);
}

// Whole vectors are read: a width that is none of them is copied.
static void pad_values(Places* places, const Shape& shape, bf16* padded) {
  if (shape.padded == shape.head_dim) return;
  for (int t = 0; t < BLOCK && places->values[t]; t++, padded += shape.padded) {
    memset(padded, 0, size_t(shape.padded) * sizeof(bf16));
    memcpy(padded, places->values[t], size_t(shape.head_dim) * sizeof(bf16));
    places->values[t] = padded;
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

// scores [64] of one query head become weights; what was summed is scaled to the new largest score.
static void soften(float* scores, int first, int last, const Shape& shape, float* acc, float* best, float* total) {
  Floats score[PIECES], top = all(*best);
  Ints index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  for (int i = 0; i < PIECES; i++, index += LANES) {
    score[i] = select((index >= first) & (index < last), load<Floats>(scores + i * LANES), all(-INFINITY));
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

// One row, all query heads of a key head, one block: `first` … `last` of its positions.
static void add_block(const Places& places, int first, int last, const Shape& shape, const RowState& row, Scratch* scratch) {
  int step = (shape.group + (shape.group + MOST - 1) / MOST - 1) / ((shape.group + MOST - 1) / MOST);
  for (int g = 0; g < shape.group; g += step) {
    int count = shape.group - g < step ? shape.group - g : step;
    const float* q = row.q + g * shape.padded;
    float *weights = scratch->weights + g * BLOCK, *acc = row.acc + g * shape.padded;
    PACELINE_FOR_HEADS(count, multiply_keys, q, scratch->keys, shape, weights)
    for (int m = 0; m < count; m++)
      soften(weights + m * BLOCK, first, last, shape, acc + m * shape.padded, row.best + g + m, row.total + (g + m) * LANES);
    PACELINE_FOR_HEADS(count, add_values, weights, places, first, last, shape, acc)
  }
}
#undef PACELINE_FOR_HEADS

static int64_t first_seen(const Attention& a, const Row& row) {
  return row.position >= a.window ? row.position - a.window + 1 : 0;
}

// The positions of a block that a row sees, counted from the block's first; false: none.
static bool seen(const Attention& a, const Row& row, int64_t block, int* first, int* last) {
  int64_t from = first_seen(a, row) - block * BLOCK, to = row.position + 1 - block * BLOCK;
  *first = from > 0 ? int(from < BLOCK ? from : BLOCK) : 0;
  *last = to < BLOCK ? int(to > 0 ? to : 0) : BLOCK;
  return *first < *last;
}

static void begin_row(const Attention& a, int64_t row, int64_t kv_head, const Shape& shape, const RowState& state) {
  const Step& s = *a.step;
  const bf16* q = a.qkv + (row * (s.num_heads + 2 * s.num_kv_heads) + kv_head * shape.group) * s.head_dim;
  for (int g = 0; g < shape.group; g++)
    turned(a, q + g * s.head_dim, a.q_norm, row, a.scale, state.q + g * shape.padded);
  memset(state.acc, 0, sizeof(float) * size_t(shape.group * shape.padded));
  memset(state.total, 0, sizeof(float) * size_t(shape.group * LANES));
  for (int g = 0; g < shape.group; g++) state.best[g] = -INFINITY;
}

static void end_row(const Attention& a, int64_t row, int64_t kv_head, const Shape& shape, const RowState& state) {
  bf16* out = a.out + (row * a.step->num_heads + kv_head * shape.group) * a.step->head_dim;
  for (int g = 0; g < shape.group; g++, out += shape.head_dim) {
    Floats total = all(sum(load<Floats>(state.total + g * LANES)));
    const float* acc = state.acc + g * shape.padded;
    in_vectors(shape.head_dim, [&](int64_t at, int count) { put(out + at, narrow(load<Floats>(acc + at) / total), count); });
  }
}

static void attend(const Attention& a, const Tile& tile, int64_t kv_head, void* memory) {
  Shape shape(*a.step);
  Scratch scratch(shape, memory);
  const Row* rows = a.step->rows + tile.first;
  int64_t committed = a.step->sequences[rows->sequence].length, from = INT64_MAX, to = 0;
  for (int64_t r = 0; r < tile.rows; r++) {
    begin_row(a, tile.first + r, kv_head, shape, scratch.rows[r]);
    if (first_seen(a, rows[r]) < from) from = first_seen(a, rows[r]);
    if (rows[r].position > to) to = rows[r].position;
  }
  for (int64_t block = from / BLOCK; block <= to / BLOCK; block++) {
    bool settled = (block + 1) * BLOCK <= committed;
    Places shared;
    bool held = false;
    for (int64_t r = 0; r < tile.rows; r++) {
      int first, last;
      if (!seen(a, rows[r], block, &first, &last)) continue;
      bool own = rows[r].path >= 0 && !settled;
      if (own || !held) {
        int64_t count = own ? last : to + 1 - block * BLOCK;
        // on a settled block every row agrees; elsewhere only those whose slots are their positions
        shared = places_of(a, rows[r], kv_head, block, int(count < BLOCK ? count : BLOCK));
        transpose_keys(shared, shape, scratch.keys);
        pad_values(&shared, shape, scratch.padded_values);
        held = !own;
      }
      add_block(shared, first, last, shape, scratch.rows[r], &scratch);
    }
  }
  for (int64_t r = 0; r < tile.rows; r++) end_row(a, tile.first + r, kv_head, shape, scratch.rows[r]);
}

const StepKernels step_kernels = {norm_rows, gated_rows, write_row, scratch_bytes, attend};

}  // namespace PACELINE_LEVEL
}  // namespace paceline
