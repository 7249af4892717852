// Kernels for processors with AVX-512 and its VNNI.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../platform.h"
#include "kernels.h"
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "simd_avx512.h"

#include "kernels.inl"

namespace kvq {
const Kernels* avx512vnni_kernels() {
    if (!platform::runs(platform::Instructions::kAvx512Vnni)) return nullptr;
    // Filled only now: compilers do it by the very instructions that others lack.
    static const Kernels table = kernels_named("avx512vnni");
    return &table;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avx512vnni_kernels() {
    return nullptr;
}
#endif
