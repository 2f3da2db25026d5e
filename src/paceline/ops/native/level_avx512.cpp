// AVX-512 with integer dot products (VPDPBUSD: unsigned weights, signed activations) and, for bf16 weights, VDPBF16PS.
// Up to 8 rows share decoded weights.
#define PACELINE_LEVEL avx512
#include "decode512.h"

namespace paceline {
namespace avx512 {

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

// Where dots begin: BASE, and off it what unsigned codes, `first` and `second` too large in the halves of a step, make too
// much.
static inline __m512i begin(const int16_t* sums, int first, int second) {
  int32_t both;
  memcpy(&both, sums, 4);
  __m512i base = _mm512_set1_epi32(BASE_BITS), offsets = _mm512_set1_epi32((-first & 0xffff) | -second * 0x10000);
  return first || second ? _mm512_dpwssd_epi32(base, offsets, _mm512_set1_epi32(both)) : base;
}

// Half of a step with M rows: a load of activations serves both tiles, since loads are what there is most of.
template <int M, int HALF, uint32_t TYPE>
static inline void add_dots(const uint8_t* low, const uint8_t* high, const int8_t* x, __m512i (*dots)[2]) {
  constexpr Format f = format_of(TYPE);
  constexpr int BITS = f.bits;
  __m512i codes[2][4];
  for (int t = 0; t < 2; t++, low += f.low_tile(), high += f.high_tile()) {
    codes[t][0] = decode<4 * HALF, BITS>(low, high), codes[t][1] = decode<4 * HALF + 1, BITS>(low, high);
    codes[t][2] = decode<4 * HALF + 2, BITS>(low, high), codes[t][3] = decode<4 * HALF + 3, BITS>(low, high);
    if constexpr (BITS == 8)
      for (int j = 0; j < 4; j++) codes[t][j] = _mm512_xor_si512(codes[t][j], _mm512_set1_epi8(-128));
  }
  for (int j = 0; j < 4; j++)
    for (int m = 0; m < M; m++) {
      int32_t four;
      memcpy(&four, x + m * STEP + 16 * HALF + 4 * j, 4);
      __m512i activations = _mm512_set1_epi32(four);
      dots[m][0] = _mm512_dpbusd_epi32(dots[m][0], codes[0][j], activations);
      dots[m][1] = _mm512_dpbusd_epi32(dots[m][1], codes[1][j], activations);
    }
}

// A chunk with M rows of one block.
template <int M, uint32_t TYPE>
static void chunk_rows(const uint8_t* unit, int steps, const Scales& s, const Codes& c, const Rounded& x, float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int offset = f.bits == 8 ? 128 : f.offset, parts = STEP / f.group;
  __m512 results[M][2];
  for (int m = 0; m < M; m++)
    for (int t = 0; t < 2; t++) results[m][t] = _mm512_load_ps(acc + m * UNIT + t * TILE);
  Rounded at = x;
  for (int step = 0; step < steps; step++, at = c.next(at)) {
    const uint8_t* block = unit + size_t(step / f.steps()) * f.unit_block();
    size_t index = size_t(step % f.steps() * 2);
    const uint8_t *low = block + f.low_at() + index * f.low_tile(), *high = block + f.high_at() + index * f.high_tile();
    const float *scales = s.scales[step * parts], *mins = s.mins[step];
    const uint8_t* share = unit + size_t(2 * step) * f.tile_share();
    __m512i dots[M][2];
    __m512 part[M][2];
    ask_ahead(share, f.tile_share());
    for (int m = 0; m < M; m++) dots[m][0] = dots[m][1] = begin(at.sums + m * 2, offset, parts == 2 ? 0 : offset);
    add_dots<M, 0, TYPE>(low, high, at.codes, dots);
    if constexpr (parts == 2)
      for (int m = 0; m < M; m++) {
        for (int t = 0; t < 2; t++) part[m][t] = scaled(dots[m][t], _mm512_load_ps(scales + t * TILE));
        dots[m][0] = dots[m][1] = begin(at.sums + m * 2, 0, offset);
      }
    ask_ahead(share + f.tile_share(), f.tile_share());
    add_dots<M, 1, TYPE>(low, high, at.codes, dots);
    for (int m = 0; m < M; m++)
      for (int t = 0; t < 2; t++) {
        __m512 scale = _mm512_load_ps(scales + (parts - 1) * UNIT + t * TILE);
        __m512 least = f.mins ? _mm512_load_ps(mins + t * TILE) : _mm512_setzero_ps();
        part[m][t] = parts == 2 ? _mm512_fmadd_ps(to_float(dots[m][t]), scale, part[m][t]) : scaled(dots[m][t], scale);
        results[m][t] = add_part<f.mins>(results[m][t], part[m][t], least, at.scale + m, at.total + m);
      }
  }
  for (int m = 0; m < M; m++)
    for (int t = 0; t < 2; t++) _mm512_store_ps(acc + m * UNIT + t * TILE, results[m][t]);
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr Format f = format_of(TYPE);
  Scales s;
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP;
    decode_scales<TYPE>(unit, steps, &s);
    for (int m = 0; m < a.rows; m += ROWS) {
#define PACELINE_ROWS(M) chunk_rows<M, TYPE>
      PACELINE_FOR_ROWS(a.rows - m, PACELINE_ROWS, unit, steps, s, a.rounded, a.rounded.at(m, k / STEP),
                        acc + m * UNIT)
#undef PACELINE_ROWS
    }
    unit += size_t(steps / f.steps()) * f.unit_block();
  }
}

static void dense(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  for (int m = 0; m < a.rows; m += ROWS) {
#define PACELINE_ROWS(M) dense_rows<M>
    PACELINE_FOR_ROWS(a.rows - m, PACELINE_ROWS, reinterpret_cast<const bf16*>(unit), inner, a.x + m * a.stride,
                      a.stride, acc + m * UNIT)
#undef PACELINE_ROWS
  }
}

const Operators operators = {round_row, product};

}  // namespace avx512
}  // namespace paceline
