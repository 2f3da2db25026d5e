// From a GGUF file's rows to the packed layout, and single rows back out of it (embeddings).
#include "pack.h"

namespace paceline {

// The codes of one row's block, by element.
static void read_codes(uint32_t type, const uint8_t* block, uint8_t* codes) {
  const uint8_t* at = block;
  switch (type) {
    case Q4_0:
    case Q4_1:
      at += type == Q4_0 ? 2 : 4;
      for (int i = 0; i < 16; i++) codes[i] = at[i] & 15, codes[i + 16] = at[i] >> 4;
      return;
    case Q5_0:
    case Q5_1: {
      at += type == Q5_0 ? 2 : 4;
      uint32_t high;
      memcpy(&high, at, 4);
      at += 4;
      for (int i = 0; i < 16; i++) {
        codes[i] = uint8_t((at[i] & 15) | (high >> i & 1) << 4);
        codes[i + 16] = uint8_t(at[i] >> 4 | (high >> (i + 16) & 1) << 4);
      }
      return;
    }
    case Q8_0:
      memcpy(codes, at + 2, 32);
      return;
    case Q4_K:
    case Q5_K: {
      const uint8_t* high = at + 16;
      const uint8_t* low = type == Q4_K ? at + 16 : at + 48;
      for (int group = 0; group < 8; group++)
        for (int i = 0; i < 32; i++) {
          int code = low[group / 2 * 32 + i] >> (group & 1) * 4 & 15;
          if (type == Q5_K) code |= (high[i] >> group & 1) << 4;
          codes[group * 32 + i] = uint8_t(code);
        }
      return;
    }
    case Q6_K:
      for (int i = 0; i < 256; i++) {
        int half = i / 128, quarter = i / 32 % 4, j = i % 32;
        int low = at[half * 64 + (quarter & 1) * 32 + j] >> (quarter / 2) * 4 & 15;
        int high = at[128 + half * 32 + j] >> quarter * 2 & 3;
        codes[i] = uint8_t(low | high << 4);
      }
      return;
  }
}

// One row's scales into the unit's block; `row` counts within the unit.
static void write_scales(uint32_t type, const uint8_t* block, int row, uint8_t* unit) {
  switch (type) {
    case Q4_1:
    case Q5_1:
      memcpy(unit + 64 + row * 2, block + 2, 2);
      [[fallthrough]];
    case Q4_0:
    case Q5_0:
    case Q8_0:
      memcpy(unit + row * 2, block, 2);
      return;
    case Q4_K:
    case Q5_K:
      memcpy(unit + row * 2, block, 2);
      memcpy(unit + 64 + row * 2, block + 2, 2);
      for (int i = 0; i < 3; i++) memcpy(unit + 128 + (i * UNIT + row) * 4, block + 4 + i * 4, 4);
      return;
    case Q6_K:
      memcpy(unit + row * 2, block + 208, 2);
      for (int group = 0; group < 16; group++) unit[64 + group * UNIT + row] = block[192 + group];
      return;
  }
}

static unsigned get_word(const uint8_t* at, int index) {
  uint16_t value;
  memcpy(&value, at + index * 2, 2);
  return value;
}

// 32 codes of one row into its tile, which is zero before.
static void write_codes(const Format& f, const uint8_t* codes, int lane, uint8_t* low, uint8_t* high) {
  for (int k = 0; k < STEP; k++) {
    int vector = k / 4, byte = lane * 4 + k % 4;
    if (f.bits == 8) {
      low[vector * 64 + byte] = codes[k];
      continue;
    }
    low[vector % 4 * 64 + byte] |= uint8_t((codes[k] & 15) << vector / 4 * 4);
    if (f.bits == 5) high[byte] |= uint8_t(codes[k] >> 4 << vector);
    if (f.bits == 6) high[vector / 4 * 64 + byte] |= uint8_t(codes[k] >> 4 << vector % 4 * 2);
  }
}

static int read_code(const Format& f, const uint8_t* low, const uint8_t* high, int lane, int k) {
  int vector = k / 4, byte = lane * 4 + k % 4;
  if (f.bits == 8) return int8_t(low[vector * 64 + byte]);
  int code = low[vector % 4 * 64 + byte] >> vector / 4 * 4 & 15;
  if (f.bits == 5) code |= (high[byte] >> vector & 1) << 4;
  if (f.bits == 6) code |= (high[vector / 4 * 64 + byte] >> vector % 4 * 2 & 3) << 4;
  return code - f.offset;
}

size_t packed_bytes(uint32_t type, int64_t out, int64_t inner) {
  Format f = format_of(type);
  int64_t units = (out + UNIT - 1) / UNIT, blocks = (inner + f.block - 1) / f.block;
  return sizeof(Header) + size_t(units * blocks) * f.unit_block();
}

void pack_unit(const Header& matrix, const uint8_t* rows, int64_t unit, uint8_t* data) {
  Format f = format_of(matrix.type);
  int64_t inner = matrix.inner, blocks = (inner + f.block - 1) / f.block, first = unit * UNIT;
  uint8_t* at = data + size_t(unit * blocks) * f.unit_block();
  memset(at, 0, size_t(blocks) * f.unit_block());
  size_t row_bytes = f.bits == 16 ? size_t(inner) * 2 : size_t(blocks) * f.bytes;
  for (int row = 0; row < UNIT && first + row < matrix.out; row++) {
    const uint8_t* from = rows + size_t(first + row) * row_bytes;
    int tile = row / TILE, lane = row % TILE;
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* to = at + size_t(b) * f.unit_block();
      if (f.bits == 16) {
        for (int k = 0; k < STEP && b * STEP + k < inner; k++)
          memcpy(to + tile * 1024 + (k / 2 * TILE + lane) * 4 + k % 2 * 2, from + (b * STEP + k) * 2, 2);
        continue;
      }
      uint8_t codes[CHUNK];
      const uint8_t* block = from + size_t(b) * f.bytes;
      read_codes(matrix.type, block, codes);
      write_scales(matrix.type, block, row, to);
      for (int step = 0; step < f.steps(); step++) {
        size_t index = size_t(step * 2 + tile);
        write_codes(f, codes + step * STEP, lane, to + f.low_at() + index * f.low_tile(),
                    to + f.high_at() + index * f.high_tile());
      }
    }
  }
}

