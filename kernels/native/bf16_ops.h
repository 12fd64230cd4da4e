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

// Lane i of the result is the sum of v[i].
inline __m512 sums16(__m512 *v) {
  for (int i = 0; i < 8; i++) {  // pairs of lanes: even i in the even places
    __m512 a = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    __m512 b = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    v[i] = _mm512_add_ps(a, b);
  }
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // v[i] now holds keys 4 i .. 4 i + 3 in each 128-bit lane.
  for (int i = 0; i < 2; i++) {
    __m512 a = v[2 * i], b = v[2 * i + 1];
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                       _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

constexpr int64_t RUN = 64;        // keys at a time
constexpr int64_t MAX_GROUP = 4;   // query heads at a time

inline __mmask32 columns(int64_t width, int64_t from) {
  int64_t n = width - from;
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

// Places of up to RUN keys of one kv head.
struct Run {
  const bf16 *keys[RUN];
};

// Keys [first, first + count); the last stands in for those behind it, up to a multiple of 16.
inline void locate(const Attend &a, int64_t first, int64_t count, Run *run) {
  const int64_t used = round_up(count, 16);
  for (int64_t j = 0; j < count;) {
    const bf16 *key = key_at<bf16>(a, first + j);
    int64_t left = a.page_size - (first + j) % a.page_size;
    for (; left && j < count; left--, j++, key += a.head_dim) run->keys[j] = key;
  }
  for (int64_t j = count; j < used; j++) run->keys[j] = run->keys[count - 1];
}

inline void fetch(const bf16 *p, int64_t d) {
  for (int64_t i = 0; i < d; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T0);
}

// scores[g * RUN + j] = q[g] . key[j], for 16 keys; the keys of the next run are on their way.
template <int G>
inline void score16(const bf16 *q, int64_t wide, const bf16 *const *keys, const bf16 *const *next,
                    int64_t d, float *out) {
  __m512 acc[G][16];
  for (int j = 0; j < 16; j++) {
    __m512 sum[G] = {};
    fetch(next[j], d);
    for (int64_t i = 0; i < d; i += 32) {
      __m512i key = _mm512_maskz_loadu_epi16(columns(d, i), keys[j] + i);
      for (int g = 0; g < G; g++)
        sum[g] = dot2(sum[g], key, _mm512_loadu_si512(q + g * wide + i));
    }
    for (int g = 0; g < G; g++) acc[g][j] = sum[g];
  }
  for (int g = 0; g < G; g++) _mm512_storeu_ps(out + g * RUN, sums16(acc[g]));
}

struct Values {
  const bf16 *const *keys, *const *next;
  int64_t offset;     // from a key to the 64 columns of its value in question
  int64_t pairs;      // of keys
  __mmask32 low, high;  // which of the 64 columns there are
};

// acc[g] = acc[g] * shrink[g] + sum of p[g][j] * value[j].
template <int G>
inline void weigh(const Values &values, const bf16 *p, const float *shrink, float *acc,
                  int64_t wide) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  __m512 o[G][4];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < 4; v++)
      o[g][v] = _mm512_mul_ps(_mm512_loadu_ps(acc + g * wide + v * 16), _mm512_set1_ps(shrink[g]));
  for (int64_t j = 0; j < values.pairs; j++) {
    const bf16 *even = values.keys[2 * j] + values.offset;
    const bf16 *odd = values.keys[2 * j + 1] + values.offset;
    fetch(values.next[2 * j] + values.offset, 64);
    fetch(values.next[2 * j + 1] + values.offset, 64);
    __m512i a = _mm512_maskz_loadu_epi16(values.low, even);
    __m512i b = _mm512_maskz_loadu_epi16(values.low, odd);
    __m512i c = _mm512_maskz_loadu_epi16(values.high, even + 32);
    __m512i e = _mm512_maskz_loadu_epi16(values.high, odd + 32);
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

// Scores of one head become weights p; returns what the sums so far are to be multiplied with.
inline float soften_row(float *s, int64_t count, float scale, bf16 *p, float *maximum,
                        float *total) {
  const int64_t used = round_up(count, 16);
  for (int64_t j = count; j < used; j++) s[j] = -INFINITY;
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int64_t j = 0; j < used; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(s + j));
  float best = _mm512_reduce_max_ps(top) * scale;
  best = *maximum > best ? *maximum : best;
  float shrink = exp2(splat(*maximum - best))[0];
  F sums = {};
  for (int64_t j = 0; j < used; j += 16) {
    F e = (F)exp2_coarse((__m512)(load(s + j) * scale - best));
    sums += e;
    store(p + j, e);
  }
  *maximum = best;
  *total = *total * shrink + sum(sums);
  return shrink;
}

// Where to read after `end` keys of this row: the row that is computed next.
inline void locate_next(const Attend &a, Run *run) {
  const Attend *next = a.next;
  if (!next) return;
  int64_t first = window_start(*next, next->position), count = next->position + 1 - first;
  locate(*next, first, count < RUN ? count : RUN, run);
  for (int64_t j = round_up(count, 16); j < RUN; j++) run->keys[j] = run->keys[0];
}

// One new token, G of its query heads, all its keys; pages are read in place.
template <int G> inline void attend_row(const Attend &a, int64_t head) {
  const int64_t d = a.head_dim, wide = round_up(d, 64), end = a.position + 1;
  alignas(64) bf16 q[G * MAX_HEAD_DIM];
  alignas(64) float acc[G * MAX_HEAD_DIM];
  alignas(64) float scores[G * RUN];
  alignas(64) bf16 p[G * RUN];
  float maxima[G], sums[G], shrink[G];
  memset(acc, 0, sizeof(float) * G * wide);
  for (int g = 0; g < G; g++) {
    maxima[g] = -INFINITY, sums[g] = 0;
    for (int64_t i = 0; i < wide; i += LANES)
      store(q + g * wide + i, i < d ? load_part(a.q + (head + g) * d + i, d - i) : F{});
  }
  Run runs[2], *run = runs, *next = runs + 1;
  int64_t first = window_start(a, a.position), count = end - first < RUN ? end - first : RUN;
  locate(a, first, count, run);
  while (count > 0) {
    int64_t left = end - first - count, following = left < RUN ? left : RUN;
    *next = *run;
    if (following)
      locate(a, first + count, following, next);
    else
      locate_next(a, next);
    for (int64_t j = 0; j < count; j += 16)
      score16<G>(q, wide, run->keys + j, next->keys + j, d, scores + j);
    for (int g = 0; g < G; g++)
      shrink[g] = soften_row(scores + g * RUN, count, a.scale * LOG2E, p + g * RUN, maxima + g,
                             sums + g);
    for (int64_t i = 0; i < d; i += 64) {
      Values values{run->keys, next->keys, a.value_offset + i, (count + 1) / 2, columns(d, i),
                    columns(d, i + 32)};
      weigh<G>(values, p, shrink, acc + i, wide);
    }
    first += count, count = following;
    Run *done = run;
    run = next, next = done;
  }
  for (int g = 0; g < G; g++) {
    bf16 *out = (bf16 *)a.out + (head + g) * d;
    for (int64_t i = 0; i < d; i += LANES)
      store_part(out + i, load(acc + g * wide + i) / sums[g], d - i);
  }
}

inline void attend_rows(const Attend &a) {
  for (int64_t t = 0; t < a.tokens; t++) {
    Attend one = a;
    one.q += t * a.q_stride;
    one.out = (bf16 *)a.out + t * a.out_stride;
    one.position += t;
    one.tokens = 1;
    int64_t head = 0;
    for (; head + 4 <= a.group; head += 4) attend_row<4>(one, head);
    if (a.group - head == 3) attend_row<3>(one, head);
    if (a.group - head == 2) attend_row<2>(one, head);
    if (a.group - head == 1) attend_row<1>(one, head);
  }
}

constexpr int64_t FEW_TOKENS = 4;  // up to here, rows one by one are faster than a block of keys

}  // namespace PF_ISA
}  // namespace pf
