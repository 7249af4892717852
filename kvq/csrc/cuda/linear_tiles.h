// Products with packed weights for many tokens: whole numbers of 8 bits on tensor cores, with the
// arithmetic of kvq/reference_linear.py to the last bit.
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

// Where things lie in a panel, and in shared memory while one block of columns is multiplied.
struct LinearRoom {
    int block, planes, level_stride, stage_bytes;
    int64_t plane_bytes, scale_bytes, panel_bytes;
    KVQ_DEVICE_MEMBER LinearRoom(const kvq_cuda_linear& c, int planes_read)
        : block(c.block), planes(planes_read) {
        const int blocks = blocks_of(c);
        plane_bytes = int64_t{blocks} * block * kPanelRows / 2;
        scale_bytes = (int64_t{blocks} * kPanelRows * 2 + 63) / 64 * 64;
        panel_bytes = plane_bytes * (c.bits / 4) + scale_bytes;
        // Rows of levels 32 bytes apart from a multiple of 128: no two lanes meet in a bank.
        level_stride = block + (block > 32 ? 32 : 0);
        stage_bytes = planes * plane_room() + kTileTokens * level_stride;
    }
    KVQ_DEVICE_MEMBER int plane_room() const { return kTilePanels * block * kPanelRows / 2; }
};

constexpr size_t linear_room_bytes(int block, int planes) {
    return size_t{2} * (planes * kTilePanels * block * kPanelRows / 2 +
                        kTileTokens * (block + (block > 32 ? 32 : 0)));
}

// A warp per block of columns: levels, scale and sum of levels of one token's input.
KVQ_DEVICE void round_block(const kvq_cuda_linear& c, const float* x, float inverse, int token,
                            int block) {
    const int lane = thread_index() % kWarp, first = block * c.block;
    const int blocks = blocks_of(c);
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
    const bool alive = finite && top >= 1e-30f;
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
    const int token = block_index().x, blocks = blocks_of(c);
    const float* x = c.x + int64_t{token} * c.columns * (c.activation == KVQ_PLAIN ? 1 : 2);
    const float inverse = norm_of(c, x, room);
    for (int block = thread_index() / kWarp; block < blocks; block += thread_count() / kWarp)
        round_block(c, x, inverse, token, block);
}

// The bytes of one block of columns on their way: of sixteen panels the planes, of 64 tokens the
// levels. What is beyond the last panel or token repeats it.
KVQ_DEVICE void stage_block(const kvq_cuda_linear& c, const LinearRoom& room, int block,
                            uint8_t* stage) {
    const int panels = panels_of(c), pieces = room.block / 2;
    const int first_panel = block_index().y * kTilePanels;
    for (int i = thread_index(); i < room.planes * kTilePanels * pieces; i += kLinearThreads) {
        const int plane = i / (kTilePanels * pieces), panel = i / pieces % kTilePanels;
        const uint8_t* from = c.panels + min(first_panel + panel, panels - 1) * room.panel_bytes +
                              plane * (room.plane_bytes + room.scale_bytes) +
                              int64_t{block} * room.block * kPanelRows / 2;
        copy_ahead<16>(stage + 16 * i, from + 16 * (i % pieces));
    }
    uint8_t* levels = stage + room.planes * room.plane_room();
    const int64_t columns = int64_t{blocks_of(c)} * c.block;
    for (int i = thread_index(); i < kTileTokens * room.block / 16; i += kLinearThreads) {
        const int token = i / (room.block / 16), piece = i % (room.block / 16);
        const int from = min(block_index().x * kTileTokens + token, c.tokens - 1);
        copy_ahead<16>(levels + token * room.level_stride + 16 * piece,
                       c.levels + from * columns + int64_t{block} * room.block + 16 * piece);
    }
}

// Of a row's codes of eight columns, less the middle of their range, columns 4 half to 4 half + 3:
// whole, or sixteen times an upper nibble.
template <bool Whole>
KVQ_DEVICE uint32_t signed_codes(uint32_t word, uint32_t low, int half) {
    const uint32_t upper = (half ? word : word << 4) & kUpper;
    const uint32_t lower = Whole ? (half ? low >> 4 : low) & ~kUpper : 0;
    return (upper | lower) ^ kSigns;
}

