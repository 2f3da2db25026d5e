// Matrix units: a tile of 16 activation rows times a tile of 16 outputs (TDPBSSD for codes, TDPBF16PS for bf16). Row m of
// a product depends on row m of the activations alone, so a call takes as many rows as there are.
#define PACELINE_LEVEL amx
#include "decode512.h"

namespace paceline {
namespace amx {

constexpr int FEW = 5;  // rows that vectors are faster with; codes have the same products there

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

constexpr int PHASE = 8;  // products between two turns of vector instructions: their sums stay in the nearest cache

// Signed codes of some steps, [step][tile][8 vectors], and their products with a block of rows, [step][part][tile].
struct Phase {
  alignas(64) __m512i codes[PHASE / 2][2][8];
  alignas(64) int32_t dots[PHASE][16][TILE];
};

template <uint32_t TYPE>
static void decode_codes(const uint8_t* unit, int first, int steps, Phase* phase) {
  constexpr Format f = format_of(TYPE);
  for (int i = 0; i < steps; i++)
    for (int t = 0; t < 2; t++) {
      const uint8_t* block = unit + size_t((first + i) / f.steps()) * f.unit_block();
      size_t index = size_t((first + i) % f.steps() * 2 + t);
      __m512i codes[8];
      decode_tile<f.bits>(block + f.low_at() + index * f.low_tile(), block + f.high_at() + index * f.high_tile(), codes);
      for (int j = 0; j < 8; j++)
        phase->codes[i][t][j] = f.offset ? _mm512_sub_epi8(codes[j], _mm512_set1_epi8(f.offset)) : codes[j];
    }
}

// The turn of a tile of sums: what it holds, product number `index` − 4, is stored; then it takes product number `index`,
// of which tile `w` has the weights. (A macro, since tiles are named by literals.)
#define PACELINE_TURN(index, sums, a, w)                                         \
  if ((index) >= 4) _tile_stored(sums, phase->dots[(index) - 4], 64);            \
  if ((index) < count) {                                                         \
    _tile_zero(sums);                                                            \
    _tile_loadd(w, phase->codes[(index) / 2 / PARTS][(index) % 2] + (index) / 2 % PARTS * 4, 64); \
    _tile_dpbssd(sums, a, w);                                                    \
  }
#define PACELINE_ROWS_OF(index, a) \
  if ((index) < count) _tile_loadd(a, x + (index) / 2 / PARTS * step + (index) / 2 % PARTS * 16, STEP);

// `count` products, an even number. Four are under way at a time: each takes long, and a tile is not renamed.
// Of `ahead` each asks for `piece` bytes: requests to memory are spread over all there is to do.
template <int PARTS>
static inline void multiply(int count, const int8_t* x, ptrdiff_t step, Phase* phase, const uint8_t* ahead,
                            size_t piece) {
  settle();
  for (int index = 0; index < count + 4; index += 4) {
    if (index < count) ask_ahead(ahead + size_t(index) * piece, 4 * piece);
    PACELINE_ROWS_OF(index, 4)
    PACELINE_TURN(index, 0, 4, 6)
    PACELINE_TURN(index + 1, 1, 4, 7)
    if (index + 2 >= count + 4) break;
    PACELINE_ROWS_OF(index + 2, 5)
    PACELINE_TURN(index + 2, 2, 5, 6)
    PACELINE_TURN(index + 3, 3, 5, 7)
  }
  settle();
}

// 16 outputs of a step with a block of rows.
template <uint32_t TYPE>
static inline void add_rows(const int32_t (*dots)[16][TILE], const Rounded& x, int rows, const float* scales,
                            const float* mins, float* acc) {
  const int32_t* d = dots[0][0];
  constexpr Format f = format_of(TYPE);
  constexpr int parts = STEP / f.group, other = (parts - 1) * 2;
  __m512 scale = _mm512_load_ps(scales), second = _mm512_load_ps(scales + (parts - 1) * UNIT);
  __m512 least = f.mins ? _mm512_load_ps(mins) : _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++) {
    __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(d + m * TILE)), scale);
    if (parts == 2) part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(d + (other * 16 + m) * TILE)), second, part);
    float* to = acc + m * UNIT;
    _mm512_store_ps(to, add_part<f.mins>(_mm512_load_ps(to), part, least, x.scale + m, x.total + m));
  }
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int parts = STEP / f.group, most = PHASE / 2 / parts;
  Scales s[2];  // by chunk, in turn
  Phase phase;
  const int height = a.rounded.height, steps = inner / STEP;
  auto decode_phase = [&](int first) {
    int chunk = first / STEPS, left = steps - first;
    const uint8_t* blocks = unit + size_t(chunk * STEPS / f.steps()) * f.unit_block();
    if (first % STEPS == 0) decode_scales<TYPE>(blocks, left < STEPS ? left : STEPS, &s[chunk % 2]);
    decode_codes<TYPE>(blocks, first % STEPS, left < most ? left : most, &phase);
  };
  configure(height, height, f.group);
  decode_phase(0);
  for (int first = 0; first < steps; first += most) {
    int count = steps - first < most ? steps - first : most;
    const Scales& own = s[first / STEPS % 2];
    for (int m = 0; m < a.rows; m += height) {
      int rows = a.rows - m < height ? a.rows - m : height;
      Rounded x = a.rounded.at(m, first);
      const uint8_t* ahead = unit + size_t(first * 2) * f.tile_share();
      constexpr size_t piece = f.tile_share() / (2 * parts);  // half while tiles compute, half while vectors do
      multiply<parts>(count * 2 * parts, x.codes, height * STEP, &phase, ahead, piece);
      ahead += size_t(count) * f.tile_share();
      // here, so that what tiles store is not waited for, nor what they load
      if (m + height >= a.rows && first + most < steps) decode_phase(first + most);
      for (int i = 0; i < count; i++, x = a.rounded.next(x))
        for (int t = 0; t < 2; t++) {
          int step = first % STEPS + i;
          const float *scales = own.scales[step * parts] + t * TILE, *mins = own.mins[step] + t * TILE;
          float* to = acc + m * UNIT + t * TILE;
          ask_ahead(ahead + size_t(2 * i + t) * f.tile_share() / 2, f.tile_share() / 2);
          if (rows == 16) add_rows<TYPE>(phase.dots + i * 2 * parts + t, x, 16, scales, mins, to);
          else add_rows<TYPE>(phase.dots + i * 2 * parts + t, x, rows, scales, mins, to);
        }
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
