// The kernels of the levels without instructions of their own for bfloat16, and what all levels
// share: norms, rotation, the ends of blocks. Included once per level, with PF_LANES and PF_ISA.
#pragma once

#include "vector.h"

namespace pf {
namespace PF_ISA {

// ---------------------------------------------------------------- matrix blocks, float32 inputs

constexpr int64_t VECTORS = WIDTH / LANES;

// Weights of vector v of a block for inputs k and k + 1.
inline void weights(const bf16 *block, int64_t k, int64_t v, F *even, F *odd) {
  U u;
  memcpy(&u, block + k * WIDTH + v * 2 * LANES, sizeof u);
  *even = (F)(u << 16);
  *odd = (F)(u & 0xffff0000u);
}

inline void weights(const float *block, int64_t k, int64_t v, F *even, F *odd) {
  *even = load(block + k * WIDTH + v * LANES);
  *odd = load(block + (k + 1) * WIDTH + v * LANES);
}

template <class W, int R> inline void block_rows(const Block &b, int64_t index, int64_t row) {
  const float *x = (const float *)b.x + row * b.stride;
  const W *w = (const W *)b.w[index];
  F acc[R][VECTORS] = {};
  int64_t k = 0;
  for (; k + 1 < b.k; k += 2) {
    F even[VECTORS], odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights(w, k, v, even + v, odd + v);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++)
        acc[r][v] = fma(x[r * b.stride + k + 1], odd[v],
                        fma(x[r * b.stride + k], even[v], acc[r][v]));
  }
  if (k < b.k)  // only float32, whose inputs are not padded
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++)
        acc[r][v] = fma(x[r * b.stride + k],
                        load((const float *)b.w[index] + k * WIDTH + v * LANES), acc[r][v]);
  float *out = b.out + (index * ROWS + row) * WIDTH;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(out + r * WIDTH + v * LANES, acc[r][v]);
}

template <class W> void block(const Block &b) {
  constexpr int64_t MOST = LANES == 16 ? 8 : 4;  // rows whose sums fit the registers
  for (int64_t i = 0; i < b.blocks; i++) {
    int64_t row = 0;
    for (; row + MOST <= b.rows; row += MOST) block_rows<W, MOST>(b, i, row);
    for (; row < b.rows; row++) block_rows<W, 1>(b, i, row);
  }
}

template <class A> void finish(const Epilogue &e) {
  for (int64_t r = 0; r < e.rows; r++)
    for (int64_t c = 0; c < e.count; c += LANES) {
      int64_t n = e.count - c;
      F value = load(e.block + r * WIDTH + c);
      if (e.bias) value += load(e.bias + c);
      if (e.write == Write::silu) {
        F up = load(e.up + r * WIDTH + c);
        if (e.up_bias) up += load(e.up_bias + c);
        store_part((A *)e.out + r * e.stride + c, silu(value) * up, n);
        continue;
      }
      float *out = (float *)e.out + r * e.stride + c;
      if (e.write == Write::add) value = fma(e.scale, value, load_part(out, n));
      store_part(out, value, n);
    }
}

// ---------------------------------------------------------------- norm and rotation

template <class X> inline float inverse_rms(const X *x, int64_t width, float eps) {
  F squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    F v = load_part(x + i, width - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / sqrtf(sum(squares) / width + eps);
}

template <class A> void norm(const Norm &n) {
  float factor = inverse_rms(n.x, n.width, n.eps);
  for (int64_t i = 0; i < n.width; i += LANES) {
    int64_t count = n.width - i;
    F v = load_part(n.x + i, count) * factor * load_part(n.weight + i, count);
    store_part((A *)n.out + i, v, count);
  }
}

template <class T>
inline void rotate(const float *head, const Rope &r, const float *weight, T *out) {
  int64_t half = r.head_dim / 2;
  float factor = weight ? inverse_rms(head, r.head_dim, r.eps) : 1.0f;
  const float *sines = r.cos_sin + half;
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t n = half - i;
    F a = load_part(head + i, n) * factor, b = load_part(head + half + i, n) * factor;
    if (weight) {
      a *= load_part(weight + i, n);
      b *= load_part(weight + half + i, n);
    }
    F c = load_part(r.cos_sin + i, n), s = load_part(sines + i, n);
    store_part(out + i, a * c - b * s, n);
    store_part(out + half + i, b * c + a * s, n);
  }
}

template <class T> void rope(const Rope &r) {
  for (int64_t h = 0; h < r.num_heads; h++) {
    float *q = r.qkv + h * r.head_dim;
    rotate(q, r, r.q_norm, q);
  }
  if (!r.slot) return;
  for (int64_t h = 0; h < r.num_kv_heads; h++) {
    const float *k = r.qkv + (r.num_heads + h) * r.head_dim;
    const float *v = k + r.num_kv_heads * r.head_dim;
    T *key = (T *)r.slot + h * r.head_stride;
    rotate(k, r, r.k_norm, key);
    T *value = key + r.value_offset;
    for (int64_t i = 0; i < r.head_dim; i += LANES)
      store_part(value + i, load_part(v + i, r.head_dim - i), r.head_dim - i);
  }
}

