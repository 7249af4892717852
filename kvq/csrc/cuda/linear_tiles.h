// Products with packed weights for many tokens: whole numbers of 8 bits on tensor cores, with the
// arithmetic of kvq/reference/linear.py to the last bit.
//
// A block is 256 outputs by 64 tokens, a warp 64 by 32. A warp reads sixteen bytes of four panels
// at a time: four outputs' codes of eight columns, which go into four products. So row g of product
// i is output 4 (g % 4) + i of panel g / 4, row g + 8 that of the panel two further.
#pragma once
#include "linear.h"

namespace kvq::cuda {

constexpr int kTileOutputs = 256, kTileTokens = 64, kTilePanels = kTileOutputs / kPanelRows;
constexpr int kWarpPanels = 4, kWarpTokens = 32;
constexpr int kLinearThreads =
    kTileOutputs / (kWarpPanels * kPanelRows) * (kTileTokens / kWarpTokens) * kWarp;
constexpr uint32_t kSigns = 0x80808080u;
// A whole number below 2^22, added to this one's bits, is a float that many above it.
constexpr float kTwelveMillion = 12582912.0f;
// A super-block is multiplied in stages of so many columns, since shared memory has no room for it;
// another block in one.
constexpr int kSuperStage = 64;
template <int Sub>
constexpr int kStages = Sub ? kSuperColumns / kSuperStage : 1;
constexpr int kMostSubs = 16;  // sub-blocks of a super-block

// What lies in shared memory while one block of columns is multiplied: of sixteen panels the upper
// bits, then the low ones that are read; of 64 tokens the levels.
struct LinearRoom {
    int block, upper_bytes, low_bytes;  // of one panel
    int level_stride, stage_bytes;
    constexpr LinearRoom(int columns, int upper_bits, int low_bits)
        : block(columns),
          upper_bytes(block * kPanelRows * upper_bits / 8),
          low_bytes(block * kPanelRows * low_bits / 8),
          // Rows 32 bytes apart from a multiple of 128: no two lanes meet in a bank.
          level_stride(block + (block > 32 ? 32 : 0)),
          stage_bytes(levels_at() + kTileTokens * level_stride) {}
    constexpr int low_at() const { return kTilePanels * upper_bytes; }
    constexpr int levels_at() const { return low_at() + kTilePanels * low_bytes; }
};

// Sums of the levels of a super-block's sub-blocks, each 256 times one signed byte and another: first
// the bytes that count once.
KVQ_DEVICE int8_t* sub_sums(const kvq_cuda_linear& c, int blocks, int block, int token) {
    auto* sums = reinterpret_cast<int8_t*>(c.steps + int64_t{blocks} * c.tokens);
    return sums + 2 * kMostSubs * (int64_t{block} * c.tokens + token);
}

// A warp per block of columns: levels, scale and sum of levels of one token's input.
KVQ_DEVICE void round_block(const kvq_cuda_linear& c, const PanelLayout& layout, const float* x,
                            float inverse, int token, int block) {
    const int lane = thread_index() % kWarp, first = block * layout.block;
    const int blocks = layout.blocks;
    float numbers[kSuperColumns / kWarp], top = 0;
    bool finite = true;
    for (int i = 0; i < layout.block / kWarp; i++) {
        const int column = first + i * kWarp + lane;
        numbers[i] = column < c.columns ? input_at(c, x, inverse, column) : 0.0f;
        finite &= fabsf(numbers[i]) < INFINITY;
        top = fmaxf(top, fabsf(numbers[i]));
    }
    top = over_lanes(top, kWarp, true);
    finite = !any_lane(!finite);
    const bool alive = finite && top >= kSmallestActivation;
    const float step = alive ? divide(127.0f, top) : 0.0f;
    float sum = 0;
    for (int i = 0; i < layout.block / kWarp; i++) {
        const float level = alive ? rint(mul(numbers[i], step)) : 0.0f;
        c.levels[int64_t{token} * blocks * layout.block + first + i * kWarp + lane] =
            static_cast<int8_t>(level);
        if (layout.sub) sum = 0;
        sum += level;
        sum = over_lanes(sum, layout.sub, false);
        if (!layout.sub || lane % layout.sub) continue;
        int8_t* sums = sub_sums(c, blocks, block, token) + (i * kWarp + lane) / layout.sub;
        const int whole = static_cast<int>(sum), low = static_cast<int8_t>(whole);
        sums[0] = static_cast<int8_t>(low);
        sums[kMostSubs] = static_cast<int8_t>((whole - low) / 256);
    }
    sum = over_lanes(sum, kWarp, false);
    if (lane) return;
    const int64_t at = int64_t{block} * c.tokens + token;
    c.steps[at] = finite ? mul(alive ? divide(top, 127.0f) : 0.0f, kScaleUnit) : NAN;
    if (!layout.sub) c.steps[int64_t{blocks} * c.tokens + at] = sum;
}

// A block of 256 threads per token.
KVQ_KERNEL round_inputs(kvq_cuda_linear c) {
    KVQ_SHARED float room[256];
    const int token = block_index().x;
    const PanelLayout layout = layout_of(c);
    const float* x = c.x + int64_t{token} * c.columns * (c.activation == KVQ_PLAIN ? 1 : 2);
    const float inverse = norm_of(c, x, room);
    for (int block = thread_index() / kWarp; block < layout.blocks; block += thread_count() / kWarp)
        round_block(c, layout, x, inverse, token, block);
}

// `count` bytes of sixteen panels each, `from` their beginning, on their way. What is beyond the
// last panel repeats it.
KVQ_DEVICE void stage_panels(const kvq_cuda_linear& c, const PanelLayout& layout, size_t from,
                             int count, uint8_t* to) {
    const int first_panel = block_index().y * kTilePanels, pieces = count / 16;
    for (int i = thread_index(); i < kTilePanels * pieces; i += kLinearThreads) {
        const int panel = min(first_panel + i / pieces, layout.panels - 1);
        copy_ahead<16>(to + 16 * i,
                       c.panels + panel * layout.panel_bytes + from + 16 * (i % pieces));
    }
}

// One block of columns, or a stage of a super-block, on its way. What is beyond the last token
// repeats it.
template <int Stages>
KVQ_DEVICE void stage_block(const kvq_cuda_linear& c, const PanelLayout& layout,
                            const LinearRoom& room, int block, uint8_t* stage) {
    const size_t upper = layout.plane_at(block / Stages) + block % Stages * room.upper_bytes;
    stage_panels(c, layout, upper, room.upper_bytes, stage);
    const size_t low = layout.low_at() + size_t(block) * room.low_bytes;
    stage_panels(c, layout, low, room.low_bytes, stage + room.low_at());
    uint8_t* levels = stage + room.levels_at();
    const int64_t columns = static_cast<int64_t>(layout.padded_columns());
    for (int i = thread_index(); i < kTileTokens * room.block / 16; i += kLinearThreads) {
        const int token = i / (room.block / 16), piece = i % (room.block / 16);
        const int from = min(block_index().x * kTileTokens + token, c.tokens - 1);
        copy_ahead<16>(levels + token * room.level_stride + 16 * piece,
                       c.levels + from * columns + int64_t{block} * room.block + 16 * piece);
    }
}

// Of a row's codes of eight columns, less the middle of their range, columns 4 half to 4 half + 3:
// the bits that `word` begins with and, below them, those of `low`; then zeros.
template <int UpperBits, int LowBits>
KVQ_DEVICE uint32_t signed_codes(uint32_t word, uint32_t low, int half) {
    constexpr uint32_t kUpper = 0x01010101u * (256 - (256 >> UpperBits));
    constexpr uint32_t kLower = kUpper >> LowBits & ~kUpper;
    const uint32_t upper = word << (8 - UpperBits * (half + 1)) & kUpper;
    const uint32_t lower = (half ? low >> LowBits : low) << (8 - UpperBits - LowBits) & kLower;
    return (upper | lower) ^ kSigns;
}

// Of four e2m1 the levels.
KVQ_DEVICE uint32_t levels_of(uint32_t word, int half) {
    uint32_t levels = 0;
    KVQ_UNROLL for (int i = 0; i < 4; i++)
        levels |= (e2m1_level(word >> (8 * i + 4 * half) & 15) & 255u) << 8 * i;
    return levels;
}

struct LinearLane {
    int g, t, panel, token;  // the first of its warp's, within the block's
};
// The first of a lane's results: it has four outputs of this panel and of that two further, of two
// of every eight tokens.
KVQ_DEVICE int first_panel_of(const LinearLane& lane) {
    return block_index().y * kTilePanels + lane.panel + lane.g / 4;
}
KVQ_DEVICE int first_token_of(const LinearLane& lane) {
    return block_index().x * kTileTokens + lane.token + 2 * lane.t;
}
// What is beyond the last panel repeats it.
KVQ_DEVICE const uint8_t* panel_of(const kvq_cuda_linear& c, const PanelLayout& layout,
                                   const LinearLane& lane, int half) {
    return c.panels + min(first_panel_of(lane) + 2 * half, layout.panels - 1) * layout.panel_bytes;
}

// [four outputs of each panel][eight tokens]
using Sums = int32_t[4][kWarpTokens / 8][4];
using Totals = float[4][kWarpTokens / 8][4];

// Adds to sums those of 32 columns from sub-block `sub` of the stage on, of product i, times their
// sub-blocks' whole scales.
template <int Sub>
KVQ_DEVICE void add_subs(const LinearLane& lane, const Constants* constants, int sub, int i,
                         const uint32_t* codes, const uint32_t (*inputs)[2], Sums& sums) {
    const int row = 4 * (lane.g % 4) + i;
    KVQ_UNROLL for (int part = 0; part < 32 / Sub; part++) {
        const int place = constants[0].place + sub + part;
        const int scale[2] = {constants[0].number(row, place, false),
                              constants[1].number(row, place, false)};
        // Of two sub-blocks each meets zeros in place of the other's inputs.
        const bool meets = Sub == 32 || lane.t / 2 == part;
        KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) {
            const uint32_t met[2] = {meets ? inputs[n][0] : 0, meets ? inputs[n][1] : 0};
            int32_t products[4] = {};
            mma(products, codes, met);
            KVQ_UNROLL for (int j = 0; j < 4; j++) sums[i][n][j] += products[j] * scale[j / 2];
        }
    }
}

