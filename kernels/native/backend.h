// What an instruction set level supplies. One instance per level; the drivers in forward.cpp call
// through it and are compiled for the base level only.
#pragma once

#include "abi.h"

namespace pf {

struct bf16 {
  uint16_t bits;
};

constexpr int64_t WIDTH = 16;     // outputs of one packed block
constexpr int64_t ROWS = 32;      // most rows at a time
constexpr int64_t ROW_PAD = 16;   // rows of activations are readable up to a multiple of this
constexpr int64_t K_PAD = 32;     // so are their columns, where zeros stand

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// out[(b * ROWS + r) * WIDTH + c] = sum over k of x[r * stride + k] * w[b][k, c].
struct Block {
  const void *x;
  int64_t stride;    // elements
  const void *w[4];  // packed blocks
  int64_t blocks;    // 2; or 4, if rows <= 16
  int64_t k;         // padded to K_PAD for bfloat16
  int64_t rows;      // 1 .. ROWS
  float *out;
};

enum class Write { store, add, silu };

// What becomes of a finished block: its first `count` columns.
struct Epilogue {
  Write write;
  const float *block, *up;  // [rows, WIDTH]; up: silu only
  const float *bias, *up_bias;  // of the first column, or null
  float scale;        // add: out += scale * (block + bias)
  int64_t rows, count;
  void *out;          // first row and column; float32, or the activation type for silu
  int64_t stride;     // elements
};

struct Norm {
  const float *x;
  const float *weight;
  void *out;  // activation type
  int64_t width;
  float eps;
};

// One token: q heads rotated in place, k rotated and v into their slot.
struct Rope {
  float *qkv;
  const float *cos_sin;  // [head_dim]
  const float *q_norm, *k_norm;
  void *slot;  // first kv head's key of this token, or null: not stored
  int64_t head_stride, value_offset;  // elements: between kv heads; from a key to its value
  int64_t num_heads, num_kv_heads, head_dim;
  float eps;
};

// Some new tokens of one sequence against the keys of some kv heads.
struct Attend {
  const float *q;    // first token's first query head of the first kv head
  int64_t q_stride;  // elements between tokens
  void *out;         // same place, activation type
  int64_t out_stride;
  int64_t kv_heads;
  int64_t group;     // query heads per kv head
  int64_t head_dim;
  int64_t tokens;
  int64_t position;  // of the first token
  int64_t window;    // 0: none
  const void *kv_layer;
  int64_t page_stride, value_offset, head_stride, head_offset, page_size;  // elements
  const int32_t *block_table;
  float scale;
  bool deterministic;  // the same bits for a token in whatever chunk it comes
  void *scratch;  // SCRATCH bytes, 64-byte aligned
};

constexpr int64_t SCRATCH = 4 << 20;
constexpr int64_t ATTEND_ROWS = 768;  // most query rows (tokens * group) of one Attend
constexpr int64_t MAX_HEAD_DIM = 512;

struct Backend {
  bool bf16_activations;  // for bfloat16 models; float32 models always compute in float32
  void (*block_f32)(const Block &);
  void (*block_bf16)(const Block &);
  void (*finish_f32)(const Epilogue &);
  void (*finish_bf16)(const Epilogue &);
  void (*norm_f32)(const Norm &);
  void (*norm_bf16)(const Norm &);
  void (*rope_f32)(const Rope &);
  void (*rope_bf16)(const Rope &);
  void (*attend_f32)(const Attend &);
  void (*attend_bf16)(const Attend &);  // bfloat16 pages
  void (*begin)();                      // in each thread, before blocks
};

namespace base { const Backend &backend(); }
#if defined(__x86_64__)
namespace avx2 { const Backend &backend(); }
namespace avx512 { const Backend &backend(); }
namespace avx512_bf16 { const Backend &backend(); }
namespace amx { const Backend &backend(); }
#endif

// Runs task(0) .. task(count - 1), spread over the threads of `pf_set_threads`.
void parallel(int64_t count, void (*task)(int64_t index, void *context), void *context);

}  // namespace pf
