#define PF_ISA avx512_bf16
#define PF_LANES 16
#include "bf16_ops.h"

namespace pf {
namespace avx512_bf16 {

inline void attend_bf16(const Attend &a) {
  a.tokens < FEW_TOKENS ? attend_rows<DotKernel>(a) : each_head<attend<bf16, bf16>, 2>(a);
}

const Backend &backend() {
  static const Backend backend = {
      .bf16_activations = true,
      .block_f32 = block<float>,
      .block_bf16 = dot_block,
      .finish_f32 = finish<float>,
      .finish_bf16 = finish<bf16>,
      .norm_f32 = norm<float>,
      .norm_bf16 = norm<bf16>,
      .rope_f32 = rope<float>,
      .rope_bf16 = rope<bf16>,
      .attend_f32 = each_head<attend<float, float>, 4>,
      .attend_bf16 = attend_bf16,
      .begin = nothing,
  };
  return backend;
}

}  // namespace avx512_bf16
}  // namespace pf