// Of four rows the words that begin with the fields of an octet of columns.
template <int Bits>
KVQ_DEVICE Quad fields_of(const uint8_t* rows, int octet) {
    constexpr int kOctets = 4 / Bits;  // that share the words
    Quad fields = *reinterpret_cast<const Quad*>(rows + 64 * (octet / kOctets));
    KVQ_UNROLL for (uint32_t& bits : fields.words) bits >>= 2 * Bits * (octet % kOctets);
    return fields;
}

// Adds to sums those of one block of columns, or of a stage of a super-block. Its first sub-block's
// are the `constants`, of both panels.
template <int LowBits, int Sub, int UpperBits>
KVQ_DEVICE void multiply_block(const LinearRoom& room, const LinearLane& lane, bool e2m1,
                               const uint8_t* stage, const Constants* constants, Sums& sums) {
    const uint8_t* levels = stage + room.levels_at();
    for (int octet = lane.t; octet < room.block / 8; octet += 4) {
        Quad word[2], low[2] = {};
        KVQ_UNROLL for (int half = 0; half < 2; half++) {
            const int panel = lane.panel + 2 * half + lane.g / 4, row = 16 * (lane.g % 4);
            word[half] = fields_of<UpperBits>(stage + panel * room.upper_bytes + row, octet);
            if constexpr (LowBits > 0)
                low[half] = fields_of<LowBits>(
                    stage + room.low_at() + panel * room.low_bytes + row, octet);
        }
        uint32_t inputs[kWarpTokens / 8][2];
        KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) {
            const auto* at = reinterpret_cast<const uint32_t*>(
                levels + (lane.token + 8 * n + lane.g) * room.level_stride + 8 * octet);
            inputs[n][0] = at[0], inputs[n][1] = at[1];
        }
        KVQ_UNROLL for (int i = 0; i < 4; i++) {
            uint32_t codes[4];
            KVQ_UNROLL for (int j = 0; j < 4; j++) codes[j] =
                !LowBits && e2m1
                    ? levels_of(word[j % 2].words[i], j / 2)
                    : signed_codes<UpperBits, LowBits>(word[j % 2].words[i], low[j % 2].words[i], j / 2);
            if constexpr (Sub) {
                add_subs<Sub>(lane, constants, octet / 4 * (32 / Sub), i, codes, inputs, sums);
            } else {
                KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
                    mma(sums[i][n], codes, inputs[n]);
            }
        }
    }
}

