// AMX serves products of weights (../linear/amxint8.cpp); attention beside them is that of AVX-512.
// Whether a processor has it is more than what it announces: see amxint8_refusal.
#include <cstring>

#include "../platform.h"
#include "../tiles.h"
#include "kernels.h"
#ifdef KVQ_TILES

namespace kvq {
namespace {

#ifdef KVQ_EMULATED_TILES
bool announced() {
    return true;
}
bool granted() {
    return emulated_tiles::granted();
}
const Kernels* beside() {
    return generic_kernels();
}
#else
bool announced() {
    return platform::runs(platform::Instructions::kAmxInt8);
}
bool granted() {
    return platform::grants_tiles();
}
const Kernels* beside() {
    return avx512vnni_kernels();
}
#endif

// One product of tiles, by the instructions that products of weights use; whether it is right.
bool multiplies() {
    constexpr int kCount = kTileRows * kTileBytes, kColumns = kTileBytes / 4;
    alignas(64) int8_t levels[kCount];
    alignas(64) uint8_t codes[kCount];
    alignas(64) int32_t found[kTileRows * kColumns];
    for (int i = 0; i < kCount; i++) {
        levels[i] = static_cast<int8_t>(127 - i % 251);
        codes[i] = static_cast<uint8_t>(i * 7);
    }
    TileShapes shapes;
    for (int tile = 0; tile < 3; tile++) shapes.set(tile, kTileRows, kTileBytes);
    written();
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_loadd(1, levels, kTileBytes);
    _tile_loadd(2, codes, kTileBytes);
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, found, kTileBytes);
    _tile_release();
    for (int m = 0; m < kTileRows; m++)
        for (int n = 0; n < kColumns; n++) {
            int32_t wanted = 0;
            for (int k = 0; k < kTileBytes; k++)
                wanted += levels[m * kTileBytes + k] * codes[k / 4 * kTileBytes + 4 * n + k % 4];
            if (found[m * kColumns + n] != wanted) return false;
        }
    return true;
}

// Null where the kernels are offered.
const char* refusal() {
    static const char* const why = []() -> const char* {
        if (!announced()) return "";
        if (!granted()) return "the system grants this process no registers for AMX";
        if (!platform::survives(multiplies))
            return "the processor announces AMX, but a process that tried it ended or computed "
                   "something else, as some virtual machines have it";
        return nullptr;
    }();
    return why;
}

}  // namespace

const char* amxint8_refusal() {
    return refusal() ? refusal() : "";
}

const Kernels* amxint8_kernels() {
    if (refusal()) return nullptr;
    static const Kernels table = [] {
        Kernels same = *beside();
        same.name = "amxint8";
        same.linear = amxint8_linear();
        return same;
    }();
    return &table;
}

}  // namespace kvq
#else
KVQ_NO_KERNEL_SET(amxint8)
const char* kvq::amxint8_refusal() {
    return "";
}
#endif
