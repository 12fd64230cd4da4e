// Packing, and the order of work: the forward pass over all layers.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend.h"
#include "levels.h"

using namespace pf;

namespace {

// ---------------------------------------------------------------- buffers

// Grows and stays; zeroed when it grows, so that padding is finite.
struct Buffer {
  void *data = nullptr;
  size_t size = 0;
  template <class T> T *get(int64_t count) {
    size_t bytes = round_up(count * (int64_t)sizeof(T), 64);
    if (bytes > size) {
      std::free(data);
      data = std::aligned_alloc(64, bytes);
      if (!data) std::abort();
      std::memset(data, 0, bytes);
      size = bytes;
    }
    return static_cast<T *>(data);
  }
  ~Buffer() { std::free(data); }
};

// Of one forward pass; a thread that computes keeps them.
struct Workspace {
  Buffer residual, x, qkv, attention, inner;
};

thread_local Workspace workspace;
thread_local Buffer scratch;

// Rows of activations: `width` columns padded to K_PAD with zeros.
struct Rows {
  void *data;
  int64_t stride;
  int64_t item;
  void *at(int64_t row) const { return static_cast<char *>(data) + row * stride * item; }
};

Rows rows_of(Buffer &buffer, int64_t rows, int64_t width, int64_t item) {
  int64_t stride = round_up(width, K_PAD);
  int64_t padded = round_up(rows, ROW_PAD);
  Rows r{buffer.get<char>(padded * stride * item), stride, item};
  if (stride != width)
    for (int64_t i = 0; i < padded; i++)
      std::memset(static_cast<char *>(r.at(i)) + width * item, 0, (stride - width) * item);
  return r;
}

int64_t activation_bytes(int64_t dtype) {
  return dtype == PF_BFLOAT16 && current().bf16_activations ? 2 : 4;
}

int64_t element_bytes(int64_t dtype) { return dtype == PF_BFLOAT16 ? 2 : 4; }

int64_t block_bytes(int64_t dtype, int64_t inputs) {
  return dtype == PF_BFLOAT16 ? round_up(inputs, K_PAD) * WIDTH * 2 : inputs * WIDTH * 4;
}

// ---------------------------------------------------------------- matrix product

struct Product {
  int64_t dtype;
  const pf_matrix *w;
  Rows x;
  int64_t rows;
  Write write;
  Rows out;
  float scale;
  int64_t steps, chunk, first_row, last_row;
};

constexpr int64_t PANEL = 768 << 10;  // bytes of activations that stay in the second level cache

// Blocks first, first + steps, ... of the product are finished: into their columns of `out`.
void finish(const Product &p, const Block &block, int64_t row, int64_t first, int64_t distance) {
  const Backend &b = current();
  const bool silu = p.write == Write::silu;
  for (int64_t i = 0; i < (silu ? block.blocks / 2 : block.blocks); i++) {
    int64_t index = first + i * distance, column = index * WIDTH;
    if (column >= p.w->outputs) return;
    int64_t up = index + 2 * p.steps;
    Epilogue e{p.write,
               block.out + i * ROWS * WIDTH,
               block.out + (i + block.blocks / 2) * ROWS * WIDTH,
               p.w->bias ? p.w->bias + column : nullptr,
               silu && p.w->bias ? p.w->bias + up * WIDTH : nullptr,
               p.scale,
               block.rows,
               std::min(WIDTH, p.w->outputs - column),
               static_cast<char *>(p.out.at(row)) + column * p.out.item,
               p.out.stride};
    (p.dtype == PF_BFLOAT16 ? b.finish_bf16 : b.finish_f32)(e);
  }
}

void product_task(int64_t index, void *context) {
  const Product &p = *static_cast<Product *>(context);
  const Backend &b = current();
  const bool half = p.dtype == PF_BFLOAT16;
  const int64_t bytes = block_bytes(p.dtype, p.w->inputs), n = p.steps;
  const auto run = half ? b.block_bf16 : b.block_f32;
  alignas(64) float out[4 * ROWS * WIDTH];
  Block block{nullptr, p.x.stride, {}, 4, half ? round_up(p.w->inputs, K_PAD) : p.w->inputs, 0, out};
  b.begin();
  for (int64_t i = index * p.chunk; i < std::min((index + 1) * p.chunk, n); i++) {
    const char *w = static_cast<const char *>(p.w->data) + i * bytes;
    if (p.last_row - p.first_row <= 16) {
      for (int64_t j = 0; j < 4; j++) block.w[j] = w + j * n * bytes;
      block.x = p.x.at(p.first_row);
      block.rows = p.last_row - p.first_row;
      run(block);
      finish(p, block, p.first_row, i, n);
      continue;
    }
    block.blocks = 2;
    for (int64_t j = 0; j < 2; j++) {
      block.w[0] = w + j * n * bytes, block.w[1] = w + (j + 2) * n * bytes;
      for (int64_t row = p.first_row; row < p.last_row; row += ROWS) {
        block.x = p.x.at(row);
        block.rows = std::min(ROWS, p.last_row - row);
        run(block);
        finish(p, block, row, i + j * n, 2 * n);
      }
    }
  }
}

void product(Product p) {
  p.steps = pf_blocks(p.w->outputs, p.write == Write::silu ? 2 : 1) / 4;
  int64_t threads = thread_count();
  // Several chunks a thread: one that was interrupted holds the others up for less.
  int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(p.steps, threads * 4);
  p.chunk = (p.steps + tasks - 1) / tasks;
  tasks = (p.steps + p.chunk - 1) / p.chunk;
  int64_t panel = std::max<int64_t>(ROWS, PANEL / (p.x.stride * p.x.item) / ROWS * ROWS);
  for (p.first_row = 0; p.first_row < p.rows; p.first_row += panel) {
    p.last_row = std::min(p.rows, p.first_row + panel);
    parallel(tasks, product_task, &p);
  }
}

// ---------------------------------------------------------------- the steps of a layer

struct Work {
  const pf_model &model;
  const pf_batch &batch;
  Rows residual, x, qkv, attention, inner;
  bool half() const { return model.dtype == PF_BFLOAT16; }
};

// fn(first, last) over ranges of rows, spread over the threads.
template <class Fn> void over_rows(int64_t rows, Fn fn) {
  struct Context {
    Fn &fn;
    int64_t rows, chunk;
  } context{fn, rows, std::max<int64_t>(16, (rows + thread_count() - 1) / thread_count())};
  parallel((rows + context.chunk - 1) / context.chunk,
           [](int64_t index, void *opaque) {
             auto &c = *static_cast<Context *>(opaque);
             c.fn(index * c.chunk, std::min(c.rows, (index + 1) * c.chunk));
           },
           &context);
}

void normalise(int64_t dtype, Rows x, const float *weight, int64_t rows, int64_t width, float eps,
               Rows out) {
  const Backend &b = current();
  auto norm = dtype == PF_BFLOAT16 ? b.norm_bf16 : b.norm_f32;
  over_rows(rows, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++)
      norm({static_cast<const float *>(x.at(r)), weight, out.at(r), width, eps});
  });
}

