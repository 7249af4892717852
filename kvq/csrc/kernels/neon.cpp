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
    static const Kernels table = kernels_named("neon");
    return platform::runs(platform::Instructions::kDotProducts) ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::neon_kernels() {
    return nullptr;
}
#endif
