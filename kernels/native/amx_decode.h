// Decode attention in AMX tiles: the `Kernel` of `attend_row` for heads and pages that fit.
#pragma once

#include "amx_tiles.h"

namespace pf {
namespace amx {

// `vdpbf16ps` takes two cycles: with three query heads a key, the products in tiles are three
// times as fast. Tiles 0-3: results of four heads, 16 columns each; 4: keys or values; 5: queries
// of four heads; 6: scores; 7: weights of four heads for 32 keys.
//
// Scores come as [16 keys, 4 heads] and are turned into one vector a head, in the order of
// `key_of_lane`; values are woven in the same order. Weaving leaves columns in groups of four: of
// 32, groups 0, 2, 4, 6 in one tile, 1, 3, 5, 7 in the next.
struct TileKernel {
  static constexpr int64_t ALIGN = 32;

  static bool fits(const Attend &a) { return a.head_dim % 32 == 0 && a.page_size % 16 == 0; }

  static void configure() {
    alignas(64) static const Shapes shapes = {
        1, 0, {}, {64, 64, 64, 64, 64, 16, 16, 64}, {4, 4, 4, 4, 16, 16, 16, 4}};
    _tile_loadconfig(&shapes);
  }

  // Queries as pairs of columns: [head_dim / 2, 4 heads, 2].
  static void begin(const Attend &a, Chunk c, int64_t head, Row *row) {
    bf16 *q = row->q + c.first * row->wide, part[LANES];
    for (int64_t g = 0; g < c.count; g++)
      for (int64_t i = 0; i < a.head_dim; i += LANES) {
        store(part, load(a.q + (head + g) * a.head_dim + i));
        for (int64_t j = 0; j < LANES; j++) q[((i + j) / 2 * 4 + g) * 2 + j % 2] = part[j];
      }
  }

