// AVX-VNNI serves products of weights (../linear/avxvnni.cpp); attention beside them is that of AVX2.
#include "kernels.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <cpuid.h>

namespace kvq {
namespace {

// Not every compiler that knows the instructions can ask for them by name.
bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return avx2_kernels() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}

}  // namespace

const Kernels* avxvnni_kernels() {
    static const bool runs = has_avxvnni();
    if (!runs) return nullptr;
    static const Kernels table = [] {
        Kernels same = *avx2_kernels();
        same.name = "avxvnni";
        return same;
    }();
    return &table;
}

}  // namespace kvq
#else
const kvq::Kernels* kvq::avxvnni_kernels() {
    return nullptr;
}
#endif
