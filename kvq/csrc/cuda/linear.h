// Products with packed weights for up to sixteen tokens: a panel of sixteen outputs is the operand
// A as it lies in memory (codes.h), sixteen halves of activations the operand B.
#pragma once
#include "../linear/linear.h"
#include "codes.h"
#include "kvq_cuda.h"
#include "queries.h"

namespace kvq::cuda {

constexpr int kLinearWarps = 4;
constexpr uint32_t k32768s = 0x78007800u;  // two halves

template <class Call>
constexpr kvq_matrix matrix_of(const Call& c) {
    return {c.rows, c.columns, c.bits, c.block, c.grid};
}
template <class Call>
constexpr PanelLayout layout_of(const Call& c) {
    return PanelLayout(matrix_of(c));
}
// Likewise of a call whose sub-blocks have `Sub` columns, 0 where there are none, and whose codes
// have `UpperBits` in the upper plane: what depends on that costs a kernel nothing.
template <int Sub, int UpperBits>
constexpr PanelLayout layout_with(const kvq_cuda_linear& c) {
    PanelLayout layout = layout_of(c);
    layout.sub = Sub, layout.upper_bits = UpperBits;
    return layout;
}
constexpr int panels_of(const kvq_cuda_linear& c) {
    return layout_of(c).panels;
}

// Blocks of c.block columns: of super-blocks their sub-blocks.
constexpr int blocks_of(const PanelLayout& layout) {
    return layout.sub ? static_cast<int>(layout.subs()) : layout.blocks;
}
// The super-block of a sub-block; a block itself.
constexpr int whole_block(const PanelLayout& layout, int block) {
    return layout.sub ? block * layout.sub / kSuperColumns : block;
}

// Of one block of c.block columns of a panel: a weight is scale * (code - zero) + minimum, in
// kScaleUnit.
struct Constants {
    const uint8_t* bytes;
    int bits, grid, sub, place;  // which of its super-block's a sub-block is

    KVQ_DEVICE_MEMBER Constants(const PanelLayout& layout, const uint8_t* panel, int block)
        : bytes(panel + layout.constants_at(whole_block(layout, block))),
          bits(layout.bits),
          grid(layout.grid),
          sub(layout.sub),
          place(block * sub % kSuperColumns / (sub == 16 ? 16 : 32)) {}
    KVQ_DEVICE_MEMBER float scale(int row) const {
        if (grid == KVQ_E2M1) return float_of((127 - kE2m1Bias + bytes[row]) << 23);
        return sub ? half_at(row) * static_cast<float>(number(row, place, false)) : half_at(row);
    }
    KVQ_DEVICE_MEMBER float zero(int row) const {
        if (grid == KVQ_MINIMUM || grid == KVQ_SUPER_MINIMUM || grid == KVQ_E2M1) return 0;
        const int parts = grid == KVQ_ZERO_POINT ? bytes[2 * kPanelRows + row] : 128;
        return static_cast<float>(parts << bits) / kZeroParts;
    }
    KVQ_DEVICE_MEMBER float minimum(int row) const {
        if (grid != KVQ_MINIMUM && grid != KVQ_SUPER_MINIMUM) return 0;
        const float offset = half_at(kPanelRows + row);
        return sub ? offset * static_cast<float>(number(row, place, true)) : offset;
    }
    // Sixteen scales, then sixteen offsets.
    KVQ_DEVICE_MEMBER float half_at(int i) const {
        return half_value(reinterpret_cast<const uint16_t*>(bytes)[i]);
    }
    // What multiplies the scales, or the offsets, of sub-blocks 4 * quad to 4 * quad + 3: a signed
    // byte each.
    KVQ_DEVICE_MEMBER uint32_t numbers(int row, int quad, bool of_offsets) const {
        const int sides = grid == KVQ_SUPER_MINIMUM ? 2 : 1, second = of_offsets ? 1 : 0;
        const auto* words = reinterpret_cast<const uint32_t*>(bytes + 2 * kPanelRows * sides) + row;
        if (sub == 16) return words[(4 * second + quad) * kPanelRows];
        const uint32_t upper = words[second * kPanelRows] >> 4 * quad;
        const uint32_t low = words[2 * kPanelRows] >> (4 * second + 2 * quad);
        return (upper & 0x0f0f0f0fu) << 2 | (low & 0x03030303u);
    }
    KVQ_DEVICE_MEMBER int number(int row, int i, bool of_offsets) const {
        return static_cast<int8_t>(numbers(row, i / 4, of_offsets) >> 8 * (i % 4));
    }
};

// Whether what codes are beyond zero differs from block to block.
constexpr bool has_offsets(int grid) {
    return grid == KVQ_ZERO_POINT || grid == KVQ_MINIMUM || grid == KVQ_SUPER_MINIMUM;
}

// Twice what the four bits of an e2m1 stand for.
KVQ_DEVICE int e2m1_level(int code) {
    const int below = code & 7, level = below < 2 ? below : (2 + below % 2) << (below / 2 - 1);
    return code & 8 ? -level : level;
}

KVQ_DEVICE float activated(int kind, float gate, float up) {
    if (kind == KVQ_SILU) return gate / (1.0f + exp2_fast(-gate * kLog2E)) * up;
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanh(inner)) * up;
}

