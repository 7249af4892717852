// Kernels in plain C++: run anywhere, and check the others.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "simd_generic.h"

#include "kernels.inl"

namespace kvq {
const Kernels* generic_kernels() {
    static const Kernels table = kernels_named("generic");
    return &table;
}
}  // namespace kvq
