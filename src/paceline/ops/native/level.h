// What every level compiles for itself: activations rounded, one unit's product, results rounded. Included once by each
// level, inside its namespace, so that the linker never mixes two instruction sets.
#include "packed.h"

namespace paceline {
namespace PACELINE_LEVEL {

// The scale of a group whose largest size is `largest`, and what activations are multiplied by for their codes: with NaN
// or infinity neither is a number to go on with; next to zero (127 / largest beyond float32) there are fewer codes.
struct Rounding {
  float scale, factor;
  explicit Rounding(float largest) {
    constexpr float most = 3.40282347e38f;
    scale = largest / 127.0f, factor = 127.0f / largest;
    if (factor > most) factor = most, scale = 1.0f / most;
  }
};

static inline void put_group(const Rounded& to, const Rounding& r, int first, int second) {
  *to.scale = r.scale;
  *to.total = r.scale * float(first + second);
  to.sums[0] = int16_t(first), to.sums[1] = int16_t(second);
}

static inline void widen(const bf16* from, int count, float* to) {  // zero beyond `count`
  bf16 padded[UNIT] = {};
  memcpy(padded, from, size_t(count) * 2);
  for (int o = 0; o < UNIT; o++) to[o] = bf16_to_float(padded[o]);
}

// sums: [rows, UNIT]
static void put_out(const float* sums, int rows, const Output& out) {
  float bias[UNIT] = {}, residual[UNIT] = {};
  if (out.bias) widen(out.bias, out.count, bias);
  for (int m = 0; m < rows; m++, sums += UNIT) {
    if (out.residual) widen(out.residual + m * out.stride, out.count, residual);
    bf16 rounded[UNIT];
    for (int o = 0; o < UNIT; o++) rounded[o] = float_to_bf16(sums[o] + bias[o] + residual[o]);
    bf16* y = out.y + m * out.stride;
    if (out.count == UNIT) memcpy(y, rounded, sizeof rounded);
    else memcpy(y, rounded, size_t(out.count) * 2);
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
