// What the levels with AVX512-BF16 share: matrix blocks and attention of single rows in
// `vdpbf16ps`, which adds the products of two bfloat16 pairs to each of 16 float32 lanes.
#pragma once

#include <immintrin.h>

#include "vector_ops.h"

namespace pf {
namespace PF_ISA {

inline __m512 dot2(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

inline __m512i pair_at(const bf16 *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}

// R rows with two blocks.
template <int R> inline void dot_rows(const Block &b, int64_t index, int64_t row) {
  const bf16 *x = (const bf16 *)b.x + row * b.stride;
  const char *first = (const char *)b.w[index], *second = (const char *)b.w[index + 1];
  __m512 acc[R][2] = {};
  for (int64_t k = 0; k < b.k; k += 2) {
    __m512i left = _mm512_loadu_si512(first + k * 32), right = _mm512_loadu_si512(second + k * 32);
    for (int r = 0; r < R; r++) {
      __m512i xs = pair_at(x + r * b.stride + k);
      acc[r][0] = dot2(acc[r][0], xs, left);
      acc[r][1] = dot2(acc[r][1], xs, right);
    }
  }
  float *out = b.out + (index * ROWS + row) * WIDTH;
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(out + r * WIDTH, acc[r][0]);
    _mm512_storeu_ps(out + (ROWS + r) * WIDTH, acc[r][1]);
  }
}

inline void dot_block(const Block &b) {
  for (int64_t i = 0; i < b.blocks; i += 2) {
    int64_t row = 0;
    for (; row + 8 <= b.rows; row += 8) dot_rows<8>(b, i, row);
    if (row + 4 <= b.rows) dot_rows<4>(b, i, row), row += 4;
    if (row + 2 <= b.rows) dot_rows<2>(b, i, row), row += 2;
    if (row < b.rows) dot_rows<1>(b, i, row);
  }
}

// 2^x for weights that are rounded to bfloat16: relative error below 4e-6. Source: the polynomial
// of degree 4 that interpolates 2^f at the Chebyshev nodes of [0, 1].
inline __m512 exp2_coarse(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.0136703095f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0517449978f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241604357f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.692972922f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000349f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x); 0 for x = -inf
}

// ---------------------------------------------------------------- decode attention

struct Add {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};
struct Max {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
};

// Lane i of the result is v[i] folded with `op`: ((0 + 2) + (1 + 3)) of each four lanes, then of the
// fours (0 + 1) + (2 + 3).
template <class Op> inline __m512 fold16(__m512 *v, Op op) {
  for (int i = 0; i < 8; i++)
    v[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
              _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
              _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // v[i] now holds keys 4 i .. 4 i + 3 in each 128-bit lane.
  for (int i = 0; i < 2; i++) {
    __m512 a = v[2 * i], b = v[2 * i + 1];
    v[i] = op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return op(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

// One vector, to the bit as in `fold16`.
template <class Op> inline float fold(__m512 v, Op op) {
  v = op(v, _mm512_permute_ps(v, 0x4e));
  v = op(v, _mm512_permute_ps(v, 0xb1));
  v = op(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  return _mm512_cvtss_f32(op(v, _mm512_shuffle_f32x4(v, v, 0x4e)));
}

constexpr int64_t RUN = 128;       // keys at a time: from one multiple of it to the next
constexpr int64_t MAX_GROUP = 4;   // query heads at a time

inline __mmask32 columns(int64_t width, int64_t from) {
  int64_t n = width - from;
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

// Up to RUN keys of the first kv head.
struct Run {
  int64_t first, count;
  const bf16 *keys[RUN];
};

// Keys from `first` to the next multiple of RUN or to `end`; the last stands in for those behind it
// up to a multiple of 32.
inline void locate(const Attend &a, int64_t first, int64_t end, Run *run) {
  const int64_t next = (first / RUN + 1) * RUN;
  run->first = first;
  run->count = (end < next ? end : next) - first;
  for (int64_t j = 0; j < run->count;) {
    const bf16 *key = key_at<bf16>(a, first + j);
    int64_t left = a.page_size - (first + j) % a.page_size;
    for (; left && j < run->count; left--, j++, key += a.head_dim) run->keys[j] = key;
  }
  for (int64_t j = run->count; j < round_up(run->count, 32); j++)
    run->keys[j] = run->keys[run->count - 1];
}

// scores[g * RUN + j] = q[g] . key[j], for 16 keys.
template <int G>
inline void score16(const bf16 *q, int64_t wide, const Run &run, int64_t first, int64_t offset,
                    int64_t d, float *out) {
  __m512 acc[G][16];
  for (int j = 0; j < 16; j++) {
    __m512 sum[G] = {};
    for (int64_t i = 0; i < d; i += 32) {
      __m512i key = _mm512_maskz_loadu_epi16(columns(d, i), run.keys[first + j] + offset + i);
      for (int g = 0; g < G; g++)
        sum[g] = dot2(sum[g], key, _mm512_loadu_si512(q + g * wide + i));
    }
    for (int g = 0; g < G; g++) acc[g][j] = sum[g];
  }
  for (int g = 0; g < G; g++) _mm512_storeu_ps(out + g * RUN + first, fold16(acc[g], Add{}));
}

// acc[g] = acc[g] * shrink[g] + sum of p[g][j] * value[j], for 64 columns (or those of the masks).
template <int G>
inline void weigh(const bf16 *const *keys, int64_t offset, int64_t pairs, const bf16 *p,
                  const float *shrink, float *acc, int64_t wide, __mmask32 low, __mmask32 high) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  __m512 o[G][4];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < 4; v++)
      o[g][v] = _mm512_mul_ps(_mm512_loadu_ps(acc + g * wide + v * 16), _mm512_set1_ps(shrink[g]));
  for (int64_t j = 0; j < pairs; j++) {
    const bf16 *even = keys[2 * j] + offset, *odd = keys[2 * j + 1] + offset;
    __m512i a = _mm512_maskz_loadu_epi16(low, even);
    __m512i b = _mm512_maskz_loadu_epi16(low, odd);
    __m512i c = _mm512_maskz_loadu_epi16(high, even + 32);
    __m512i e = _mm512_maskz_loadu_epi16(high, odd + 32);
    __m512i v0 = _mm512_permutex2var_epi16(a, first, b);
    __m512i v1 = _mm512_permutex2var_epi16(a, second, b);
    __m512i v2 = _mm512_permutex2var_epi16(c, first, e);
    __m512i v3 = _mm512_permutex2var_epi16(c, second, e);
    for (int g = 0; g < G; g++) {
      __m512i weight = pair_at(p + g * RUN + 2 * j);
      o[g][0] = dot2(o[g][0], weight, v0);
      o[g][1] = dot2(o[g][1], weight, v1);
      o[g][2] = dot2(o[g][2], weight, v2);
      o[g][3] = dot2(o[g][3], weight, v3);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < 4; v++) _mm512_storeu_ps(acc + g * wide + v * 16, o[g][v]);
}

// Scores of one head, `keys` of them, a multiple of 16, become weights p; returns what the sums so
// far are to be multiplied with.
inline float soften_row(const float *s, int64_t keys, float scale, bf16 *p, float *maximum,
                        float *total) {
  __m512 top = _mm512_loadu_ps(s);
  for (int64_t j = 16; j < keys; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(s + j));
  const float old = *maximum, found = fold(top, Max{}) * scale;
  const float best = old > found ? old : found;
  const float base = best > -INFINITY ? best : 0;  // no key seen yet: all weights are 0
  F sums = {};
  for (int64_t j = 0; j < keys; j += 16) {
    F e = (F)exp2_coarse((__m512)fma(scale, load(s + j), splat(-base)));
    sums += e;
    store(p + j, e);
  }
  const float shrink = best == old ? 1 : exp2(splat(old - base))[0];
  *maximum = best;
  *total = *total * shrink + fold((__m512)sums, Add{});
  return shrink;
}

// One row's state. Query heads stand in chunks of up to MAX_GROUP of one kv head; `heads` counts
// them with the gaps of chunks that are not full.
struct Row {
  int64_t wide;    // head_dim, padded to 64
  int64_t chunks;  // of each kv head
  int64_t heads;   // MAX_GROUP * chunks * kv_heads
  bf16 *q;         // [heads, wide]
  float *acc;      // [heads, wide]
  float *maxima, *sums;
  alignas(64) float scores[MAX_GROUP * RUN];
  float shrink[MAX_GROUP];
  alignas(64) bf16 p[MAX_GROUP * RUN];
};

// The part of the work that one call of `attend_chunk` does.
struct Chunk {
  int64_t kv_head, first, count;  // heads first .. first + count - 1 of the row
};

inline void start_row(const Attend &a, Row *row) {
  row->wide = round_up(a.head_dim, 64);
  row->chunks = (a.group + MAX_GROUP - 1) / MAX_GROUP;
  row->heads = MAX_GROUP * row->chunks * a.kv_heads;
  char *at = (char *)a.scratch;
  row->acc = (float *)at, at += row->heads * row->wide * 4;
  row->q = (bf16 *)at, at += row->heads * row->wide * 2;
  row->maxima = (float *)at, row->sums = row->maxima + row->heads;
  memset(row->acc, 0, sizeof(float) * row->heads * row->wide);
  memset(row->q, 0, sizeof(bf16) * row->heads * row->wide);
  memset(row->p, 0, sizeof row->p);
  for (int64_t h = 0; h < row->heads; h++) row->maxima[h] = -INFINITY, row->sums[h] = 0;
}

// fn(chunk, its first query head).
template <class Fn> inline void over_chunks(const Attend &a, const Row &row, Fn fn) {
  for (int64_t k = 0; k < a.kv_heads; k++)
    for (int64_t c = 0; c < row.chunks; c++) {
      int64_t left = a.group - c * MAX_GROUP;
      fn(Chunk{k, (k * row.chunks + c) * MAX_GROUP, left < MAX_GROUP ? left : MAX_GROUP},
         k * a.group + c * MAX_GROUP);
    }
}

// One new token, all its query heads, all its keys; pages are read in place. `Kernel` has
//   begin(a, chunk, head, row)                  queries of a chunk
//   run(a, run, chunk, row)                     a chunk against a run of keys
//   end(a, chunk, head, row)                    its results
template <class Kernel> inline void attend_row(const Attend &a) {
  Row row;
  start_row(a, &row);
  over_chunks(a, row, [&](Chunk c, int64_t head) { Kernel::begin(a, c, head, &row); });
  const int64_t end = a.position + 1;
  Run run;
  int64_t first = window_start(a, a.position) / Kernel::ALIGN * Kernel::ALIGN;
  for (; first < end; first += run.count) {
    locate(a, first, end, &run);
    over_chunks(a, row, [&](Chunk c, int64_t) { Kernel::run(a, run, c, &row); });
  }
  over_chunks(a, row, [&](Chunk c, int64_t head) { Kernel::end(a, c, head, &row); });
}

template <class Kernel> inline void attend_rows(const Attend &a) {
  for (int64_t t = 0; t < a.tokens; t++) {
    Attend one = a;
    one.q += t * a.q_stride;
    one.out = (bf16 *)a.out + t * a.out_stride;
    one.position += t;
    one.tokens = 1;
    attend_row<Kernel>(one);
  }
}

struct DotKernel {
  static constexpr int64_t ALIGN = 1;  // a row begins where its window does

  static void begin(const Attend &a, Chunk c, int64_t head, Row *row) {
    for (int64_t g = 0; g < c.count; g++)
      for (int64_t i = 0; i < a.head_dim; i += LANES)
        store(row->q + (c.first + g) * row->wide + i,
              load_part(a.q + (head + g) * a.head_dim + i, a.head_dim - i));
  }

  template <int G>
  static void run_of(const Attend &a, const Run &run, Chunk c, Row *row) {
    const int64_t d = a.head_dim, wide = row->wide, offset = c.kv_head * a.head_stride;
    for (int64_t j = 0; j < run.count; j += 16)
      score16<G>(row->q + c.first * wide, wide, run, j, offset, d, row->scores);
    const int64_t used = round_up(run.count, 16);
    for (int g = 0; g < G; g++) {
      float *scores = row->scores + g * RUN;
      for (int64_t j = run.count; j < used; j++) scores[j] = -INFINITY;
      row->shrink[g] = soften_row(scores, used, a.scale * LOG2E, row->p + g * RUN,
                                  row->maxima + c.first + g, row->sums + c.first + g);
    }
    for (int64_t i = 0; i < d; i += 64)
      weigh<G>(run.keys, offset + a.value_offset + i, (run.count + 1) / 2, row->p, row->shrink,
               row->acc + c.first * wide + i, wide, columns(d, i), columns(d, i + 32));
  }

  static void run(const Attend &a, const Run &run, Chunk c, Row *row) {
    if (c.count == 4) run_of<4>(a, run, c, row);
    if (c.count == 3) run_of<3>(a, run, c, row);
    if (c.count == 2) run_of<2>(a, run, c, row);
    if (c.count == 1) run_of<1>(a, run, c, row);
  }

  static void end(const Attend &a, Chunk c, int64_t head, Row *row) {
    for (int64_t g = 0; g < c.count; g++)
      for (int64_t i = 0; i < a.head_dim; i += LANES)
        store_part((bf16 *)a.out + (head + g) * a.head_dim + i,
                   load(row->acc + (c.first + g) * row->wide + i) / row->sums[c.first + g],
                   a.head_dim - i);
  }
};

constexpr int64_t FEW_TOKENS = 4;  // up to here, rows one by one are faster than a block of keys

// The backend of a level with AVX512-BF16, whose attention over bfloat16 pages is `attend`.
inline Backend bf16_backend(void (*attend)(const Attend &)) {
  Backend b = vector_backend;
  b.bf16_activations = true;
  b.block_bf16 = dot_block;
  b.finish_bf16 = finish<bf16>;
  b.norm_bf16 = norm<bf16>;
  b.attend_bf16 = attend;
  return b;
}

}  // namespace PF_ISA
}  // namespace pf
