// Products for AVX-512 with VNNI, on 512-bit vectors.
#include <cmath>
#include <cstring>
#include <utility>

#include "../platform.h"
#include "linear.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "vectors_avx512.h"

#include "linear.inl"

namespace kvq {
const LinearKernels* avx512vnni_linear() {
    static const LinearKernels table{"avx512vnni", round_row, norm_row,
                                     gate_row,     multiply,  add_row};
    return platform::runs(platform::Instructions::kAvx512Vnni) ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::avx512vnni_linear() {
    return nullptr;
}
#endif
