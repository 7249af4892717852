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
    static const Kernels table{"avx512vnni",      pack,        read_grid,   narrow_keys, narrow,
                               attend_pages, attend_tile, page_scores, page_bounds,
                               page_evidence, to_half,   from_half,  delta_read,  delta_fold,
                               silu,        add,         dot};
    return platform::runs(platform::Instructions::kAvx512Vnni) ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::Kernels* kvq::avx512vnni_kernels() {
    return nullptr;
}
#endif
