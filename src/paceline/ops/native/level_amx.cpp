// Matrix units: a tile of 16 activation rows times a tile of 16 outputs (TDPBSSD for codes, TDPBF16PS for bf16). Row m of
// a product depends on row m of the activations alone, so a call takes as many rows as there are.
#define PACELINE_LEVEL amx
#include "decode512.h"

namespace paceline {
namespace amx {

constexpr int FEW = 8;  // rows that vectors are faster with; codes have the same products there

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

// Products of a tile of weights between two turns of vector instructions. Turns are long, since for some hundred cycles
// behind a tile instruction floats are multiplied at half their rate; and what a turn holds stays in the nearest cache.
constexpr int TURN = 8;

// Some steps of a unit: their signed codes, and their products with a block of rows, from BASE on.
template <uint32_t TYPE>
struct Turn {
  static constexpr int parts = STEP / format_of(TYPE).group, steps = TURN / parts;
  alignas(64) __m512i codes[2][steps][8];            // [tile][step]
  alignas(64) int32_t dots[2][TURN * 16][TILE];      // [tile][step, part, row]
  Scales scales[2];                                  // of chunks, in turn
};

// What memory is asked for meanwhile: all that a turn does asks for its piece of each step's weights. Requests all at once
// would wait for one another, and whatever else is not in the nearest cache for them.
struct Ahead {
  const uint8_t* from;
  size_t step, piece;  // bytes

