// The kernel in plain loops of fixed length, for the compiler to vectorise: included once by each level that has no
// kernel of its own, inside the level's namespace (so that the linker never mixes two instruction sets).
#include "packed.h"

namespace paceline {
namespace PACELINE_LEVEL {

static void decode_tile(const Format& f, const uint8_t* low, const uint8_t* high, bf16* out) {
  for (int r = 0; r < 16; r++) {
    int16_t codes[32];
    if (f.bits == 8) {
      for (int i = 0; i < 32; i++) codes[i] = int8_t(low[r / 2 * 64 + i / 2 * 4 + r % 2 * 2 + i % 2]);
    } else {
      uint16_t words[32];
      memcpy(words, low + r / 4 * 64, 64);
      for (int i = 0; i < 32; i++) codes[i] = int16_t(words[i] >> r % 4 * 4 & 15);
      if (f.bits > 4) {
        memcpy(words, f.bits == 5 ? high : high + r / 8 * 64, 64);
        int shift = f.bits == 5 ? r : r % 8 * 2, mask = f.bits == 5 ? 1 : 3;
        for (int i = 0; i < 32; i++) codes[i] = int16_t(codes[i] | (words[i] >> shift & mask) << 4);
      }
      for (int i = 0; i < 32; i++) codes[i] = int16_t(codes[i] - f.offset);
    }
    float values[32];
    uint32_t bits[32];
    for (int i = 0; i < 32; i++) values[i] = float(codes[i]);
    memcpy(bits, values, sizeof bits);
    for (int i = 0; i < 32; i++) out[r * 32 + i] = bf16(bits[i] >> 16);  // exact: a code has at most 8 bits
  }
}

static void halves(const uint8_t* from, float* out) {
  uint16_t words[UNIT];
  memcpy(words, from, sizeof words);
  for (int o = 0; o < UNIT; o++) out[o] = half_to_float(words[o]);
}

static void decode_scales(uint32_t type, const Format& f, const uint8_t* unit, int step, Chunk* c) {
  float d[UNIT];
  halves(unit, d);
  if (f.block == STEP) {
    memcpy(c->scales[step], d, sizeof d);
    if (!f.mins) return;
    halves(unit + 64, c->mins[step]);
    for (int o = 0; o < UNIT; o++) c->mins[step][o] = -c->mins[step][o];
  } else if (type == Q6_K) {
    for (int g = 0; g < 16; g++)
      for (int o = 0; o < UNIT; o++) c->scales[g][o] = d[o] * float(int8_t(unit[64 + g * UNIT + o]));
  } else {
    float least[UNIT];
    uint32_t words[3][UNIT];
    halves(unit + 64, least);
    memcpy(words, unit + 128, sizeof words);
    for (int g = 0; g < 8; g++)
      for (int o = 0; o < UNIT; o++) {
        int scale, minimum;
        scale_and_min(words[0][o], words[1][o], words[2][o], g, &scale, &minimum);
        c->scales[g][o] = d[o] * float(scale);
        c->mins[g][o] = least[o] * float(minimum);
      }
  }
}

// `steps` tiles high, beginning with a block.
static void decode(uint32_t type, const Format& f, const uint8_t* unit, int steps, Chunk* c) {
  for (int first = 0; first < steps; first += f.steps(), unit += f.unit_block()) {
    decode_scales(type, f, unit, first, c);
    for (int s = 0; s < f.steps(); s++)
      for (int t = 0; t < 2; t++) {
        size_t index = size_t(s * 2 + t);
        decode_tile(f, unit + f.low_at() + index * f.low_tile(), unit + f.high_at() + index * f.high_tile(),
                    c->weights[first + s][t]);
      }
  }
}

// sums [2][16] += pairs of weights times pairs of activations, in the pairs' order
static inline void add_pairs(const bf16* weights, const bf16* x, int pairs, float* sums) {
  for (int p = 0; p < pairs; p++) {
    float even = bf16_to_float(x[2 * p]), odd = bf16_to_float(x[2 * p + 1]);
    uint32_t words[TILE], bits[TILE];
    float w[TILE];
    memcpy(words, weights + p * 32, sizeof words);
    for (int o = 0; o < TILE; o++) bits[o] = words[o] << 16;
    memcpy(w, bits, sizeof w);
    for (int o = 0; o < TILE; o++) sums[o] += w[o] * even;
    for (int o = 0; o < TILE; o++) bits[o] = words[o] & 0xffff0000u;
    memcpy(w, bits, sizeof w);
    for (int o = 0; o < TILE; o++) sums[o] += w[o] * odd;
  }
}

static void dense(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  const bf16* weights = reinterpret_cast<const bf16*>(unit);
  for (int k = 0; k < inner; k += STEP, weights += 1024)
    for (int m = 0; m < a.rows; m++)
      for (int t = 0; t < 2; t++) add_pairs(weights + t * 512, a.x + m * a.stride + k, 16, acc + m * UNIT + t * TILE);
}

void compute_unit(uint32_t type, const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  Format f = format_of(type);
  memset(acc, 0, sizeof(float) * UNIT * size_t(a.rows));
  if (type == BF16) return dense(unit, inner, a, acc);
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP, groups = steps * STEP / f.group;
    decode(type, f, unit, steps, c);
    unit += size_t(steps / f.steps()) * f.unit_block();
    for (int m = 0; m < a.rows; m++)
      for (int g = 0; g < groups; g++) {
        int step = g * f.group / STEP, pair = g * f.group % STEP / 2;
        float sums[UNIT] = {};
        for (int t = 0; t < 2; t++)
          add_pairs(c->weights[step][t] + pair * 32, a.x + m * a.stride + k + g * f.group, f.group / 2, sums + t * TILE);
        for (int o = 0; o < UNIT; o++) acc[m * UNIT + o] += sums[o] * c->scales[g][o];
        if (!f.mins) continue;
        float sum = a.sums[ptrdiff_t(m) * (inner / STEP) + k / STEP + step];
        for (int o = 0; o < UNIT; o++) acc[m * UNIT + o] -= sum * c->mins[step][o];
      }
  }
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
