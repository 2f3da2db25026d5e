// The kernel in the compiler's own vectors and in loops of fixed length: included once by each level that has no
// kernel of its own, inside the level's namespace (so that the linker never mixes two instruction sets).
#include "packed.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace paceline {
namespace PACELINE_LEVEL {

#if defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;  // ROWS: activation rows that share a load of weights, as registers allow
#else
constexpr int LANES = 4, ROWS = 2;
#endif
constexpr int VECTORS = TILE / LANES;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

// A tile in float32: by pair of inner elements, then 16 rows' even elements and their odd ones.
struct Tile {
  alignas(64) float pairs[16][2][TILE];
};

static inline Floats floats(const float* from) {
  Floats out;
  memcpy(&out, from, sizeof out);
  return out;
}

static inline void put(float* to, Floats value) { memcpy(to, &value, sizeof value); }

static inline Ints ints(const uint8_t* from) {
  Ints out;
  memcpy(&out, from, sizeof out);
  return out;
}

// Pair r of some rows, whose codes stand in words of 32 bits: the even one from some bit on, the odd one 16 bits beyond.
template <int BITS>
static inline void decode_pairs(const uint8_t* low, const uint8_t* high, int r, int offset, float* even, float* odd) {
  if constexpr (BITS == 16) {
    Ints words = ints(low + r * 64), first = words << 16, second = words & int(0xffff0000u);
    memcpy(even, &first, sizeof first);
    memcpy(odd, &second, sizeof second);
  } else if constexpr (BITS == 8) {
    Ints words = ints(low + r / 2 * 64) << (16 - r % 2 * 16);  // the pair's two bytes on top
    put(even, __builtin_convertvector(words << 8 >> 24, Floats));
    put(odd, __builtin_convertvector(words >> 24, Floats));
  } else {
    Ints words = ints(low + r / 4 * 64) >> r % 4 * 4, first = words & 15, second = words >> 16 & 15;
    if constexpr (BITS > 4) {
      constexpr int mask = BITS == 5 ? 16 : 48;
      int shift = BITS == 5 ? r : r % 8 * 2;
      Ints upper = ints(BITS == 5 ? high : high + r / 8 * 64);
      first |= (upper >> shift << 4) & mask;
      second |= (upper >> (16 + shift) << 4) & mask;
    }
    put(even, __builtin_convertvector(first - offset, Floats));
    put(odd, __builtin_convertvector(second - offset, Floats));
  }
}

template <int BITS>
static void decode_tile(const uint8_t* low, const uint8_t* high, int offset, Tile* tile) {
  for (int r = 0; r < 16; r++)
    for (int h = 0; h < TILE; h += LANES)  // 4 bytes a row
      decode_pairs<BITS>(low + h * 4, high + h * 4, r, offset, tile->pairs[r][0] + h, tile->pairs[r][1] + h);
}

static void halves(const uint8_t* from, float* out) {
#if defined(__F16C__)
  for (int o = 0; o < UNIT; o += 8)
    _mm256_storeu_ps(out + o, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + o * 2))));
#else
  uint16_t words[UNIT];
  memcpy(words, from, sizeof words);
  for (int o = 0; o < UNIT; o++) out[o] = half_to_float(words[o]);
#endif
}

template <uint32_t TYPE>
static void decode_scales(const uint8_t* unit, Chunk* c) {  // of one block
  constexpr Format f = format_of(TYPE);
  float d[UNIT];
  halves(unit, d);
  if (f.block == STEP) {
    memcpy(c->scales[0], d, sizeof d);
    if (!f.mins) return;
    halves(unit + 64, c->mins[0]);
    for (int o = 0; o < UNIT; o++) c->mins[0][o] = -c->mins[0][o];
  } else if (TYPE == Q6_K) {
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

// sums [M rows, 16] += `count` pairs of weights times pairs of activations, in the pairs' order
template <int M>
static inline void add_pairs(const float (*pairs)[2][TILE], int count, const bf16* x, ptrdiff_t stride,
                             Floats (*sums)[VECTORS]) {
  for (int p = 0; p < count; p++)
    for (int parity = 0; parity < 2; parity++) {
      Floats weights[VECTORS];
      for (int h = 0; h < VECTORS; h++) weights[h] = floats(pairs[p][parity] + h * LANES);
      for (int m = 0; m < M; m++) {
        float value = bf16_to_float(x[m * stride + 2 * p + parity]);
        for (int h = 0; h < VECTORS; h++) sums[m][h] += weights[h] * value;
      }
    }
}

// One block of the inner dimension, one tile of it in `tile`: acc [M rows, 32] += …
template <int M, uint32_t TYPE>
static inline void tile_rows(const Tile& tile, const float* scales, const float* mins, const bf16* x, ptrdiff_t stride,
                             const float* totals, ptrdiff_t totals_stride, float* acc) {
  constexpr Format f = format_of(TYPE);
  for (int part = 0; part < STEP / f.group; part++) {
    Floats sums[M][VECTORS];
    for (int m = 0; m < M; m++)
      for (int h = 0; h < VECTORS; h++) sums[m][h] = TYPE == BF16 ? floats(acc + m * UNIT + h * LANES) : Floats{};
    add_pairs<M>(tile.pairs + part * f.group / 2, f.group / 2, x + part * f.group, stride, sums);
    for (int m = 0; m < M; m++)
      for (int h = 0; h < VECTORS; h++) {
        float* to = acc + m * UNIT + h * LANES;
        if (TYPE == BF16) {
          put(to, sums[m][h]);
          continue;
        }
        Floats sum = floats(to) + sums[m][h] * floats(scales + part * UNIT + h * LANES);
        if (f.mins) sum -= floats(mins + h * LANES) * totals[m * totals_stride];
        put(to, sum);
      }
  }
}

template <uint32_t TYPE>
static void typed(const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  constexpr Format f = format_of(TYPE);
  memset(acc, 0, sizeof(float) * UNIT * size_t(a.rows));
  Tile tile;
  ptrdiff_t steps = inner / STEP;
  for (int k = 0; k < inner; k += f.block, unit += f.unit_block()) {
    if (TYPE != BF16) decode_scales<TYPE>(unit, c);
    for (int s = 0; s < f.steps(); s++)
      for (int t = 0; t < 2; t++) {
        size_t index = size_t(s * 2 + t);
        const uint8_t *low = unit + f.low_at() + index * f.low_tile(), *high = unit + f.high_at() + index * f.high_tile();
        decode_tile<f.bits>(low, high, f.offset, &tile);
        const float *scales = c->scales[s * STEP / f.group] + t * TILE, *mins = c->mins[s] + t * TILE;
        const bf16* x = a.x + k + s * STEP;
        for (int m = 0, count; m < a.rows; m += count) {
          count = m + ROWS <= a.rows ? ROWS : 1;
          const bf16* from = x + m * a.stride;
          const float* totals = f.mins ? a.sums + m * steps + k / STEP + s : nullptr;
          float* to = acc + m * UNIT + t * TILE;
          if (count == ROWS) tile_rows<ROWS, TYPE>(tile, scales, mins, from, a.stride, totals, steps, to);
          else tile_rows<1, TYPE>(tile, scales, mins, from, a.stride, totals, steps, to);
        }
      }
  }
}

void compute_unit(uint32_t type, const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  PACELINE_FOR_TYPE(type, typed, unit, inner, a, c, acc)
  if (type == BF16) typed<BF16>(unit, inner, a, c, acc);
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
