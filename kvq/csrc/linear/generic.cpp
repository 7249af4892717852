// Products in plain C++: run anywhere, and check the others.
#include <cmath>
#include <cstring>
#include <utility>

#include "../platform.h"
#include "linear.h"
#include "vectors_generic.h"

#include "linear.inl"

namespace kvq {
const LinearKernels* generic_linear() {
    static const LinearKernels table{"generic", round_row, norm_row, gate_row, multiply, add_row};
    return &table;
}
}  // namespace kvq
