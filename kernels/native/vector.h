// Vectors of PF_LANES floats in the compilers' own vector extension: the same source serves SSE2,
// NEON, AVX2 and AVX-512. Everything lies in the namespace PF_ISA, so that code compiled for one
// instruction set cannot be merged with that of another by the linker; for the same reason the
// files that include this one use no templates of the standard library.
#pragma once

#include <math.h>
#include <string.h>

#include "backend.h"
#if PF_LANES >= 8
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pf {
namespace PF_ISA {

constexpr int64_t LANES = PF_LANES;
typedef float F __attribute__((vector_size(4 * PF_LANES)));
typedef uint32_t U __attribute__((vector_size(4 * PF_LANES)));
typedef int32_t I __attribute__((vector_size(4 * PF_LANES)));
typedef uint16_t H __attribute__((vector_size(2 * PF_LANES)));

inline F splat(float value) { return value - F{}; }
inline U bits(F v) { return (U)v; }

// a * b + c, rounded once where there is an instruction for it. The compiler fuses nothing by itself
// (-ffp-contract=off): a row's bits must not depend on which copy of a loop computes it.
inline F fma(F a, F b, F c) {
#if PF_LANES == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PF_LANES == 8
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline F fma(float a, F b, F c) { return fma(splat(a), b, c); }

inline F load(const float *p) {
  F v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Where a is less than b: c, else d (NaN: d).
inline F choose_less(F a, F b, F c, F d) {
#if PF_LANES == 16  // gcc 12 takes the comparison of such vectors apart
  return (F)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ), (__m512)d,
                                 (__m512)c);
#else
  return a < b ? c : d;
#endif
}

inline F load(const bf16 *p) {
#if PF_LANES == 16
  __m256i h = _mm256_loadu_si256((const __m256i *)p);
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
  H h;
  memcpy(&h, p, sizeof h);
  return (F)(__builtin_convertvector(h, U) << 16);
#endif
}

inline void store(float *p, F v) { memcpy(p, &v, sizeof v); }

// To nearest, ties to even; NaN stays NaN.
inline void store(bf16 *p, F v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &h, sizeof h);
#elif PF_LANES == 16
  __m512i u = (__m512i)v, odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
#else
  U u = bits(v);
  U rounded = u + 0x7fff + ((u >> 16) & 1);
  H h = __builtin_convertvector((v == v ? rounded : (u | 0x400000)) >> 16, H);
  memcpy(p, &h, sizeof h);
#endif
}

inline float widen(float v) { return v; }
inline float widen(bf16 v) {
  uint32_t u = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

inline void narrow(float v, float *p) { *p = v; }
inline void narrow(float v, bf16 *p) {
  uint32_t u;
  memcpy(&u, &v, sizeof u);
  u = v == v ? u + 0x7fff + ((u >> 16) & 1) : u | 0x400000;
  p->bits = (uint16_t)(u >> 16);
}

// A vector of the first `count` elements, zeros behind them; and its writing.
template <class T> inline F load_part(const T *p, int64_t count) {
  if (count >= LANES) return load(p);
  float part[LANES] = {};
  for (int64_t i = 0; i < count; i++) part[i] = widen(p[i]);
  return load(part);
}

template <class T> inline void store_part(T *p, F v, int64_t count) {
  if (count >= LANES) return store(p, v);
  for (int64_t i = 0; i < count; i++) narrow(v[i], p + i);
}

inline float sum(F v) {
#if PF_LANES == 16
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int64_t i = 0; i < LANES; i++) total += v[i];
  return total;
#endif
}

// 2^x, zero for x below -126: a polynomial for the fraction, the exponent by addition. Relative
// error below 3e-7 for x <= 127 (Taylor series of degree 6 on [-1/2, 1/2]).
inline F exp2(F x) {
  F safe = choose_less(x, splat(-126.0f), splat(-126.0f), x);  // NaN stays NaN
  F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F shifted = safe + magic;
  F f = safe - (shifted - magic);
  F p = splat(1.5403530e-4f);
  p = fma(p, f, splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  F scaled = (F)(bits(p) + (bits(shifted) << 23));
  return choose_less(x, splat(-126.0f), F{}, scaled);
}

constexpr float LOG2E = 1.44269504f;

inline F silu(F x) {
  F clipped = choose_less(x, splat(-87.0f), splat(-87.0f), x);
  return x / (exp2(clipped * -LOG2E) + 1.0f);
}

}  // namespace PF_ISA
}  // namespace pf