// Keys and values of this step into their pages, queries rotated in place.
void rotate_and_store(const pf_model &m, const pf_batch &batch, const pf_layer &layer, Rows qkv,
                      void *kv_layer) {
  const Backend &b = current();
  auto rope = m.dtype == PF_BFLOAT16 ? b.rope_bf16 : b.rope_f32;
  const int64_t item = element_bytes(m.dtype), head = m.page_size * m.head_dim;
  over_rows(batch.num_tokens, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      Rope r{static_cast<float *>(qkv.at(t)), m.rope_table + batch.positions[t] * m.head_dim,
             layer.q_norm, layer.k_norm, nullptr, head, m.num_kv_heads * head,
             m.num_heads, m.num_kv_heads, m.head_dim, m.eps};
      int64_t slot = batch.slot_mapping[t];
      if (slot >= 0)
        r.slot = static_cast<char *>(kv_layer) +
                 item * (slot / m.page_size * 2 * m.num_kv_heads * head +
                         slot % m.page_size * m.head_dim);
      rope(r);
    }
  });
}

struct Piece {
  int64_t seq, kv_head, first, tokens;  // first: row of the step
};

void attend(const pf_model &m, const pf_batch &batch, const pf_layer &layer, Rows qkv,
            const void *kv_layer, Rows out) {
  const Backend &b = current();
  auto run = m.dtype == PF_BFLOAT16 ? b.attend_bf16 : b.attend_f32;
  const int64_t group = m.num_heads / m.num_kv_heads, head = m.page_size * m.head_dim;
  const int64_t most = std::max<int64_t>(1, ATTEND_ROWS / group);
  // A page's heads lie side by side: read together, unless that leaves threads idle.
  const int64_t heads = batch.num_seqs < thread_count() ? 1 : m.num_kv_heads;
  std::vector<Piece> pieces;
  for (int64_t s = 0; s < batch.num_seqs; s++)
    for (int64_t h = 0; h < m.num_kv_heads; h += heads)
      for (int64_t t = batch.cu_seqlens_q[s]; t < batch.cu_seqlens_q[s + 1]; t += most)
        pieces.push_back({s, h, t, std::min<int64_t>(most, batch.cu_seqlens_q[s + 1] - t)});
  auto attend_of = [&](const Piece &p) {
    int64_t computed = batch.seq_lens[p.seq] - batch.cu_seqlens_q[p.seq + 1] + p.first;
    int64_t column = p.kv_head * group * m.head_dim;
    Attend a{};
    a.q = static_cast<const float *>(qkv.at(p.first)) + column;
    a.q_stride = qkv.stride;
    a.out = static_cast<char *>(out.at(p.first)) + column * out.item;
    a.out_stride = out.stride;
    a.kv_heads = heads;
    a.group = group;
    a.head_dim = m.head_dim;
    a.tokens = p.tokens;
    a.position = computed;
    a.window = layer.window;
    a.kv_layer = kv_layer;
    a.page_stride = 2 * m.num_kv_heads * head;
    a.value_offset = m.num_kv_heads * head;
    a.head_stride = head;
    a.head_offset = p.kv_head * head;
    a.page_size = m.page_size;
    a.block_table = batch.block_tables + p.seq * batch.table_stride;
    a.scale = m.attention_scale;
    a.deterministic = m.deterministic;
    a.scratch = scratch.get<char>(SCRATCH);
    return a;
  };
  auto one = [&](int64_t index) { run(attend_of(pieces[index])); };
  struct Context {
    decltype(one) &run;
    const Backend &backend;
  } context{one, b};
  parallel((int64_t)pieces.size(),
           [](int64_t index, void *opaque) {
             auto &c = *static_cast<Context *>(opaque);
             c.backend.begin();
             c.run(index);
           },
           &context);
}

