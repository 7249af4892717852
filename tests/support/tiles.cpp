// Products by emulated tiles as a library of their own (tests/kvq/test_tiles.py): kvq_linear_run with
// the set `amxint8`, and whether it is offered. Attention and the other sets are left out.
#include "kernels/kernels.h"
#include "linear/linear.h"

namespace kvq {

const Kernels* generic_kernels() {
    static const Kernels none{};
    return &none;
}
const Kernels& kernels() {
    return *amxint8_kernels();
}
const LinearKernels* generic_linear() {
    return amxint8_linear();
}
const LinearKernels* avx2_linear() {
    return nullptr;
}
const LinearKernels* avxvnni_linear() {
    return nullptr;
}
const LinearKernels* avx512vnni_linear() {
    return nullptr;
}
const LinearKernels* neon_linear() {
    return nullptr;
}

}  // namespace kvq

extern "C" {
const char* kvq_isa() {
    return kvq::amxint8_kernels() ? "amxint8" : "";
}
const char* kvq_isa_refused() {
    return kvq::amxint8_refusal();
}
}
