// Products for processors that have AMX for int8: many rows by tiles, few as AVX-512 has them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "../kernels/kernels.h"
#include "../platform.h"
#include "../tiles.h"
#include "linear.h"
#ifdef KVQ_TILES
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "vectors_avx512.h"
#else
#include "vectors_generic.h"
#endif

#include "linear.inl"

namespace {

using kvq::kMostTileRows;
using kvq::kMostTiles;
using kvq::kTileBytes;
using kvq::kTileRows;

// Of kTileRows to kMostTileRows rows. They lie in as few tiles as can be, all of the same number of
// rows: where that does not divide them the last tile begins within the one before, and both compute
// the same there. Sums are those of multiply_rows, in its order.
template <int LowBits, bool E2m1>
void multiply_tiles(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x,
                    int first, int count, float* out) {
    const int tiles = (count + kTileRows - 1) / kTileRows, rows = (count + tiles - 1) / tiles;
    const int second = std::min(rows, count - rows), third = count - rows;
    const int width = std::min(layout.block, kTileBytes);  // columns of one product
    const size_t stride = layout.padded_columns();
    const size_t ahead = prefetch_bytes(layout, LowBits == layout.low_bits());
    const Reading reading(layout, LowBits, 0.0f);
    kvq::TileShapes shapes;
    for (int tile = 0; tile < kMostTiles; tile++) {
        shapes.set(tile, rows, kTileBytes);          // sums, int32 [rows, 16]
        shapes.set(kMostTiles + tile, rows, width);  // levels, int8 [rows, width]
    }
    shapes.set(2 * kMostTiles, width / 4, kTileBytes);  // codes
    kvq::written();
    _tile_loadconfig(&shapes);
    alignas(64) uint8_t codes[kPanelRows * kWidestBlock];
    alignas(64) int32_t sums[kMostTileRows * kPanelRows];
    std::fill_n(out, count * kPanelRows, 0.0f);
    for (int b = 0; b < layout.blocks; b++) {
        unpack<LowBits, E2m1>(layout, panel, b, ahead, codes);
        kvq::written();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        for (int column = 0; column < layout.block; column += width) {
            const int8_t* levels = x.levels + first * stride + size_t(b) * layout.block + column;
            _tile_loadd(6, codes + kPanelRows * column, kTileBytes);
            _tile_loadd(3, levels, stride);
            _tile_dpbsud(0, 3, 6);
            if (tiles < 2) continue;
            _tile_loadd(4, levels + second * stride, stride);
            _tile_dpbsud(1, 4, 6);
            if (tiles < 3) continue;
            _tile_loadd(5, levels + third * stride, stride);
            _tile_dpbsud(2, 5, 6);
        }
        _tile_stored(0, sums, kTileBytes);
        if (tiles > 1) _tile_stored(1, sums + second * kPanelRows, kTileBytes);
        if (tiles > 2) _tile_stored(2, sums + third * kPanelRows, kTileBytes);
        const BlockTerms<E2m1> terms(layout, reading, panel, b);
        for (int m = 0; m < count; m++) {
            const size_t at = size_t(first + m) * layout.blocks + b;
            const Ints raw = load_ints(sums + kPanelRows * m);
            float* result = out + kPanelRows * m;
            Floats total = terms.added(load(result), raw, x.sums[at], x.scales[at]);
            if (terms.has_minimum) total = terms.with_minimum(total, x.sums[at], x.scales[at]);
            store(result, total);
        }
    }
    _tile_release();
}

using MultiplyTiles = void (*)(const PanelLayout&, const uint8_t*, const RoundedRows&, int, int,
                               float*);

void multiply_many(const PanelLayout& layout, int view, const uint8_t* panel, const RoundedRows& x,
                   int first, int count, float* out) {
    if (count < kTileRows || layout.sub) return multiply(layout, view, panel, x, first, count, out);
    const int low_bits = layout.low_bits(view);
    const MultiplyTiles chosen =
        for_codes(low_bits, layout.grid, [](auto low, auto e2m1) -> MultiplyTiles {
            return multiply_tiles<low(), e2m1()>;
        });
    chosen(layout, panel, x, first, count, out);
}

}  // namespace

namespace kvq {
const LinearKernels* amxint8_linear() {
    static const LinearKernels table{"amxint8", round_row,     norm_row,
                                     gate_row,  multiply_many, add_row};
    return amxint8_kernels() ? &table : nullptr;
}
}  // namespace kvq
#else
const kvq::LinearKernels* kvq::amxint8_linear() {
    return nullptr;
}
#endif
