// Packing and its inverse, unit by unit and row by row.
#pragma once
#include "packed.h"

namespace paceline {

size_t packed_bytes(uint32_t type, int64_t out, int64_t inner);  // with the header

// `rows`: the matrix's rows as a GGUF file stores them. `data`: what follows the header.
void pack_unit(const Header& matrix, const uint8_t* rows, int64_t unit, uint8_t* data);

// One row, dequantised in float32 and rounded to bf16: [inner].
void unpack_row(const Header& matrix, const uint8_t* data, int64_t row, bf16* out);

}  // namespace paceline