// Sums over a super-block's sub-blocks of their numbers times their levels' sums, which are bytes as
// sub_sums has them.
KVQ_DEVICE void multiply_sums(const uint32_t* numbers, const uint32_t* sums, int32_t* products) {
    const uint32_t codes[4] = {numbers[0], numbers[1], 0, 0};
    const uint32_t low[2] = {sums[0], 0}, high[2] = {sums[1], 0};
    mma(products, codes, high);
    KVQ_UNROLL for (int j = 0; j < 4; j++) products[j] *= 256;
    mma(products, codes, low);
}

// Adds a super-block's part to the totals.
template <int LowBits, int Sub>
KVQ_DEVICE void add_super_block(const kvq_cuda_linear& c, const PanelLayout& layout,
                                const LinearLane& lane, const Constants* constants, int block,
                                const Sums& sums, Totals& totals) {
    const bool minimum = layout.grid == KVQ_SUPER_MINIMUM;
    const int step = 1 << (layout.low_bits() - LowBits);
    // Twice what codes are beyond what was multiplied in their place, which may be a half.
    const int beyond = ((minimum ? 1 << layout.bits : 0) + step - 1) << (8 - layout.bits);
    const float half_unit = static_cast<float>(1 << layout.bits) / 512.0f;
    KVQ_UNROLL for (int i = 0; i < 4; i++) {
        const int row = 4 * (lane.g % 4) + i;
        uint32_t scales[2] = {}, offsets[2] = {};
        for (int half = 0; half < 2 && lane.t < kSuperColumns / Sub / 4; half++) {
            scales[half] = constants[half].numbers(row, lane.t, false);
            if (minimum) offsets[half] = constants[half].numbers(row, lane.t, true);
        }
        KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) {
            const int first = first_token_of(lane) + 8 * n;
            const int met = min(first - 2 * lane.t + lane.g, c.tokens - 1);
            const auto* words =
                reinterpret_cast<const uint32_t*>(sub_sums(c, layout.blocks, block, met));
            const uint32_t level_sums[2] = {words[lane.t], words[kMostSubs / 4 + lane.t]};
            int32_t shift[4] = {}, low[4] = {};
            if (beyond) multiply_sums(scales, level_sums, shift);
            if (minimum) multiply_sums(offsets, level_sums, low);
            KVQ_UNROLL for (int j = 0; j < 4; j++) {
                const Constants& fields = constants[j / 2];
                const int token = min(first + j % 2, c.tokens - 1);
                const float step = c.steps[int64_t{block} * c.tokens + token];
                // Whole until it is rounded once.
                const int dot = 2 * sums[i][n][j] + beyond * shift[j];
                float& total = totals[i][n][j];
                total = fma_once(mul(static_cast<float>(dot), half_unit),
                                 mul(fields.half_at(row), step), total);
                if (minimum)
                    total = fma_once(static_cast<float>(low[j]),
                                     mul(fields.half_at(kPanelRows + row), step), total);
            }
        }
    }
}

