// Products by emulated tiles as a library of their own (tests/kvq/test_tiles.py): kvq_linear_run by
// the set `amxint8`, and whether it is offered. Attention and the other sets are left out.
#include <sys/mman.h>

#include <vector>

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

}  // namespace kvq

extern "C" {
const char* kvq_isa() {
    return kvq::amxint8_kernels() ? "amxint8" : "";
}
const char* kvq_isa_refused() {
    return kvq::amxint8_refusal();
}
// Multiplies rows, kMostTileRows at most, whose levels end where memory ends: to read beyond them
// ends the process.
void kvq_multiply_at_the_end_of_memory(int rows) {
    constexpr size_t kRoom = 1 << 16;
    for (const kvq_matrix& matrix : {kvq_matrix{kvq::kPanelRows, 96, 4, 32, KVQ_SYMMETRIC},
                                     kvq_matrix{kvq::kPanelRows, 256, 4, 32, KVQ_SUPER_MINIMUM},
                                     kvq_matrix{kvq::kPanelRows, 512, 6, 16, KVQ_SUPER_SYMMETRIC}}) {
        const kvq::PanelLayout layout(matrix);
        const std::vector<uint8_t> panel(layout.panel_bytes);
        std::vector<float> constants(size_t(rows) * layout.blocks);
        std::vector<float> out(size_t(rows) * kvq::kPanelRows);
        std::vector<int16_t> sub_sums(size_t(rows) * layout.subs());
        void* memory = mmap(nullptr, 2 * kRoom, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(static_cast<char*>(memory) + kRoom, kRoom, PROT_NONE);
        int8_t* levels = static_cast<int8_t*>(memory) + kRoom - rows * layout.padded_columns();
        const kvq::RoundedRows x{levels, constants.data(), constants.data(), false, sub_sums.data()};
        kvq::amxint8_linear()->multiply(layout, KVQ_FULL, panel.data(), x, 0, rows, out.data());
        munmap(memory, 2 * kRoom);
    }
}
}
