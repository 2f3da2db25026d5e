// The two halves of a decoder layer, a call each: what Python would else ask for in four calls apiece.
#include <stdlib.h>

#include <cstdint>

#include "calls.h"

#define PACELINE_API extern "C" __attribute__((visibility("default")))

namespace paceline {

struct Weights {
  const void* data;
  int64_t packed_bytes;  // 0: rows of bf16
  int64_t out, inner;
  const bf16* bias;  // or null
};

struct NormWeight {
  const void* data;  // or null: no norm
  bool wide;         // float32
};

// As `_Layer` of fused_layer.py has it.
struct Layer {
  Weights qkv, output, gate_up, down;
  NormWeight attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm, k_norm;
  int64_t index, window;
  float scale, eps;
  bool gelu;
};

// Rows of intermediate results.
class Rows {
 public:
  Rows(int64_t rows, int64_t width) : data_(static_cast<bf16*>(malloc(size_t(rows * width + 1) * sizeof(bf16)))) {}
  ~Rows() { free(data_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  bf16* get() const { return data_; }

 private:
  bf16* data_;
};

struct Call {
  int level, threads;
  int64_t rows;
  float eps;

  bool linear(const Weights& w, const bf16* x, const bf16* residual, bf16* y) const {
    if (w.packed_bytes)
      return paceline_linear(level, static_cast<const uint8_t*>(w.data), w.packed_bytes, x, w.inner, rows, w.bias, residual,
                             y, threads);
    return paceline_dense(level, static_cast<const bf16*>(w.data), w.out, w.inner, x, w.inner, rows, w.bias, residual, y,
                          threads);
  }

  void norm(const NormWeight& weight, int64_t width, const bf16* x, const bf16* residual, bf16* y) const {
    paceline_norm(level, x, rows, width, weight.data, weight.wide, eps, residual, y, threads);
  }

  // y = x + w(inner), normed in between where the layer has it so; `scratch` holds a row of x's width for each row
  bool add(const Weights& w, const NormWeight& post, const bf16* inner, const bf16* x, bf16* scratch, bf16* y) const {
    if (!post.data) return linear(w, inner, x, y);
    if (!linear(w, inner, nullptr, scratch)) return false;
    norm(post, w.out, scratch, x, y);
    return true;
  }
};

}  // namespace paceline

using namespace paceline;

// y [rows, hidden] = x + attention(norm(x)), keys and values written into the cache. False: no memory.
PACELINE_API bool paceline_attention_half(int level, const Layer* layer, const Step* step, const float* cos,
                                          const float* sin, const bf16* x, bf16* y, int threads) {
  Call call = {level, threads, step->num_rows, layer->eps};
  const Weights &qkv = layer->qkv, &output = layer->output;
  Rows normed(call.rows, qkv.inner), heads(call.rows, qkv.out), mixed(call.rows, output.inner);
  if (!normed.get() || !heads.get() || !mixed.get()) return false;
  call.norm(layer->attention_norm, qkv.inner, x, nullptr, normed.get());
  return call.linear(qkv, normed.get(), nullptr, heads.get()) &&
         paceline_attention(level, step, layer->index, layer->window, layer->scale, layer->eps, layer->q_norm.data,
                            layer->k_norm.data, layer->q_norm.wide, cos, sin, heads.get(), mixed.get(), threads) &&
         call.add(output, layer->post_attention_norm, mixed.get(), x, normed.get(), y);
}

// y [rows, hidden] = x + down(gated(gate_up(norm(x)))). False: no memory.
PACELINE_API bool paceline_mlp_half(int level, const Layer* layer, const bf16* x, int64_t rows, bf16* y, int threads) {
  Call call = {level, threads, rows, layer->eps};
  const Weights &gate_up = layer->gate_up, &down = layer->down;
  Rows normed(rows, gate_up.inner), both(rows, gate_up.out), active(rows, down.inner);
  if (!normed.get() || !both.get() || !active.get()) return false;
  call.norm(layer->mlp_norm, gate_up.inner, x, nullptr, normed.get());
  if (!call.linear(gate_up, normed.get(), nullptr, both.get())) return false;
  paceline_gated(level, both.get(), rows, down.inner, layer->gelu, active.get(), threads);
  return call.add(down, layer->post_mlp_norm, active.get(), x, normed.get(), y);
}
