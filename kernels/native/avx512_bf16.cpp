#define PF_ISA avx512_bf16
#define PF_LANES 16
#include "bf16_ops.h"

namespace pf {
namespace avx512_bf16 {

// Rows one by one: of a long chunk head by head, whose keys then stay in the second level cache.
inline void attend_bf16(const Attend &a) {
  a.tokens < FEW_TOKENS ? attend_rows<DotKernel>(a) : each_head<attend_rows<DotKernel>, 2>(a);
}

const Backend &backend() {
  static const Backend backend = bf16_backend(attend_bf16);
  return backend;
}

}  // namespace avx512_bf16
}  // namespace pf
