// Kernels for AVX2 + FMA + F16C.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"

#include "kernels.inl"

namespace kvq {
const Kernels* avx2_kernels() {
    static const Kernels table{"avx2",      pack,        read_grid,   narrow,
                               attend_pages, attend_tile, page_scores, page_bounds,
                               page_evidence, to_half,   from_half};
    // F16C came before AVX2, and clang 14 cannot ask for it.
    const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return runs ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avx2_kernels() {
    return nullptr;
}
#endif
