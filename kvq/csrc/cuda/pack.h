// Closing a page on the device: the bytes of kvq/reference/stored.py, to the last one. Every operation is
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

// One side of a page on its way to its bytes, in the shared memory of its block. Rows are four
// floats longer than they need, so that the threads of a warp, which read eight of them, meet other
// banks.
struct Packing {
    int dim;
    bool values, channels;
    float *x, *mid, *scale;
    uint8_t* planes;  // hi4, then lo4

    KVQ_DEVICE_MEMBER float* row(int token) const { return x + token * (dim + 4); }
    KVQ_DEVICE_MEMBER int groups() const { return channels ? dim : kPageTokens; }
    // Number j of a group.
    KVQ_DEVICE_MEMBER float at(int group, int j) const {
        return channels ? row(j)[group] : row(group)[j];
    }
};
constexpr size_t packing_bytes(int dim) {
    return size_t{kPageTokens} * (dim + 4) * sizeof(float) + size_t{kPageTokens} * dim;
}

KVQ_DEVICE void read_rows(const Packing& p, const uint16_t* x, const int32_t* rows, bool rotated) {
    for (int i = thread_index(); i < kPageTokens * p.dim; i += thread_count())
        p.row(i / p.dim)[i % p.dim] = half_value(x[int64_t{rows[i / p.dim]} * p.dim + i % p.dim]);
    sync_block();
    for (int t = 0; rotated && t < kPageTokens; t++) hadamard(p.row(t), p.dim);
}

KVQ_DEVICE void encode_grid(const Packing& p, uint8_t* grid) {
    KVQ_SHARED float line[2];
    const int i = thread_index(), groups = p.groups();
    float low = 0, high = 0;
    if (i < groups) {
        low = high = p.at(i, 0);
        for (int j = 1; j < (p.channels ? kPageTokens : p.dim); j++)
            low = fminf(low, p.at(i, j)), high = fmaxf(high, p.at(i, j));
        p.mid[i] = mul(add(low, high), 0.5f);
    }
    sync_block();
    encode_line(p.mid, groups, false, grid + 4, grid + 8 + groups, line);
    if (i < groups) p.scale[i] = divide(fmaxf(sub(high, p.mid[i]), sub(p.mid[i], low)), kReach);
    sync_block();
    encode_line(p.scale, groups, true, grid, grid + 8, line);
}

KVQ_DEVICE int code_of(const Packing& p, int token, int channel) {
    const int group = p.channels ? channel : token;
    const float away = sub(p.row(token)[channel], p.mid[group]);
    const float code = add(divide(away, fmaxf(p.scale[group], 1e-30f)), 127.5f);
    return static_cast<int>(rint(fminf(fmaxf(code, 0.0f), 255.0f)));
}

// As kvq.reference.stored.carried, for keys that will be read at `bits`. A code is the same when it is
// asked for again: what is taken off a channel comes of those before it.
KVQ_DEVICE void carry(const Packing& p, int bits, const float* feedback) {
    KVQ_SHARED float error[kPageTokens];
    const int step = 1 << (8 - bits);
    const float middle = from_middle(bits);
    for (int c = 0; c + 1 < p.dim; c++, feedback += p.dim) {
        for (int t = thread_index(); t < kPageTokens; t += thread_count()) {
            const float seen = add(static_cast<float>(code_of(p, t, c) & -step), middle);
            error[t] = sub(p.row(t)[c], add(p.mid[c], mul(p.scale[c], seen)));
        }
        sync_block();
        const int behind = p.dim - c - 1;
        for (int i = thread_index(); i < kPageTokens * behind; i += thread_count()) {
            float& x = p.row(i / behind)[c + 1 + i % behind];
            x = sub(x, mul(error[i / behind], feedback[c + 1 + i % behind]));
        }
        sync_block();
    }
}

