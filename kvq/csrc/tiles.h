// AMX's tiles: eight registers of up to sixteen rows of 64 bytes, and an instruction that multiplies
// two of them (Intel's Architecture Instruction Set Extensions and Future Features, chapter 3). Where
// KVQ_EMULATED_TILES is defined a header of the tests computes them, by the same names.
#pragma once
#include <cstdint>

#if defined(KVQ_EMULATED_TILES)
#define KVQ_TILES
#elif (defined(__AMX_TILE__) || defined(__AMXTILE__)) && \
    (defined(__AMX_INT8__) || defined(__AMXINT8__)) && defined(__AVX512VNNI__) && \
    defined(__AVX512VL__) && defined(__AVX512BW__)  // the second spelling is clang 14's and older
#define KVQ_TILES
#include <immintrin.h>
#endif

namespace kvq {

constexpr int kTileRows = 16, kTileBytes = 64;
// Rows' levels lie in up to three tiles: with as many of sums and one of codes, seven of the eight.
constexpr int kMostTiles = 3, kMostTileRows = kMostTiles * kTileRows;

// The shapes of a thread's tiles, as _tile_loadconfig reads them. A tile without rows is none.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int count, int bytes) {
        rows[tile] = static_cast<uint8_t>(count);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

// What was written before is in memory for the tile instructions that follow: GCC does not know
// that they read it.
inline void written() {
    __asm__ volatile("" ::: "memory");
}

}  // namespace kvq
