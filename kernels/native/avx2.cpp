#define PF_ISA avx2
#define PF_LANES 8
#include "vector_ops.h"

namespace pf {
const Backend &avx2::backend() { return vector_backend; }
}  // namespace pf
