// Products for ARM processors with the dot products of ARMv8.2 (dotprod).
#include <cmath>
#include <cstring>
#include <utility>

#include "../platform.h"
#include "linear.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "vectors_neon.h"

#include "linear.inl"

namespace kvq {
const LinearKernels* neon_linear() {
    static const LinearKernels table{"neon", round_row, norm_row, gate_row, multiply, add_row};
    return platform::runs(platform::Instructions::kDotProducts) ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::neon_linear() {
    return nullptr;
}
#endif
