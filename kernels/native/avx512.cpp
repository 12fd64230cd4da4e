#define PF_ISA avx512
#define PF_LANES 16
#include "vector_ops.h"

namespace pf {
const Backend &avx512::backend() { return vector_backend; }
}  // namespace pf
