// Kernels for AVX2 + FMA + F16C + AVX-VNNI.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../platform.h"
#include "kernels.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"

#include "kernels.inl"

namespace kvq {
const Kernels* avxvnni_kernels() {
    if (!platform::runs(platform::Instructions::kAvxVnni)) return nullptr;
    // Filled only now: compilers do it by the very instructions that others lack.
    static const Kernels table = kernels_named("avxvnni");
    return &table;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avxvnni_kernels() {
    return nullptr;
}
#endif