  static void turn(float *scores, int64_t j, float *out) {
    __m512 r0 = _mm512_loadu_ps(scores), r1 = _mm512_loadu_ps(scores + 16);
    __m512 r2 = _mm512_loadu_ps(scores + 32), r3 = _mm512_loadu_ps(scores + 48);
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
    __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
    __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
    _mm512_storeu_ps(out + j, _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
    _mm512_storeu_ps(out + RUN + j, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
    _mm512_storeu_ps(out + 2 * RUN + j, _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
    _mm512_storeu_ps(out + 3 * RUN + j, _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
  }

  // 32 keys from j on, 64 columns from `offset` on (32 if `half`), as tiles. Each 16 of them lie in
  // one page, `stride` apart (see `fits`). Those behind the last count as zeros: their slots may
  // hold anything.
  static void weave(const Run &run, int64_t j, int64_t offset, int64_t stride, bool half,
                    bf16 *tiles) {
    for (int64_t pair = 0; pair < 16; pair++) {
      const int64_t block = j + pair / 8 * 16, even = pair % 8 / 2 + pair % 2 * 8;
      const bf16 *a = run.keys[block] + offset + even * stride, *b = a + 4 * stride;
      const __mmask32 has_a = block + even < run.count ? ~0u : 0;
      const __mmask32 has_b = block + even + 4 < run.count ? ~0u : 0;
      bf16 *out = tiles + pair * 32;
      __m512i x = _mm512_maskz_loadu_epi16(has_a, a), y = _mm512_maskz_loadu_epi16(has_b, b);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(out + TILE, _mm512_unpackhi_epi16(x, y));
      if (half) continue;
      x = _mm512_maskz_loadu_epi16(has_a, a + 32), y = _mm512_maskz_loadu_epi16(has_b, b + 32);
      _mm512_store_si512(out + 2 * TILE, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(out + 3 * TILE, _mm512_unpackhi_epi16(x, y));
    }
  }

  static void run(const Attend &a, const Run &run, Chunk c, Row *row) {
    const int64_t d = a.head_dim, offset = c.kv_head * a.head_stride;
    const int64_t used = round_up(run.count, 32);
    const bf16 *q = row->q + c.first * row->wide;
    alignas(64) float scores[RUN * 4];
    alignas(64) bf16 tiles[RUN / 32][4 * TILE];
    written();
    for (int64_t j = 0; j < run.count; j += 16) {
      _tile_zero(6);
      for (int64_t i = 0; i < d; i += 32) {
        _tile_loadd(4, run.keys[j] + offset + i, d * 2);
        _tile_loadd(5, q + i * 4, 16);
        _tile_dpbf16ps(6, 4, 5);
      }
      _tile_stored(6, scores + j * 4, 16);
    }
    for (int64_t i = 0; i < d; i += 64) {
      const bool half = d - i < 64;
      for (int64_t j = 0; j < used; j += 32)
        weave(run, j, offset + a.value_offset + i, d, half, tiles[j / 32]);
      if (i == 0) soften_chunk(a, run, scores, c, row);
      float *acc = row->acc + c.first * row->wide + i;
      written();
      _tile_loadd(0, acc, row->wide * 4);
      _tile_loadd(1, acc + 16, row->wide * 4);
      _tile_loadd(2, acc + 32, row->wide * 4);
      _tile_loadd(3, acc + 48, row->wide * 4);
      for (int64_t j = 0; j < used; j += 32) {
        _tile_loadd(7, row->p + j, RUN * 2);
        _tile_loadd(4, tiles[j / 32], 64);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(4, tiles[j / 32] + TILE, 64);
        _tile_dpbf16ps(1, 7, 4);
        if (half) continue;
        _tile_loadd(4, tiles[j / 32] + 2 * TILE, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(4, tiles[j / 32] + 3 * TILE, 64);
        _tile_dpbf16ps(3, 7, 4);
      }
      _tile_stored(0, acc, row->wide * 4);
      _tile_stored(1, acc + 16, row->wide * 4);
      _tile_stored(2, acc + 32, row->wide * 4);
      _tile_stored(3, acc + 48, row->wide * 4);
    }
  }

  // Scores [keys, 4 heads] become weights; what the chunk has so far is scaled to the new maxima.
  static void soften_chunk(const Attend &a, const Run &run, float *scores, Chunk c, Row *row) {
    const int64_t used = round_up(run.count, 16), low = window_start(a, a.position) - run.first;
    for (int64_t j = 0; j < used; j += 16) {
      turn(scores + j * 4, j, row->scores);
      if (j < low || j + 16 > run.count)
        for (int64_t g = 0; g < c.count; g++) hide(row->scores + g * RUN, j, low, run.count);
    }
    if (used % 32)  // the second half of the last pair of tiles
      for (int64_t g = 0; g < MAX_GROUP; g++) store(row->p + g * RUN + used, F{});
    for (int64_t g = 0; g < c.count; g++) {
      int64_t h = c.first + g;
      float shrink = soften_row(row->scores + g * RUN, used, a.scale * LOG2E, row->p + g * RUN,
                                row->maxima + h, row->sums + h);
      float *acc = row->acc + h * row->wide;
      if (shrink != 1)
        for (int64_t i = 0; i < row->wide; i += LANES) store(acc + i, load(acc + i) * shrink);
    }
  }

  // Columns leave their groups of four: of each 32, 0-3 | 8-11 | 16-19 | 24-27 and the others.
  static void end(const Attend &a, Chunk c, int64_t head, Row *row) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t g = 0; g < c.count; g++) {
      const float *acc = row->acc + (c.first + g) * row->wide, sums = row->sums[c.first + g];
      bf16 *out = (bf16 *)a.out + (head + g) * a.head_dim;
      for (int64_t i = 0; i < a.head_dim; i += 32) {
        __m512 x = (__m512)(load(acc + i) / sums), y = (__m512)(load(acc + i + 16) / sums);
        store(out + i, (F)_mm512_permutex2var_ps(x, low, y));
        store(out + i + 16, (F)_mm512_permutex2var_ps(x, high, y));
      }
    }
  }
};

}  // namespace amx
}  // namespace pf
