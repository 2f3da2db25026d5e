// Any processor that the compiler knows: the integer products in plain loops. The levels' reference.
#define PACELINE_LEVEL portable
#include <cmath>

#include "plain.h"

namespace paceline {
namespace portable {

template <uint32_t TYPE>
static void decode_tile(const Tile& tile, int16_t (*codes)[TILE]) {  // [32][16]
  constexpr Format f = format_of(TYPE);
  for (int k = 0; k < STEP; k++)
    for (int lane = 0; lane < TILE; lane++) {
      int vector = k / 4, byte = lane * 4 + k % 4, code;
      if (f.bits == 8) {
        code = int8_t(tile.low[vector * 64 + byte]);
      } else {
        code = tile.low[vector % 4 * 64 + byte] >> vector / 4 * 4 & 15;
        if (f.bits == 5) code |= (tile.high[byte] >> vector & 1) << 4;
        if (f.bits == 6) code |= (tile.high[vector / 4 * 64 + byte] >> vector % 4 * 2 & 3) << 4;
      }
      codes[k][lane] = int16_t(code - f.offset);
    }
}

template <uint32_t TYPE>
static void add_row(const int16_t (*codes)[TILE], const Rounded& x, const Scales& s, int step, int tile, float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int parts = STEP / f.group;
  int32_t dots[parts][TILE] = {};
  for (int k = 0; k < STEP; k++)
    for (int o = 0; o < TILE; o++) dots[k / f.group][o] += codes[k][o] * int16_t(x.codes[k]);
  const float *scales = s.scales[step * parts] + tile * TILE, *mins = s.mins[step] + tile * TILE;
  for (int o = 0; o < TILE; o++) {
    float part = float(dots[0][o]) * scales[o];
    if (parts == 2) part = std::fmaf(float(dots[parts - 1][o]), scales[UNIT + o], part);
    acc[o] = std::fmaf(part, *x.scale, acc[o]);
    if (f.mins) acc[o] = std::fmaf(-mins[o], *x.total, acc[o]);
  }
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  by_chunks<TYPE>(unit, inner, [&](const uint8_t* blocks, int steps, int group, const Scales& s) {
    int16_t codes[STEP][TILE];
    for (int step = 0; step < steps; step++)
      for (int t = 0; t < 2; t++) {
        decode_tile<TYPE>(tile_of<TYPE>(blocks, step, t), codes);
        for (int m = 0; m < a.rows; m++)
          add_row<TYPE>(codes, a.rounded.at(m, group + step), s, step, t, acc + m * UNIT + t * TILE);
      }
  });
}

const Operators operators = {round_row, product};

}  // namespace portable
}  // namespace paceline