// A byte of the planes is two codes: of a key's or value's row, four columns apart (format.h).
KVQ_DEVICE void encode_planes(const Packing& p) {
    for (int at = thread_index(); at < 32 * p.dim; at += thread_count()) {
        const int vector = at / 32, inner = at % 32;
        uint8_t nibbles[2] = {};
        for (int upper = 0; upper < 2; upper++) {
            int token, channel;
            if (p.values) {
                channel = vector / 8 * 8 + inner / 4;
                token = vector % 8 * 8 + 4 * upper + inner % 4;
            } else {
                token = vector / (p.dim / 8) * 8 + inner / 4;
                channel = vector % (p.dim / 8) * 8 + 4 * upper + inner % 4;
            }
            const int code = code_of(p, token, channel);
            nibbles[0] |= static_cast<uint8_t>(code >> 4 << 4 * upper);
            nibbles[1] |= static_cast<uint8_t>((code & 15) << 4 * upper);
        }
        p.planes[at] = nibbles[0];
        p.planes[32 * p.dim + at] = nibbles[1];
    }
    sync_block();
}

// Word `at` of the 2-bit plane that a nibble plane's top bits are, from two of its words.
KVQ_DEVICE uint32_t top_bits(const uint32_t* plane, int at) {
    const uint32_t a = plane[at / 8 * 16 + at % 8], b = plane[at / 8 * 16 + 8 + at % 8];
    const uint32_t low = 0x03030303u;
    return (a >> 2 & low) | (a >> 6 & low) << 2 | (b >> 2 & low) << 4 | (b >> 6 & low) << 6;
}

// What a side of `bits` bits keeps of both planes.
KVQ_DEVICE void store_planes(const Packing& p, int bits, uint8_t* const* granule) {
    const int words = 4 * p.dim;
    for (int g = 0; g < granules(bits); g++) {
        const auto* from = reinterpret_cast<const uint32_t*>(p.planes) + g * words;
        auto* to = reinterpret_cast<uint32_t*>(granule[g]);
        const bool half = halves_plane(bits) && g == static_cast<int>(halved(bits));
        for (int at = thread_index(); at < words; at += thread_count())
            to[at] = half ? top_bits(from, at) : from[at];
    }
}

// A block per page, KV head and side; a thread per channel, token or group, kMostChannels of them.
KVQ_KERNEL close_pages(kvq_cuda_closing c) {
    KVQ_DYNAMIC_SHARED(room);
    KVQ_SHARED float mid[kMostChannels], scale[kMostChannels];
    const int page = block_index().x, head = block_index().y, form = c.forms[head];
    const bool values = block_index().z == 1;
    auto* x = reinterpret_cast<float*>(room);
    const Packing p{c.head_dim, values, !values || (form & kChannelValues), x, mid, scale,
                    room + kPageTokens * (c.head_dim + 4) * sizeof(float)};
    const uint16_t* rows = c.x + (int64_t{head} * 2 + values) * c.stride * c.head_dim;
    read_rows(p, rows, c.rows + page * kPageTokens, !values && (form & kRotatedKeys));
    const kvq_cuda_page& to = c.pages[head * c.count + page];
    uint8_t* grid = to.constants + (values ? grid_bytes(c.head_dim) : 0);
    encode_grid(p, grid);
    if (!values && c.feedback)
        carry(p, to.k_bits, c.feedback + int64_t{head} * c.head_dim * c.head_dim);
    encode_planes(p);
    store_planes(p, values ? to.v_bits : to.k_bits, to.granules + values * kGranulesPerSide);
    // Not every form fills the room for its grids.
    uint8_t *rest = grid + grid_bytes(p.groups()), *end = to.constants + c.constant_bytes;
    for (int i = thread_index(); values && rest + i < end; i += thread_count()) rest[i] = 0;
}

