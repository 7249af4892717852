// AMX's tile instructions in plain memory, by the names of their intrinsics, for processors without
// them: kvq/csrc/tiles.h takes them where KVQ_EMULATED_TILES is defined. What the processor
// answers with a fault ends the program. The variable KVQ_TILES says what a machine has that is not
// in order: `refused`, the system grants no tiles; `faults`, they are announced and not executed;
// `wrong`, they compute something else.
#pragma once
#define KVQ_EMULATED_TILES
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>  // before its names are others'
#endif

namespace emulated_tiles {

inline bool machine_is(const char* state) {
    const char* found = std::getenv("KVQ_TILES");
    return found && !std::strcmp(found, state);
}
inline bool granted() {
    return !machine_is("refused");
}

struct Tile {
    int rows, row_bytes;
    uint8_t bytes[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "a tile instruction faults: %s\n", what);
    std::abort();
}
inline Tile& tile(int number) {
    check(configured, "no shapes were loaded");
    check(number >= 0 && number < 8 && tiles[number].rows, "there is no such tile");
    return tiles[number];
}
inline void load_config(const void* from) {
    if (machine_is("faults")) __builtin_trap();
    uint8_t shapes[64];
    std::memcpy(shapes, from, 64);
    check(shapes[0] == 1 && shapes[1] == 0, "palette or first row");
    for (int i = 2; i < 16; i++) check(!shapes[i], "reserved bytes");
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, shapes + 16 + 2 * i, 2);
        const int rows = shapes[48 + i];
        check(rows <= 16 && row_bytes <= 64 && !rows == !row_bytes, "a shape beyond 16 rows of 64");
        check(i < 8 || !rows, "more than eight tiles");
        if (i < 8) tiles[i] = {rows, row_bytes, {}};
    }
    configured = true;
}
inline void load(int to, const void* from, long stride) {
    Tile& into = tile(to);
    std::memset(into.bytes, 0, sizeof into.bytes);
    for (int r = 0; r < into.rows; r++)
        std::memcpy(into.bytes[r], static_cast<const uint8_t*>(from) + r * stride, into.row_bytes);
}
inline void store(int number, void* to, long stride) {
    const Tile& from = tile(number);
    for (int r = 0; r < from.rows; r++)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, from.bytes[r], from.row_bytes);
}
inline void zero(int to) {
    std::memset(tile(to).bytes, 0, sizeof(Tile::bytes));
}
// Signed bytes of `first` times bytes of `second`, four by four.
template <class Byte>
inline void dot(int to, int first, int second) {
    Tile &c = tile(to), &a = tile(first), &b = tile(second);
    check(to != first && to != second && first != second, "a tile is named twice");
    check(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows &&
              c.row_bytes % 4 == 0,
          "shapes do not match");
    const int more = machine_is("wrong");
    for (int m = 0; m < c.rows; m++)
        for (int n = 0; n < c.row_bytes / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, c.bytes[m] + 4 * n, 4);
            for (int k = 0; k < a.row_bytes; k++)
                sum += static_cast<int8_t>(a.bytes[m][k]) *
                       static_cast<Byte>(b.bytes[k / 4][4 * n + k % 4]);
            sum += more;
            std::memcpy(c.bytes[m] + 4 * n, &sum, 4);
        }
}
inline void release() {
    for (Tile& each : tiles) each = {};
    configured = false;
}

}  // namespace emulated_tiles

// Compilers have some of these as macros.
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbssd
#undef _tile_release
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_zero emulated_tiles::zero
#define _tile_dpbsud emulated_tiles::dot<uint8_t>
#define _tile_dpbssd emulated_tiles::dot<int8_t>
#define _tile_release emulated_tiles::release
