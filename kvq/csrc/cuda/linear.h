// Products with packed weights for up to sixteen tokens: a panel of sixteen outputs is the operand
// A as it lies in memory (codes.h), sixteen halves of activations the operand B.
#pragma once
#include "../kvq.h"
#include "codes.h"
#include "kvq_cuda.h"
#include "queries.h"

namespace kvq::cuda {

constexpr int kPanelRows = 16, kLinearWarps = 4;
constexpr float kScaleUnit = 1.0f / 256.0f;

constexpr int panels_of(const kvq_cuda_linear& c) {
    return (c.rows + kPanelRows - 1) / kPanelRows;
}
// Of columns, of a row of weights.
template <class Call>
constexpr int blocks_of(const Call& c) {
    return (c.columns + c.block - 1) / c.block;
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
    room[i] = top;
    sync_block();
    for (int half = thread_count() / 2; half > 0; half /= 2) {
        if (i < half) room[i] = fmaxf(room[i], room[i + half]);
        sync_block();
    }
    top = fmaxf(room[0], 1e-30f);
    for (int k = i; k < c.columns; k += thread_count())
        c.inputs[int64_t{token} * c.columns + k] = half_bits(input_at(c, x, inverse, k) / top);
    if (i == 0) c.tops[token] = top;
}

// Less the middle of the range, 2^(bits - 1); of 8 bits by the hi plane alone in steps of 16.
template <int Bits, bool Hi>
KVQ_DEVICE uint32_t weight_pair(uint32_t word, uint32_t low, int i, int odd) {
    const uint32_t upper = whole_pair<4>(word, i, odd);
    if constexpr (Bits == 4) return fma_halves(upper, kOnes, kMinus8);
    if constexpr (Hi) return fma_halves(upper, kOnes, 0xc788c788u);  // (7.5 - 128) / 16
    const uint32_t whole = fma_halves(upper, kSixteens, whole_pair<4>(low, i, odd));
    return fma_halves(whole, kOnes, kMinus128);
}

// Eight activations from column k on, as the operands of two products.
KVQ_DEVICE void input_operands(const kvq_cuda_linear& c, int token, int k, uint32_t (*b)[2]) {
    for (int i = 0; i < 2; i++) {
        const auto* x = c.inputs + int64_t{token} * c.columns + k + 4 * i;
        for (int odd = 0; odd < 2; odd++) {
            uint32_t pair = 0;
            for (int upper = 0; upper < 2; upper++) {
                const int at = odd + 2 * upper;
                if (token < c.tokens && k + 4 * i + at < c.columns)
                    pair |= uint32_t{x[at]} << 16 * upper;
            }
            b[i][odd] = pair;
        }
    }
}

KVQ_DEVICE bool is_marked(const kvq_cuda_linear& c, int token, int panel) {
    return c.marks[int64_t{token} * panels_of(c) + panel];
}

// A block per panel. Tiles: of eight tokens. Marked: of tokens that have marked the panel alone;
// how far what was there errs is kept.
template <int Bits, bool Hi, int Tiles, bool Marked>
KVQ_KERNEL product(kvq_cuda_linear c) {
    if (Marked) {
        bool any = false;
        for (int token = 0; token < c.tokens; token++) any |= is_marked(c, token, block_index().x);
        if (!any) return;
    }
    KVQ_SHARED float totals[kLinearWarps][Tiles * 8][kPanelRows];
    const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
    const int g = lane / 4, t = lane % 4, blocks = blocks_of(c);
    const int64_t plane = int64_t{blocks} * c.block * kPanelRows / 2;
    const int64_t scale_bytes = (int64_t{blocks} * kPanelRows * 2 + 63) / 64 * 64;
    const uint8_t* panel = c.panels + block_index().x * (plane * (Bits / 4) + scale_bytes);
    const auto* scales = reinterpret_cast<const uint16_t*>(panel + plane);
    float total[Tiles][4] = {};
    for (int block = warp; block < blocks; block += kLinearWarps) {
        float sums[Tiles][4] = {};
        for (int octet = t; octet < c.block / 8; octet += 4) {
            const int column = block * c.block + 8 * octet;
            const int64_t at = int64_t{column} * kPanelRows / 2 + 4 * g;
            uint32_t word[2], low[2] = {};
            for (int half = 0; half < 2; half++) {
                word[half] = *reinterpret_cast<const uint32_t*>(panel + at + 32 * half);
                if (Bits == 8 && !Hi)
                    low[half] = *reinterpret_cast<const uint32_t*>(panel + plane + scale_bytes +
                                                                   at + 32 * half);
            }
            uint32_t weights[2][4];
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++)
                    weights[i][j] = weight_pair<Bits, Hi>(word[j % 2], low[j % 2], i, j / 2);
            for (int tile = 0; tile < Tiles; tile++) {
                uint32_t b[2][2];
                input_operands(c, 8 * tile + g, column, b);
                for (int i = 0; i < 2; i++) mma(sums[tile], weights[i], b[i]);
            }
        }
        for (int i = 0; i < 4; i++) {
            const float scale = half_value(scales[block * kPanelRows + g + i / 2 * 8]);
            for (int tile = 0; tile < Tiles; tile++)
                total[tile][i] +=
                    sums[tile][i] * scale * kScaleUnit * (Hi && Bits == 8 ? 16.0f : 1.0f);
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
        sum *= c.tops[token];
        if (Marked) {
            if (!is_marked(c, token, block_index().x)) continue;
            atomic_max(c.deviations + token, fabsf(sub(sum, c.out[int64_t{token} * c.rows + row])));
        }
        finish_output(c, token, row, sum);
    }
}

// A block per token, threads over its columns. What is no row of the matrix adds nothing.
KVQ_KERNEL embed(kvq_cuda_embed e) {
    const int token = block_index().x, blocks = blocks_of(e);
    const int64_t plane = int64_t{blocks} * e.block * kPanelRows / 2;
    const int64_t scale_bytes = (int64_t{blocks} * kPanelRows * 2 + 63) / 64 * 64;
    for (int i = thread_index(); i < e.columns; i += thread_count()) {
        float sum = 0;
        for (int k = 0; k < e.mixed; k++) {
            const int64_t at = int64_t{token} * e.mixed + k, id = e.ids[at];
            if (id < 0 || id >= e.rows) continue;
            const int lane = static_cast<int>(id % kPanelRows);
            const uint8_t* panel =
                e.panels + id / kPanelRows * (plane * (e.bits / 4) + scale_bytes);
            const auto* scales = reinterpret_cast<const uint16_t*>(panel + plane);
            const int64_t place = int64_t{i} / 8 * 64 + 4 * lane + i % 4;
            const int shift = i & 4;
            int level = (panel[place] >> shift & 15) - 8;
            if (e.bits == 8)
                level = 16 * level + (panel[plane + scale_bytes + place] >> shift & 15);
            const float scale =
                mul(half_value(scales[i / e.block * kPanelRows + lane]), kScaleUnit);
            sum = add(sum, mul(e.weights[at], mul(scale, static_cast<float>(level))));
        }
        e.out[int64_t{token} * e.columns + i] = sum;
    }
}

}  // namespace kvq::cuda
