// Products for processors that have AMX for int8: many rows by tiles, few as AVX-512 has them.
#include <algorithm>

#include "../tiles.h"
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

// A super-block's codes times the whole scales of their sub-blocks, middles taken off: sixteen bits
// each, as a plane of lower bytes and a plane of upper ones, which are signed. A plane has
// [256 / 4][16 rows][4], so that two products by tiles are the sums of all its columns.
struct ScaledCodes {
    alignas(64) uint8_t low[kPanelRows * kvq::kSuperColumns];
    alignas(64) uint8_t high[kPanelRows * kvq::kSuperColumns];

    template <int Sub, bool kMinimum, class Source>
    void unpack(const Source& source, const Words* scales, int beyond) {
        for (int group = 0; group < kvq::kSuperColumns / kPanelGroup; group += kFlushGroups) {
            const int sub = group * kPanelGroup / Sub;
            const LaneFactors first(scale_of(scales, sub), beyond);
            const LaneFactors second =
                Sub == 32 ? first : LaneFactors(scale_of(scales, sub + 1), beyond);
            put<!kMinimum>(group, source.template group<0>(group), first);
            put<!kMinimum>(group + 1, source.template group<1>(group), first);
            put<!kMinimum>(group + 2, source.template group<2>(group), second);
            put<!kMinimum>(group + 3, source.template group<3>(group), second);
        }
    }

private:
    static Ints scale_of(const Words* scales, int sub) {
        const Words& words = scales[sub / 4 * 2 + sub % 2];
        return sub % 4 < 2 ? first_words(words) : second_words(words);
    }
    template <bool kMore>
    void put(int group, const CodePair& codes, const LaneFactors& factors) {
        const int at = group * kPanelGroup * kPanelRows;
        store_scaled<kMore>(low + at, high + at, codes.first, factors);
        store_scaled<kMore>(low + at + 64, high + at + 64, codes.second, factors);
    }
};

// Two tiles' sums of products with a super-block's codes, of rows [first, first + 2 * kTileRows) at
// most. Of these [start, end) are to be added to results: the others were before.
struct PairSums {
    alignas(64) int32_t low[2 * kTileRows * kPanelRows], high[2 * kTileRows * kPanelRows];
    int first = 0, start = 0, end = 0;

    Ints of(int row) const {
        const int at = kPanelRows * (row - first);
        return shifted<8>(load_ints(high + at)) + load_ints(low + at);
    }
};

