// What Python calls (C names, no exceptions), and the loop over units on the threads of torch's own pool.
#include <stdlib.h>

#include "pack.h"
#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define PACELINE_API extern "C" __attribute__((visibility("default")))

namespace paceline {

enum Level { PORTABLE, AVX2, AVX512, AMX, LEVELS };

#if defined(__x86_64__)
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

static bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned bf16_units = 1u << 22, tiles = 1u << 24, int8_units = 1u << 25;
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM: the kernel saves tiles only when asked to
  return (d & bf16_units) && (d & tiles) && (d & int8_units) && syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

static const Operators* operators_of(int level) {  // null: not on this machine, or not in this build
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  switch (level) {
    case PORTABLE: return &portable::operators;
#if defined(PACELINE_WITH_AVX2)
    case AVX2: return has_avx2() ? &avx2::operators : nullptr;
#endif
#if defined(PACELINE_WITH_AVX512)
    case AVX512: return has_avx512() ? &avx512::operators : nullptr;
#endif
#if defined(PACELINE_WITH_AMX) && defined(PACELINE_WITH_AVX512)
    case AMX: return has_amx() ? &amx::operators : nullptr;
#endif
    default: return nullptr;
  }
}

static const Operators* levels[LEVELS];

// OpenMP's "run this function on so many threads", of the runtime that torch uses: one pool for both. Null: one thread.
using Pool = void (*)(void (*)(void*), void*, unsigned, unsigned);
static Pool pool;

void on_threads(void (*work)(void*), void* data, int threads) {
  if (pool && threads > 1) pool(work, data, unsigned(threads), 0);
  else work(data);
}

constexpr int MOST_PARTS = 8;

struct Part {
  Header header;
  const uint8_t* data;
  int64_t first_unit, first_out;

