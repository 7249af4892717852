// Products for AVX2 processors that have AVX-VNNI too: vpdpbusd on 256-bit vectors.
#include <cmath>
#include <cstring>
#include <utility>

#include "../kernels/kernels.h"
#include "../platform.h"
#include "linear.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"

#include "linear.inl"

namespace kvq {
const LinearKernels* avxvnni_linear() {
    static const LinearKernels table{"avxvnni", round_row, norm_row, gate_row, multiply, add_row};
    return avxvnni_kernels() ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::avxvnni_linear() {
    return nullptr;
}
#endif
