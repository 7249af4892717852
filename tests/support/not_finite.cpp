// Attends rows to keys that are no numbers, or whose products are none, and prints their results.
// With `-fsanitize=undefined` it stops where a kernel takes such a weight for a number.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kernels.h"

const kvq::LinearKernels* kvq::generic_linear() {
    return nullptr;
}

int main() {
    constexpr int kDim = 16, kKeys = 64, kRows = 8;
    constexpr uint16_t kOne = 0x3c00, kNan = 0x7e00, kInfinity = 0x7c00, kLargest = 0x7bff;
    static kvq::Block block;
    for (const uint16_t odd : {kOne, kNan, kInfinity, kLargest}) {
        block.start(kRows, kDim, 0.0f);
        for (int i = 0; i < kRows * kDim; i++) block.q[i] = odd == kLargest ? 1e37f : 0.25f;
        std::vector<uint16_t> keys(kKeys * kDim, kOne), values(kKeys * kDim, kOne);
        keys[40 * kDim + 3] = keys[50 * kDim + 3] = odd;
        const std::vector<uint64_t> visible(kRows, ~uint64_t{0});
        kvq::generic_kernels()->tile(block, block.q, keys.data(), values.data(), kKeys,
                                     visible.data());
        std::printf("%d", std::isfinite(block.acc[0] / block.sum[0]));
    }
}
