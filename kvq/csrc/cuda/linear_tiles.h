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
constexpr uint32_t kUpper = 0xf0f0f0f0u, kSigns = 0x80808080u;
// A whole number below 2^22, added to this one's bits, is a float that many above it.
constexpr float kTwelveMillion = 12582912.0f;

// What lies in shared memory while one block of columns is multiplied: of sixteen panels the upper
// nibbles, then the low bits that are read; of 64 tokens the levels.
struct LinearRoom {
    int block, upper_bytes, low_bytes;  // of one panel
    int level_stride, stage_bytes;
    constexpr LinearRoom(int columns, int low_bits)
        : block(columns),
          upper_bytes(block * kPanelRows / 2),
          low_bytes(upper_bytes * low_bits / 4),
          // Rows 32 bytes apart from a multiple of 128: no two lanes meet in a bank.
          level_stride(block + (block > 32 ? 32 : 0)),
          stage_bytes(levels_at() + kTileTokens * level_stride) {}
    constexpr int low_at() const { return kTilePanels * upper_bytes; }
    constexpr int levels_at() const { return low_at() + kTilePanels * low_bytes; }
};

// A warp per block of columns: levels, scale and sum of levels of one token's input.
KVQ_DEVICE void round_block(const kvq_cuda_linear& c, const float* x, float inverse, int token,
                            int block) {
    const int lane = thread_index() % kWarp, first = block * c.block;
    const int blocks = layout_of(c).blocks;
    float numbers[4], top = 0;  // of 128 columns at most
    bool finite = true;
    for (int i = 0; i < c.block / kWarp; i++) {
        const int column = first + i * kWarp + lane;
        numbers[i] = column < c.columns ? input_at(c, x, inverse, column) : 0.0f;
        finite &= fabsf(numbers[i]) < INFINITY;
        top = fmaxf(top, fabsf(numbers[i]));
    }
    for (int mask = 1; mask < kWarp; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
    finite = !any_lane(!finite);
    const bool alive = finite && top >= kSmallestActivation;
    const float step = alive ? divide(127.0f, top) : 0.0f;
    float sum = 0;
    for (int i = 0; i < c.block / kWarp; i++) {
        const float level = alive ? rint(mul(numbers[i], step)) : 0.0f;
        c.levels[int64_t{token} * blocks * c.block + first + i * kWarp + lane] =
            static_cast<int8_t>(level);
        sum += level;
    }
    for (int mask = 1; mask < kWarp; mask *= 2) sum += shuffle_xor(sum, mask);
    if (lane) return;
    const int64_t at = int64_t{block} * c.tokens + token;
    c.steps[at] = finite ? mul(alive ? divide(top, 127.0f) : 0.0f, kScaleUnit) : NAN;
    c.steps[int64_t{blocks} * c.tokens + at] = sum;
}

// A block of 256 threads per token.
KVQ_KERNEL round_inputs(kvq_cuda_linear c) {
    KVQ_SHARED float room[256];
    const int token = block_index().x, blocks = layout_of(c).blocks;
    const float* x = c.x + int64_t{token} * c.columns * (c.activation == KVQ_PLAIN ? 1 : 2);
    const float inverse = norm_of(c, x, room);
    for (int block = thread_index() / kWarp; block < blocks; block += thread_count() / kWarp)
        round_block(c, x, inverse, token, block);
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

// One block of columns on its way. What is beyond the last token repeats it.
KVQ_DEVICE void stage_block(const kvq_cuda_linear& c, const PanelLayout& layout,
                            const LinearRoom& room, int block, uint8_t* stage) {
    stage_panels(c, layout, size_t(block) * room.upper_bytes, room.upper_bytes, stage);
    const size_t low = layout.plane_bytes + layout.constant_bytes + size_t(block) * room.low_bytes;
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
// upper nibbles and, below them, the bits that `low` begins with; then zeros.
template <int LowBits>
KVQ_DEVICE uint32_t signed_codes(uint32_t word, uint32_t low, int half) {
    constexpr uint32_t kLower = kUpper >> LowBits & ~kUpper;
    const uint32_t upper = (half ? word : word << 4) & kUpper;
    const uint32_t lower = (half ? low >> LowBits : low) << (4 - LowBits) & kLower;
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

// Sums of one block of columns: [four outputs of each panel][eight tokens].
template <int LowBits>
KVQ_DEVICE void multiply_block(const LinearRoom& room, const LinearLane& lane, bool e2m1,
                               const uint8_t* stage, int32_t (*sums)[kWarpTokens / 8][4]) {
    const uint8_t* levels = stage + room.levels_at();
    for (int octet = lane.t; octet < room.block / 8; octet += 4) {
        Quad word[2], low[2] = {};
        KVQ_UNROLL for (int half = 0; half < 2; half++) {
            const int panel = lane.panel + 2 * half + lane.g / 4, row = 16 * (lane.g % 4);
            word[half] = *reinterpret_cast<const Quad*>(stage + panel * room.upper_bytes +
                                                        64 * octet + row);
            if constexpr (LowBits > 0) {
                constexpr int kOctets = 4 / LowBits;  // that share the words
                low[half] = *reinterpret_cast<const Quad*>(stage + room.low_at() +
                                                           panel * room.low_bytes +
                                                           64 * (octet / kOctets) + row);
                KVQ_UNROLL for (uint32_t& bits : low[half].words) bits >>=
                    2 * LowBits * (lane.t % kOctets);
            }
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
                    : signed_codes<LowBits>(word[j % 2].words[i], low[j % 2].words[i], j / 2);
            KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) mma(sums[i][n], codes, inputs[n]);
        }
    }
}

// Grid: blocks of 64 tokens, blocks of 256 outputs. LowBits: of codes, read beside their upper
// nibbles. What is multiplied are codes' distances from the middle, times 2^(8 - bits), or the levels
// of e2m1; what a code is beyond that meets the sum of levels.
template <int LowBits>
KVQ_KERNEL product_tiles(kvq_cuda_linear c) {
    KVQ_DYNAMIC_SHARED(bytes);
    const PanelLayout layout = layout_of(c);
    const LinearRoom room(c.block, LowBits);
    const int step = 1 << (layout.low_bits() - LowBits);  // of codes, for whose middle one stands
    const float middle = static_cast<float>((1 << layout.bits) + step - 1) / 2;
    const bool e2m1 = layout.grid == KVQ_E2M1;
    const float unit = e2m1 ? 1.0f : static_cast<float>(1 << layout.bits) / 256.0f;
    const bool shifted = has_offsets(layout.grid) || step > 1;
    const int warp = thread_index() / kWarp, blocks = layout.blocks;
    const LinearLane lane{thread_index() % kWarp / 4, thread_index() % 4,
                          warp % (kTilePanels / kWarpPanels) * kWarpPanels,
                          warp / (kTilePanels / kWarpPanels) * kWarpTokens};
    const int first_token = block_index().x * kTileTokens + lane.token + 2 * lane.t;
    const int first_panel = block_index().y * kTilePanels + lane.panel + lane.g / 4;
    float totals[4][kWarpTokens / 8][4] = {};
    stage_block(c, layout, room, 0, bytes);
    commit_copies();
    for (int block = 0; block < blocks; block++) {
        if (block + 1 < blocks)
            stage_block(c, layout, room, block + 1, bytes + (block + 1) % 2 * room.stage_bytes);
        commit_copies();
        wait_copies<1>();
        sync_block();
        int32_t sums[4][kWarpTokens / 8][4];
        KVQ_UNROLL for (int i = 0; i < 4; i++) KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
            KVQ_UNROLL for (int j = 0; j < 4; j++) sums[i][n][j] = bits_of(kTwelveMillion);
        multiply_block<LowBits>(room, lane, e2m1, bytes + block % 2 * room.stage_bytes, sums);
        KVQ_UNROLL for (int half = 0; half < 2; half++) {
            const int panel = min(first_panel + 2 * half, layout.panels - 1);
            const Constants constants(layout, c.panels + panel * layout.panel_bytes, block);
            float scale[4], beyond[4], minimum[4];
            KVQ_UNROLL for (int i = 0; i < 4; i++) {
                const int row = 4 * (lane.g % 4) + i;
                scale[i] = constants.scale(row), minimum[i] = constants.minimum(row);
                beyond[i] = middle - constants.zero(row);
            }
            KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
                KVQ_UNROLL for (int j = 0; j < 2; j++) {
                const int64_t at =
                    int64_t{block} * c.tokens + min(first_token + 8 * n + j, c.tokens - 1);
                const float step = c.steps[at];
                const float levels =
                    shifted ? c.steps[int64_t{blocks} * c.tokens + at] : 0.0f;  // their sum
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
        sync_block();
    }
    KVQ_UNROLL for (int i = 0; i < 4; i++) KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
        KVQ_UNROLL for (int j = 0; j < 4; j++) {
        const int token = first_token + 8 * n + j % 2;
        const int row = (first_panel + j / 2 * 2) * kPanelRows + 4 * (lane.g % 4) + i;
        if (token < c.tokens && row < c.rows) finish_output(c, token, row, totals[i][n][j]);
    }
}

}  // namespace kvq::cuda