// Adds a block's part to the totals. What was multiplied are codes' distances from the middle,
// times 2^(8 - bits), or the levels of e2m1; what a code is beyond that meets the sum of levels.
template <int LowBits>
KVQ_DEVICE void add_block(const kvq_cuda_linear& c, const PanelLayout& layout,
                          const LinearLane& lane, int block, const Sums& sums, Totals& totals) {
    const int step = 1 << (layout.low_bits() - LowBits);  // of codes, for whose middle one stands
    const float middle = static_cast<float>((1 << layout.bits) + step - 1) / 2;
    const float unit =
        layout.grid == KVQ_E2M1 ? 1.0f : static_cast<float>(1 << layout.bits) / 256.0f;
    const bool shifted = has_offsets(layout.grid) || step > 1;
    KVQ_UNROLL for (int half = 0; half < 2; half++) {
        const Constants constants(layout, panel_of(c, layout, lane, half), block);
        float scale[4], beyond[4], minimum[4];
        KVQ_UNROLL for (int i = 0; i < 4; i++) {
            const int row = 4 * (lane.g % 4) + i;
            scale[i] = constants.scale(row), minimum[i] = constants.minimum(row);
            beyond[i] = middle - constants.zero(row);
        }
        KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) KVQ_UNROLL for (int j = 0; j < 2; j++) {
            const int64_t at =
                int64_t{block} * c.tokens + min(first_token_of(lane) + 8 * n + j, c.tokens - 1);
            const float step = c.steps[at];
            const float levels =
                shifted ? c.steps[int64_t{layout.blocks} * c.tokens + at] : 0.0f;  // their sum
            KVQ_UNROLL for (int i = 0; i < 4; i++) {
                float& total = totals[i][n][2 * half + j];
                // Exact: a power of two times the difference of both.
                float dot = fma_once(float_of(sums[i][n][2 * half + j]), unit,
                                     -unit * kTwelveMillion);
                if (shifted) dot = fma_once(beyond[i], levels, dot);
                total = fma_once(dot, mul(scale[i], step), total);
                if (layout.grid == KVQ_MINIMUM)
                    total = fma_once(minimum[i], mul(levels, step), total);
            }
        }
    }
}

