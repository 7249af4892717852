// Kernels for ARM processors with the dot products of ARMv8.2 (dotprod).
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../platform.h"
#include "kernels.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"

#include "kernels.inl"

namespace kvq {
const Kernels* neon_kernels() {
    if (!platform::runs(platform::Instructions::kDotProducts)) return nullptr;
    // Filled only now: compilers do it by the very instructions that others lack.
    static const Kernels table = kernels_named("neon");
    return &table;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::neon_kernels() {
    return nullptr;
}
#endif
