// Attention of many tokens over quantised pages and floating-point rows: prompts and large drafts.
//
// A block is (part of the pages, 64 query rows, KV head). Each page is written out once, as halves
// in shared memory, for all of its rows; then every warp computes logits [16 rows, tokens] =
// queries . keys and values [16 rows, channels] += weights . values. While it does, the next page's
// bytes are on their way.
//
// Columns of a product may come in any order that both operands share. Here it is the one in which
// codes leave a word: of four neighbours the first and third, then the second and fourth, so that
// lane 4g + t meets neighbours 4t to 4t + 3 of sixteen.
#pragma once
#include "attend.h"

namespace kvq::cuda {

constexpr int kTileRows = 64, kTileThreads = kTileRows / 16 * kWarp;

// What a block keeps in shared memory. Rows are 32 bytes apart from a multiple of 128: lanes that
// read 8 bytes of four rows each meet every bank once.
template <int Dim>
struct TileRoom {
    static constexpr int kTokens = Dim > 128 ? 32 : kPageTokens;  // of a page at once
    static constexpr int kStages = Dim > 128 ? 1 : 2;             // pages' bytes
    static constexpr int kKeyStride = Dim + (Dim % 32 ? 0 : 16), kValueStride = kTokens + 16;

    alignas(16) uint16_t keys[kTokens * kKeyStride];  // [token, in key_row's order][channel]
    alignas(16) uint16_t values[Dim * kValueStride];  // [channel][token]
    SideRoom<Dim> stages[kStages][2];                 // keys, values
};

struct Tile {
    int kv_head, first_row, rows;  // of the KV head's rows, all of them
    int first_token, last_token;
};

// Sixteen or eight of a line's numbers from `first` on, in the order of codes.
template <int Bits>
KVQ_DEVICE void line_pairs(const Line& line, int first, float factor, uint32_t* pairs) {
    KVQ_UNROLL for (int i = 0; i < 2 * kProducts<Bits>; i++) {
        const int at = first + i / 2 * 4 + i % 2;
        pairs[i] = halves(line.at(at) * factor, line.at(at + 2) * factor);
    }
}

// A word's codes as numbers, to `out` in shared memory.
template <int Bits>
KVQ_DEVICE void write_out(uint32_t word, uint32_t low, const uint32_t* steps, const uint32_t* mids,
                          uint16_t* out) {
    KVQ_UNROLL for (int i = 0; i < kProducts<Bits>; i += 2) {
        Quad quad;
        KVQ_UNROLL for (int j = 0; j < 4; j++) quad.words[j] = fma_halves(
            centred_pair<Bits>(word, low, i + j / 2, j % 2), steps[2 * i + j], mids[2 * i + j]);
        reinterpret_cast<Quad*>(out)[i / 2] = quad;
    }
}

// Where a token's key stands: so that a lane's logits of two products are those of four
// neighbouring tokens.
KVQ_DEVICE int key_row(int token) {
    return token / 16 * 16 + token % 2 * 8 + token % 16 / 4 * 2 + token % 4 / 2;
}

// Threads in eights take vectors of a page side in turn; a thread's vectors share their channels
// (keys) or tokens (values), so that it reads the grid once.
template <int Dim, int Bits>
KVQ_DEVICE void write_keys(const SideRoom<Dim>& side, int part, uint16_t* keys) {
    using Room = TileRoom<Dim>;
    constexpr int kVectors = Dim / kCodes<Bits>, kGroupBytes = Dim * (Bits == 2 ? 2 : 4);
    constexpr int kColumns = kVectors < 16 ? kVectors : 16, kSets = 16 / kColumns;
    const int token = thread_index() % 8, eight = thread_index() / 8;
    const Line scales = scales_of(side.grid), mids = mids_of(side.grid, Dim);
    for (int vector = eight % kColumns; vector < kVectors && eight < kColumns * kSets;
         vector += kColumns) {
        uint32_t step[2 * kProducts<Bits>], mid[2 * kProducts<Bits>];
        line_pairs<Bits>(scales, vector * kCodes<Bits>, 1 << (8 - Bits), step);
        line_pairs<Bits>(mids, vector * kCodes<Bits>, 1, mid);
        for (int group = eight / kColumns; group < Room::kTokens / 8; group += kSets) {
            const int in_page = group + part * (Room::kTokens / 8);
            const uint32_t word = side.word(0, in_page * kGroupBytes + 32 * vector + 4 * token);
            const uint32_t low = side.template low_word<Bits>(in_page, kGroupBytes, vector, token);
            write_out<Bits>(
                word, low, step, mid,
                keys + key_row(8 * group + token) * Room::kKeyStride + vector * kCodes<Bits>);
        }
    }
}

template <int Dim, int Bits>
KVQ_DEVICE void write_values(const SideRoom<Dim>& side, bool channels, int part, uint16_t* values) {
    using Room = TileRoom<Dim>;
    constexpr int kVectors = Room::kTokens / kCodes<Bits>, kSets = 16 / kVectors;
    constexpr int kGroupBytes = kPageTokens * (Bits == 2 ? 2 : 4);
    const int row = thread_index() % 8, eight = thread_index() / 8, vector = eight % kVectors;
    const int groups = channels ? Dim : kPageTokens, in_page = vector + part * kVectors;
    const Line scales = scales_of(side.grid), mids = mids_of(side.grid, groups);
    uint32_t step[2 * kProducts<Bits>], mid[2 * kProducts<Bits>];
    if (!channels) {
        line_pairs<Bits>(scales, in_page * kCodes<Bits>, 1 << (8 - Bits), step);
        line_pairs<Bits>(mids, in_page * kCodes<Bits>, 1, mid);
    }
    for (int group = eight / kVectors; group < Dim / 8; group += kSets) {
        const int channel = 8 * group + row;
        if (channels) {
            const float scale = scales.at(channel) * (1 << (8 - Bits)), middle = mids.at(channel);
            KVQ_UNROLL for (int i = 0; i < 2 * kProducts<Bits>; i++) step[i] = halves(scale, scale),
                                                                     mid[i] =
                                                                         halves(middle, middle);
        }
        const uint32_t word = side.word(0, group * kGroupBytes + 32 * in_page + 4 * row);
        const uint32_t low = side.template low_word<Bits>(group, kGroupBytes, in_page, row);
        write_out<Bits>(word, low, step, mid,
                        values + channel * Room::kValueStride + vector * kCodes<Bits>);
    }
}

template <int Dim>
KVQ_DEVICE void write_page(const kvq_cuda_sequence& s, int kv_head, const Entry& e,
                           const SideRoom<Dim>* stage, int part, TileRoom<Dim>& room) {
    const bool channels = s.forms[kv_head] & kChannelValues;
    with_bits(side_bits(s, e, false), [&](auto bits) {
        write_keys<Dim, decltype(bits)::kBits>(stage[0], part, room.keys);
    });
    with_bits(side_bits(s, e, true), [&](auto bits) {
        write_values<Dim, decltype(bits)::kBits>(stage[1], channels, part, room.values);
    });
}

// Rows of the tail from `first` on, `count` of them there; zeros where there are none, for a weight
// of zero would not hide what is no number.
template <int Dim>
KVQ_DEVICE void write_rows(const uint16_t* keys, const uint16_t* values, int count,
                           TileRoom<Dim>& room) {
    using Room = TileRoom<Dim>;
    for (int i = thread_index(); i < Room::kTokens * Dim / 8; i += kTileThreads) {
        const int token = i / (Dim / 8), octet = i % (Dim / 8);
        Quad in{}, out;
        if (token < count) in = reinterpret_cast<const Quad*>(keys + int64_t{token} * Dim)[octet];
        for (int j = 0; j < 4; j++) {
            const uint32_t a = in.words[j / 2 * 2], b = in.words[j / 2 * 2 + 1];
            out.words[j] = j % 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
        }
        reinterpret_cast<Quad*>(room.keys + key_row(token) * Room::kKeyStride)[octet] = out;
    }
    for (int i = thread_index(); i < Room::kTokens / 4 * Dim / 2; i += kTileThreads) {
        const int pair = i % 8 + i / (8 * (Room::kTokens / 4)) * 8;  // of channels
        const int token = i / 8 % (Room::kTokens / 4) * 4;
        uint32_t in[4];
        for (int j = 0; j < 4; j++) {
            const auto* row = reinterpret_cast<const uint32_t*>(values + int64_t{token + j} * Dim);
            in[j] = token + j < count ? row[pair] : 0;
        }
        auto* even =
            reinterpret_cast<uint32_t*>(room.values + 2 * pair * Room::kValueStride + token);
        uint32_t* odd = even + Room::kValueStride / 2;
        for (int j = 0; j < 2; j++) {
            even[j] = (in[j] & 0xffffu) | in[j + 2] << 16;
            odd[j] = in[j] >> 16 | (in[j + 2] & 0xffff0000u);
        }
    }
}

// What a lane knows of query rows g and g + 8 of its warp's sixteen.
template <int Dim>
struct TwoRows {
    int row[2];  // of the KV head's, -1 for padding
    int token[2];
    float maximum[2] = {kNothing, kNothing}, sum[2] = {};
    float out[Dim / 8][4] = {};  // channels 8n + 2t and the next, of both
    uint32_t query[Dim / 16][4];
    int turn = -1;  // whose queries they are
};

template <int Dim>
KVQ_DEVICE void load_queries(const kvq_cuda_attention& a, const kvq_cuda_sequence& s,
                             const Tile& tile, int turn, TwoRows<Dim>& state) {
    if (state.turn == turn) return;
    state.turn = turn;
    const int t = thread_index() % 4;
    const int64_t first = int64_t{turn} * a.heads * s.tokens + int64_t{tile.kv_head} * tile.rows;
    KVQ_UNROLL for (int k = 0; k < Dim / 16; k++) KVQ_UNROLL for (int r = 0; r < 2; r++) {
        float x[4] = {};
        const float* row = s.queries + (first + state.row[r]) * Dim + 16 * k + 4 * t;
        if (state.row[r] >= 0)
            for (int i = 0; i < 4; i++) x[i] = row[i];
        state.query[k][r] = halves(x[0], x[2]);
        state.query[k][2 + r] = halves(x[1], x[3]);
    }
}

// Goes on with the softmax of two rows: logits [8-token products][row, row, row + 8, row + 8]
// become weights, and what was summed before shrinks.
template <int Dim>
KVQ_DEVICE void weigh_tile(const uint64_t* seen, float softcap, float (*logits)[4],
                           TwoRows<Dim>& state) {
    constexpr int kProducts8 = TileRoom<Dim>::kTokens / 8;
    const int t = thread_index() % 4;
    KVQ_UNROLL for (int r = 0; r < 2; r++) {
        float most = kNothing;
        KVQ_UNROLL for (int n = 0; n < kProducts8; n++) KVQ_UNROLL for (int i = 0; i < 2; i++) {
            float& x = logits[n][2 * r + i];
            if (softcap > 0) x = softcap * kLog2E * tanh(x / (softcap * kLog2E));
            const int token = n / 2 * 16 + 4 * t + n % 2 + 2 * i;
            x = seen[r] >> token & 1 ? x : kNothing;
            most = fmaxf(most, x);
        }
        const float maximum = fmaxf(state.maximum[r], over_lanes(most, 4, true));
        const float shrunk = exp2_fast(state.maximum[r] - maximum);
        float sum = 0;
        KVQ_UNROLL for (int n = 0; n < kProducts8; n++) KVQ_UNROLL for (int i = 0; i < 2; i++) {
            float& x = logits[n][2 * r + i];
            x = x > kNothing ? exp2_fast(x - maximum) : 0.0f;
            sum += x;
        }
        state.sum[r] = state.sum[r] * shrunk + over_lanes(sum, 4, false);
        state.maximum[r] = maximum;
        KVQ_UNROLL for (int n = 0; n < Dim / 8; n++) KVQ_UNROLL for (int i = 0; i < 2; i++)
            state.out[n][2 * r + i] *= shrunk;
    }
}

template <int Dim>
KVQ_DEVICE void attend_room(const TileRoom<Dim>& room, const uint64_t* seen, float softcap,
                            TwoRows<Dim>& state) {
    using Room = TileRoom<Dim>;
    const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
    float weights[Room::kTokens / 8][4] = {};
    KVQ_UNROLL for (int k = 0; k < Dim / 16; k++)
        KVQ_UNROLL for (int n = 0; n < Room::kTokens / 8; n++)
            mma(weights[n], state.query[k],
                reinterpret_cast<const uint32_t*>(room.keys + (8 * n + g) * Room::kKeyStride +
                                                  16 * k + 4 * t));
    weigh_tile<Dim>(seen, softcap, weights, state);
    KVQ_UNROLL for (int k = 0; k < Room::kTokens / 16; k++) {
        const float *first = weights[2 * k], *second = weights[2 * k + 1];
        const uint32_t own[4] = {halves(first[0], first[1]), halves(first[2], first[3]),
                                 halves(second[0], second[1]), halves(second[2], second[3])};
        KVQ_UNROLL for (int n = 0; n < Dim / 8; n++)
            mma(state.out[n], own,
                reinterpret_cast<const uint32_t*>(room.values + (8 * n + g) * Room::kValueStride +
                                                  16 * k + 4 * t));
    }
}

// One item, of a page the bytes in `stage`: written out and attended to, part by part.
template <int Dim>
KVQ_DEVICE void attend_item(const kvq_cuda_attention& a, const kvq_cuda_sequence& s,
                            const Tile& tile, int index, const SideRoom<Dim>* stage,
                            TileRoom<Dim>& room, TwoRows<Dim>& state) {
    constexpr int kTokens = TileRoom<Dim>::kTokens;
    const int visit = index - s.view_count;
    load_queries(a, s, tile, 1 + (visit < 0 ? s.turn_of_view[index] : s.tile_turns[visit]), state);
    uint64_t seen[2];
    for (int r = 0; r < 2; r++)
        seen[r] = state.row[r] >= 0 ? seen_by(a, s, tile.kv_head, index, state.token[r]) : 0;
    for (int part = 0; part < kPageTokens / kTokens; part++) {
        if (visit < 0) {
            write_page<Dim>(s, tile.kv_head, entry_of(s, tile.kv_head, index), stage, part, room);
        } else {
            const int from = kPageTokens * s.tile_rows[visit] + part * kTokens;
            const int64_t at = (int64_t{tile.kv_head} * s.tail_stride + from) * Dim;
            write_rows<Dim>(s.tail_keys + at, s.tail_values + at, s.tail_rows - from, room);
        }
        sync_block();
        attend_room<Dim>(room, seen, a.softcap, state);
        sync_block();
        for (uint64_t& mask : seen) mask = kTokens < 64 ? mask >> kTokens % 64 : mask;
    }
}

template <int Dim>
KVQ_DEVICE void store_rows(const kvq_cuda_attention& a, const kvq_cuda_sequence& s,
                           const Tile& tile, int split, const TwoRows<Dim>& state) {
    const int t = thread_index() % 4, group = a.heads / a.kv_heads;
    for (int r = 0; r < 2; r++) {
        if (state.row[r] < 0) continue;
        const int64_t row = int64_t{tile.kv_head} * tile.rows + state.row[r];
        float* part = s.partials + (row * a.splits + split) * (Dim + 2);
        const int head = tile.kv_head * group + state.row[r] % group;
        float* out =
            a.splits > 1 ? part + 2 : s.out + (int64_t{state.token[r]} * a.heads + head) * Dim;
        const float seen[2] = {state.maximum[r], state.sum[r]};
        const Softmax softmax(seen, 1, 2, sink_of(s, head));
        const float inverse = softmax.share(seen[0]) * softmax.inverse;
        KVQ_UNROLL for (int n = 0; n < Dim / 8; n++) KVQ_UNROLL for (int i = 0; i < 2; i++)
            out[8 * n + 2 * t + i] = state.out[n][2 * r + i] * (a.splits > 1 ? 1.0f : inverse);
        if (a.splits > 1 && t == 0) part[0] = state.maximum[r], part[1] = state.sum[r];
    }
}

// Grid: splits, blocks of 64 rows, KV heads.
template <int Dim>
KVQ_KERNEL attend_tiles(kvq_cuda_attention a, kvq_cuda_sequence s) {
    using Room = TileRoom<Dim>;
    KVQ_DYNAMIC_SHARED(bytes);
    Room& room = *reinterpret_cast<Room*>(bytes);
    const int group = a.heads / a.kv_heads, split = block_index().x;
    Tile tile{block_index().z, block_index().y * kTileRows, s.tokens * group, 0, 0};
    tile.first_token = tile.first_row / group;
    tile.last_token = (min(tile.first_row + kTileRows, tile.rows) - 1) / group;
    TwoRows<Dim> state;
    for (int r = 0; r < 2; r++) {
        const int row =
            tile.first_row + thread_index() / kWarp * 16 + thread_index() % kWarp / 4 + 8 * r;
        state.row[r] = row < tile.rows ? row : -1;
        state.token[r] = row < tile.rows ? row / group : 0;
    }
    const int64_t all = s.view_count + s.tiles;
    const int end = static_cast<int>(all * (split + 1) / a.splits);
    const auto stage = [&](int index, int place) {
        for (int side = 0; side < 2 && index < s.view_count; side++)
            stage_side(s, entry_of(s, tile.kv_head, index), tile.kv_head, side, thread_index(),
                       kTileThreads, room.stages[place][side]);
        commit_copies();
    };
    const auto next = [&](int index) {
        return next_seen(a, s, tile.kv_head, tile.first_token, tile.last_token, index, 1, end);
    };
    int index = next(static_cast<int>(all * split / a.splits));
    if (Room::kStages == 2 && index < end) stage(index, 0);
    for (int place = 0; index < end; place ^= Room::kStages - 1) {
        const int ahead = next(index + 1);
        if (Room::kStages == 1) stage(index, 0);
        else if (ahead < end) stage(ahead, 1 - place);
        else commit_copies();
        wait_copies<Room::kStages - 1>();
        sync_block();
        attend_item<Dim>(a, s, tile, index, room.stages[place], room, state);
        index = ahead;
    }
    store_rows<Dim>(a, s, tile, split, state);
}

}  // namespace kvq::cuda
