// What the matrix blocks and both kinds of attention in AMX tiles share.
#pragma once

#include "bf16_ops.h"

namespace pf {
namespace amx {

struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Eight tiles of 16 rows of 64 bytes; rows that do not matter are computed and dropped.
inline void configure() {
  alignas(64) static const Shapes shapes = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&shapes);
}

// gcc's tile loads do not tell the compiler that they read memory: what was written before must
// be in memory by then.
inline void written() { __asm__ volatile("" ::: "memory"); }

// ---------------------------------------------------------------- attention
//
// Decode rows and chunks give the same bits: both take keys in blocks of RUN from multiples of RUN,
// 32 to a product of weights and values, in the order of lanes that is cheapest for decode rows.

constexpr int64_t TILE = 512;  // bfloat16 elements

// Lane i of 16 keys holds key `key_of_lane(i)`.
constexpr int64_t key_of_lane(int64_t i) { return i % 4 * 4 + i / 4; }

// -inf for the lanes j .. j + 15 of `scores` whose keys are not in [low, high).
inline void hide(float *scores, int64_t j, int64_t low, int64_t high) {
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i key = _mm512_add_epi32(order, _mm512_set1_epi32((int)j));
  __mmask16 out = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32((int)low)) |
                  _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32((int)high));
  _mm512_mask_storeu_ps(scores + j, out, _mm512_set1_ps(-INFINITY));
}

}  // namespace amx
}  // namespace pf
