// Products for AVX2 + FMA + F16C.
#include <cmath>
#include <cstring>
#include <utility>

#include "../platform.h"
#include "linear.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"

#include "linear.inl"

namespace kvq {
const LinearKernels* avx2_linear() {
    static const LinearKernels table{"avx2", round_row, norm_row, gate_row, multiply, add_row};
    return platform::runs(platform::Instructions::kAvx2) ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::avx2_linear() {
    return nullptr;
}
#endif