static void scale_of(uint32_t type, const uint8_t* unit, int row, int group, float* scale, float* minimum) {
  float d = half_to_float(uint16_t(get_word(unit, row)));
  *scale = d, *minimum = 0;
  if (type == Q4_1 || type == Q5_1) *minimum = -half_to_float(uint16_t(get_word(unit + 64, row)));
  if (type == Q6_K) *scale = d * float(int8_t(unit[64 + group * UNIT + row]));
  if (type == Q4_K || type == Q5_K) {
    uint32_t words[3];
    for (int i = 0; i < 3; i++) memcpy(&words[i], unit + 128 + (i * UNIT + row) * 4, 4);
    int s, m;
    scale_and_min(words[0], words[1], words[2], group, &s, &m);
    *scale = d * float(s);
    *minimum = half_to_float(uint16_t(get_word(unit + 64, row))) * float(m);
  }
}

void unpack_row(const Header& matrix, const uint8_t* data, int64_t row, bf16* out) {
  Format f = format_of(matrix.type);
  int64_t blocks = (int64_t(matrix.inner) + f.block - 1) / f.block;
  int in_unit = int(row % UNIT), tile = in_unit / TILE, lane = in_unit % TILE;
  const uint8_t* unit = data + size_t(row / UNIT * blocks) * f.unit_block();
  for (int64_t b = 0; b < blocks; b++, unit += f.unit_block()) {
    for (int i = 0; i < f.block && b * f.block + i < int64_t(matrix.inner); i++) {
      bf16* to = out + b * f.block + i;
      if (f.bits == 16) {
        memcpy(to, unit + tile * 1024 + (i / 2 * TILE + lane) * 4 + i % 2 * 2, 2);
        continue;
      }
      size_t index = size_t(i / STEP * 2 + tile);
      float scale, minimum;
      scale_of(matrix.type, unit, in_unit, i / f.group, &scale, &minimum);
      int code = read_code(f, unit + f.low_at() + index * f.low_tile(), unit + f.high_at() + index * f.high_tile(),
                           lane, i % STEP);
      *to = float_to_bf16(scale * float(code) - minimum);
    }
  }
}

}  // namespace paceline
