// Matrix units: a tile of 16 activation rows times a tile of 16 outputs (TDPBSSD for codes, TDPBF16PS for bf16). Row m of
// a product depends on row m of the activations alone, so a call takes as many rows as there are.
#define PACELINE_LEVEL amx
#include "decode512.h"

namespace paceline {
namespace amx {

constexpr int FEW = 4;  // rows that vectors are faster with; codes have the same products there

// Compilers do not know that tile instructions read memory.
static inline void settle(const void* read = nullptr) { asm volatile("" ::"r"(read) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, rest[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 … 3: sums; 4, 5: activations; 6, 7: weights. `first` rows in 0, 1, 4; `second` in 2, 3, 5. `bytes`: of a row
// of activations.
static void configure(int first, int second, int bytes) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    bool upper = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = uint8_t(tile > 5 ? bytes / 4 : upper ? second : first);
    config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : 64);
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

static void dense(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr int rows = 32;  // two tiles of activations, two of weights, four of sums: all eight
  configure(a.rows < 16 ? a.rows : 16, a.rows > 16 && a.rows < 32 ? a.rows - 16 : 16, 64);
  const bf16* weights = reinterpret_cast<const bf16*>(unit);
  for (int m = 0; m < a.rows; m += rows) {
    if (a.rows - m > 16) dense_rows<true>(weights, inner, a.x + m * a.stride, a.stride, acc + m * UNIT);
    else dense_rows<false>(weights, inner, a.x + m * a.stride, a.stride, acc + m * UNIT);
  }
  _tile_release();
}

// Signed codes of a chunk: [step][tile][8 vectors].
struct Codebook {
  alignas(64) __m512i codes[STEPS][2][8];
};

template <uint32_t TYPE>
static void decode_codes(const uint8_t* unit, int steps, Codebook* book) {
  constexpr Format f = format_of(TYPE);
  for (int step = 0; step < steps; step++)
    for (int t = 0; t < 2; t++) {
      const uint8_t* block = unit + size_t(step / f.steps()) * f.unit_block();
      size_t index = size_t(step % f.steps() * 2 + t);
      __m512i codes[8];
      decode_tile<f.bits>(block + f.low_at() + index * f.low_tile(), block + f.high_at() + index * f.high_tile(), codes);
      for (int j = 0; j < 8; j++)
        book->codes[step][t][j] = f.offset ? _mm512_sub_epi8(codes[j], _mm512_set1_epi8(f.offset)) : codes[j];
    }
}

// One tile of a step with a block of rows: by part of the step, [parts][16 rows][16 outputs].
template <int PARTS>
static inline void multiply_tile(const __m512i* codes, const int8_t* x, int32_t* dots) {
  _tile_zero(0);
  _tile_loadd(6, codes, 64);
  _tile_loadd(4, x, STEP);
  _tile_dpbssd(0, 4, 6);
  _tile_stored(0, dots, 64);
  if constexpr (PARTS == 2) {
    _tile_zero(1);
    _tile_loadd(7, codes + 4, 64);
    _tile_loadd(5, x + 16, STEP);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, dots + 256, 64);
  }
  settle();
}

template <uint32_t TYPE>
static void step_rows(const __m512i* codes, const Rounded& x, int rows, const float* scales, const float* mins,
                      float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int parts = STEP / f.group;
  alignas(64) int32_t dots[parts][16][TILE];
  multiply_tile<parts>(codes, x.codes, dots[0][0]);
  __m512 scale = _mm512_load_ps(scales), other = _mm512_load_ps(scales + (parts - 1) * UNIT);
  __m512 least = f.mins ? _mm512_load_ps(mins) : _mm512_setzero_ps();
  for (int m = 0; m < rows; m++) {
    __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(dots[0][m])), scale);
    if (parts == 2) part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(dots[parts - 1][m])), other, part);
    float* to = acc + m * UNIT;
    _mm512_store_ps(to, add_part<f.mins>(_mm512_load_ps(to), part, least, x.scale + m, x.total + m));
  }
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr Format f = format_of(TYPE);
  Scales s;
  Codebook book;
  configure(a.rounded.height, a.rounded.height, f.group);
  for (int k = 0; k < inner; k += CHUNK) {
    int steps = (inner - k < CHUNK ? inner - k : CHUNK) / STEP;
    decode_scales<TYPE>(unit, steps, &s);
    decode_codes<TYPE>(unit, steps, &book);
    unit += size_t(steps / f.steps()) * f.unit_block();
    for (int m = 0; m < a.rows; m += a.rounded.height) {
      int rows = a.rows - m < a.rounded.height ? a.rows - m : a.rounded.height;
      for (int step = 0; step < steps; step++)
        for (int t = 0; t < 2; t++)
          step_rows<TYPE>(book.codes[step][t], a.rounded.at(m, k / STEP + step), rows,
                          s.scales[step * STEP / f.group] + t * TILE, s.mins[step] + t * TILE,
                          acc + m * UNIT + t * TILE);
    }
  }
  _tile_release();
}

static void by_rows(uint32_t type, const uint8_t* unit, int inner, const Activations& a, const Output& out) {
  if (type != BF16 && a.rows <= FEW) avx512::operators.product(type, unit, inner, a, out);
  else product(type, unit, inner, a, out);
}

const Operators operators = {round_row, by_rows};

}  // namespace amx
}  // namespace paceline
