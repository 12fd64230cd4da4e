#define PF_ISA base
#define PF_LANES 4
#include "vector_ops.h"

namespace pf {
const Backend &base::backend() { return vector_backend; }
}  // namespace pf
