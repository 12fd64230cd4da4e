// Matrix blocks and prefill attention in AMX tiles: one instruction multiplies 16 rows of 32
// bfloat16 with 32 x 16, in 16 cycles. Decode attention stands in amx_decode.h.
#define PF_ISA amx
#define PF_LANES 16
#include "amx_decode.h"

namespace pf {
namespace amx {

// ---------------------------------------------------------------- matrix blocks

// Up to 16 rows with four blocks: four streams of weights from memory.
inline void block_rows16(const Block &b) {
  const char *x = (const char *)b.x, *w0 = (const char *)b.w[0], *w1 = (const char *)b.w[1];
  const char *w2 = (const char *)b.w[2], *w3 = (const char *)b.w[3];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < b.k; k += 32) {
    _tile_loadd(4, x + k * 2, b.stride * 2);
    _tile_loadd(5, w0 + k * 32, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, w1 + k * 32, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, w2 + k * 32, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, w3 + k * 32, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, b.out, WIDTH * 4);
  _tile_stored(1, b.out + ROWS * WIDTH, WIDTH * 4);
  _tile_stored(2, b.out + 2 * ROWS * WIDTH, WIDTH * 4);
  _tile_stored(3, b.out + 3 * ROWS * WIDTH, WIDTH * 4);
}

// Up to 32 rows with two blocks.
inline void block_rows32(const Block &b) {
  const char *x = (const char *)b.x, *w0 = (const char *)b.w[0], *w1 = (const char *)b.w[1];
  const char *y = x + (b.rows > 16 ? 16 * b.stride * 2 : 0);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < b.k; k += 32) {
    _tile_loadd(6, w0 + k * 32, 64);
    _tile_stream_loadd(4, x + k * 2, b.stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + k * 32, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(5, y + k * 2, b.stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, b.out, WIDTH * 4);
  _tile_stored(1, b.out + ROWS * WIDTH, WIDTH * 4);
  _tile_stored(2, b.out + 16 * WIDTH, WIDTH * 4);
  _tile_stored(3, b.out + (ROWS + 16) * WIDTH, WIDTH * 4);
}

void tile_block(const Block &b) {
  written();
  b.blocks == 4 ? block_rows16(b) : block_rows32(b);
}

// ---------------------------------------------------------------- prefill attention

constexpr int64_t KEYS_AT_ONCE = RUN;
constexpr int64_t TOGETHER = 2;  // row tiles that take each step together: what one writes has
                                 // reached memory before a tile load wants it

// 16 rows of 16 dwords, transposed.
inline void transpose16(__m512i *r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

struct Tiles {
  int64_t key_blocks, value_blocks;  // head_dim in blocks of 32 and of 16
  int64_t width;                     // of a row of acc: 16 * value_blocks
  bf16 *q;                           // [rows padded to 16, 32 * key_blocks]
  bf16 *keys;                        // [KEYS_AT_ONCE / 16, key_blocks] tiles, transposed
  bf16 *values;                      // [KEYS_AT_ONCE / 32, value_blocks] tiles
  bf16 *p;                           // [16, KEYS_AT_ONCE] for each of TOGETHER row tiles
  float *scores;                     // the same
  float *acc, *maxima, *sums;        // [rows padded to 16, width]; per row
};

inline Tiles carve(const Attend &a, int64_t rows) {
  Tiles t;
  t.key_blocks = round_up(a.head_dim, 32) / 32;
  t.value_blocks = round_up(a.head_dim, 16) / 16;
  t.width = 16 * t.value_blocks;
  char *at = (char *)a.scratch;
  t.q = (bf16 *)at, at += rows * t.key_blocks * 64;
  t.keys = (bf16 *)at, at += KEYS_AT_ONCE / 16 * t.key_blocks * TILE * 2;
  t.values = (bf16 *)at, at += KEYS_AT_ONCE / 32 * t.value_blocks * TILE * 2;
  t.p = (bf16 *)at, at += TOGETHER * 16 * KEYS_AT_ONCE * 2;
  t.scores = (float *)at, at += TOGETHER * 16 * KEYS_AT_ONCE * 4;
  t.acc = (float *)at, at += rows * t.width * 4;
  t.maxima = (float *)at, at += round_up(rows, 16) * 4;
  t.sums = (float *)at;
  return t;
}

inline void load_queries(const Attend &a, const Tiles &t, int64_t rows, int64_t padded) {
  int64_t d = a.head_dim, wide = 32 * t.key_blocks;
  for (int64_t r = 0; r < padded; r++) {
    const float *q = a.q + r / a.group * a.q_stride + r % a.group * d;
    for (int64_t i = 0; i < wide; i += 16)
      store(t.q + r * wide + i, r < rows && i < d ? load_part(q + i, d - i) : F{});
    t.maxima[r] = -INFINITY, t.sums[r] = 0;
  }
  memset(t.acc, 0, padded * t.width * sizeof(float));
}

// Keys [first, first + count) and zeros behind them, as tiles.
inline void load_keys(const Attend &a, const Tiles &t, int64_t first, int64_t count) {
  const bf16 *at[KEYS_AT_ONCE];  // of each lane; null: a zero
  int64_t padded = round_up(count, 32);
  for (int64_t j = 0; j < padded; j++) {
    int64_t key = j / 16 * 16 + key_of_lane(j % 16);
    at[j] = key < count ? key_at<bf16>(a, first + key) : nullptr;
  }
  for (int64_t j = 0; j < padded; j += 16)
    for (int64_t b = 0; b < t.key_blocks; b++) {
      __m512i row[16];
      for (int64_t i = 0; i < 16; i++)
        row[i] = at[j + i]
                     ? _mm512_maskz_loadu_epi16(columns(a.head_dim, 32 * b), at[j + i] + 32 * b)
                     : _mm512_setzero_si512();
      transpose16(row);
      bf16 *tile = t.keys + (j / 16 * t.key_blocks + b) * TILE;
      for (int64_t i = 0; i < 16; i++) _mm512_store_si512(tile + i * 32, row[i]);
    }
  const __m512i weave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t j = 0; j < padded; j += 2)
    for (int64_t b = 0; b < t.value_blocks; b++) {
      __mmask16 mask = (__mmask16)columns(a.head_dim, 16 * b);
      __m256i even = _mm256_setzero_si256(), odd = even;
      if (at[j]) even = _mm256_maskz_loadu_epi16(mask, at[j] + a.value_offset + 16 * b);
      if (at[j + 1]) odd = _mm256_maskz_loadu_epi16(mask, at[j + 1] + a.value_offset + 16 * b);
      __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
      bf16 *tile = t.values + (j / 32 * t.value_blocks + b) * TILE;
      _mm512_store_si512(tile + j % 32 / 2 * 32, _mm512_permutexvar_epi16(weave, both));
    }
}

// scores [16, keys] of the row tile at `row`.
inline void score(const Tiles &t, int64_t row, int64_t keys) {
  const bf16 *q = t.q + row * 32 * t.key_blocks;
  int64_t stride = 64 * t.key_blocks, step = t.key_blocks * TILE;
  for (int64_t j = 0; j < keys; j += 32) {
    const bf16 *tile = t.keys + j / 16 * step;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t b = 0; b < t.key_blocks; b++) {
      _tile_loadd(4, q + 32 * b, stride);
      _tile_loadd(5, tile + b * TILE, 64);
      _tile_loadd(6, tile + step + b * TILE, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, t.scores + j, KEYS_AT_ONCE * 4);
    _tile_stored(1, t.scores + j + 16, KEYS_AT_ONCE * 4);
  }
}

// Scores of the row tile become weights `p`; sums and maxima go on, acc is scaled to them. To the
// bit as `soften_row`, for 16 rows together: one by one they would wait for their own reductions.
inline void soften(const Attend &a, const Tiles &t, int64_t row, int64_t keys) {
  const float scale = a.scale * LOG2E;
  __m512 each[16];
  for (int64_t r = 0; r < 16; r++) {
    const float *s = t.scores + r * KEYS_AT_ONCE;
    each[r] = _mm512_loadu_ps(s);
    for (int64_t j = 16; j < keys; j += 16) each[r] = _mm512_max_ps(each[r], _mm512_loadu_ps(s + j));
  }
  const F old = load(t.maxima + row), found = (F)fold16(each, Max{}) * scale;
  const F best = (F)_mm512_max_ps((__m512)found, (__m512)old);
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)best, (__m512)splat(-INFINITY), _CMP_GT_OQ);
  const __mmask16 moved = _mm512_cmp_ps_mask((__m512)best, (__m512)old, _CMP_NEQ_OQ);
  const __m512 base = _mm512_maskz_mov_ps(seen, (__m512)best);
  alignas(64) float bases[16], shrinks[16];
  const __m512 one = _mm512_set1_ps(1);
  const __m512 shrink = _mm512_mask_mov_ps(one, moved, (__m512)exp2(old - (F)base));
  _mm512_store_ps(bases, base);
  _mm512_store_ps(shrinks, shrink);
  store(t.maxima + row, best);
  for (int64_t r = 0; r < 16; r++) {
    const float *s = t.scores + r * KEYS_AT_ONCE;
    F sums = {};
    for (int64_t j = 0; j < keys; j += 16) {
      F e = (F)exp2_coarse((__m512)fma(scale, load(s + j), splat(-bases[r])));
      sums += e;
      store(t.p + r * KEYS_AT_ONCE + j, e);
    }
    each[r] = (__m512)sums;
  }
  store(t.sums + row, load(t.sums + row) * (F)shrink + (F)fold16(each, Add{}));
  for (int64_t r = 0; moved && r < 16; r++) {
    float *acc = t.acc + (row + r) * t.width;
    for (int64_t i = 0; i < t.width; i += 16) store(acc + i, load(acc + i) * shrinks[r]);
  }
}

template <int N> inline void weigh_tiles(const Tiles &t, float *acc, int64_t column, int64_t keys) {
  int64_t stride = t.width * 4, step = t.value_blocks * TILE;
  const bf16 *tile = t.values + column * TILE;
  acc += column * 16;
  _tile_loadd(0, acc, stride);
  if constexpr (N > 1) _tile_loadd(1, acc + 16, stride);
  if constexpr (N > 2) _tile_loadd(2, acc + 32, stride);
  if constexpr (N > 3) _tile_loadd(3, acc + 48, stride);
  for (int64_t j = 0; j < keys; j += 32, tile += step) {
    _tile_loadd(4, t.p + j, KEYS_AT_ONCE * 2);
    _tile_loadd(5, tile, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) { _tile_loadd(6, tile + TILE, 64); _tile_dpbf16ps(1, 4, 6); }
    if constexpr (N > 2) { _tile_loadd(7, tile + 2 * TILE, 64); _tile_dpbf16ps(2, 4, 7); }
    if constexpr (N > 3) { _tile_loadd(5, tile + 3 * TILE, 64); _tile_dpbf16ps(3, 4, 5); }
  }
  _tile_stored(0, acc, stride);
  if constexpr (N > 1) _tile_stored(1, acc + 16, stride);
  if constexpr (N > 2) _tile_stored(2, acc + 32, stride);
  if constexpr (N > 3) _tile_stored(3, acc + 48, stride);
}

inline void weigh_values(const Tiles &t, int64_t row, int64_t keys) {
  float *acc = t.acc + row * t.width;
  int64_t c = 0;
  for (; c + 4 <= t.value_blocks; c += 4) weigh_tiles<4>(t, acc, c, keys);
  if (t.value_blocks - c == 3) weigh_tiles<3>(t, acc, c, keys);
  if (t.value_blocks - c == 2) weigh_tiles<2>(t, acc, c, keys);
  if (t.value_blocks - c == 1) weigh_tiles<1>(t, acc, c, keys);
}

// -inf for what a row of the tile may not see.
inline void mask(const Attend &a, const Tiles &t, int64_t row, int64_t first, int64_t keys) {
  for (int64_t r = 0; r < 16; r++) {
    int64_t own = a.position + (row + r) / a.group;
    int64_t high = own + 1 - first, low = window_start(a, own) - first;
    for (int64_t j = 0; j < keys; j += 16)
      if (j < low || j + 16 > high) hide(t.scores + r * KEYS_AT_ONCE, j, low, high);
  }
}

// What 16 rows from `row` on see of the keys from `first` on: the number of keys, to a multiple of
// 32, and whether some of these are hidden from some rows.
struct Sight {
  int64_t keys;
  bool partial;
};

inline Sight sight(const Attend &a, int64_t row, int64_t rows, int64_t first, int64_t count) {
  int64_t oldest = a.position + row / a.group;
  int64_t newest = a.position + (row + 16 < rows ? row + 15 : rows - 1) / a.group;
  if (newest < first || window_start(a, oldest) >= first + count) return {0, false};
  int64_t keys = round_up(newest + 1 - first < count ? newest + 1 - first : count, 32);
  return {keys, oldest + 1 - first < keys || window_start(a, newest) > first};
}

void attend_tiles(const Attend &a) {
  const int64_t rows = a.tokens * a.group, padded = round_up(rows, 16);
  const int64_t end = a.position + a.tokens;
  Tiles t = carve(a, padded);
  load_queries(a, t, rows, padded);
  int64_t first = window_start(a, a.position) / KEYS_AT_ONCE * KEYS_AT_ONCE;
  for (; first < end; first += KEYS_AT_ONCE) {
    int64_t count = end - first < KEYS_AT_ONCE ? end - first : KEYS_AT_ONCE;
    load_keys(a, t, first, count);
    for (int64_t row = 0; row < padded; row += 16 * TOGETHER) {
      Tiles part[TOGETHER];
      Sight seen[TOGETHER] = {};
      written();
      for (int64_t i = 0; i < TOGETHER && row + 16 * i < padded; i++) {
        part[i] = t;
        part[i].p += i * 16 * KEYS_AT_ONCE;
        part[i].scores += i * 16 * KEYS_AT_ONCE;
        seen[i] = sight(a, row + 16 * i, rows, first, count);
        if (seen[i].keys) score(part[i], row + 16 * i, seen[i].keys);
      }
      for (int64_t i = 0; i < TOGETHER; i++) {
        if (!seen[i].keys) continue;
        if (seen[i].partial) mask(a, part[i], row + 16 * i, first, seen[i].keys);
        soften(a, part[i], row + 16 * i, seen[i].keys);
      }
      written();
      for (int64_t i = 0; i < TOGETHER; i++)
        if (seen[i].keys) weigh_values(part[i], row + 16 * i, seen[i].keys);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    bf16 *out = (bf16 *)a.out + r / a.group * a.out_stride + r % a.group * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += 16)
      store_part(out + i, load(t.acc + r * t.width + i) / t.sums[r], a.head_dim - i);
  }
}

void attend_bf16(const Attend &a) {
  const bool fits = TileKernel::fits(a);
  if (a.tokens >= FEW_TOKENS || (a.deterministic && !fits)) return each_head<attend_tiles, 2>(a);
  if (!fits) return attend_rows<DotKernel>(a);
  TileKernel::configure();
  attend_rows<TileKernel>(a);
  configure();
}

const Backend &backend() {
  static const Backend backend = [] {
    Backend b = bf16_backend(attend_bf16);
    b.block_bf16 = tile_block;
    b.begin = configure;
    return b;
  }();
  return backend;
}

}  // namespace amx
}  // namespace pf
