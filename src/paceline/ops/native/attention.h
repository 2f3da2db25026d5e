// Attention of rows over a block cache: every row walks its own keys in position order, 64 aligned positions at a time.
//
// A block's keys are transposed once for all rows that see the same ones; scores then stand in the lanes. Which keys a
// row sees, and so the order of its sums, follows from its position and its path alone. What it may not see is neither
// multiplied nor added, be it NaN.
#pragma once
#if defined(__AMX_BF16__)
#include "products_amx.h"
#else
#include "products.h"
#endif

namespace paceline {
namespace PACELINE_LEVEL {

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

// keys [pairs of elements, 64 positions], zeros beyond the head's width
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
  memset(keys + p * BLOCK, 0, size_t(shape.padded / 2 - p) * BLOCK * 4);
  for (; p < pairs; p++)
    for (int t = 0; t < BLOCK; t++) memcpy(keys + p * BLOCK + t, (places.keys[t] ? places.keys[t] : nothing) + 2 * p, 4);
}

static int64_t first_seen(const Attention& a, const Row& row) {
  return row.position >= a.window ? row.position - a.window + 1 : 0;
}

static Seen seen_of(const Attention& a, const Row& row, int64_t block) {
  int64_t from = first_seen(a, row) - block * BLOCK, to = row.position + 1 - block * BLOCK;
  return {from > 0 ? int(from < BLOCK ? from : BLOCK) : 0, to < BLOCK ? int(to > 0 ? to : 0) : BLOCK};
}

static void begin_row(const Attention& a, int64_t row, int64_t kv_head, const Shape& shape, int query, Scratch* scratch) {
  const Step& s = *a.step;
  const bf16* q = a.qkv + (row * (s.num_heads + 2 * s.num_kv_heads) + kv_head * shape.group) * s.head_dim;
  size_t floats = size_t(shape.group) * sizeof(float);
  memset(scratch->q + query * shape.padded, 0, floats * size_t(shape.padded));
  memset(scratch->acc + query * shape.padded, 0, floats * size_t(shape.padded));
  memset(scratch->total + query * LANES, 0, floats * LANES);
  for (int g = 0; g < shape.group; g++, query++) {
    turned(a, q + g * s.head_dim, a.q_norm, row, a.scale, scratch->q + query * shape.padded);
    scratch->best[query] = -INFINITY;
  }
}

static void end_row(const Attention& a, int64_t row, int64_t kv_head, const Shape& shape, int query, const Scratch& scratch) {
  bf16* out = a.out + (row * a.step->num_heads + kv_head * shape.group) * a.step->head_dim;
  for (int g = 0; g < shape.group; g++, query++, out += shape.head_dim) {
    Floats total = all(sum(load<Floats>(scratch.total + query * LANES)));
    const float* acc = scratch.acc + query * shape.padded;
    in_vectors(shape.head_dim, [&](int64_t at, int count) { put(out + at, narrow(load<Floats>(acc + at) / total), count); });
  }
}

static void attend(const Attention& a, const Tile& tile, int64_t kv_head, void* memory) {
  Shape shape(*a.step);
  Scratch scratch(shape, memory);
  const Row* rows = a.step->rows + tile.first;
  int count = int(tile.rows);
  int64_t committed = a.step->sequences[rows->sequence].length, from = INT64_MAX, to = 0;
  for (int r = 0; r < count; r++) {
    begin_row(a, tile.first + r, kv_head, shape, r * shape.group, &scratch);
    if (first_seen(a, rows[r]) < from) from = first_seen(a, rows[r]);
    if (rows[r].position > to) to = rows[r].position;
  }
  begin_products(shape, count * shape.group, &scratch);
  for (int64_t block = from / BLOCK; block <= to / BLOCK; block++) {
    bool settled = (block + 1) * BLOCK <= committed, held = false;
    Places places;
    Seen seen[TILE_ROWS];
    for (int r = 0; r < count; r++) seen[r] = seen_of(a, rows[r], block);
    auto own = [&](int r) { return rows[r].path >= 0 && !settled; };
    auto sees = [&](int r) { return seen[r].first < seen[r].last; };
    for (int r = 0, run; r < count; r += run) {
      run = 1;
      if (!sees(r)) continue;
      if (own(r) || !held) {
        // on a settled block every row agrees; elsewhere only those whose slots are their positions
        int64_t last = own(r) ? seen[r].last : to + 1 - block * BLOCK;
        places = places_of(a, rows[r], kv_head, block, int(last < BLOCK ? last : BLOCK));
        transpose_keys(places, shape, scratch.keys);
        prepare_values(&places, shape, &scratch);
        held = !own(r);
      }
      if (!own(r))
        while (r + run < count && !own(r + run) && sees(r + run)) run++;
      add_block(places, seen, r, run, shape, &scratch);
    }
  }
  end_products();
  for (int r = 0; r < count; r++) end_row(a, tile.first + r, kv_head, shape, r * shape.group, scratch);
}

const StepKernels step_kernels = {norm_rows, gated_rows, maxima_of, write_row, scratch_bytes, attend};

}  // namespace PACELINE_LEVEL
}  // namespace paceline