// The code of token t, channel c of keys of `bits` bits; of bits that are gone 0.
KVQ_DEVICE int read_key(uint8_t* const* granule, int dim, int bits, int t, int c) {
    const KeyPlace at = key_place(dim, t, c);
    const int size = 16 * dim, which = at.nibble / size, byte = at.nibble % size;
    if (bits == 2) return (granule[0][at.pair] >> at.pair_shift & 3) << 6;
    const int upper = (granule[which][byte] >> at.nibble_shift & 15) << 4;
    if (bits == 8) return upper | (granule[2 + which][byte] >> at.nibble_shift & 15);
    return bits == 6 ? upper | (granule[2][at.pair] >> at.pair_shift & 3) << 2 : upper;
}

// A block of kMostChannels threads per page. All is read before it is written.
KVQ_KERNEL narrow_keys(const kvq_cuda_keys* all, int head_dim) {
    KVQ_DYNAMIC_SHARED(room);
    KVQ_SHARED float mid[kMostChannels], scale[kMostChannels];
    const kvq_cuda_keys& keys = all[block_index().x];
    const Packing p{head_dim, false, true, reinterpret_cast<float*>(room), mid, scale,
                    room + kPageTokens * (head_dim + 4) * sizeof(float)};
    const Line scales = scales_of(keys.grid), mids = mids_of(keys.grid, head_dim);
    for (int c = thread_index(); c < head_dim; c += thread_count()) {
        scale[c] = add(scales.low, mul(scales.unit, static_cast<float>(scales.codes[c])));
        mid[c] = add(mids.low, mul(mids.unit, static_cast<float>(mids.codes[c])));
    }
    sync_block();
    const float middle = from_middle(keys.from);
    for (int i = thread_index(); i < kPageTokens * head_dim; i += thread_count()) {
        const int t = i / head_dim, c = i % head_dim;
        const auto code = static_cast<float>(read_key(keys.granules, head_dim, keys.from, t, c));
        p.row(t)[c] = add(mid[c], mul(scale[c], add(code, middle)));
    }
    sync_block();
    carry(p, keys.to, keys.feedback);
    encode_planes(p);
    store_planes(p, keys.to, keys.granules);
}

// A block of kMostChannels threads per plane; the first granule is read before it is written.
KVQ_KERNEL narrow(const kvq_cuda_plane* planes, int head_dim) {
    const kvq_cuda_plane& plane = planes[block_index().x];
    auto* first = reinterpret_cast<uint32_t*>(plane.first);
    const auto* second = reinterpret_cast<const uint32_t*>(plane.second);
    const int half = 2 * head_dim, i = thread_index();  // words that come of one granule
    uint32_t merged[4];
    for (int k = 0, at = i; k < 4 && at < 2 * half; k++, at += thread_count())
        merged[k] = at < half ? top_bits(first, at) : top_bits(second, at - half);
    sync_block();
    for (int k = 0, at = i; k < 4 && at < 2 * half; k++, at += thread_count())
        first[at] = merged[k];
}

constexpr int kGatherThreads = 256, kGatherPieces = 4;

// A block per stream and side. Each of its threads reads some pieces of sixteen bytes, all of them
// before any is written: in place, no later piece comes from where they go.
KVQ_KERNEL gather_rows(kvq_cuda_rows r) {
    const int pieces = r.head_dim / 8, step = thread_count();
    auto* rows = reinterpret_cast<Quad*>(r.rows + block_index().x * r.stride) + r.first * pieces;
    const auto* source =
        reinterpret_cast<const Quad*>(r.source + block_index().x * r.source_stride) +
        r.first * pieces;
    const int count = r.count * pieces, batch = kGatherPieces * step;
    for (int first = thread_index(); first < count + thread_index(); first += batch) {
        Quad held[kGatherPieces];
        KVQ_UNROLL for (int k = 0; k < kGatherPieces; k++) {
            const int at = first + k * step;
            if (at < count) held[k] = source[int64_t{r.from[at / pieces]} * pieces + at % pieces];
        }
        sync_block();
        KVQ_UNROLL for (int k = 0; k < kGatherPieces; k++)
            if (first + k * step < count) rows[first + k * step] = held[k];
    }
}

}  // namespace kvq::cuda