// ---------------------------------------------------------------- attention

constexpr int64_t KEYS = 64;  // keys at a time

template <class T> inline const T *key_at(const Attend &a, int64_t position) {
  int64_t page = a.block_table[position / a.page_size];
  return (const T *)a.kv_layer + page * a.page_stride + a.head_offset +
         position % a.page_size * a.head_dim;
}

// First key that query `position` sees.
inline int64_t window_start(const Attend &a, int64_t position) {
  int64_t first = a.window ? position - a.window + 1 : 0;
  return first > 0 ? first : 0;
}

// Online softmax (arXiv:2205.14135) over blocks of KEYS keys, which are widened to float32 once
// for all query rows: keys transposed to [head_dim, KEYS], values [KEYS, head_dim].
template <class T, class A> void attend(const Attend &a) {
  int64_t rows = a.tokens * a.group, d = a.head_dim, wide = round_up(d, LANES);
  float *keys = (float *)a.scratch, *values = keys + d * KEYS, *acc = values + KEYS * wide;
  float *maxima = acc + rows * wide, *sums = maxima + rows;
  memset(acc, 0, sizeof(float) * rows * wide);
  for (int64_t r = 0; r < rows; r++) maxima[r] = -INFINITY, sums[r] = 0;
  int64_t end = a.position + a.tokens;
  for (int64_t first = window_start(a, a.position) / KEYS * KEYS; first < end; first += KEYS) {
    int64_t count = end - first < KEYS ? end - first : KEYS;
    for (int64_t j = 0; j < KEYS; j++) {
      const T *key = j < count ? key_at<T>(a, first + j) : nullptr;
      for (int64_t i = 0; i < d; i++) keys[i * KEYS + j] = key ? widen(key[i]) : 0;
      for (int64_t i = 0; i < wide; i += LANES)
        store(values + j * wide + i,
              key && i < d ? load_part(key + a.value_offset + i, d - i) : F{});
    }
    for (int64_t r = 0; r < rows; r++) {
      int64_t own = a.position + r / a.group, low = window_start(a, own) - first;
      int64_t high = own + 1 - first;  // keys [low, high) of this block are seen
      if (high <= 0 || low >= KEYS) continue;
      const float *q = a.q + r / a.group * a.q_stride + r % a.group * d;
      F scores[KEYS / LANES] = {};
      for (int64_t i = 0; i < d; i++)
        for (int64_t v = 0; v < KEYS / LANES; v++)
          scores[v] = fma(q[i], load(keys + i * KEYS + v * LANES), scores[v]);
      float p[KEYS], best = maxima[r];
      for (int64_t v = 0; v < KEYS / LANES; v++) store(p + v * LANES, scores[v] * (a.scale * LOG2E));
      for (int64_t j = 0; j < KEYS; j++) {
        if (j < low || j >= high) p[j] = -INFINITY;
        if (p[j] > best || p[j] != p[j]) best = p[j];
      }
      float shrink = exp2(splat(maxima[r] - best))[0];
      F total = {};
      for (int64_t v = 0; v < KEYS / LANES; v++) {
        F e = exp2(load(p + v * LANES) - best);
        store(p + v * LANES, e);
        total += e;
      }
      maxima[r] = best;
      sums[r] = sums[r] * shrink + sum(total);
      float *o = acc + r * wide;
      for (int64_t i = 0; i < wide; i += LANES) {
        F value = load(o + i) * shrink;
        for (int64_t j = low > 0 ? low : 0; j < (high < KEYS ? high : KEYS); j++)
          value = fma(p[j], load(values + j * wide + i), value);
        store(o + i, value);
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    A *out = (A *)a.out + r / a.group * a.out_stride + r % a.group * d;
    for (int64_t i = 0; i < d; i += LANES)
      store_part(out + i, load(acc + r * wide + i) / sums[r], d - i);
  }
}

// A kernel for one kv head, for several.
template <void (*attend)(const Attend &), int64_t item> void each_head(const Attend &a) {
  for (int64_t k = 0; k < a.kv_heads; k++) {
    Attend one = a;
    one.q += k * a.group * a.head_dim;
    one.out = (char *)a.out + k * a.group * a.head_dim * item;
    one.head_offset += k * a.head_stride;
    one.kv_heads = 1;
    attend(one);
  }
}

inline void nothing() {}

inline const Backend vector_backend = {
    .bf16_activations = false,
    .block_f32 = block<float>,
    .block_bf16 = block<bf16>,
    .finish_f32 = finish<float>,
    .finish_bf16 = finish<float>,
    .norm_f32 = norm<float>,
    .norm_bf16 = norm<float>,
    .rope_f32 = rope<float>,
    .rope_bf16 = rope<bf16>,
    .attend_f32 = each_head<attend<float, float>, 4>,
    .attend_bf16 = each_head<attend<bf16, float>, 4>,
    .begin = nothing,
};

}  // namespace PF_ISA
}  // namespace pf
