// What the levels without matrix units or AVX-512 share: scales of a block, and the product with bf16 weights in the
// compiler's own vectors. Included once by each, inside its namespace.
#include "level.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace paceline {
namespace PACELINE_LEVEL {

// One row of activations to 8 bits, to nearest, ties to even.
static void round_row(const bf16* x, int row, int inner, const Codes& codes) {
  constexpr float shift = 0x1.8p23f;  // shift + v has v, rounded, in its low bits
  Rounded to = codes.at(row, 0);
  for (int group = 0; group < inner / STEP; group++, x += STEP, to = codes.next(to)) {
    int top = 0, sums[2] = {0, 0};
    for (int k = 0; k < STEP; k++) top = (x[k] & 0x7fff) > top ? x[k] & 0x7fff : top;
    Rounding r(bf16_to_float(bf16(top)));
    for (int k = 0; k < STEP; k++) {
      float shifted = bf16_to_float(x[k]) * r.factor + shift;
      int32_t bits;
      memcpy(&bits, &shifted, 4);
      to.codes[k] = int8_t(bits);
      sums[k / 16] += int8_t(bits);
    }
    put_group(to, r, sums[0], sums[1]);
  }
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

// Of one block, which is step `step` of the chunk or all of it.
template <uint32_t TYPE>
static void decode_scales(const uint8_t* unit, int step, Scales* s) {
  constexpr Format f = format_of(TYPE);
  float d[UNIT];
  halves(unit, d);
  if (f.block == STEP) {
    memcpy(s->scales[step], d, sizeof d);
    if (!f.mins) return;
    halves(unit + 64, s->mins[step]);
    for (int o = 0; o < UNIT; o++) s->mins[step][o] = -s->mins[step][o];
  } else if (TYPE == Q6_K) {
    for (int g = 0; g < 16; g++)
      for (int o = 0; o < UNIT; o++) s->scales[g][o] = d[o] * float(int8_t(unit[64 + g * UNIT + o]));
  } else {
    float least[UNIT];
    uint32_t words[3][UNIT];
    halves(unit + 64, least);
    memcpy(words, unit + 128, sizeof words);
    for (int g = 0; g < 8; g++)
      for (int o = 0; o < UNIT; o++) {
        int scale, minimum;
        scale_and_min(words[0][o], words[1][o], words[2][o], g, &scale, &minimum);
        s->scales[g][o] = d[o] * float(scale);
        s->mins[g][o] = least[o] * float(minimum);
      }
  }
}

#if defined(__AVX2__)
constexpr int LANES = 8, ROWS = 4;  // ROWS: activation rows that share a load of weights, as registers allow
#else
constexpr int LANES = 4, ROWS = 2;
#endif
constexpr int VECTORS = TILE / LANES;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline Floats multiply_add(Floats a, float b, Floats c) {
#if defined(__AVX2__)
  return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c);
#else
  return a * b + c;
#endif
}

// M rows with 16 outputs, in the order of the pairs
template <int M>
static void dense_rows(const uint8_t* tile, int inner, const bf16* x, ptrdiff_t stride, float* acc) {
  Floats sums[M][VECTORS] = {};
  for (int k = 0; k < inner; k += 2) {
    Floats even[VECTORS], odd[VECTORS];
    for (int h = 0; h < VECTORS; h++) {
      Ints words, first, second;
      memcpy(&words, tile + k / STEP * 2048 + k % STEP * 32 + h * LANES * 4, sizeof words);
      first = words << 16, second = words & int(0xffff0000u);
      memcpy(&even[h], &first, sizeof first);
      memcpy(&odd[h], &second, sizeof second);
    }
    for (int m = 0; m < M; m++)
      for (int h = 0; h < VECTORS; h++) {
        sums[m][h] = multiply_add(even[h], bf16_to_float(x[m * stride + k]), sums[m][h]);
        sums[m][h] = multiply_add(odd[h], bf16_to_float(x[m * stride + k + 1]), sums[m][h]);
      }
  }
  for (int m = 0; m < M; m++)
    for (int h = 0; h < VECTORS; h++) memcpy(acc + m * UNIT + h * LANES, &sums[m][h], sizeof(Floats));
}

static void dense(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  for (int t = 0; t < 2; t++)
    for (int m = 0, count; m < a.rows; m += count) {
      count = m + ROWS <= a.rows ? ROWS : 1;
      const bf16* x = a.x + m * a.stride;
      float* to = acc + m * UNIT + t * TILE;
      if (count == ROWS) dense_rows<ROWS>(unit + t * 1024, inner, x, a.stride, to);
      else dense_rows<1>(unit + t * 1024, inner, x, a.stride, to);
    }
}

// Chunk by chunk: decoded scales, and what `add` makes of the chunk's blocks. add(unit, steps, first group, scales).
template <uint32_t TYPE, typename Add>
static void by_chunks(const uint8_t* unit, int inner, const Add& add) {
  constexpr Format f = format_of(TYPE);
  Scales s;
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP, blocks = steps / f.steps();
    for (int b = 0; b < blocks; b++) decode_scales<TYPE>(unit + size_t(b) * f.unit_block(), b, &s);
    add(unit, steps, k / STEP, s);
    unit += size_t(blocks) * f.unit_block();
  }
}

// Where a chunk's step finds its codes.
struct Tile {
  const uint8_t *low, *high;
};

template <uint32_t TYPE>
static Tile tile_of(const uint8_t* unit, int step, int tile) {
  constexpr Format f = format_of(TYPE);
  unit += size_t(step / f.steps()) * f.unit_block();
  size_t index = size_t(step % f.steps() * 2 + tile);
  return {unit + f.low_at() + index * f.low_tile(), unit + f.high_at() + index * f.high_tile()};
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
