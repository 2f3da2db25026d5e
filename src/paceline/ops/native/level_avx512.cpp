// AVX-512 with bf16 dot products (VDPBF16PS), VBMI2 not needed. Up to 8 rows share a decoded weight.
#define PACELINE_LEVEL avx512
#include "decode512.h"

namespace paceline {
namespace avx512 {

constexpr int ROWS = 8;

static inline __m512bh pair_of(const bf16* x) {  // two activations in every lane
  int32_t both;
  memcpy(&both, x, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

// PAIRS rows of two tiles' weights, `second` elements apart
template <int M, int PAIRS>
static inline void add_pairs(const bf16* weights, int second, const bf16* x, ptrdiff_t stride, __m512 (*sums)[2]) {
  for (int p = 0; p < PAIRS; p++) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(weights + p * 32);
    __m512bh w1 = (__m512bh)_mm512_loadu_si512(weights + second + p * 32);
    for (int m = 0; m < M; m++) {
      __m512bh pair = pair_of(x + m * stride + 2 * p);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], w0, pair);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], w1, pair);
    }
  }
}

template <int M>
static void dense_rows(const bf16* weights, int inner, const bf16* x, ptrdiff_t stride, float* acc) {
  __m512 sums[M][2];
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (int k = 0; k < inner; k += STEP, weights += 1024) add_pairs<M, 16>(weights, 512, x + k, stride, sums);
  for (int m = 0; m < M; m++)
    for (int t = 0; t < 2; t++) _mm512_storeu_ps(acc + m * UNIT + t * TILE, sums[m][t]);
}

template <int M, uint32_t TYPE>
static void chunk_rows(const Chunk* c, int groups, const bf16* x, ptrdiff_t stride, const float* totals,
                       ptrdiff_t totals_stride, float* acc) {
  constexpr Format f = format_of(TYPE);
  for (int g = 0; g < groups; g++) {
    int step = g * f.group / STEP;
    __m512 sums[M][2];
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    add_pairs<M, f.group / 2>(c->weights[step][0] + g * f.group % STEP * TILE, TILE * STEP, x + g * f.group, stride,
                              sums);
    for (int m = 0; m < M; m++)
      for (int t = 0; t < 2; t++) {
        float* to = acc + m * UNIT + t * TILE;
        __m512 sum = _mm512_fmadd_ps(sums[m][t], _mm512_load_ps(c->scales[g] + t * TILE), _mm512_loadu_ps(to));
        if constexpr (f.mins)
          sum = _mm512_fnmadd_ps(_mm512_set1_ps(totals[m * totals_stride + step]),
                                 _mm512_load_ps(c->mins[step] + t * TILE), sum);
        _mm512_storeu_ps(to, sum);
      }
  }
}

// Calls rows<M, …>(…) with M = `count` of 1 … 8.
#define PACELINE_FOR_ROWS(count, rows, ...)                  \
  switch (count) {                                           \
    case 1: rows(1)(__VA_ARGS__); break;                     \
    case 2: rows(2)(__VA_ARGS__); break;                     \
    case 3: rows(3)(__VA_ARGS__); break;                     \
    case 4: rows(4)(__VA_ARGS__); break;                     \
    case 5: rows(5)(__VA_ARGS__); break;                     \
    case 6: rows(6)(__VA_ARGS__); break;                     \
    case 7: rows(7)(__VA_ARGS__); break;                     \
    default: rows(8)(__VA_ARGS__);                           \
  }

template <uint32_t TYPE>
static void typed(const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  constexpr Format f = format_of(TYPE);
  const Tables tables(f);
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP, groups = steps * STEP / f.group;
    decode<TYPE>(unit, steps, tables, c);
    unit += size_t(steps / f.steps()) * f.unit_block();
    for (int m = 0; m < a.rows; m += ROWS) {
      const float* totals = f.mins ? a.sums + ptrdiff_t(m) * (inner / STEP) + k / STEP : nullptr;
#define PACELINE_ROWS(M) chunk_rows<M, TYPE>
      PACELINE_FOR_ROWS(a.rows - m, PACELINE_ROWS, c, groups, a.x + m * a.stride + k, a.stride, totals, inner / STEP,
                        acc + m * UNIT)
#undef PACELINE_ROWS
    }
  }
}

void compute_unit(uint32_t type, const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  if (type == BF16) {
    for (int m = 0; m < a.rows; m += ROWS) {
#define PACELINE_ROWS(M) dense_rows<M>
      PACELINE_FOR_ROWS(a.rows - m, PACELINE_ROWS, reinterpret_cast<const bf16*>(unit), inner, a.x + m * a.stride,
                        a.stride, acc + m * UNIT)
#undef PACELINE_ROWS
    }
    return;
  }
  memset(acc, 0, sizeof(float) * UNIT * size_t(a.rows));
  PACELINE_FOR_TYPE(type, typed, unit, inner, a, c, acc)
}

}  // namespace avx512
}  // namespace paceline
