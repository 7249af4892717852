// AVX-VNNI serves products of weights (../linear/avxvnni.cpp); attention beside them is that of AVX2.
#include "../platform.h"
#include "kernels.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

namespace kvq {
const Kernels* avxvnni_kernels() {
    if (!platform::runs(platform::Instructions::kAvxVnni)) return nullptr;
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
