#define PF_ISA avx512_bf16
#define PF_LANES 16
#include "bf16_ops.h"

namespace pf {
namespace avx512_bf16 {

inline void attend_bf16(const Attend &a) {
  a.tokens < FEW_TOKENS ? attend_rows<DotKernel>(a) : each_head<attend<bf16, bf16>, 2>(a);
}

const Backend &backend() {
  static const Backend backend = bf16_backend(attend_bf16);
  return backend;
}

}  // namespace avx512_bf16
}  // namespace pf
