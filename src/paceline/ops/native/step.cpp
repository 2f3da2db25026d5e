// What Python calls for a decoder layer's operators, and how rows are dealt out to threads.
#include "step.h"

#include <stdlib.h>

#include "calls.h"
#include "dense.h"
#include "threads.h"

#define PACELINE_API extern "C" __attribute__((visibility("default")))

namespace paceline {

struct Kernels {
  const StepKernels& step;
  const DenseKernels& dense;
};

static Kernels kernels_of(int level) {  // Python asks for levels that `paceline_start` found
#if defined(PACELINE_WITH_AMX)
  if (level >= 3) return {amx::step_kernels, amx::dense_kernels};
#endif
#if defined(PACELINE_WITH_AVX512)
  if (level >= 2) return {avx512::step_kernels, avx512::dense_kernels};
#endif
#if defined(PACELINE_WITH_AVX2)
  if (level >= 1) return {avx2::step_kernels, avx2::dense_kernels};
#endif
  (void)level;
  return {portable::step_kernels, portable::dense_kernels};
}

// `count` items in runs of `run`; each thread takes the next, the last ones first: of a prompt they see most keys.
template <typename Job>
struct Shared {
  const Job& job;
  void (*work)(const Job&, int64_t first, int64_t count);
  int64_t count, run, left;
};

template <typename Job>
static void take_runs(void* data) {
  Shared<Job>& all = *static_cast<Shared<Job>*>(data);
  int64_t index;
  while ((index = __atomic_sub_fetch(&all.left, 1, __ATOMIC_RELAXED)) >= 0) {
    int64_t first = index * all.run;
    all.work(all.job, first, all.count - first < all.run ? all.count - first : all.run);
  }
}

template <typename Job>
static void deal_out(const Job& job, void (*work)(const Job&, int64_t, int64_t), int64_t count, int64_t run, int threads) {
  int64_t runs = (count + run - 1) / run;
  Shared<Job> all = {job, work, count, run, runs};
  on_threads(take_runs<Job>, &all, int(runs < threads ? runs : threads));
}

constexpr int64_t GRAIN = 8192;  // elements that are worth waking a thread for

static int64_t rows_for_grain(int64_t width) { return width >= GRAIN ? 1 : (GRAIN + width - 1) / width; }

struct Attending {
  const Attention& a;
  const StepKernels& kernels;
  const Tile* tiles;
  size_t scratch_bytes;
  bool failed;
};

static void write_rows(const Attending& job, int64_t first, int64_t count) {
  for (int64_t row = first; row < first + count; row++) job.kernels.write(job.a, row);
}

static void attend_items(const Attending& job, int64_t first, int64_t count) {
  int64_t kv_heads = job.a.step->num_kv_heads;
  void* scratch = aligned_alloc(64, job.scratch_bytes);
  if (!scratch) {
    __atomic_store_n(const_cast<bool*>(&job.failed), true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = first; i < first + count; i++) job.kernels.attend(job.a, job.tiles[i / kv_heads], i % kv_heads, scratch);
  free(scratch);
}

}  // namespace paceline

using namespace paceline;

PACELINE_API void paceline_norm(int level, const bf16* x, int64_t rows, int64_t width, const void* weight, bool wide,
                                float eps, const bf16* residual, bf16* y, int threads) {
  Norm job = {x, weight, wide, eps, residual, y, rows, width};
  deal_out(job, kernels_of(level).step.norm, rows, rows_for_grain(width), threads);
}

PACELINE_API void paceline_gated(int level, const bf16* x, int64_t rows, int64_t width, bool gelu, bf16* y, int threads) {
  Gated job = {x, y, gelu, rows, width};
  deal_out(job, kernels_of(level).step.gated, rows, rows_for_grain(width), threads);
}

// y [rows, ⌈width / 128⌉]: of each 128 numbers of x [rows, width] the largest, NaN if they hold one.
PACELINE_API void paceline_maxima(int level, const bf16* x, int64_t rows, int64_t width, float* y, int threads) {
  int64_t chunks = (width + CHUNK - 1) / CHUNK;
  Maxima job = {x, y, width, chunks};
  deal_out(job, kernels_of(level).step.maxima, rows * chunks, GRAIN / CHUNK * 4, threads);
}

// First every row's keys and values are written, then every row attends. False: no memory.
PACELINE_API bool paceline_attention(int level, const Step* step, int64_t layer, int64_t window, float scale, float eps,
                                     const void* q_norm, const void* k_norm, bool wide, const float* cos, const float* sin,
                                     const bf16* qkv, bf16* out, int threads) {
  Attention a = {step, layer, window, scale, eps, q_norm, k_norm, wide, cos, sin, qkv, out};
  const StepKernels& kernels = kernels_of(level).step;
  Tile* tiles = static_cast<Tile*>(malloc(sizeof(Tile) * size_t(step->num_rows)));
  if (!tiles) return false;
  int64_t count = 0, keys = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    Tile* last = tiles + count - 1;
    if (count && last->rows < TILE_ROWS && step->rows[row].sequence == step->rows[row - 1].sequence) last->rows++;
    else tiles[count++] = {row, 1};
    int64_t position = step->rows[row].position + 1;
    keys += position < window ? position : window;
  }
  Attending job = {a, kernels, tiles, kernels.scratch(*step), false};
  int64_t written = step->num_kv_heads * step->head_dim;
  deal_out(job, write_rows, step->num_rows, rows_for_grain(written), threads);
  bool small = keys * step->num_heads * step->head_dim < GRAIN * 8;
  deal_out(job, attend_items, count * step->num_kv_heads, 1, small ? 1 : threads);
  free(tiles);
  return !job.failed;
}

// y [rows, out] = x [rows, inner] · Wᵀ + bias + residual, rounded once. Rows of x are `stride` elements apart. False: no memory.
PACELINE_API bool paceline_dense(int level, const bf16* weights, int64_t out, int64_t inner, const bf16* x, int64_t stride,
                                 int64_t rows, const bf16* bias, const bf16* residual, bf16* y, int threads) {
  const DenseKernels& kernels = kernels_of(level).dense;
  Dense job = {weights, out, inner, x, stride, rows < DENSE_ROWS ? rows : DENSE_ROWS, bias, residual, y, nullptr};
  job.arranged = aligned_alloc(64, kernels.bytes(job));
  if (!job.arranged) return false;
  // whole runs of units, so that what is asked of memory ahead of time is used; enough of them to share evenly
  int64_t units = (out + UNIT_ROWS - 1) / UNIT_ROWS, run = units / (16 * int64_t(threads)) + 1;
  for (int64_t first = 0; first < rows; first += DENSE_ROWS) {
    job.rows = rows - first < DENSE_ROWS ? rows - first : DENSE_ROWS;
    job.x = x + first * stride, job.y = y + first * out;
    job.residual = residual ? residual + first * out : nullptr;
    int64_t blocks = (job.rows + X_ROWS - 1) / X_ROWS;
    deal_out(job, kernels.arrange, blocks, 1, job.rows * inner < GRAIN * 4 ? 1 : threads);
    deal_out(job, kernels.units, units, run, threads);
  }
  free(job.arranged);
  return true;
}
