// Decoding with AVX-512, shared by the two levels that have it: codes to bytes in registers, scales to float32.
// Included inside a level's namespace.
#include <immintrin.h>

#include "level.h"

namespace paceline {
namespace PACELINE_LEVEL {

static inline __m512 widened(const bf16* x) {
  __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// The largest size of 32 numbers, NaN being larger than any other.
static inline bf16 largest_of(const bf16* x) {
  __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  __m128i eighth = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return bf16(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eighth, _mm_set1_epi16(-1)))));
}

static inline __m128i rounded(const bf16* x, __m512 factor) {  // 16 codes, to nearest, ties to even
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(widened(x), factor)));
}

static inline int sum_of(__m128i codes) {
  __m128i sums = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// One row of activations to 8 bits.
static void round_row(const bf16* x, int row, int inner, const Codes& codes) {
  Rounded to = codes.at(row, 0);
  for (int k = 0; k < inner; k += STEP, x += STEP, to = codes.next(to)) {
    Rounding r(bf16_to_float(largest_of(x)));
    __m128i first = rounded(x, _mm512_set1_ps(r.factor)), second = rounded(x + 16, _mm512_set1_ps(r.factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.codes), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.codes + 16), second);
    put_group(to, r, sum_of(first), sum_of(second));
  }
}

template <int SHIFT>
static inline __m512i shifted(__m512i x) {  // right, or left where negative
  if constexpr (SHIFT > 0) return _mm512_srli_epi16(x, SHIFT);
  if constexpr (SHIFT < 0) return _mm512_slli_epi16(x, -SHIFT);
  return x;
}

// Vector J of a tile as it is stored: 8 bits are signed, others lack their offset.
template <int J, int BITS>
static inline __m512i decode(const uint8_t* low, const uint8_t* high) {
  if constexpr (BITS == 8) return _mm512_loadu_si512(low + J * 64);
  __m512i codes = shifted<J / 4 * 4>(_mm512_loadu_si512(low + J % 4 * 64));
  if constexpr (BITS > 4) {
    __m512i upper = BITS == 5 ? shifted<J - 4>(_mm512_loadu_si512(high))
                              : shifted<J % 4 * 2 - 4>(_mm512_loadu_si512(high + J / 4 * 64));
    codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), codes, upper, 0xca);  // mask ? codes : upper
  }
  return _mm512_and_si512(codes, _mm512_set1_epi8((1 << BITS) - 1));
}

// Memory shall have ready what stands some time from now behind `from`, for all of `bytes`: in the second cache, which
// takes more requests at a time than the first.
static inline void ask_ahead(const uint8_t* from, size_t bytes) {
  constexpr size_t ahead = 16384;
  for (size_t line = 0; line < bytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from) + ahead + line, _MM_HINT_T1);
}

template <int BITS>
static inline void decode_tile(const uint8_t* low, const uint8_t* high, __m512i* codes) {
  codes[0] = decode<0, BITS>(low, high), codes[1] = decode<1, BITS>(low, high);
  codes[2] = decode<2, BITS>(low, high), codes[3] = decode<3, BITS>(low, high);
  codes[4] = decode<4, BITS>(low, high), codes[5] = decode<5, BITS>(low, high);
  codes[6] = decode<6, BITS>(low, high), codes[7] = decode<7, BITS>(low, high);
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
static inline void decode_scales(const uint8_t* unit, int step, int tile, Scales* s) {
  __m512 d = halves(unit + tile * 2);
  if constexpr (TYPE == Q6_K) {
    for (int g = 0; g < 16; g++) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + 64 + g * UNIT + tile));
      _mm512_store_ps(s->scales[g] + tile, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
    }
  } else if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
    __m512 least = halves(unit + 64 + tile * 2);
    __m512i six = _mm512_set1_epi8(63), four = _mm512_set1_epi8(15), top = _mm512_set1_epi8(48);
    __m512i a = _mm512_loadu_si512(unit + 128 + tile * 4), b = _mm512_loadu_si512(unit + 256 + tile * 4);
    __m512i both = _mm512_loadu_si512(unit + 384 + tile * 4);
    four_groups(_mm512_and_si512(a, six), d, s->scales[0] + tile);
    four_groups(_mm512_and_si512(b, six), least, s->mins[0] + tile);
    a = _mm512_and_si512(_mm512_srli_epi32(a, 2), top);
    b = _mm512_and_si512(_mm512_srli_epi32(b, 2), top);
    four_groups(_mm512_or_si512(_mm512_and_si512(both, four), a), d, s->scales[4] + tile);
    both = _mm512_and_si512(_mm512_srli_epi32(both, 4), four);
    four_groups(_mm512_or_si512(both, b), least, s->mins[4] + tile);
  } else {
    _mm512_store_ps(s->scales[step] + tile, d);
    if constexpr (format_of(TYPE).mins)
      _mm512_store_ps(s->mins[step] + tile, _mm512_sub_ps(_mm512_setzero_ps(), halves(unit + 64 + tile * 2)));
  }
}

template <uint32_t TYPE>
static inline void decode_scales(const uint8_t* unit, int steps, Scales* s) {  // of a chunk
  constexpr Format f = format_of(TYPE);
  for (int step = 0; step < steps; step += f.steps(), unit += f.unit_block()) {
    decode_scales<TYPE>(unit, step, 0, s);
    decode_scales<TYPE>(unit, step, TILE, s);
  }
}

// Integer products are summed from the bits of BASE on, and so are floats as they stand: BASE + dot, |dot| < 2^22.
constexpr float BASE = 0x1.8p23f;
constexpr int32_t BASE_BITS = 0x4b400000;

// float(dot) · scale, rounded once: a scale has 19 bits at most, so that BASE · scale is exact. (A scale that is not finite
// makes NaN of all.)
static inline __m512 scaled(__m512i dot, __m512 scale) {
  return _mm512_fmsub_ps(_mm512_castsi512_ps(dot), scale, _mm512_mul_ps(_mm512_set1_ps(BASE), scale));
}

static inline __m512 to_float(__m512i dot) { return _mm512_sub_ps(_mm512_castsi512_ps(dot), _mm512_set1_ps(BASE)); }

// 16 outputs of a step with one row, from what its products are.
template <bool MINS>
static inline __m512 add_part(__m512 acc, __m512 part, __m512 least, const float* scale, const float* total) {
  acc = _mm512_fmadd_ps(part, _mm512_set1_ps(*scale), acc);
  return MINS ? _mm512_fnmadd_ps(least, _mm512_set1_ps(*total), acc) : acc;
}

constexpr int ROWS = 8;  // that share decoded weights, or scales

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

}  // namespace PACELINE_LEVEL
}  // namespace paceline