// Of kTileRows rows or more, codes whole. Rows lie in tiles as those of multiply_tiles do, two tiles at
// a time: while these are multiplied, sums of the two before are added to results. Sums are those of
// multiply_super.
template <int Sub, bool kMinimum, int UpperBits, int LowBits>
void multiply_super_tiles(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x,
                          int first, int count, float* out) {
    const int tiles = (count + kTileRows - 1) / kTileRows, rows = (count + tiles - 1) / tiles;
    const size_t stride = layout.padded_columns(), blocks = layout.blocks, subs = layout.subs();
    const size_t ahead = prefetch_bytes(layout, true);
    const uint8_t* low = panel + layout.low_at();
    const int middle = kMinimum ? 0 : 1 << (layout.bits - 1);
    kvq::TileShapes shapes;
    for (int tile = 0; tile < 6; tile++) shapes.set(tile, rows, kTileBytes);  // sums, levels
    for (int tile = 6; tile < 8; tile++) shapes.set(tile, kTileRows, kTileBytes);  // codes
    kvq::written();
    _tile_loadconfig(&shapes);
    ScaledCodes codes;
    PairSums pairs[2];
    std::fill_n(out, count * kPanelRows, 0.0f);
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t* constants = panel + layout.constants_at(b);
        for (size_t i = 0; i < layout.block_constants; i += 64)
            __builtin_prefetch(constants + ahead + i);
        const uint8_t* numbers = constants + 2 * kPanelRows * (kMinimum ? 2 : 1);
        Words scales[kSubWords<Sub>], minima[kSubWords<Sub>];
        load_subs<Sub>(numbers, false, scales);
        if constexpr (kMinimum) load_subs<Sub>(numbers, true, minima);
        const Plane<UpperBits, false> upper{panel + layout.plane_at(b), ahead};
        const Plane<LowBits ? LowBits : 4, false> lower{
            low + b * PanelLayout::bytes_of(kvq::kSuperColumns, LowBits), ahead};
        if constexpr (LowBits == 0)
            codes.unpack<Sub, kMinimum>(upper, scales, -middle);
        else if constexpr (UpperBits == 2)
            codes.unpack<Sub, kMinimum>(ThreeBits<false>{upper, lower}, scales, -middle);
        else
            codes.unpack<Sub, kMinimum>(WholeCodes<LowBits, false>{upper, lower}, scales, -middle);
        kvq::written();
        const Floats scale = load_half(constants);
        const Floats offset = load_half(constants + 2 * kPanelRows);
        // Adds a part of four of a pair's sums to results.
        const auto add = [&](const PairSums& sums, int part) {
            const int all = sums.end - sums.start, end = sums.start + all * (part + 1) / 4;
            for (int m = sums.start + all * part / 4; m < end; m++) {
                const size_t row = first + m;
                const Floats unit = set1(x.scales[row * blocks + b]);
                float* result = out + kPanelRows * m;
                Floats total = fma(to_float(sums.of(m)), scale * unit, load(result));
                if constexpr (kMinimum) {
                    const int16_t* row_sums = x.sub_sums + row * subs + b * (kvq::kSuperColumns / Sub);
                    total = fma(to_float(dot_subs<Sub>(minima, row_sums)), offset * unit, total);
                }
                store(result, total);
            }
        };
        const int8_t* levels = x.levels + first * stride + b * kvq::kSuperColumns;
        int place = 0;
        pairs[1].start = pairs[1].end = 0;
        for (int tile = 0; tile < tiles; tile += 2, place ^= 1) {
            const bool two = tile + 1 < tiles;
            const int begin = std::min(tile * rows, count - rows);
            const int second = std::min(begin + rows, count - rows);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int part = 0; part < 4; part++) {
                const int column = part * kTileBytes;
                _tile_loadd(4, levels + begin * stride + column, stride);
                _tile_loadd(6, codes.low + kPanelRows * column, kTileBytes);
                _tile_loadd(7, codes.high + kPanelRows * column, kTileBytes);
                _tile_dpbsud(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                if (two) {
                    _tile_loadd(5, levels + second * stride + column, stride);
                    _tile_dpbsud(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
                add(pairs[place ^ 1], part);
            }
            PairSums& sums = pairs[place];
            sums.first = begin, sums.start = tile * rows;
            sums.end = std::min((tile + 2) * rows, count);
            _tile_stored(0, sums.low, kTileBytes);
            _tile_stored(1, sums.high, kTileBytes);
            if (two) {
                _tile_stored(2, sums.low + (second - begin) * kPanelRows, kTileBytes);
                _tile_stored(3, sums.high + (second - begin) * kPanelRows, kTileBytes);
            }
        }
        for (int part = 0; part < 4; part++) add(pairs[place ^ 1], part);
    }
    _tile_release();
}

using MultiplyTiles = void (*)(const PanelLayout&, const uint8_t*, const RoundedRows&, int, int,
                               float*);

void multiply_many(const PanelLayout& layout, int view, const uint8_t* panel, const RoundedRows& x,
                   int first, int count, float* out) {
    const int low_bits = layout.low_bits(view);
    // Of super-blocks, codes are multiplied whole: another view's would not fit.
    if (count < kTileRows || (layout.sub && low_bits < layout.low_bits()))
        return multiply(layout, view, panel, x, first, count, out);
    if (layout.sub) {
        const auto super = [](auto sub, auto minimum, auto upper, auto low) -> MultiplyTiles {
            return multiply_super_tiles<sub(), minimum(), upper(), low()>;
        };
        return for_supers(layout, low_bits, super)(layout, panel, x, first, count, out);
    }
    const MultiplyTiles chosen =
        for_codes(low_bits, layout.grid, [](auto low, auto e2m1) -> MultiplyTiles {
            return multiply_tiles<low(), e2m1()>;
        });
    while (count > 0) {
        // Sixteen rows at least are left for the next call, or none.
        const int left = count - kMostTileRows;
        const int rows = left <= 0 ? count : left < kTileRows ? count - kTileRows : kMostTileRows;
        chosen(layout, panel, x, first, rows, out);
        first += rows, count -= rows, out += kPanelRows * rows;
    }
}

}  // namespace

KVQ_LINEAR_SET(amxint8, multiply_many, 0)
#endif