  Ahead part(int index) const { return {from + size_t(index) * piece, step, piece}; }
  void ask(int i) const { ask_ahead(from + size_t(i) * step, piece); }
};

template <uint32_t TYPE>
static void decode_turn(const uint8_t* unit, int first, int steps, int all, const Ahead& ahead, Turn<TYPE>* turn) {
  constexpr Format f = format_of(TYPE);
  auto block_of = [&](int step) { return unit + size_t(step / f.steps()) * f.unit_block(); };
  for (int i = 0; i < steps; i++) {
    ahead.ask(i);
    for (int t = 0; t < 2; t++) {
      const uint8_t* block = block_of(first + i);
      size_t index = size_t((first + i) % f.steps() * 2 + t);
      __m512i codes[8];
      decode_tile<f.bits>(block + f.low_at() + index * f.low_tile(), block + f.high_at() + index * f.high_tile(), codes);
      for (int j = 0; j < 8; j++)
        turn->codes[t][i][j] = f.offset ? _mm512_sub_epi8(codes[j], _mm512_set1_epi8(f.offset)) : codes[j];
    }
  }
  if (first % STEPS == 0)
    decode_scales<TYPE>(block_of(first), all - first < STEPS ? all - first : STEPS, &turn->scales[first / STEPS % 2]);
}

struct Base {  // a row of a tile of sums before its products
  int32_t bits[TILE] = {};
  constexpr Base() {
    for (int o = 0; o < TILE; o++) bits[o] = BASE_BITS;
  }
};
alignas(64) static constexpr Base base;

// Two products, of the activations at `x` with both tiles of weights. (Macros, since tiles are named by literals.)
#define PACELINE_PRODUCTS(a, s0, s1, x, at) \
  _tile_loadd(a, x, STEP);                  \
  _tile_loadd(s0, base.bits, 0);            \
  _tile_loadd(6, w0 + (at), 64);            \
  _tile_dpbssd(s0, a, 6);                   \
  _tile_loadd(s1, base.bits, 0);            \
  _tile_loadd(7, w1 + (at), 64);            \
  _tile_dpbssd(s1, a, 7);
#define PACELINE_SUMS(s0, s1, at)     \
  _tile_stored(s0, dots0 + (at), 64); \
  _tile_stored(s1, dots1 + (at), 64);

// Products of `count` steps with the block of `height` rows at `x`. Four are under way at a time: each takes long, and a tile
// is not renamed; so there may be those of one step too many, which nobody reads.
template <uint32_t TYPE>
static inline void multiply(int count, const int8_t* x, int height, const Ahead& ahead, Turn<TYPE>* turn) {
  constexpr int parts = Turn<TYPE>::parts, steps = 2 / parts, vectors = 8 / parts;
  const ptrdiff_t row = height * STEP, second = parts == 2 ? 16 : row;
  const __m512i *w0 = turn->codes[0][0], *w1 = turn->codes[1][0];
  int32_t(*dots0)[TILE] = turn->dots[0], (*dots1)[TILE] = turn->dots[1];
  settle();
  for (int i = 0; i < count; i += steps, x += steps * row, w0 += 2 * vectors, w1 += 2 * vectors) {
    ahead.ask(i);
    if (i) {
      PACELINE_SUMS(0, 1, 0)
    }
    PACELINE_PRODUCTS(4, 0, 1, x, 0)
    if (steps == 2) ahead.ask(i + 1);
    if (i) {
      PACELINE_SUMS(2, 3, height)
      dots0 += 2 * height, dots1 += 2 * height;
    }
    PACELINE_PRODUCTS(5, 2, 3, x + second, vectors)
  }
  PACELINE_SUMS(0, 1, 0)
  PACELINE_SUMS(2, 3, height)
  settle();
}

// What a turn's `count` steps, the unit's from `first` on, make of M rows from row `row` of the block on.
template <int M, uint32_t TYPE>
static void add_rows(const Turn<TYPE>& turn, int first, int count, int row, int height, const Rounded& x, const Ahead& ahead,
                     float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int parts = Turn<TYPE>::parts;
  const float *scale = x.scale, *total = x.total;
  __m512 sums[M][2];
  for (int m = 0; m < M; m++)
    for (int t = 0; t < 2; t++) sums[m][t] = _mm512_load_ps(acc + m * UNIT + t * TILE);
  for (int i = 0; i < count; i++, scale += height, total += height, row += parts * height) {
    const Scales& s = turn.scales[(first + i) / STEPS % 2];
    const int step = (first + i) % STEPS;
    ahead.ask(i);
    __m512 scales[2][2], least[2];
    for (int t = 0; t < 2; t++) {
      for (int part = 0; part < parts; part++) scales[t][part] = _mm512_load_ps(s.scales[step * parts + part] + t * TILE);
      least[t] = f.mins ? _mm512_load_ps(s.mins[step] + t * TILE) : _mm512_setzero_ps();
    }
    for (int m = 0; m < M; m++)
      for (int t = 0; t < 2; t++) {
        __m512 part = scaled(_mm512_load_si512(turn.dots[t][row + m]), scales[t][0]);
        if (parts == 2)
          part = _mm512_fmadd_ps(to_float(_mm512_load_si512(turn.dots[t][row + height + m])), scales[t][parts - 1], part);
        sums[m][t] = add_part<f.mins>(sums[m][t], part, least[t], scale + m, total + m);
      }
  }
  for (int m = 0; m < M; m++)
    for (int t = 0; t < 2; t++) _mm512_store_ps(acc + m * UNIT + t * TILE, sums[m][t]);
}

template <uint32_t TYPE>
static void quantised(const uint8_t* unit, int inner, const Activations& a, float* acc) {
  constexpr Format f = format_of(TYPE);
  constexpr int most = Turn<TYPE>::steps;
  Turn<TYPE> turn;
  const int height = a.rounded.height, steps = inner / STEP, blocks = (a.rows + height - 1) / height;
  const int pieces = 1 + blocks * (1 + (height + ROWS - 1) / ROWS);
  constexpr size_t step_bytes = 2 * f.tile_share();
  auto count_of = [&](int first) { return steps - first < most ? steps - first : most; };
  configure(height, height, f.group);
  decode_turn<TYPE>(unit, 0, count_of(0), steps, {unit, 0, 0}, &turn);
  for (int first = 0, count; first < steps; first += count) {
    count = count_of(first);
    Ahead ahead = {unit + size_t(first) * step_bytes, step_bytes, step_bytes / size_t(pieces) + 1};
    for (int m = 0, part = 1; m < a.rows; m += height) {
      multiply<TYPE>(count, a.rounded.at(m, first).codes, height, ahead.part(part++), &turn);
      // here, so that what tiles store is not waited for, nor what they load
      if (m + height >= a.rows && first + count < steps)
        decode_turn<TYPE>(unit, first + count, count_of(first + count), steps, ahead, &turn);
      int rows = a.rows - m < height ? a.rows - m : height;
      for (int row = 0; row < rows; row += ROWS) {
#define PACELINE_ROWS(M) add_rows<M, TYPE>
        PACELINE_FOR_ROWS(rows - row, PACELINE_ROWS, turn, first, count, row, height, a.rounded.at(m + row, first),
                          ahead.part(part++), acc + (m + row) * UNIT)
#undef PACELINE_ROWS
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