void embed(const Work &w) {
  const pf_model &m = w.model;
  const int64_t bytes = block_bytes(m.dtype, m.hidden);
  for (int64_t t = 0; t < w.batch.num_tokens; t++) {
    int64_t id = w.batch.input_ids[t];
    float *out = static_cast<float *>(w.residual.at(t));
    const char *block = static_cast<const char *>(m.head.data) + id / WIDTH * bytes;
    for (int64_t k = 0; k < m.hidden; k++) {
      float value;
      if (!w.half()) {
        value = m.embedding ? static_cast<const float *>(m.embedding)[id * m.hidden + k]
                            : reinterpret_cast<const float *>(block)[k * WIDTH + id % WIDTH];
      } else {
        int64_t packed = k / 2 * 32 + id % WIDTH * 2 + k % 2;
        uint32_t u = m.embedding ? static_cast<const uint16_t *>(m.embedding)[id * m.hidden + k]
                                 : reinterpret_cast<const uint16_t *>(block)[packed];
        u <<= 16;
        std::memcpy(&value, &u, 4);
      }
      out[k] = value * m.embedding_multiplier;
    }
  }
}

// Activations as rows of the caller's dtype.
void copy_out(const Work &w, void *hidden) {
  const int64_t width = w.model.hidden, item = element_bytes(w.model.dtype);
  for (int64_t t = 0; t < w.batch.num_tokens; t++) {
    char *out = static_cast<char *>(hidden) + t * width * item;
    if (item == w.x.item) {
      std::memcpy(out, w.x.at(t), width * item);
      continue;
    }
    const uint32_t *row = static_cast<const uint32_t *>(w.x.at(t));  // float32 to bfloat16
    for (int64_t i = 0; i < width; i++) {
      uint32_t u = row[i];
      bool nan = (u & 0x7fffffff) > 0x7f800000;
      reinterpret_cast<uint16_t *>(out)[i] =
          (uint16_t)((nan ? u | 0x400000 : u + 0x7fff + ((u >> 16) & 1)) >> 16);
    }
  }
}

// Rows of the caller's dtype as activations.
void copy_in(int64_t dtype, const void *rows, int64_t count, int64_t width, Rows out) {
  const int64_t item = element_bytes(dtype);
  for (int64_t r = 0; r < count; r++) {
    const char *row = static_cast<const char *>(rows) + r * width * item;
    if (item == out.item) {
      std::memcpy(out.at(r), row, width * item);
      continue;
    }
    for (int64_t i = 0; i < width; i++)
      static_cast<uint32_t *>(out.at(r))[i] =
          (uint32_t) reinterpret_cast<const uint16_t *>(row)[i] << 16;
  }
}

Rows plain(void *data, int64_t stride, int64_t item) { return {data, stride, item}; }

}  // namespace

extern "C" {

int64_t pf_blocks(int64_t outputs, int64_t halves) {
  return halves * round_up(outputs, 4 * WIDTH / halves) / WIDTH;
}

int64_t pf_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs, int64_t halves) {
  return pf_blocks(outputs, halves) * block_bytes(dtype, inputs);
}

