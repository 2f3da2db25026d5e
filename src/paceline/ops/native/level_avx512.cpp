// AVX-512 with integer dot products (VPDPBUSD: unsigned weights, signed activations) and, for bf16 weights, VDPBF16PS.
// Up to 8 rows share decoded weights.
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

template <int FIRST, int COUNT>
static inline __m512i dot(__m512i sum, const __m512i* codes, const int8_t* x) {
  for (int j = FIRST; j < FIRST + COUNT; j++) {
    int32_t four;
    memcpy(&four, x + j * 4, 4);
    sum = _mm512_dpbusd_epi32(sum, codes[j], _mm512_set1_epi32(four));
  }
  return sum;
}

// What unsigned codes, `offset` too large, make too much of, off BASE. `sums`: two of 16 bits; parts that count are not 0.
static inline __m512i less(const int16_t* sums, int first, int second) {
  int32_t both;
  memcpy(&both, sums, 4);
  __m512i base = _mm512_set1_epi32(BASE_BITS), offsets = _mm512_set1_epi32((first & 0xffff) | second << 16);
  return first || second ? _mm512_dpwssd_epi32(base, offsets, _mm512_set1_epi32(both)) : base;
}

// 16 outputs of a step with one row, before the activations' scale.
template <uint32_t TYPE>
static inline __m512 part_of(const __m512i* codes, const int8_t* x, const int16_t* sums, const float* scales) {
  constexpr Format f = format_of(TYPE);
  constexpr int offset = f.bits == 8 ? 128 : f.offset;
  __m512 scale = _mm512_load_ps(scales);
  if constexpr (f.group == STEP) return scaled(dot<0, 8>(less(sums, -offset, -offset), codes, x), scale);
  __m512i second = dot<4, 4>(less(sums, 0, -offset), codes, x);
  __m512 part = scaled(dot<0, 4>(less(sums, -offset, 0), codes, x), scale);
  return _mm512_fmadd_ps(to_float(second), _mm512_load_ps(scales + UNIT), part);
}

// A chunk with M rows of one block.
template <int M, uint32_t TYPE>
static void chunk_rows(const uint8_t* unit, int steps, const Scales& s, const Codes& c, const Rounded& x, float* acc) {
  constexpr Format f = format_of(TYPE);
  for (int t = 0; t < 2; t++) {
    __m512 results[M];
    for (int m = 0; m < M; m++) results[m] = _mm512_load_ps(acc + m * UNIT + t * TILE);
    Rounded at = x;
    for (int step = 0; step < steps; step++, at = c.next(at)) {
      const uint8_t* block = unit + size_t(step / f.steps()) * f.unit_block();
      size_t index = size_t(step % f.steps() * 2 + t);
      __m512i codes[8];
      ask_ahead(unit + size_t(2 * step + t) * f.tile_share(), f.tile_share());
      decode_tile<f.bits>(block + f.low_at() + index * f.low_tile(), block + f.high_at() + index * f.high_tile(), codes);
      if constexpr (f.bits == 8)
        for (int j = 0; j < 8; j++) codes[j] = _mm512_xor_si512(codes[j], _mm512_set1_epi8(-128));
      const float* scales = s.scales[step * STEP / f.group] + t * TILE;
      __m512 least = f.mins ? _mm512_load_ps(s.mins[step] + t * TILE) : _mm512_setzero_ps();
      for (int m = 0; m < M; m++) {
        __m512 part = part_of<TYPE>(codes, at.codes + m * STEP, at.sums + m * 2, scales);
        results[m] = add_part<f.mins>(results[m], part, least, at.scale + m, at.total + m);
      }
    }
    for (int m = 0; m < M; m++) _mm512_store_ps(acc + m * UNIT + t * TILE, results[m]);
  }
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