  int64_t units() const { return (int64_t(header.out) + UNIT - 1) / UNIT; }
  int64_t unit_bytes() const { return int64_t(header.bytes - sizeof(Header)) / units(); }
  int padded_inner() const { return int(header.inner + STEP - 1) / STEP * STEP; }
};

// The parts that follow one another in `packed`; 0 if its bytes are not what the headers say.
static int parts_of(const uint8_t* packed, int64_t bytes, Part* parts) {
  int count = 0;
  int64_t unit = 0, out = 0;
  while (bytes > 0) {
    if (count == MOST_PARTS || bytes < int64_t(sizeof(Header))) return 0;
    Part& part = parts[count++];
    memcpy(&part.header, packed, sizeof(Header));
    const Header& h = part.header;
    Format f = format_of(h.type);
    if (h.magic != MAGIC || !f.block || !h.out || !h.inner || h.inner != parts[0].header.inner) return 0;
    if (f.bits != 16 && h.inner % unsigned(f.block)) return 0;
    if (h.bytes != packed_bytes(h.type, h.out, h.inner) || int64_t(h.bytes) > bytes) return 0;
    part.data = packed + sizeof(Header);
    part.first_unit = unit, part.first_out = out;
    unit += part.units(), out += h.out;
    packed += h.bytes, bytes -= int64_t(h.bytes);
  }
  return count;
}

struct Linear {
  const Operators* level;
  const Part* parts;
  int num_parts;
  Activations a;
  const bf16 *bias, *residual;
  bf16* y;
  int64_t out;    // of all parts
  int64_t next;   // row to be rounded, or unit to be computed: taken by whichever thread is free
  int64_t batch;  // units taken at a time
};

static void round_rows(void* data) {
  Linear& job = *static_cast<Linear*>(data);
  int64_t m;
  while ((m = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.a.rows)
    job.level->round(job.a.x + m * job.a.stride, int(m), job.parts[0].padded_inner(), job.a.rounded);
}

static void linear_unit(const Linear& job, int64_t index) {
  const Part* part = job.parts;
  while (index >= part->first_unit + part->units()) part++;
  int64_t unit = index - part->first_unit, at = part->first_out + unit * UNIT, left = part->header.out - unit * UNIT;
  Output out = {job.bias ? job.bias + at : nullptr, job.residual ? job.residual + at : nullptr, job.y + at, job.out,
                int(left < UNIT ? left : UNIT)};
  job.level->product(part->header.type, part->data + unit * part->unit_bytes(), part->padded_inner(), job.a, out);
}

static void linear_units(void* data) {
  Linear& job = *static_cast<Linear*>(data);
  const Part& last = job.parts[job.num_parts - 1];
  int64_t units = last.first_unit + last.units(), first;
  while ((first = __atomic_fetch_add(&job.next, job.batch, __ATOMIC_RELAXED)) < units)
    for (int64_t index = first; index < first + job.batch && index < units; index++) linear_unit(job, index);
}

static size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void* cache_lines(size_t bytes) { return aligned_alloc(64, lines(bytes ? bytes : 1)); }

// Memory for rounded activations, in one piece that starts at `codes`; null if there is none.
static bool make_codes(int rows, int inner, Codes* c) {
  c->groups = inner / STEP, c->height = rows < 16 ? rows : 16;
  int padded_rows = (rows + c->height - 1) / c->height * c->height;
  size_t groups = size_t(padded_rows) * size_t(c->groups), one = lines(groups * 4);
  size_t bytes = groups * STEP + 3 * one + 16 * STEP;  // matrix units may load a step too many
  uint8_t* at = static_cast<uint8_t*>(cache_lines(bytes));
  if (!at) return false;
  if (padded_rows != rows) memset(at, 0, bytes);
  c->codes = reinterpret_cast<int8_t*>(at), at += groups * STEP;
  c->scales = reinterpret_cast<float*>(at), at += one;
  c->totals = reinterpret_cast<float*>(at), at += one;
  c->sums = reinterpret_cast<int16_t*>(at);
  return true;
}

// At most ROW_BLOCK rows.
static bool linear_rows(Linear& job, const bf16* x, int64_t stride, int inner, int threads) {
  int rows = job.a.rows, padded_inner = job.parts[0].padded_inner();
  int padded_rows = rows > 32 ? (rows + 15) / 16 * 16 : rows;
  bool quantised = false, dense = false;
  for (int p = 0; p < job.num_parts; p++) (job.parts[p].header.type == BF16 ? dense : quantised) = true;
  bf16* copy = nullptr;
  if (padded_inner != inner || (dense && padded_rows != rows)) {
    size_t bytes = size_t(padded_rows) * size_t(padded_inner) * 2;
    if (!(copy = static_cast<bf16*>(cache_lines(bytes)))) return false;
    memset(copy, 0, bytes);
    for (int m = 0; m < rows; m++) memcpy(copy + size_t(m) * size_t(padded_inner), x + m * stride, size_t(inner) * 2);
    x = copy, stride = padded_inner;
  }
  job.a = {x, stride, rows, {}};
  bool done = !quantised || make_codes(rows, padded_inner, &job.a.rounded);
  if (done && quantised) {
    job.next = 0;
    on_threads(round_rows, &job, rows < 4 ? 1 : threads);
  }
  if (done) {
    job.next = 0;
    on_threads(linear_units, &job, threads);
  }
  free(job.a.rounded.codes);
  free(copy);
  return done;
}

struct Packing {
  Header header;
  const uint8_t* rows;
  uint8_t* data;
  int64_t next_unit;
};

static void pack_units(void* data) {
  Packing& job = *static_cast<Packing*>(data);
  int64_t units = (int64_t(job.header.out) + UNIT - 1) / UNIT, unit;
  while ((unit = __atomic_fetch_add(&job.next_unit, 1, __ATOMIC_RELAXED)) < units)
    pack_unit(job.header, job.rows, unit, job.data);
}

}  // namespace paceline

using namespace paceline;

// `gomp_parallel` may be null. Returns the levels at hand as a bit set; to be called once, before any other.
PACELINE_API unsigned paceline_start(void* gomp_parallel) {
  pool = reinterpret_cast<Pool>(gomp_parallel);
  unsigned found = 0;
  for (int level = 0; level < LEVELS; level++)
    if ((levels[level] = operators_of(level))) found |= 1u << level;
  return found;
}

// Bytes of a packed matrix with its header; 0 for a type that is not known or an inner dimension that does not fit it.
PACELINE_API int64_t paceline_packed_bytes(uint32_t type, int64_t out, int64_t inner) {
  Format f = format_of(type);
  if (!f.block || out < 1 || inner < 1 || (f.bits != 16 && inner % f.block)) return 0;
  return int64_t(packed_bytes(type, out, inner));
}

// `rows` as a GGUF file stores them, or bf16.
PACELINE_API void paceline_pack(uint32_t type, int64_t out, int64_t inner, const uint8_t* rows, uint8_t* packed,
                                int threads) {
  Header header = {MAGIC, type, uint32_t(out), uint32_t(inner), packed_bytes(type, out, inner), {}};
  memcpy(packed, &header, sizeof header);
  Packing job = {header, rows, packed + sizeof header, 0};
  on_threads(pack_units, &job, threads);
}

// Rows `ids` of all parts taken together, dequantised: y [n, inner]. False: not a packed matrix, or no such row.
PACELINE_API bool paceline_rows(const uint8_t* packed, int64_t bytes, const int64_t* ids, int64_t n, bf16* y) {
  Part parts[MOST_PARTS];
  int count = parts_of(packed, bytes, parts);
  if (!count) return false;
  for (int64_t i = 0; i < n; i++) {
    const Part* part = parts;
    while (part < parts + count && ids[i] >= part->first_out + int64_t(part->header.out)) part++;
    if (part == parts + count || ids[i] < 0) return false;
    unpack_row(part->header, part->data, ids[i] - part->first_out, y + i * int64_t(part->header.inner));
  }
  return true;
}

// y [rows, out] = x [rows, inner] · Wᵀ + bias [out] + residual [rows, out], rounded once; bias and residual may be null.
// Rows of x are `stride` elements apart. False: not a packed matrix, no such level, or no memory.
PACELINE_API bool paceline_linear(int level, const uint8_t* packed, int64_t bytes, const bf16* x, int64_t stride,
                                  int64_t rows, const bf16* bias, const bf16* residual, bf16* y, int threads) {
  Part parts[MOST_PARTS];
  int count = parts_of(packed, bytes, parts);
  if (!count || level < 0 || level >= LEVELS || !levels[level]) return false;
  const Part& last = parts[count - 1];
  // whole runs of units, so that what is asked of memory ahead of time is used; enough of them to share evenly
  int64_t batch = (last.first_unit + last.units()) / (16 * int64_t(threads)) + 1;
  Linear job = {levels[level], parts, count, {}, bias, residual, y, last.first_out + int64_t(last.header.out), 0, batch};
  for (int64_t m = 0; m < rows; m += ROW_BLOCK) {
    job.a.rows = int(rows - m < ROW_BLOCK ? rows - m : ROW_BLOCK);
    job.residual = residual ? residual + m * job.out : nullptr;
    job.y = y + m * job.out;
    if (!linear_rows(job, x + m * stride, stride, int(parts[0].header.inner), threads)) return false;
  }
  return true;
}

// What this was built from: the digest that build.py made of the sources.
extern "C" __attribute__((visibility("default"))) const char* const paceline_sources = PACELINE_SOURCES;
