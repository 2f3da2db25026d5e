// The packed layout of a weight matrix, and what the operators' translation units share.
//
// A matrix [out, inner] is cut into units of 32 output rows, a unit into blocks along the inner dimension. A unit's
// block holds the same bytes as 32 rows of the GGUF file do, in another order: scales of all rows first, then codes as
// the matrix units want them. The codes of 32 inner elements of 16 rows make a tile, 16 pairs of elements high:
//
//   low nibbles   4 × 32 words; word (row, parity) of 64 bytes number j has in nibble s the element 2 (4 j + s) + parity
//   5th bit       32 words; bit r of word (row, parity) is of the element 2 r + parity
//   bits 5 and 6  2 × 32 words; bits 2 t, 2 t + 1 of word (row, parity) number i are of the element 2 (8 i + t) + parity
//   8 bits        8 × 16 words of 4 bytes: of each row the elements 4 j … 4 j + 3
//   bf16          16 × 16 pairs: pair r of each row
//
// Rows beyond `out`, and elements of bf16 beyond `inner`, are zero.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {

using bf16 = uint16_t;

constexpr int TILE = 16;    // output rows of a tile
constexpr int UNIT = 32;    // output rows that are packed and computed together
constexpr int STEP = 32;    // inner elements of a tile
constexpr int CHUNK = 256;  // inner elements that are decoded at a time
constexpr int STEPS = CHUNK / STEP;
constexpr uint32_t MAGIC = 0x4b434150;  // "PACK"

enum Type : uint32_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// What stands before a packed matrix; several may follow one another.
struct Header {
  uint32_t magic, type, out, inner;
  uint64_t bytes;  // with the header; a multiple of 64
  uint8_t rest[40];
};
static_assert(sizeof(Header) == 64, "one cache line");

struct Format {
  int block;   // inner elements of a block
  int bytes;   // of a block of one row
  int bits;    // of a code
  int offset;  // value = code − offset
  int group;   // inner elements that share a scale
  int scales;  // bytes of a row's scales in a block
  bool mins;   // value = scale · code − minimum

  constexpr size_t unit_block() const { return size_t(UNIT) * bytes; }
  constexpr int steps() const { return block / STEP; }
  constexpr size_t low_at() const { return size_t(UNIT) * scales; }
  constexpr size_t low_tile() const { return bits == 16 ? 1024 : bits == 8 ? 512 : 256; }  // bytes of 16 rows
  constexpr size_t high_at() const { return low_at() + steps() * 2 * low_tile(); }
  constexpr size_t high_tile() const { return bits == 5 ? 64 : 128; }
};

constexpr Format format_of(uint32_t type) {
  switch (type) {
    case Q4_0: return {32, 18, 4, 8, 32, 2, false};
    case Q4_1: return {32, 20, 4, 0, 32, 4, true};
    case Q5_0: return {32, 22, 5, 16, 32, 2, false};
    case Q5_1: return {32, 24, 5, 0, 32, 4, true};
    case Q8_0: return {32, 34, 8, 0, 32, 2, false};
    case Q4_K: return {256, 144, 4, 0, 32, 16, true};
    case Q5_K: return {256, 176, 5, 0, 32, 16, true};
    case Q6_K: return {256, 210, 6, 32, 16, 18, false};
    case BF16: return {32, 64, 16, 0, 32, 0, false};
    default: return {0, 0, 0, 0, 0, 0, false};
  }
}

// A part of a unit in bf16: codes as exact integers, and what they are multiplied by.
struct Chunk {
  alignas(64) bf16 weights[STEPS][2][TILE * STEP];  // [step][tile][16 pairs][16 rows][2]
  alignas(64) float scales[CHUNK / 16][UNIT];       // by group
  alignas(64) float mins[STEPS][UNIT];
};

struct Activations {
  const bf16* x;     // [rows, inner]; beyond 32 rows there are zeros up to a multiple of 16
  ptrdiff_t stride;  // elements from one row to the next
  int rows;
  const float* sums;  // [rows, inner / 32], of 32 elements each
};

// acc [rows up to a multiple of 16, 32] = x · (a unit's 32 rows)ᵀ; a row's sums have one order, whatever `rows` is.
using ComputeUnit = void (*)(uint32_t type, const uint8_t* unit, int inner, const Activations&, Chunk*, float* acc);

namespace portable { void compute_unit(uint32_t, const uint8_t*, int, const Activations&, Chunk*, float*); }
namespace avx2 { void compute_unit(uint32_t, const uint8_t*, int, const Activations&, Chunk*, float*); }
namespace avx512 { void compute_unit(uint32_t, const uint8_t*, int, const Activations&, Chunk*, float*); }
namespace amx { void compute_unit(uint32_t, const uint8_t*, int, const Activations&, Chunk*, float*); }

static inline float bf16_to_float(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

static inline bf16 float_to_bf16(float value) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);  // NaN stays NaN
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float small = float(mantissa) * 0x1p-24f;  // exact
    memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// The 6-bit scale and minimum of a K-quant's group of 32: 12 bytes a row, kept as three words of four bytes.
static inline void scale_and_min(uint32_t a, uint32_t b, uint32_t c, int group, int* scale, int* minimum) {
  int shift = 8 * (group & 3);
  a >>= shift, b >>= shift, c >>= shift;
  *scale = group < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
  *minimum = group < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
}

// Returns compute<TYPE>(…) for the type at hand.
#define PACELINE_FOR_TYPE(type, compute, ...)                 \
  switch (type) {                                             \
    case Q4_0: return compute<Q4_0>(__VA_ARGS__);             \
    case Q4_1: return compute<Q4_1>(__VA_ARGS__);             \
    case Q5_0: return compute<Q5_0>(__VA_ARGS__);             \
    case Q5_1: return compute<Q5_1>(__VA_ARGS__);             \
    case Q8_0: return compute<Q8_0>(__VA_ARGS__);             \
    case Q4_K: return compute<Q4_K>(__VA_ARGS__);             \
    case Q5_K: return compute<Q5_K>(__VA_ARGS__);             \
    case Q6_K: return compute<Q6_K>(__VA_ARGS__);             \
  }

}  // namespace paceline
