// Vectors of float32 in the compiler's own notation, as wide as the level's registers. Included inside no namespace but
// its own level's, so that the linker never mixes two instruction sets.
#pragma once
#include <cmath>
#include <cstring>

#include "step.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace paceline {
namespace PACELINE_LEVEL {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#define PACELINE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define PACELINE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
constexpr int LANES = 8;
#define PACELINE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define PACELINE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int LANES = 4;
#define PACELINE_LOW 0, 4, 1, 5
#define PACELINE_HIGH 2, 6, 3, 7
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

template <typename Vector, typename Element>
static inline Vector load(const Element* from) {
  Vector out;
  memcpy(&out, from, sizeof out);
  return out;
}

template <typename Vector, typename Element>
static inline void store(Element* to, Vector value) { memcpy(to, &value, sizeof value); }

static inline Floats all(float value) { return value - Floats{}; }

static inline Floats as_floats(Words bits) { return (Floats)bits; }

static inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The compilers' own notation splits these in halves at 512 bits.
#if defined(__AVX512F__)
static inline Words widened(Halves value) { return (Words)_mm512_cvtepu16_epi32((__m256i)value); }

static inline Halves narrowed(Words value) { return (Halves)_mm512_cvtepi32_epi16((__m512i)value); }

static inline Floats select(Ints mask, Floats yes, Floats no) {
  return (Floats)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
}

static inline float sum(Floats value) { return _mm512_reduce_add_ps((__m512)value); }

static inline float largest(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
#else
static inline Words widened(Halves value) { return __builtin_convertvector(value, Words); }

static inline Halves narrowed(Words value) { return __builtin_convertvector(value, Halves); }

static inline Floats select(Ints mask, Floats yes, Floats no) {
  return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

static inline float sum(Floats value) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) value[i] += value[i + half];
  return value[0];
}

static inline float largest(Floats value) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) value[i] = value[i] > value[i + half] ? value[i] : value[i + half];
  return value[0];
}
#endif

static inline Floats larger(Floats a, Floats b) { return select(a > b, a, b); }

static inline Floats wide(const bf16* from) { return as_floats(widened(load<Halves>(from)) << 16); }

static inline Floats wide(const float* from) { return load<Floats>(from); }

// The upper halves, to nearest, ties to even; NaN stays NaN.
static inline Words shortened(Floats value) {
  Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (Words)select(value != value, as_floats(bits >> 16 | 0x40), as_floats(rounded));
}

static inline Halves narrow(Floats value) { return narrowed(shortened(value)); }

static inline Floats rounded(Floats value) { return as_floats(shortened(value) << 16); }

// Calls body(offset, count of elements) for whole vectors, and for what is left of `width`.
template <typename Body>
static inline void in_vectors(int64_t width, Body body) {
  int64_t at = 0;
  for (; at + LANES <= width; at += LANES) body(at, LANES);
  if (at < width) body(at, int(width - at));
}

// What is left is computed as a whole vector too, zeros behind it: an element's bits do not know where it stands.
template <typename Element>
static inline Floats wide(const Element* from, int count) {
  if (count == LANES) return wide(from);
  Element padded[LANES] = {};
  memcpy(padded, from, size_t(count) * sizeof(Element));
  return wide(padded);
}

static inline void put(bf16* to, Halves value, int count) { memcpy(to, &value, size_t(count) * sizeof(bf16)); }

// e^x = 2^n · e^r with |r| ≤ ln 2 / 2. Source: Cephes, expf. NaN stays NaN; results under 2^−126 are 0.
static inline Floats exponential(Floats x) {
  Floats in = select(x > 88.8f, all(88.8f), select(x < -88.f, all(-88.f), x));
  Floats magic = all(0x1.8p23f), shifted = fma(in, all(1.44269504088896341f), magic), n = shifted - magic;
  Floats r = fma(n, all(-0.693359375f), in);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  Floats y = fma(p, r * r, r) + 1.f;
  Words scale = ((Words)shifted + 126) << 23;  // of 2^(n − 1): n itself may be 128
  y = y * as_floats(scale) * 2.f;
  return select(x > 88.8f, all(INFINITY), select(x < -87.f, Floats{}, y));
}

static inline Words interleaved(Words a, Words b, bool high) {
#if defined(__clang__)
  return high ? __builtin_shufflevector(a, b, PACELINE_HIGH) : __builtin_shufflevector(a, b, PACELINE_LOW);
#else
  return high ? __builtin_shuffle(a, b, Words{PACELINE_HIGH}) : __builtin_shuffle(a, b, Words{PACELINE_LOW});
#endif
}

// Rows become columns: each round turns the bits of an element's row and column by one place.
static inline void transpose(Words* rows) {
  for (int left = LANES; left > 1; left /= 2) {
    Words next[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = interleaved(rows[i], rows[i + LANES / 2], false);
      next[2 * i + 1] = interleaved(rows[i], rows[i + LANES / 2], true);
    }
    memcpy(rows, next, sizeof next);
  }
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
