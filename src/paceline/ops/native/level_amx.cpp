// Matrix units: a tile of 16 activation rows times a tile of 32 inner elements of 16 outputs (TDPBF16PS). Row m of a
// product depends on row m of the activations alone, so a call takes as many rows as there are.
#define PACELINE_LEVEL amx
#include "decode512.h"

namespace paceline {
namespace amx {

// Compilers do not know that tile instructions read memory.
static inline void settle(const void* read = nullptr) { asm volatile("" ::"r"(read) : "memory"); }

constexpr int ROWS = 32;  // two tiles of activations, two of weights, four of sums: all eight

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, rest[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 … 3: sums; 4, 5: activations; 6, 7: weights.
static void configure(int rows, int group) {
  TileConfig config;
  int first = rows < 16 ? rows : 16, second = rows <= 16 ? 16 : rows < 32 ? rows - 16 : 16;
  for (int tile = 0; tile < 8; tile++) {
    bool upper = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = uint8_t(tile > 5 ? group / 2 : upper ? second : first);
    config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? group * 2 : 64);
  }
  settle(&config);
  _tile_loadconfig(&config);
}

template <bool TWO>
static inline void multiply(const bf16* first, const bf16* second, const bf16* x, ptrdiff_t stride) {
  _tile_loadd(6, first, 64);
  _tile_loadd(4, x, stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, second, 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (TWO) {
    _tile_loadd(5, x + 16 * stride, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool TWO>
static inline void clear() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool TWO>
static inline void store(float* sums) {  // [32, 32]
  constexpr size_t row = UNIT * sizeof(float);
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + TILE, row);
  if constexpr (TWO) {
    _tile_stored(2, sums + 16 * UNIT, row);
    _tile_stored(3, sums + 16 * UNIT + TILE, row);
  }
  settle();
}

template <bool TWO>
static void dense_rows(const bf16* weights, int inner, const bf16* x, ptrdiff_t stride, float* acc) {
  settle();
  clear<TWO>();
  for (int k = 0; k < inner; k += STEP, weights += 1024) multiply<TWO>(weights, weights + 512, x + k, stride);
  store<TWO>(acc);
}

template <bool TWO, uint32_t TYPE>
static void chunk_rows(const Chunk* c, int groups, const bf16* x, ptrdiff_t stride, int rows, const float* totals,
                       ptrdiff_t totals_stride, float* acc) {
  constexpr Format f = format_of(TYPE);
  alignas(64) float sums[ROWS * UNIT];
  settle();
  for (int g = 0; g < groups; g++) {
    int step = g * f.group / STEP;
    const bf16* weights = c->weights[step][0] + g * f.group % STEP * TILE;
    clear<TWO>();
    multiply<TWO>(weights, weights + TILE * STEP, x + g * f.group, stride);
    store<TWO>(sums);
    for (int t = 0; t < 2; t++) {
      __m512 scale = _mm512_load_ps(c->scales[g] + t * TILE), least = _mm512_load_ps(c->mins[step] + t * TILE);
      for (int m = 0; m < rows; m++) {
        float* to = acc + m * UNIT + t * TILE;
        __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(sums + m * UNIT + t * TILE), scale, _mm512_load_ps(to));
        if constexpr (f.mins) sum = _mm512_fnmadd_ps(_mm512_set1_ps(totals[m * totals_stride + step]), least, sum);
        _mm512_store_ps(to, sum);
      }
    }
  }
}

template <uint32_t TYPE>
static void typed(const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  constexpr Format f = format_of(TYPE);
  const Tables tables(f);
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP, groups = steps * STEP / f.group;
    decode<TYPE>(unit, steps, tables, c);
    unit += size_t(steps / f.steps()) * f.unit_block();
    for (int m = 0; m < a.rows; m += ROWS) {
      int rows = a.rows - m < ROWS ? a.rows - m : ROWS;
      const float* totals = f.mins ? a.sums + ptrdiff_t(m) * (inner / STEP) + k / STEP : nullptr;
      const bf16* x = a.x + m * a.stride + k;
      if (rows > 16) chunk_rows<true, TYPE>(c, groups, x, a.stride, rows, totals, inner / STEP, acc + m * UNIT);
      else chunk_rows<false, TYPE>(c, groups, x, a.stride, rows, totals, inner / STEP, acc + m * UNIT);
    }
  }
}

static void any_type(uint32_t type, const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  PACELINE_FOR_TYPE(type, typed, unit, inner, a, c, acc)
}

void compute_unit(uint32_t type, const uint8_t* unit, int inner, const Activations& a, Chunk* c, float* acc) {
  configure(a.rows, format_of(type).group);
  if (type == BF16) {
    for (int m = 0; m < a.rows; m += ROWS) {
      const bf16* weights = reinterpret_cast<const bf16*>(unit);
      if (a.rows - m > 16) dense_rows<true>(weights, inner, a.x + m * a.stride, a.stride, acc + m * UNIT);
      else dense_rows<false>(weights, inner, a.x + m * a.stride, a.stride, acc + m * UNIT);
    }
  } else {
    memset(acc, 0, sizeof(float) * UNIT * size_t(a.rows));
    any_type(type, unit, inner, a, c, acc);
  }
  _tile_release();
}

}  // namespace amx
}  // namespace paceline
