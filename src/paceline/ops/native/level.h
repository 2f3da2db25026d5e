// What every level compiles for itself: activations rounded, one unit's product, results rounded. Included once by each
// level, inside its namespace, so that the linker never mixes two instruction sets.
#include "packed.h"

namespace paceline {
namespace PACELINE_LEVEL {

// One row of activations to 8 bits, to nearest, ties to even. A group with NaN or infinity has a scale that is no
// number; one that is all but zero (127 / its largest is beyond float32) is rounded to fewer codes.
static void round_row(const bf16* x, int row, int inner, const Codes& codes) {
  constexpr float most = 3.40282347e38f, shift = 0x1.8p23f;  // shift + v has v, rounded, in its low bits
  for (int group = 0; group < inner / STEP; group++, x += STEP) {
    Rounded to = codes.at(row, group);
    int16_t top = 0;
    for (int k = 0; k < STEP; k++) {
      int16_t size = int16_t(x[k] & 0x7fff);
      top = size > top ? size : top;
    }
    float largest = bf16_to_float(bf16(top)), factor = 127.0f / largest;
    factor = factor > most ? most : factor;
    int sums[2] = {0, 0};
    for (int half = 0; half < 2; half++)
      for (int k = half * 16; k < half * 16 + 16; k++) {
        float shifted = bf16_to_float(x[k]) * factor + shift;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        int8_t code = int8_t(bits);
        to.codes[k] = code;
        sums[half] += code;
      }
    *to.scale = largest < 127.0f / most ? 1.0f / most : largest / 127.0f;
    *to.total = *to.scale * float(sums[0] + sums[1]);
    to.sums[0] = sums[0], to.sums[1] = sums[1];
  }
}

// sums: [rows, UNIT]
static void put_out(const float* sums, int rows, const Output& out) {
  for (int m = 0; m < rows; m++, sums += UNIT) {
    float values[UNIT];
    bf16 rounded[UNIT] = {};
    memcpy(values, sums, sizeof values);
    if (out.bias)
      for (int o = 0; o < out.count; o++) values[o] += bf16_to_float(out.bias[o]);
    if (out.residual)
      for (int o = 0; o < out.count; o++) values[o] += bf16_to_float(out.residual[m * out.stride + o]);
    for (int o = 0; o < UNIT; o++) rounded[o] = float_to_bf16(values[o]);
    memcpy(out.y + m * out.stride, rounded, size_t(out.count) * 2);
  }
}

// The level's own: acc [rows, 32] += the product with one unit, of quantised weights and of bf16 ones.
template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc);
static void dense(const uint8_t* unit, int inner, const Activations& a, float* acc);

static void product(uint32_t type, const uint8_t* unit, int inner, const Activations& a, const Output& out) {
  alignas(64) float acc[ROW_BLOCK * UNIT];
  memset(acc, 0, sizeof(float) * UNIT * size_t(a.rows));
  if (type == BF16) dense(unit, inner, a, acc);
  PACELINE_FOR_TYPE(type, quantised, unit, inner, a, acc)
  put_out(acc, a.rows, out);
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