struct LinearLane {
    int g, t, panel, token;  // the first of its warp's, within the block's
};

// Sums of one block of columns: [four outputs of each panel][eight tokens].
template <bool Whole>
KVQ_DEVICE void multiply_block(const LinearRoom& room, const LinearLane& lane, const uint8_t* stage,
                               int32_t (*sums)[kWarpTokens / 8][4]) {
    const int panel_bytes = room.block * kPanelRows / 2;
    const uint8_t* levels = stage + room.planes * room.plane_room();
    for (int octet = lane.t; octet < room.block / 8; octet += 4) {
        Quad word[2], low[2] = {};
        KVQ_UNROLL for (int half = 0; half < 2; half++) {
            const uint8_t* at = stage + (lane.panel + 2 * half + lane.g / 4) * panel_bytes +
                                64 * octet + 16 * (lane.g % 4);
            word[half] = *reinterpret_cast<const Quad*>(at);
            if (Whole) low[half] = *reinterpret_cast<const Quad*>(at + room.plane_room());
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
                signed_codes<Whole>(word[j % 2].words[i], low[j % 2].words[i], j / 2);
            KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++) mma(sums[i][n], codes, inputs[n]);
        }
    }
}

// Grid: blocks of 64 tokens, blocks of 256 outputs. Of 4 bits and of the view hi upper nibbles are
// multiplied sixteenfold; codes of the view hi stand 7.5 above them.
template <int Bits, bool Hi>
KVQ_KERNEL product_tiles(kvq_cuda_linear c) {
    constexpr bool kWhole = Bits == 8 && !Hi;
    KVQ_DYNAMIC_SHARED(bytes);
    const LinearRoom room(c, kWhole ? 2 : 1);
    const int warp = thread_index() / kWarp, blocks = blocks_of(c);
    const int panels = panels_of(c);
    const LinearLane lane{thread_index() % kWarp / 4, thread_index() % 4,
                          warp % (kTilePanels / kWarpPanels) * kWarpPanels,
                          warp / (kTilePanels / kWarpPanels) * kWarpTokens};
    const int first_token = block_index().x * kTileTokens + lane.token + 2 * lane.t;
    const int first_panel = block_index().y * kTilePanels + lane.panel + lane.g / 4;
    float totals[4][kWarpTokens / 8][4] = {};
    stage_block(c, room, 0, bytes);
    commit_copies();
    for (int block = 0; block < blocks; block++) {
        if (block + 1 < blocks)
            stage_block(c, room, block + 1, bytes + (block + 1) % 2 * room.stage_bytes);
        commit_copies();
        wait_copies<1>();
        sync_block();
        int32_t sums[4][kWarpTokens / 8][4];
        KVQ_UNROLL for (int i = 0; i < 4; i++) KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
            KVQ_UNROLL for (int j = 0; j < 4; j++) sums[i][n][j] = bits_of(kTwelveMillion);
        multiply_block<kWhole>(room, lane, bytes + block % 2 * room.stage_bytes, sums);
        KVQ_UNROLL for (int half = 0; half < 2; half++) {
            const auto* scales =
                reinterpret_cast<const uint16_t*>(
                    c.panels + min(first_panel + 2 * half, panels - 1) * room.panel_bytes +
                    room.plane_bytes) +
                block * kPanelRows + 4 * (lane.g % 4);
            KVQ_UNROLL for (int n = 0; n < kWarpTokens / 8; n++)
                KVQ_UNROLL for (int j = 0; j < 2; j++) {
                const int64_t at =
                    int64_t{block} * c.tokens + min(first_token + 8 * n + j, c.tokens - 1);
                const float step = c.steps[at];
                const float middle =
                    Hi && Bits == 8 ? 7.5f * c.steps[int64_t{blocks} * c.tokens + at] : 0.0f;
                KVQ_UNROLL for (int i = 0; i < 4; i++) {
                    float& total = totals[i][n][2 * half + j];
                    float dot = float_of(sums[i][n][2 * half + j]) - kTwelveMillion;
                    if (Bits == 4) dot *= 0.0625f;
                    if (Hi && Bits == 8) dot += middle;
                    total = fma_once(dot, mul(half_value(scales[i]), step), total);
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
