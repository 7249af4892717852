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
    static const Kernels table = kernels_named("avx2");  // after it: vectors fill the table
    return &table;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avx2_kernels() {
    return nullptr;
}
#endif
