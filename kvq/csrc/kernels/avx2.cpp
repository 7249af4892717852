// Kernels for AVX2 + FMA + F16C.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../platform.h"
#include "kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"

#include "kernels.inl"

namespace kvq {
const Kernels* avx2_kernels() {
    if (!platform::runs(platform::Instructions::kAvx2)) return nullptr;
    // Filled only now: compilers do it by the very instructions that others lack.
    static const Kernels table = kernels_named("avx2");
    return &table;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avx2_kernels() {
    return nullptr;
}
#endif
