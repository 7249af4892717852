// Products for AVX2 processors that have AVX-VNNI too, vpdpbusd on 256-bit vectors.
#include <cmath>
#include <cstring>
#include <utility>

#include "linear.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <cpuid.h>

#include "vectors_avx2.h"

#include "linear.inl"

namespace kvq {
// Not every compiler that knows the instructions can ask for them by name.
static bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}
const LinearKernels* avxvnni_linear() {
    static const LinearKernels table{"avxvnni", round_row, norm_row, gate_row, multiply, add_row};
    static const bool runs = has_avxvnni();
    return runs ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::avxvnni_linear() {
    return nullptr;
}
#endif
