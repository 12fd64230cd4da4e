#pragma once

#include "backend.h"

namespace pf {
const Backend &current();  // of the level chosen by pf_use_level
int64_t thread_count();
}  // namespace pf