KVQ_DEVICE float input_at(const kvq_cuda_linear& c, const float* x, float inverse, int i) {
    if (c.activation != KVQ_PLAIN) return activated(c.activation, x[i], x[c.columns + i]);
    return c.norm ? x[i] * inverse * c.norm[i] : x[i];
}

// What the norm multiplies a row by, its weight aside.
KVQ_DEVICE float norm_of(const kvq_cuda_linear& c, const float* x, float* room) {
    if (!c.norm) return 1;
    float squares = 0;
    for (int k = thread_index(); k < c.columns; k += thread_count()) squares += x[k] * x[k];
    const float mean = block_sum(squares, room) / static_cast<float>(c.columns);
    return 1.0f / root(mean + c.norm_eps);
}

KVQ_DEVICE void finish_output(const kvq_cuda_linear& c, int token, int row, float sum) {
    const int64_t at = int64_t{token} * c.rows + row;
    if (c.bias) sum = add(sum, c.bias[row]);
    if (c.residual) sum = add(sum, c.residual[at]);
    c.out[at] = sum;
}

// A warp per block of columns, where a grid has offsets: the sum of one token's halves.
KVQ_DEVICE void sum_block(const kvq_cuda_linear& c, int token, int block) {
    const int lane = thread_index() % kWarp, end = min(c.columns, (block + 1) * c.block);
    float sum = 0;
    for (int k = block * c.block + lane; k < end; k += kWarp)
        sum += half_value(c.inputs[int64_t{token} * c.columns + k]);
    sum = over_lanes(sum, kWarp, false);
    if (lane == 0) c.steps[int64_t{block} * c.tokens + token] = sum;
}

// A block of 256 threads per token: its input as halves of what its largest number is 1 of.
KVQ_KERNEL inputs(kvq_cuda_linear c) {
    KVQ_SHARED float room[256];
    const int token = block_index().x, i = thread_index();
    const int width = c.activation == KVQ_PLAIN ? c.columns : 2 * c.columns;
    const float* x = c.x + int64_t{token} * width;
    const float inverse = norm_of(c, x, room);
    float top = 0;
    for (int k = i; k < c.columns; k += thread_count())
        top = fmaxf(top, fabsf(input_at(c, x, inverse, k)));
    top = over_block(top, room, [](float a, float b) { return fmaxf(a, b); });
    top = fmaxf(top, kSmallestActivation);
    for (int k = i; k < c.columns; k += thread_count())
        c.inputs[int64_t{token} * c.columns + k] = half_bits(input_at(c, x, inverse, k) / top);
    if (i == 0) c.tops[token] = top;
    if (!has_offsets(c.grid)) return;
    sync_block();
    const int blocks = blocks_of(layout_of(c));
    for (int block = i / kWarp; block < blocks; block += thread_count() / kWarp)
        sum_block(c, token, block);
}

