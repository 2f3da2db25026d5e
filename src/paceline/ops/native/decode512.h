// Decoding a chunk with AVX-512, shared by the two levels that have it: codes become exact bf16 integers by table
// look-up, 32 at a time. Included inside a level's namespace.
#include <immintrin.h>

#include "packed.h"

namespace paceline {
namespace PACELINE_LEVEL {

// bf16 of code − offset, for all codes of 5 bits (4: the table holds its 16 entries twice)
static inline __m512i table_of(int bits, int offset, int first = 0) {
  alignas(64) bf16 entries[32];
  for (int i = 0; i < 32; i++) entries[i] = float_to_bf16(float(first + (bits == 4 ? i % 16 : i) - offset));
  return _mm512_load_si512(entries);
}

struct Tables {
  __m512i low, high;
  explicit Tables(const Format& f) : low(table_of(f.bits, f.offset)), high(table_of(f.bits, f.offset, 32)) {}
};

template <int SHIFT>
static inline __m512i shifted(__m512i x) {  // right, or left where negative
  if constexpr (SHIFT > 0) return _mm512_srli_epi16(x, SHIFT);
  if constexpr (SHIFT < 0) return _mm512_slli_epi16(x, -SHIFT);
  return x;
}

static inline __m512i merged(__m512i low, __m512i high) {  // (low & 15) | (high & ~15)
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);
}

template <int R, int BITS>
static inline void decode_pairs(const uint8_t* low, const uint8_t* high, const Tables& tables, bf16* out) {
  __m512i codes;
  if constexpr (BITS == 8) {
    __m512i bytes = _mm512_loadu_si512(low + R / 2 * 64);
    __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(bytes, R % 2 ? 8 : 24), 24);
    __m512i odd = _mm512_srai_epi32(R % 2 ? bytes : _mm512_slli_epi32(bytes, 16), 24);
    even = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
    odd = _mm512_castps_si512(_mm512_cvtepi32_ps(odd));
    codes = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), even, odd, 0xca);
  } else {
    __m512i index = shifted<R % 4 * 4>(_mm512_loadu_si512(low + R / 4 * 64));
    if constexpr (BITS == 5) index = merged(index, shifted<R - 4>(_mm512_loadu_si512(high)));
    if constexpr (BITS == 6) index = merged(index, shifted<R % 8 * 2 - 4>(_mm512_loadu_si512(high + R / 8 * 64)));
    if constexpr (BITS == 6) codes = _mm512_permutex2var_epi16(tables.low, index, tables.high);
    else codes = _mm512_permutexvar_epi16(index, tables.low);
  }
  _mm512_store_si512(out + R * 32, codes);
}

template <int BITS>
static inline void decode_tile(const uint8_t* low, const uint8_t* high, const Tables& t, bf16* out) {
  decode_pairs<0, BITS>(low, high, t, out), decode_pairs<1, BITS>(low, high, t, out);
  decode_pairs<2, BITS>(low, high, t, out), decode_pairs<3, BITS>(low, high, t, out);
  decode_pairs<4, BITS>(low, high, t, out), decode_pairs<5, BITS>(low, high, t, out);
  decode_pairs<6, BITS>(low, high, t, out), decode_pairs<7, BITS>(low, high, t, out);
  decode_pairs<8, BITS>(low, high, t, out), decode_pairs<9, BITS>(low, high, t, out);
  decode_pairs<10, BITS>(low, high, t, out), decode_pairs<11, BITS>(low, high, t, out);
  decode_pairs<12, BITS>(low, high, t, out), decode_pairs<13, BITS>(low, high, t, out);
  decode_pairs<14, BITS>(low, high, t, out), decode_pairs<15, BITS>(low, high, t, out);
}

static inline __m512 halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

template <int SHIFT>
static inline __m512 bytes_to_float(__m512i words) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, SHIFT), _mm512_set1_epi32(255)));
}

static inline void four_groups(__m512i bytes, __m512 factor, float* out) {
  _mm512_store_ps(out, _mm512_mul_ps(factor, bytes_to_float<0>(bytes)));
  _mm512_store_ps(out + UNIT, _mm512_mul_ps(factor, bytes_to_float<8>(bytes)));
  _mm512_store_ps(out + 2 * UNIT, _mm512_mul_ps(factor, bytes_to_float<16>(bytes)));
  _mm512_store_ps(out + 3 * UNIT, _mm512_mul_ps(factor, bytes_to_float<24>(bytes)));
}

// `tile`: 0 or 16, the first of the 16 rows
template <uint32_t TYPE>
static inline void decode_scales(const uint8_t* unit, int step, int tile, Chunk* c) {
  __m512 d = halves(unit + tile * 2);
  if constexpr (TYPE == Q6_K) {
    for (int g = 0; g < 16; g++) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + 64 + g * UNIT + tile));
      _mm512_store_ps(c->scales[g] + tile, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
    }
  } else if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
    __m512 least = halves(unit + 64 + tile * 2);
    __m512i six = _mm512_set1_epi8(63), four = _mm512_set1_epi8(15), top = _mm512_set1_epi8(48);
    __m512i a = _mm512_loadu_si512(unit + 128 + tile * 4), b = _mm512_loadu_si512(unit + 256 + tile * 4);
    __m512i both = _mm512_loadu_si512(unit + 384 + tile * 4);
    four_groups(_mm512_and_si512(a, six), d, c->scales[0] + tile);
    four_groups(_mm512_and_si512(b, six), least, c->mins[0] + tile);
    a = _mm512_and_si512(_mm512_srli_epi32(a, 2), top);
    b = _mm512_and_si512(_mm512_srli_epi32(b, 2), top);
    four_groups(_mm512_or_si512(_mm512_and_si512(both, four), a), d, c->scales[4] + tile);
    both = _mm512_and_si512(_mm512_srli_epi32(both, 4), four);
    four_groups(_mm512_or_si512(both, b), least, c->mins[4] + tile);
  } else {
    _mm512_store_ps(c->scales[step] + tile, d);
    if constexpr (format_of(TYPE).mins)
      _mm512_store_ps(c->mins[step] + tile, _mm512_sub_ps(_mm512_setzero_ps(), halves(unit + 64 + tile * 2)));
  }
}

template <uint32_t TYPE>
static inline void decode(const uint8_t* unit, int steps, const Tables& tables, Chunk* c) {
  constexpr Format f = format_of(TYPE);
  constexpr size_t ahead = 2 * CHUNK / f.block * f.unit_block();  // memory answers while this chunk is computed
  for (int first = 0; first < steps; first += f.steps(), unit += f.unit_block()) {
    for (size_t line = 0; line < f.unit_block(); line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(unit) + ahead + line, _MM_HINT_T0);
    decode_scales<TYPE>(unit, first, 0, c);
    decode_scales<TYPE>(unit, first, TILE, c);
    for (int s = 0; s < f.steps(); s++)
      for (int t = 0; t < 2; t++) {
        size_t index = size_t(s * 2 + t);
        decode_tile<f.bits>(unit + f.low_at() + index * f.low_tile(), unit + f.high_at() + index * f.high_tile(),
                            tables, c->weights[first + s][t]);
      }
  }
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