// Grid: blocks of 64 tokens, blocks of 256 outputs. LowBits: of codes, read beside their upper ones.
// Sub: columns of a super-block's sub-blocks, 0 where there are none.
template <int LowBits, int Sub, int UpperBits = 4>
KVQ_KERNEL product_tiles(kvq_cuda_linear c) {
    KVQ_DYNAMIC_SHARED(bytes);
    const PanelLayout layout = layout_with<Sub, UpperBits>(c);
    const LinearRoom room(Sub ? kSuperStage : c.block, UpperBits, LowBits);
    const int warp = thread_index() / kWarp, stages = layout.blocks * kStages<Sub>;
    const LinearLane lane{thread_index() % kWarp / 4, thread_index() % 4,
                          warp % (kTilePanels / kWarpPanels) * kWarpPanels,
                          warp / (kTilePanels / kWarpPanels) * kWarpTokens};
    Totals totals = {};
    Sums sums;
    stage_block<kStages<Sub>>(c, layout, room, 0, bytes);
    commit_copies();
    for (int stage = 0; stage < stages; stage++) {
        if (stage + 1 < stages)
            stage_block<kStages<Sub>>(c, layout, room, stage + 1,
                                      bytes + (stage + 1) % 2 * room.stage_bytes);
        commit_copies();
        wait_copies<1>();
        sync_block();
        const uint8_t* staged = bytes + stage % 2 * room.stage_bytes;
        const int block = stage / kStages<Sub>, part = stage % kStages<Sub>;
        if (part == 0)
            KVQ_UNROLL for (int i = 0; i < 4; i++)
                KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
                    KVQ_UNROLL for (int j = 0; j < 4; j++)
                        sums[i][n][j] = Sub ? 0 : bits_of(kTwelveMillion);
        if constexpr (Sub) {
            const int first_sub = stage * kSuperStage / Sub;
            const Constants constants[2] = {{layout, panel_of(c, layout, lane, 0), first_sub},
                                            {layout, panel_of(c, layout, lane, 1), first_sub}};
            multiply_block<LowBits, Sub, UpperBits>(room, lane, false, staged, constants, sums);
            if (part == kStages<Sub> - 1)
                add_super_block<LowBits, Sub>(c, layout, lane, constants, block, sums, totals);
        } else {
            multiply_block<LowBits, 0, UpperBits>(room, lane, layout.grid == KVQ_E2M1, staged, nullptr, sums);
            add_block<LowBits>(c, layout, lane, block, sums, totals);
        }
        sync_block();
    }
    KVQ_UNROLL for (int i = 0; i < 4; i++) KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
        KVQ_UNROLL for (int j = 0; j < 4; j++) {
        const int token = first_token_of(lane) + 8 * n + j % 2;
        const int panel = first_panel_of(lane) + j / 2 * 2;
        const int row = panel * kPanelRows + 4 * (lane.g % 4) + i;
        if (token < c.tokens && row < c.rows) finish_output(c, token, row, totals[i][n][j]);
    }
}

}  // namespace kvq::cuda