void pf_pack(int64_t dtype, const void *weight, int64_t outputs, int64_t inputs, int64_t halves,
             void *packed) {
  const int64_t bytes = block_bytes(dtype, inputs), blocks = pf_blocks(outputs, halves);
  std::memset(packed, 0, blocks * bytes);
  for (int64_t n = 0; n < halves * outputs; n++) {
    const int64_t row = n % outputs;
    char *to = static_cast<char *>(packed) + (n / outputs * (blocks / 2) + row / WIDTH) * bytes;
    if (dtype == PF_F32) {
      const float *from = static_cast<const float *>(weight) + n * inputs;
      for (int64_t k = 0; k < inputs; k++)
        reinterpret_cast<float *>(to)[k * WIDTH + row % WIDTH] = from[k];
    } else {
      const uint16_t *from = static_cast<const uint16_t *>(weight) + n * inputs;
      for (int64_t k = 0; k < inputs; k++)
        reinterpret_cast<uint16_t *>(to)[k / 2 * 32 + row % WIDTH * 2 + k % 2] = from[k];
    }
  }
}

void pf_forward(const pf_model *model, const pf_batch *batch, void *kv, int64_t layer_bytes,
                void *hidden, pf_on_layer on_layer) {
  const pf_model &m = *model;
  const int64_t tokens = batch->num_tokens, act = activation_bytes(m.dtype);
  const int64_t qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
  Work w{m, *batch, rows_of(workspace.residual, tokens, m.hidden, 4),
         rows_of(workspace.x, tokens, m.hidden, act), rows_of(workspace.qkv, tokens, qkv, 4),
         rows_of(workspace.attention, tokens, m.num_heads * m.head_dim, act),
         rows_of(workspace.inner, tokens, m.intermediate, act)};
  embed(w);
  for (int64_t i = 0; i < m.num_layers; i++) {
    const pf_layer &layer = m.layers[i];
    void *kv_layer = static_cast<char *>(kv) + i * layer_bytes;
    normalise(m.dtype, w.residual, layer.input_norm, tokens, m.hidden, m.eps, w.x);
    product({m.dtype, &layer.qkv, w.x, tokens, Write::store, w.qkv, 1});
    rotate_and_store(m, *batch, layer, w.qkv, kv_layer);
    if (on_layer) on_layer(i);
    attend(m, *batch, layer, w.qkv, kv_layer, w.attention);
    product({m.dtype, &layer.o, w.attention, tokens, Write::add, w.residual,
             m.residual_multiplier});
    normalise(m.dtype, w.residual, layer.post_norm, tokens, m.hidden, m.eps, w.x);
    product({m.dtype, &layer.gate_up, w.x, tokens, Write::silu, w.inner, 1});
    product({m.dtype, &layer.down, w.inner, tokens, Write::add, w.residual,
             m.residual_multiplier});
  }
  normalise(m.dtype, w.residual, m.final_norm, tokens, m.hidden, m.eps, w.x);
  copy_out(w, hidden);
}

void pf_logits(const pf_model *model, const void *hidden, int64_t rows, float *logits) {
  pf_linear(model->dtype, &model->head, hidden, rows, logits);
}

void pf_linear(int64_t dtype, const pf_matrix *w, const void *x, int64_t rows, float *out) {
  Rows in = rows_of(workspace.x, rows, w->inputs, activation_bytes(dtype));
  copy_in(dtype, x, rows, w->inputs, in);
  product({dtype, w, in, rows, Write::store, plain(out, w->outputs, 4), 1});
}

void pf_linear_silu(int64_t dtype, const pf_matrix *w, const void *x, int64_t rows, void *out) {
  Rows in = rows_of(workspace.x, rows, w->inputs, activation_bytes(dtype));
  copy_in(dtype, x, rows, w->inputs, in);
  product({dtype, w, in, rows, Write::silu, plain(out, w->outputs, activation_bytes(dtype)), 1});
}

void pf_rms_norm(int64_t dtype, const float *x, const float *weight, int64_t rows, int64_t width,
                 float eps, void *out) {
  normalise(dtype, plain(const_cast<float *>(x), width, 4), weight, rows, width, eps,
            plain(out, width, activation_bytes(dtype)));
}

void pf_rope_store(const pf_model *model, const pf_batch *batch, const pf_layer *layer, float *qkv,
                   void *kv_layer) {
  int64_t width = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
  rotate_and_store(*model, *batch, *layer, plain(qkv, width, 4), kv_layer);
}

void pf_attention(const pf_model *model, const pf_batch *batch, const pf_layer *layer,
                  const float *qkv, const void *kv_layer, void *out) {
  int64_t width = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
  attend(*model, *batch, *layer, plain(const_cast<float *>(qkv), width, 4), kv_layer,
         plain(out, model->num_heads * model->head_dim, activation_bytes(model->dtype)));
}

}  // extern "C"
