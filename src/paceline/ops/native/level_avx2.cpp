// AVX2 with FMA and F16C: VPMADDUBSW, whose 16-bit sums of two products cannot saturate here (2 · 63 · 127 and, of
// 8-bit codes by their sizes, 2 · 128 · 127 at most).
#define PACELINE_LEVEL avx2
#include "plain.h"

namespace paceline {
namespace avx2 {

static inline __m256i bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

template <int SHIFT>
static inline __m256i bits_at(__m256i x, int mask) {  // right, or left where negative
  if constexpr (SHIFT > 0) x = _mm256_srli_epi16(x, SHIFT);
  if constexpr (SHIFT < 0) x = _mm256_slli_epi16(x, -SHIFT);
  return _mm256_and_si256(x, _mm256_set1_epi8(char(mask)));
}

// Vector J of a tile, 8 rows of it: codes before their offset is taken off.
template <int J, int BITS>
static inline __m256i decode(const uint8_t* low, const uint8_t* high) {
  if constexpr (BITS == 8) return bytes(low + J * 64);
  __m256i codes = bits_at<J / 4 * 4>(bytes(low + J % 4 * 64), 15);
  if constexpr (BITS == 5) codes = _mm256_or_si256(codes, bits_at<J - 4>(bytes(high), 16));
  if constexpr (BITS == 6) codes = _mm256_or_si256(codes, bits_at<J % 4 * 2 - 4>(bytes(high + J / 4 * 64), 48));
  return codes;
}

template <int BITS>
static inline __m256i dot(__m256i sum, __m256i codes, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i activations = _mm256_set1_epi32(four), pairs;
  if constexpr (BITS == 8) pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(activations, codes));
  else pairs = _mm256_maddubs_epi16(codes, activations);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// 8 outputs of a step with one row.
template <uint32_t TYPE>
static inline void add_row(const __m256i* codes, const Rounded& x, const float* scales, const float* mins, float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int parts = STEP / f.group;
  __m256 part = _mm256_setzero_ps();
  for (int p = 0; p < parts; p++) {
    int all = parts == 2 ? x.sums[p] : x.sums[0] + x.sums[1];
    __m256i sum = _mm256_set1_epi32(-f.offset * all);
    for (int j = p * f.group / 4; j < (p + 1) * f.group / 4; j++) sum = dot<f.bits>(sum, codes[j], x.codes + j * 4);
    __m256 scale = _mm256_load_ps(scales + p * UNIT), value = _mm256_cvtepi32_ps(sum);
    part = p ? _mm256_fmadd_ps(value, scale, part) : _mm256_mul_ps(value, scale);
  }
  __m256 result = _mm256_fmadd_ps(part, _mm256_broadcast_ss(x.scale), _mm256_load_ps(acc));
  if (f.mins) result = _mm256_fnmadd_ps(_mm256_load_ps(mins), _mm256_broadcast_ss(x.total), result);
  _mm256_store_ps(acc, result);
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr Format f = format_of(TYPE);
  by_chunks<TYPE>(unit, inner, [&](const uint8_t* blocks, int steps, int group, const Scales& s) {
    for (int step = 0; step < steps; step++)
      for (int o = 0; o < UNIT; o += 8) {
        Tile tile = tile_of<TYPE>(blocks, step, o / TILE);
        const uint8_t *low = tile.low + o % TILE * 4, *high = tile.high + o % TILE * 4;
        const __m256i codes[8] = {decode<0, f.bits>(low, high), decode<1, f.bits>(low, high),
                                  decode<2, f.bits>(low, high), decode<3, f.bits>(low, high),
                                  decode<4, f.bits>(low, high), decode<5, f.bits>(low, high),
                                  decode<6, f.bits>(low, high), decode<7, f.bits>(low, high)};
        const float *scales = s.scales[step * STEP / f.group] + o, *mins = s.mins[step] + o;
        for (int m = 0; m < a.rows; m++)
          add_row<TYPE>(codes, a.rounded.at(m, group + step), scales, mins, acc + m * UNIT + o);
      }
  });
}

const Operators operators = {round_row, product};

}  // namespace avx2
}  // namespace paceline
