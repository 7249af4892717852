// One side of a page in shared memory, where the copy engine brings it while others are computed.
#pragma once
#include "codes.h"
#include "kvq_cuda.h"

namespace kvq::cuda {

KVQ_DEVICE int widest_bits(const kvq_cuda_sequence& s) {
    return s.hi_view ? 4 : 8;
}
KVQ_DEVICE int side_bits(const kvq_cuda_sequence& s, const Entry& e, bool values) {
    return min(widest_bits(s), int{values ? e.v_bits : e.k_bits});
}

// Planes as at 8 bits, and the grid.
template <int Dim>
struct SideRoom {
    alignas(16) uint8_t planes[kPageTokens * Dim];
    alignas(16) uint8_t grid[grid_bytes(Dim > kPageTokens ? Dim : kPageTokens)];

    KVQ_DEVICE_MEMBER uint32_t word(int plane, int offset) const {
        return *reinterpret_cast<const uint32_t*>(planes + plane * 32 * Dim + offset);
    }
    // The bits below the upper nibbles, of vector `vector` of a group: half as many vectors where
    // they are two each, of which the codes of odd vectors lie in the upper fields.
    template <int Bits>
    KVQ_DEVICE_MEMBER uint32_t low_word(int group, int group_bytes, int vector, int g) const {
        if constexpr (Bits == 8) return word(1, group * group_bytes + 32 * vector + 4 * g);
        if constexpr (Bits == 6)
            return word(1, group * group_bytes / 2 + 32 * (vector / 2) + 4 * g) >> 4 * (vector % 2);
        return 0;
    }
};

// Thread `thread` of `threads` sends its part on its way.
template <int Dim>
KVQ_DEVICE void stage_side(const kvq_cuda_sequence& s, const Entry& e, int kv_head, bool values,
                           int thread, int threads, SideRoom<Dim>& room) {
    const uint8_t* end = s.pool + s.pool_bytes;
    for (int i = thread; i < granules(side_bits(s, e, values)) * Dim; i += threads) {
        const int64_t slot = e.granule[values * kGranulesPerSide + i / Dim];
        copy_ahead<16>(room.planes + 16 * i, end - (slot + 1) * s.granule_bytes + 16 * (i % Dim));
    }
    const bool channels = !values || (s.forms[kv_head] & kChannelValues);
    const uint8_t* grid = s.pool + int64_t{e.constants} * s.constant_bytes +
                          values * static_cast<int64_t>(grid_bytes(Dim));
    const int pieces = static_cast<int>(grid_bytes(channels ? Dim : kPageTokens) / 8);
    for (int i = thread; i < pieces; i += threads) copy_ahead<8>(room.grid + 8 * i, grid + 8 * i);
}

// Calls with the width as a type.
template <int Bits>
struct Width {
    static constexpr int kBits = Bits;
};
template <class Call>
KVQ_DEVICE void with_bits(int bits, const Call& call) {
    if (bits == 8) call(Width<8>{});
    else if (bits == 6) call(Width<6>{});
    else if (bits == 4) call(Width<4>{});
    else call(Width<2>{});
}

}  // namespace kvq::cuda