// Of codes with `UpperBits` in the upper plane: whole ones, `Low` bits included, or upper nibbles
// alone, each of which stands for the middle of a step of codes. As halves, less the middle of the
// range, in steps; of e2m1 its levels.
template <bool Low, int UpperBits>
struct Reading {
    static constexpr bool kLast = Low || UpperBits < 4;  // codes go into the last bits of 1024
    static constexpr uint32_t kUpperMask = 0x00010001u * ((1u << UpperBits) - 1);
    int low_bits;
    bool e2m1;
    uint32_t low_mask, less;
    float step;

    KVQ_DEVICE_MEMBER explicit Reading(const PanelLayout& layout)
        : low_bits(layout.low_bits()),
          e2m1(layout.grid == KVQ_E2M1),
          low_mask(0x00010001u * ((1u << low_bits) - 1)),
          step(Low ? 1.0f : static_cast<float>(1 << low_bits)) {
        const float middle = static_cast<float>(1 << (layout.bits - 1));
        const float taken = (kLast ? 1024.0f : 16.0f) + (middle - (step - 1) / 2) / step;
        less = halves(-taken, -taken);
    }

    // Codes 4i + 0, 4i + 2 (`odd` 0) or 4i + 1, 4i + 3 of eight columns. A code goes into the last
    // bits of 1024, a nibble alone into those of 16, which leave it room for parts.
    KVQ_DEVICE_MEMBER uint32_t pair(uint32_t word, uint32_t low, int i, int odd) const {
        const int place = UpperBits * i + 8 * odd;
        uint32_t codes;
        if constexpr (kLast) {
            codes = (word >> place & kUpperMask) << (Low ? low_bits : 0) | kOneThousand24;
            if (Low) codes |= low >> (low_bits * i + 8 * odd) & low_mask;
        } else if (e2m1) {
            // Its bits are a half's, but for an exponent that is less by 14, and twice it is wanted.
            const uint32_t bits = word >> place;
            return fma_halves((bits & 0x00070007u) << 9 | (bits & 0x00080008u) << 12, k32768s, 0);
        } else {
            codes = (place < 6 ? word << (6 - place) : word >> (place - 6)) & 0x03c003c0u;
            codes |= kSixteens;
        }
        return fma_halves(codes, kOnes, less);
    }

    // What weights of a row are beyond their codes' distance from the middle, in steps.
    KVQ_DEVICE_MEMBER float beyond(const Constants& constants, int row) const {
        const int half = 1 << (low_bits + UpperBits - 1);
        const float middle = static_cast<float>(half) - constants.zero(row);
        const float all = fma_once(constants.scale(row), middle, constants.minimum(row));
        return Low ? all : all * float_of((127 - low_bits) << 23);  // over the codes of a step
    }
};

// Four activations from column k on, as the operand of a product.
KVQ_DEVICE void input_operand(const kvq_cuda_linear& c, int token, int k, uint32_t* b) {
    const auto* x = c.inputs + int64_t{token} * c.columns + k;
    for (int odd = 0; odd < 2; odd++) {
        uint32_t pair = 0;
        for (int upper = 0; upper < 2; upper++) {
            const int at = odd + 2 * upper;
            if (token < c.tokens && k + at < c.columns) pair |= uint32_t{x[at]} << 16 * upper;
        }
        b[odd] = pair;
    }
}

KVQ_DEVICE bool is_marked(const kvq_cuda_linear& c, int token, int panel) {
    return c.marks[int64_t{token} * panels_of(c) + panel];
}

