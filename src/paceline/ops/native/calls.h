// The calls that a decoder layer is made of, for whoever makes several of them at once. Documented where they are defined.
#pragma once
#include "step.h"

extern "C" {
bool paceline_linear(int level, const uint8_t* packed, int64_t bytes, const paceline::bf16* x, int64_t stride, int64_t rows,
                     const paceline::bf16* bias, const paceline::bf16* residual, paceline::bf16* y, int threads);
bool paceline_dense(int level, const paceline::bf16* weights, int64_t out, int64_t inner, const paceline::bf16* x,
                    int64_t stride, int64_t rows, const paceline::bf16* bias, const paceline::bf16* residual,
                    paceline::bf16* y, int threads);
void paceline_norm(int level, const paceline::bf16* x, int64_t rows, int64_t width, const void* weight, bool wide, float eps,
                   const paceline::bf16* residual, paceline::bf16* y, int threads);
void paceline_gated(int level, const paceline::bf16* x, int64_t rows, int64_t width, bool gelu, paceline::bf16* y,
                    int threads);
bool paceline_attention(int level, const paceline::Step* step, int64_t layer, int64_t window, float scale, float eps,
                        const void* q_norm, const void* k_norm, bool wide, const float* cos, const float* sin,
                        const paceline::bf16* qkv, paceline::bf16* out, int threads);
}
