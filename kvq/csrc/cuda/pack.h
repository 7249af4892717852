// Closing a page on the device: the bytes of kvq/reference.py, to the last one. Every operation is
// rounded once and in the reference's order.
#pragma once
#include "codes.h"
#include "kvq_cuda.h"
#include "queries.h"

namespace kvq::cuda {

KVQ_DEVICE uint16_t half_down(float x) {
    const uint16_t h = half_bits(x);
    if (!(half_value(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
KVQ_DEVICE uint16_t half_up(float x) {  // x >= 0
    const uint16_t h = half_bits(x);
    return static_cast<uint16_t>(half_value(h) < x ? h + 1 : h);
}

// One line of the grid: x [n] in shared memory becomes codes and is replaced by what they mean.
KVQ_DEVICE void encode_line(float* x, int n, bool up, uint8_t* ends, uint8_t* codes, float* line) {
    const int i = thread_index();
    if (i == 0) {
        float least = x[0], most = x[0];
        for (int j = 1; j < n; j++) least = fminf(least, x[j]), most = fmaxf(most, x[j]);
        least = add(least, 0.0f), most = add(most, 0.0f);
        const uint16_t low = half_down(least);
        const uint16_t unit = half_up(divide(sub(most, half_value(low)), 255.0f));
        auto* out = reinterpret_cast<uint16_t*>(ends);
        out[0] = low, out[1] = unit;
        line[0] = half_value(low), line[1] = half_value(unit);
    }
    sync_block();
    if (i < n) {
        const float code = divide(sub(x[i], line[0]), fmaxf(line[1], 1e-30f));
        codes[i] = static_cast<uint8_t>(fminf(up ? ceil(code) : rint(code), 255.0f));
        x[i] = add(line[0], mul(line[1], static_cast<float>(codes[i])));
    }
    sync_block();
}

// One block; a thread per channel, token or group, kMaxHeadDim of them.
KVQ_KERNEL pack(kvq_cuda_page p) {
    KVQ_SHARED float row[kMaxHeadDim], mid[kMaxHeadDim], scale[kMaxHeadDim], line[2];
    const int i = thread_index(), dim = p.head_dim;
    for (int t = 0; t < kPageTokens; t++) {
        if (i < dim) row[i] = half_value(p.x[int64_t{p.rows[t]} * dim + i]);
        sync_block();
        if (p.rotated) hadamard(row, dim);
        if (i < dim) p.scratch[t * dim + i] = row[i];
        sync_block();
    }
    const int groups = p.channels ? dim : kPageTokens, length = p.channels ? kPageTokens : dim;
    const int step = p.channels ? dim : 1;
    float low = 0, high = 0;
    if (i < groups) {
        const float* first = p.scratch + (p.channels ? i : i * dim);
        low = high = first[0];
        for (int j = 1; j < length; j++)
            low = fminf(low, first[j * step]), high = fmaxf(high, first[j * step]);
        mid[i] = mul(add(low, high), 0.5f);
    }
    sync_block();
    encode_line(mid, groups, false, p.grid + 4, p.grid + 8 + groups, line);
    if (i < groups) scale[i] = divide(fmaxf(sub(high, mid[i]), sub(mid[i], low)), kReach);
    sync_block();
    encode_line(scale, groups, true, p.grid, p.grid + 8, line);
    // A byte of the planes is two codes: of a key's or value's row, four columns apart (format.h).
    for (int at = i; at < 32 * dim; at += thread_count()) {
        const int vector = at / 32, inner = at % 32;
        uint8_t nibbles[2] = {};
        for (int upper = 0; upper < 2; upper++) {
            int token, channel;
            if (p.values) {
                channel = vector / 8 * 8 + inner / 4;
                token = vector % 8 * 8 + 4 * upper + inner % 4;
            } else {
                token = vector / (dim / 8) * 8 + inner / 4;
                channel = vector % (dim / 8) * 8 + 4 * upper + inner % 4;
            }
            const int group = p.channels ? channel : token;
            const float away = sub(p.scratch[token * dim + channel], mid[group]);
            const float code = add(divide(away, fmaxf(scale[group], 1e-30f)), 127.5f);
            const int whole = static_cast<int>(rint(fminf(fmaxf(code, 0.0f), 255.0f)));
            nibbles[0] |= static_cast<uint8_t>(whole >> 4 << 4 * upper);
            nibbles[1] |= static_cast<uint8_t>((whole & 15) << 4 * upper);
        }
        p.planes[at] = nibbles[0];
        p.planes[32 * dim + at] = nibbles[1];
    }
}

// One block of kMaxHeadDim threads: word i of the result joins the top bits of two words.
KVQ_KERNEL narrow(uint8_t* plane, int head_dim) {
    auto* words = reinterpret_cast<uint32_t*>(plane);
    const int i = thread_index(), count = 4 * head_dim;
    uint32_t merged[4];
    for (int k = 0; k < 4; k++) {
        const int at = i + k * thread_count();
        if (at >= count) break;
        const uint32_t a = words[at / 8 * 16 + at % 8], b = words[at / 8 * 16 + 8 + at % 8];
        const uint32_t low = 0x03030303u;
        merged[k] =
            (a >> 2 & low) | (a >> 6 & low) << 2 | (b >> 2 & low) << 4 | (b >> 6 & low) << 6;
    }
    sync_block();
    for (int k = 0; k < 4; k++)
        if (i + k * thread_count() < count) words[i + k * thread_count()] = merged[k];
}

// A block per stream and side, a thread per sixteen bytes of a row: rows come in order, so each
// takes what no earlier one has overwritten.
KVQ_KERNEL gather_rows(kvq_cuda_rows r) {
    const int pieces = r.head_dim / 8;
    auto* rows = reinterpret_cast<Quad*>(r.rows + block_index().x * r.stride);
    for (int piece = thread_index(); piece < pieces; piece += thread_count())
        for (int i = 0; i < r.count; i++)
            rows[int64_t{r.first + i} * pieces + piece] =
                rows[int64_t{r.first + r.from[i]} * pieces + piece];
}

}  // namespace kvq::cuda