// A block per panel. Tiles: of eight tokens. Marked: of tokens that have marked the panel alone;
// how far what was there errs is kept. Sub: columns of a sub-block, 0 where there are none.
template <bool Low, int Tiles, bool Marked, int Sub, int UpperBits = 4>
KVQ_KERNEL product(kvq_cuda_linear c) {
    if (Marked) {
        bool any = false;
        for (int token = 0; token < c.tokens; token++) any |= is_marked(c, token, block_index().x);
        if (!any) return;
    }
    KVQ_SHARED float totals[kLinearWarps][Tiles * 8][kPanelRows];
    const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
    const int g = lane / 4, t = lane % 4;
    constexpr int kQuads = Sub == 16 ? 1 : 2;  // of columns, that a lane multiplies at once
    const PanelLayout layout = layout_with<Sub, UpperBits>(c);
    const Reading<Low, UpperBits> reading(layout);
    const uint8_t* panel = c.panels + block_index().x * layout.panel_bytes;
    const uint8_t* low_plane = panel + layout.low_at();
    const int blocks = blocks_of(layout);
    float total[Tiles][4] = {};
    for (int block = warp; block < blocks; block += kLinearWarps) {
        float sums[Tiles][4] = {};
        const int whole = whole_block(layout, block);
        const uint8_t* plane = panel + layout.plane_at(whole);
        for (int quad = kQuads * t; quad < c.block / 4; quad += 4 * kQuads) {
            const int column = block * c.block + quad / 2 * 8;
            const int upper_columns = (column - whole * layout.block) * UpperBits;
            const int64_t at = int64_t{upper_columns / 32} * 64 + 4 * g;
            const int low_columns = column * reading.low_bits;  // times the bits of each
            const int64_t low_at = int64_t{low_columns / 32} * 64 + 4 * g;
            uint32_t word[2], low[2] = {};
            for (int half = 0; half < 2; half++) {
                word[half] = *reinterpret_cast<const uint32_t*>(plane + at + 32 * half);
                if (UpperBits < 4) word[half] >>= upper_columns / 4 % 8;
                if (!Low) continue;
                low[half] = *reinterpret_cast<const uint32_t*>(low_plane + low_at + 32 * half);
                low[half] >>= low_columns / 4 % 8;
            }
            for (int i = 0; i < kQuads; i++) {
                const int upper = kQuads == 2 ? i : quad % 2;  // fields of these columns
                uint32_t weights[4], b[2];
                for (int j = 0; j < 4; j++)
                    weights[j] = reading.pair(word[j % 2], low[j % 2], upper, j / 2);
                for (int tile = 0; tile < Tiles; tile++) {
                    input_operand(c, 8 * tile + g, column + 4 * upper, b);
                    mma(sums[tile], weights, b);
                }
            }
        }
        const Constants constants(layout, panel, block);
        for (int i = 0; i < 4; i++) {
            const float scale = constants.scale(g + i / 2 * 8);
            for (int tile = 0; tile < Tiles; tile++)
                total[tile][i] = fma_once(sums[tile][i], scale, total[tile][i]);
        }
    }
    // In a loop of its own, so that grids without offsets pay no registers for it.
    for (int block = warp; block < blocks && has_offsets(c.grid); block += kLinearWarps)
        for (int i = 0; i < 4; i++) {
            const Constants constants(layout, panel, block);
            const float extra = reading.beyond(constants, g + i / 2 * 8);
            for (int tile = 0; tile < Tiles; tile++) {
                const int token = min(8 * tile + 2 * t + i % 2, c.tokens - 1);
                const float inputs_sum = c.steps[int64_t{block} * c.tokens + token];
                total[tile][i] = fma_once(inputs_sum, extra, total[tile][i]);
            }
        }
    for (int tile = 0; tile < Tiles; tile++)
        for (int i = 0; i < 4; i++)
            totals[warp][8 * tile + 2 * t + i % 2][g + i / 2 * 8] = total[tile][i];
    sync_block();
    for (int i = thread_index(); i < Tiles * 8 * kPanelRows; i += thread_count()) {
        const int token = i / kPanelRows, row = block_index().x * kPanelRows + i % kPanelRows;
        if (token >= c.tokens || row >= c.rows) continue;
        float sum = 0;
        for (int w = 0; w < kLinearWarps; w++) sum += totals[w][token][i % kPanelRows];
        sum *= c.tops[token] * (reading.step * kScaleUnit);
        if (Marked) {
            if (!is_marked(c, token, block_index().x)) continue;
            atomic_max(c.deviations + token, fabsf(sub(sum, c.out[int64_t{token} * c.rows + row])));
        }
        finish_output(c, token, row, sum);
    }
}

}  // namespace kvq::cuda
