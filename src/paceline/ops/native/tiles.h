// What the matrix units (AMX) are told before they compute. Included inside no namespace but a level's own.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace paceline {
namespace PACELINE_LEVEL {

// Compilers do not know that tile instructions read memory.
static inline void settle(const void* read = nullptr) { asm volatile("" ::"r"(read) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, rest[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

static inline void configure(const TileConfig& config) {
  settle(&config);
  _tile_loadconfig(&config);
}

}  // namespace PACELINE_LEVEL
}  // namespace paceline
