// The C interface of the CPU kernels; kernels/native.py mirrors these structs.
//
// All pointers are to memory of the caller, valid for the duration of the call. Nothing here
// checks its arguments: kernels/native.py does, before it calls.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

enum pf_level { PF_BASE = 0, PF_AVX2 = 1, PF_AVX512 = 2, PF_BF16 = 3, PF_AMX = 4 };
enum pf_dtype { PF_F32 = 0, PF_BFLOAT16 = 1 };

// A packed [out, in] matrix: blocks of 16 outputs, one after the other.
//   bfloat16: [blocks][in / 32][16][16][2]  (block, k / 32, k % 32 / 2, output, k % 2)
//   float32:  [blocks][in][16]
// There are 4 n blocks; missing outputs and inputs are zero. A gate/up matrix is two halves of 2 n
// blocks each. Step i works on blocks i, i + n, i + 2 n and i + 3 n: a core reads memory faster in
// four streams than in one (20 against 15 GB/s on a Xeon of 2023).
typedef struct {
  const void *data;
  const float *bias;  // [16 * blocks], or null
  int64_t outputs;    // columns of the product; of a gate/up matrix: of the result of silu_mul
  int64_t inputs;
} pf_matrix;

typedef struct {
  pf_matrix qkv, o, gate_up, down;
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;         // [head_dim] or null
  int64_t window;                       // newest keys that a query sees; 0: all
} pf_layer;

typedef struct {
  int64_t dtype;  // of the matrices and of the KV pages
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, page_size;
  int64_t deterministic;  // 1: a row's bits do not depend on what is computed with it
  float eps, embedding_multiplier, residual_multiplier, attention_scale;
  const pf_layer *layers;
  const float *final_norm;  // [hidden]
  const float *rope_table;  // [max positions, head_dim]: cosines, then sines
  const void *embedding;    // [vocab, hidden] of dtype, or null: rows of `head`
  pf_matrix head;           // [vocab, hidden]
} pf_model;

typedef struct {
  int64_t num_tokens, num_seqs, table_stride;
  const int64_t *input_ids, *positions, *slot_mapping;  // [num_tokens]; slot -1: not stored
  const int32_t *cu_seqlens_q;                          // [num_seqs + 1]
  const int32_t *seq_lens;                              // [num_seqs]
  const int32_t *block_tables;                          // [num_seqs, table_stride]
} pf_batch;

typedef void (*pf_on_layer)(int64_t layer);

// Changes with this file; kernels/native.py asks for it.
int64_t pf_abi_version(void);

// What this machine offers, and what is used: the lesser of that and `pf_use_level`'s argument.
int64_t pf_best_level(void);
int64_t pf_use_level(int64_t level);
int64_t pf_current_level(void);
void pf_set_threads(int64_t count);
// More threads, one pinned to each of `cores`, that help whenever *busy is 0. count 0: none.
void pf_borrow(const int64_t *busy, const int64_t *cores, int64_t count);

// Bytes and blocks of a packed matrix, and the packing. halves = 2: weight is [2 * outputs, in],
// gate rows before up rows.
int64_t pf_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs, int64_t halves);
int64_t pf_blocks(int64_t outputs, int64_t halves);
void pf_pack(int64_t dtype, const void *weight, int64_t outputs, int64_t inputs, int64_t halves,
             void *packed);

// New tokens through all layers. kv: [layers, pages, 2, kv_heads, page_size, head_dim] of dtype;
// `layer_bytes` is the distance between two layers. hidden: [num_tokens, hidden] of dtype, normed.
// `on_layer` (may be null) is called when a layer's keys and values are stored.
void pf_forward(const pf_model *model, const pf_batch *batch, void *kv, int64_t layer_bytes,
                void *hidden, pf_on_layer on_layer);

// hidden [rows, hidden] of dtype -> float32 [rows, vocab].
void pf_logits(const pf_model *model, const void *hidden, int64_t rows, float *logits);

// Single kernels, for tests and measurements.
void pf_linear(int64_t dtype, const pf_matrix *w, const void *x, int64_t rows, float *out);
void pf_linear_silu(int64_t dtype, const pf_matrix *w, const void *x, int64_t rows, void *out);
void pf_rms_norm(int64_t dtype, const float *x, const float *weight, int64_t rows, int64_t width,
                 float eps, void *out);
void pf_rope_store(const pf_model *model, const pf_batch *batch, const pf_layer *layer, float *qkv,
                   void *kv_layer);
void pf_attention(const pf_model *model, const pf_batch *batch, const pf_layer *layer,
                  const float *qkv, const void *kv_layer, void *out);
double pf_read_bandwidth(int64_t bytes, int64_t repeats);
}
#pragma GCC visibility pop
