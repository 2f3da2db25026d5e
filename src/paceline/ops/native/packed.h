// The packed layout of a weight matrix, and what the operators' translation units share.
//
// A matrix [out, inner] is cut into units of 32 output rows, a unit into blocks along the inner dimension. A unit's
// block holds the same bytes as 32 rows of the GGUF file do, in another order: scales of all rows first, then codes as
// the integer products want them. The codes of 32 inner elements of 16 rows make a tile: eight vectors of 64 bytes, of
// which vector j has in byte (row, i) the element 4 j + i. Codes of fewer than 8 bits lie in
//
//   low nibbles   4 vectors; vector w holds vector w of the tile in its low nibbles and vector w + 4 in its high ones
//   5th bit       1 vector, whose bit j is of vector j
//   bits 5 and 6  2 vectors; vector h has in bits 2 t and 2 t + 1 those of vector 4 h + t
//   bf16          16 vectors of 16 pairs: pair r of each row
//
// Rows beyond `out`, and elements of bf16 beyond `inner`, are zero.
//
// What a product with such codes is, at every level of instructions, to the bit. Activations are rounded to 8 bits, in
// groups of 32 that share a scale. By group of 32, in order,
//
//   part = float(dot) · scale                      dot: the exact sum of code · activation code; the weight's scale
//   part = fma(float(dot'), scale', part)          where weights have a scale for 16: of the second half
//   sum  = fma(part, activation scale, sum)
//   sum  = fma(−minimum, total, sum)               where weights have minima; total: the group's sum of activations
//
// bf16 weights are multiplied with bf16 activations as they are; there a level's order of sums is its own.
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
  constexpr size_t tile_share() const { return unit_block() / size_t(2 * steps()); }  // with its part of the scales
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

// What a part of a unit's codes is multiplied by, and what is taken off.
struct Scales {
  alignas(64) float scales[CHUNK / 16][UNIT];  // by group
  alignas(64) float mins[STEPS][UNIT];
};

// One group of 32 activations.
struct Rounded {
  int8_t* codes;   // [32]
  float* scale;
  float* total;    // scale · sum of codes
  int16_t* sums;   // [2], of 16 codes each
};

// Activations rounded to 8 bits, in blocks of `height` rows: [blocks, inner / 32, height] groups.
struct Codes {
  int8_t* codes;
  float *scales, *totals;
  int16_t* sums;
  int groups;  // of a row
  int height;  // at most 16; the last block is as high as the others, and zero where there are no more rows

  // Group `group` of row `row`; the next row of the block stands right behind.
  Rounded at(int row, int group) const {
    size_t index = (size_t(row / height) * size_t(groups) + size_t(group)) * size_t(height) + size_t(row % height);
    return {codes + index * STEP, scales + index, totals + index, sums + index * 2};
  }

  Rounded next(const Rounded& r) const {  // the same row's next group
    return {r.codes + height * STEP, r.scale + height, r.total + height, r.sums + height * 2};
  }
};

struct Activations {
  const bf16* x;     // [rows, inner]; beyond 32 rows there are zeros up to a multiple of 16
  ptrdiff_t stride;  // elements from one row to the next
  int rows;          // at most ROW_BLOCK
  Codes rounded;     // where a part's weights are quantised
};

constexpr int ROW_BLOCK = 256;  // activation rows that share a decoded weight: bounds a thread's sums to 32 KB

// Where a unit's results go: y = sums + bias + residual, rounded once.
struct Output {
  const bf16 *bias, *residual;  // of the unit's first row, or null
  bf16* y;
  ptrdiff_t stride;  // of residual and y
  int count;         // at most UNIT
};

// One level of instructions.
struct Operators {
  void (*round)(const bf16* x, int row, int inner, const Codes&);
  void (*product)(uint32_t type, const uint8_t* unit, int inner, const Activations&, const Output&);
};

namespace portable { extern const Operators operators; }
namespace avx2 { extern const Operators operators; }
namespace avx512 { extern const Operators operators; }
namespace amx { extern const Operators operators; }

static inline float bf16_to_float(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

static inline bf16 float_to_bf16(float value) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return bf16((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);  // NaN stays NaN
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

// Calls compute<TYPE>(…) for the quantised type at hand.
#define PACELINE_FOR_TYPE(type, compute, ...)       \
  switch (type) {                                   \
    case Q4_0: compute<Q4_0>(__VA_ARGS__); break;   \
    case Q4_1: compute<Q4_1>(__VA_ARGS__); break;   \
    case Q5_0: compute<Q5_0>(__VA_ARGS__); break;   \
    case Q5_1: compute<Q5_1>(__VA_ARGS__); break;   \
    case Q8_0: compute<Q8_0>(__VA_ARGS__); break;   \
    case Q4_K: compute<Q4_K>(__VA_ARGS__); break;   \
    case Q5_K: compute<Q5_K>(__VA_ARGS__); break;   \
    case Q6_K: compute<Q6_K>(__VA_ARGS__); break;   \
  }

}  // namespace paceline
