// Attention of a few tokens over quantised pages and a floating-point tail, on tensor cores.
//
// A block is (part of the pages, 8 query rows, KV head); its warps take pages in turn. Of a page a
// warp computes logits [64 tokens, 8 rows] = codes . (queries * scales), each query row's running
// softmax, and values [channels, 8 rows] += codes . (weights * scales): both are products of codes
// as they lie in memory (codes.h). Lane 4g + t owns query row g, sixteen of its tokens each. While
// a warp computes with a page's keys its values are on their way to shared memory, and then the
// next page's keys.
#pragma once
#include "codes.h"
#include "kvq_cuda.h"
#include "queries.h"
#include "side.h"

namespace kvq::cuda {

constexpr int kRows = 8;
// Of wide heads two warps fill the shared memory that a block of any GPU may have.
template <int Dim>
constexpr int kWarps = Dim > 128 ? 2 : 4;
template <int Dim>
constexpr int kThreads = kWarps<Dim>* kWarp;
constexpr float kNothing = -1e30f;  // running maximum before the first visible key

// What a lane knows of its query row, and of the part of the output it holds: channels 16m + g and
// 16m + g + 8 of query rows 2t and 2t + 1.
template <int Dim>
struct Running {
    float maximum = kNothing, sum = 0;
    float out[Dim / 16][4] = {};
};

struct Lane {
    int g, t;            // of lane 4g + t
    bool is_row;         // row g is a query row, not padding
    const float* query;  // as floats are met, [head_dim]
    int64_t turn_stride;
};

// Which slots of a view's page a token sees, as visibility.h has it.
KVQ_DEVICE uint64_t sees(int64_t position, const View& view, int window) {
    const int64_t start = int64_t{view.pos0} + view.delta;
    const uint64_t outside = window > 0 ? low_bits(position - window + 1 - start) : 0;
    return view.mask & low_bits(position - start + 1) & ~outside;
}
// Token i of the sixteen a lane owns, by the width at which the page's values lie.
KVQ_DEVICE int own_token(const Lane& lane, int v_bits, int i) {
    return v_bits == 2 ? 16 * lane.t + i : i / 8 * 32 + 8 * lane.t + i % 8;
}

// Codes . numbers for 16 tokens at a time: logits [row][token] of one page in shared memory.
template <int Dim, int Bits>
KVQ_DEVICE void key_logits(const Lane& lane, const float* query, const SideRoom<Dim>& side,
                           float (*logits)[kPageTokens]) {
    constexpr int kPer = kCodes<Bits>, kTurns = (Dim + 4 * kPer - 1) / (4 * kPer);
    const Line scales = scales_of(side.grid), mids = mids_of(side.grid, Dim);
    const float top = fmaxf(scales.top(), 1e-30f);
    uint32_t numbers[kTurns][kProducts<Bits>][2], ones[4];
    ones_operand(ones);
    float base = 0, beyond[4] = {};
    KVQ_UNROLL for (int turn = 0; turn < kTurns; turn++)
        KVQ_UNROLL for (int i = 0; i < kProducts<Bits>; i++) {
        float x[4];
        KVQ_UNROLL for (int j = 0; j < 4; j++) {
            const int channel = (4 * turn + lane.t) * kPer + 4 * i + j;
            const float q = channel < Dim && lane.is_row ? query[channel] : 0.0f;
            x[j] = channel < Dim ? q * (scales.at(channel) / top) : 0.0f;
            base += channel < Dim ? q * mids.at(channel) : 0.0f;
        }
        number_operand(x, numbers[turn][i]);
        mma(beyond, ones, numbers[turn][i]);
    }
    base = over_lanes(base, 4, false);
    const float unit = top * static_cast<float>(1 << (8 - Bits));
    constexpr int kStored = Bits == 2 ? 2 : 4;  // bits of the first plane
    constexpr int kGroupBytes = Dim * kStored;  // of eight tokens
    for (int tile = 0; tile < kPageTokens / 16; tile++) {
        float sums[4] = {};
        KVQ_UNROLL for (int turn = 0; turn < kTurns; turn++) {
            uint32_t word[2] = {}, low[2] = {};
            const int vector = 4 * turn + lane.t;
            KVQ_UNROLL for (int half = 0; half < 2; half++) {
                if (vector * kPer >= Dim) continue;
                word[half] =
                    side.word(0, (2 * tile + half) * kGroupBytes + 32 * vector + 4 * lane.g);
                low[half] =
                    side.template low_word<Bits>(2 * tile + half, kGroupBytes, vector, lane.g);
            }
            KVQ_UNROLL for (int i = 0; i < kProducts<Bits>; i++) {
                uint32_t codes[4];
                code_operand<Bits>(word, low, i, codes);
                mma(sums, codes, numbers[turn][i]);
            }
        }
        KVQ_UNROLL for (int i = 0; i < 4; i++)
            logits[2 * lane.t + i % 2][16 * tile + lane.g + i / 2 * 8] =
                (sums[i] - kBeyond<Bits> * beyond[i]) * unit;
    }
    sync_warp();
    for (int i = 0; i < 16; i++) logits[lane.g][16 * lane.t + i] += base;
    sync_warp();
}

// The row's softmax goes on over its logits; weights of the lane's own tokens. How far what was
// summed before has shrunk.
template <int Dim>
KVQ_DEVICE float weigh(const Lane& lane, const float* logits, uint64_t seen, int v_bits,
                       float softcap, Running<Dim>& state, float* weights) {
    float most = kNothing;
    KVQ_UNROLL for (int i = 0; i < 16; i++) {
        const int token = own_token(lane, v_bits, i);
        float x = logits[token];
        if (softcap > 0) x = softcap * kLog2E * tanh(x / (softcap * kLog2E));
        weights[i] = seen >> token & 1 ? x : kNothing;
        most = fmaxf(most, weights[i]);
    }
    const float maximum = fmaxf(state.maximum, over_lanes(most, 4, true));
    const float shrunk = exp2_fast(state.maximum - maximum);
    float sum = 0;
    KVQ_UNROLL for (int i = 0; i < 16; i++) {
        weights[i] = weights[i] > kNothing ? exp2_fast(weights[i] - maximum) : 0.0f;
        sum += weights[i];
    }
    state.sum = state.sum * shrunk + over_lanes(sum, 4, false);
    state.maximum = maximum;
    return shrunk;
}

// Adds the page's values: out = out * shrunk + codes . (weights * scales) + weights . mids.
template <int Dim, int Bits>
KVQ_DEVICE void add_values(const Lane& lane, const float* weights, float shrunk,
                           const SideRoom<Dim>& side, bool channels, Running<Dim>& state) {
    const int groups = channels ? Dim : kPageTokens;
    const Line scales = scales_of(side.grid), mids = mids_of(side.grid, groups);
    const float top = channels ? 1.0f : fmaxf(scales.top(), 1e-30f);
    uint32_t numbers[4][2], ones[4];
    ones_operand(ones);
    float constant = 0, beyond[4] = {};
    KVQ_UNROLL for (int i = 0; i < 4; i++) {
        float x[4];
        KVQ_UNROLL for (int j = 0; j < 4; j++) {
            const int token = own_token(lane, Bits, 4 * i + j);
            const float weight = weights[4 * i + j];
            x[j] = channels ? weight : weight * (scales.at(token) / top);
            constant += channels ? weight : weight * mids.at(token);
        }
        number_operand(x, numbers[i]);
        mma(beyond, ones, numbers[i]);
    }
    constant = over_lanes(constant, 4, false);
    const float unit = top * static_cast<float>(1 << (8 - Bits));
    float shrink[2], added[2];
    KVQ_UNROLL for (int i = 0; i < 2; i++) {
        const int source = 4 * (2 * lane.t + i);
        shrink[i] = shuffle_from(shrunk, source);
        added[i] = shuffle_from(constant, source);
    }
    constexpr int kWords = 4 / kProducts<Bits>;            // of a channel, in this lane
    constexpr int kGroupBytes = 64 * (Bits == 2 ? 2 : 4);  // of eight channels
    KVQ_UNROLL for (int tile = 0; tile < Dim / 16; tile++) {
        float sums[4] = {};
        KVQ_UNROLL for (int w = 0; w < kWords; w++) {
            uint32_t word[2], low[2];
            KVQ_UNROLL for (int half = 0; half < 2; half++) {
                const int group = 2 * tile + half, vector = 4 * w + lane.t;
                word[half] = side.word(0, group * kGroupBytes + 32 * vector + 4 * lane.g);
                low[half] = side.template low_word<Bits>(group, kGroupBytes, vector, lane.g);
            }
            KVQ_UNROLL for (int i = 0; i < kProducts<Bits>; i++) {
                uint32_t codes[4];
                code_operand<Bits>(word, low, i, codes);
                mma(sums, codes, numbers[w * kProducts<Bits> + i]);
            }
        }
        KVQ_UNROLL for (int i = 0; i < 4; i++) {
            const int channel = 16 * tile + lane.g + i / 2 * 8;
            const float scale = channels ? scales.at(channel) * unit : unit;
            const float more = channels ? added[i % 2] * mids.at(channel) : added[i % 2];
            state.out[tile][i] = state.out[tile][i] * shrink[i % 2] +
                                 (sums[i] - kBeyond<Bits> * beyond[i]) * scale + more;
        }
    }
}

// Visit `index` to up to 64 rows of the tail, float16 as they are: a page without codes.
template <int Dim>
KVQ_DEVICE void attend_tail(const kvq_cuda_attention& a, const kvq_cuda_sequence& s,
                            const Lane& lane, int kv_head, int index, uint64_t seen,
                            float (*logits)[kPageTokens], Running<Dim>& state) {
    const int tile = s.tile_rows[index];
    const float* query = lane.query + (1 + s.tile_turns[index]) * lane.turn_stride;
    const int64_t first = int64_t{kv_head} * s.tail_stride + 64 * tile;
    const int count = min(64, s.tail_rows - 64 * tile);
    const uint16_t *keys = s.tail_keys + first * Dim, *values = s.tail_values + first * Dim;
    for (int group = 0; group < 4; group++) {
        float sums[4] = {};
        for (int c = 4 * lane.t; c < Dim; c += 16) {
            uint32_t b[2], k[4] = {};
            const float* q = query + c;
            for (int i = 0; i < 2; i++) b[i] = lane.is_row ? halves(q[2 * i], q[2 * i + 1]) : 0;
            for (int i = 0; i < 4; i++) {
                const int token = 16 * group + lane.g + i % 2 * 8;
                if (token < count)
                    k[i] = *reinterpret_cast<const uint32_t*>(keys + token * Dim + c + i / 2 * 2);
            }
            mma(sums, k, b);
        }
        for (int i = 0; i < 4; i++)
            logits[2 * lane.t + i % 2][16 * group + lane.g + i / 2 * 8] = sums[i];
    }
    sync_warp();
    float weights[16];
    const float shrunk = weigh<Dim>(lane, logits[lane.g], seen, 4, a.softcap, state, weights);
    uint32_t numbers[4][2];
    for (int i = 0; i < 4; i++) number_operand(weights + 4 * i, numbers[i]);
    float shrink[2];
    for (int i = 0; i < 2; i++) shrink[i] = shuffle_from(shrunk, 4 * (2 * lane.t + i));
    KVQ_UNROLL for (int m = 0; m < Dim / 16; m++) {
        float sums[4] = {};
        KVQ_UNROLL for (int i = 0; i < 4; i++) {
            uint32_t v[4];
            KVQ_UNROLL for (int j = 0; j < 4; j++) {
                const int channel = 16 * m + lane.g + j % 2 * 8;
                uint32_t pair = 0;
                for (int k = 0; k < 2; k++) {
                    const int token = own_token(lane, 4, 4 * i + j / 2 + 2 * k);
                    if (token < count) pair |= uint32_t{values[token * Dim + channel]} << 16 * k;
                }
                v[j] = pair;
            }
            mma(sums, v, numbers[i]);
        }
        KVQ_UNROLL for (int i = 0; i < 4; i++) state.out[m][i] =
            state.out[m][i] * shrink[i % 2] + sums[i];
    }
    sync_warp();
}

// Joins the warps of a block, one after the other, into the partial results of its 8 rows.
template <int Dim>
KVQ_DEVICE void join(const Lane& lane, const Running<Dim>& state, float (*part)[Dim + 2],
                     int warp) {
    for (int turn = 0; turn < kWarps<Dim>; turn++) {
        if (turn == warp) {
            const float before = turn ? part[lane.g][0] : kNothing;
            const float sum = turn ? part[lane.g][1] : 0.0f;
            const float maximum = fmaxf(before, state.maximum);
            const float old = exp2_fast(before - maximum),
                        mine = exp2_fast(state.maximum - maximum);
            sync_warp();
            if (lane.t == 0) {
                part[lane.g][0] = maximum;
                part[lane.g][1] = sum * old + state.sum * mine;
            }
            KVQ_UNROLL for (int i = 0; i < 2; i++) {
                const int row = 2 * lane.t + i;
                const float o = shuffle_from(old, 4 * row), m = shuffle_from(mine, 4 * row);
                KVQ_UNROLL for (int tile = 0; tile < Dim / 16; tile++)
                    KVQ_UNROLL for (int upper = 0; upper < 2; upper++) {
                    float& to = part[row][2 + 16 * tile + lane.g + 8 * upper];
                    to = (turn ? to * o : 0.0f) + state.out[tile][2 * upper + i] * m;
                }
            }
        }
        sync_block();
    }
}

// What a block keeps in shared memory: of each warp the sides under way and a page's logits.
template <int Dim>
struct AttendRoom {
    struct {
        SideRoom<Dim> keys, values;
        float logits[kRows][kPageTokens];
    } warps[kWarps<Dim>];
    float part[kRows][Dim + 2];
};

// Which keys of item `index` a token reads: of a view's page, then of the visits to the tail.
KVQ_DEVICE uint64_t seen_by(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, int kv_head,
                            int index, int token) {
    if (index >= s.view_count) return s.tail_masks[int64_t{token} * s.tiles + index - s.view_count];
    if (s.chosen && !s.chosen[(int64_t{kv_head} * s.tokens + token) * s.view_count + index])
        return 0;
    return sees(s.positions[token], static_cast<const View*>(s.views)[index], a.window_tokens);
}

KVQ_DEVICE const Entry& entry_of(const kvq_cuda_sequence& s, int kv_head, int view) {
    const int64_t column = static_cast<const View*>(s.views)[view].column;
    return static_cast<const Entry*>(s.entries)[kv_head * int64_t{s.most_columns} + column];
}

// The first item of those `step` apart that any token from `first` to `last` sees, or `end`. Alike
// in all lanes of a warp.
KVQ_DEVICE int next_seen(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, int kv_head,
                         int first, int last, int index, int step, int end) {
    for (; index < end; index += step) {
        if (index < s.view_count && entry_of(s, kv_head, index).k_bits == 0) continue;
        bool any = false;
        for (int token = first + thread_index() % kWarp; token <= last; token += kWarp)
            any |= seen_by(a, s, kv_head, index, token) != 0;
        if (any_lane(any)) return index;
    }
    return end;
}

// A page whose keys are on their way. `stage_next` sends the next item's, once these are read.
template <int Dim, class Stage>
KVQ_DEVICE void attend_page(const kvq_cuda_attention& a, const kvq_cuda_sequence& s,
                            const Lane& lane, int kv_head, int index, uint64_t seen,
                            const Stage& stage_next, AttendRoom<Dim>& room, Running<Dim>& state) {
    auto& own = room.warps[thread_index() / kWarp];
    const Entry& e = entry_of(s, kv_head, index);
    const int v_bits = side_bits(s, e, true);
    stage_side(s, e, kv_head, true, thread_index() % kWarp, kWarp, own.values);
    commit_copies();
    wait_copies<1>();
    sync_warp();
    const float* query = lane.query + (1 + s.turn_of_view[index]) * lane.turn_stride;
    with_bits(side_bits(s, e, false), [&](auto bits) {
        key_logits<Dim, decltype(bits)::kBits>(lane, query, own.keys, own.logits);
    });
    stage_next();
    wait_copies<1>();
    float weights[16];
    const float shrunk =
        weigh<Dim>(lane, own.logits[lane.g], seen, v_bits, a.softcap, state, weights);
    sync_warp();
    const bool channels = s.forms[kv_head] & kChannelValues;
    with_bits(v_bits, [&](auto bits) {
        add_values<Dim, decltype(bits)::kBits>(lane, weights, shrunk, own.values, channels, state);
    });
    sync_warp();
}

// Grid: splits, blocks of 8 rows, KV heads.
template <int Dim>
KVQ_KERNEL attend(kvq_cuda_attention a, kvq_cuda_sequence s) {
    KVQ_DYNAMIC_SHARED(bytes);
    auto& room = *reinterpret_cast<AttendRoom<Dim>*>(bytes);
    const int split = block_index().x, kv_head = block_index().z, warp = thread_index() / kWarp;
    const int group = a.heads / a.kv_heads, rows = s.tokens * group;
    Lane lane;
    lane.g = thread_index() % kWarp / 4, lane.t = thread_index() % 4;
    const int row = block_index().y * kRows + lane.g;
    lane.is_row = row < rows;
    const int token = lane.is_row ? row / group : 0;
    lane.query = s.queries + (int64_t{kv_head} * rows + (lane.is_row ? row : 0)) * Dim;
    lane.turn_stride = int64_t{a.heads} * s.tokens * Dim;

    const int first_token = block_index().y * kRows / group;
    const int last_token = (min((block_index().y + 1) * kRows, rows) - 1) / group;
    const int64_t all = s.view_count + s.tiles;
    const int end = static_cast<int>(all * (split + 1) / a.splits);
    const auto next = [&](int index) {
        return next_seen(a, s, kv_head, first_token, last_token, index, kWarps<Dim>, end);
    };
    const auto stage_keys = [&](int index) {
        if (index < min(end, s.view_count))
            stage_side(s, entry_of(s, kv_head, index), kv_head, false, thread_index() % kWarp,
                       kWarp, room.warps[warp].keys);
        commit_copies();
    };
    Running<Dim> state;
    int index = next(static_cast<int>(all * split / a.splits) + warp);
    stage_keys(index);
    while (index < end) {
        const int ahead = next(index + kWarps<Dim>);
        const uint64_t seen = lane.is_row ? seen_by(a, s, kv_head, index, token) : 0;
        if (index < s.view_count)
            attend_page<Dim>(
                a, s, lane, kv_head, index, seen, [&] { stage_keys(ahead); }, room, state);
        else
            attend_tail<Dim>(a, s, lane, kv_head, index - s.view_count, seen,
                             room.warps[warp].logits, state);
        index = ahead;
    }
    join<Dim>(lane, state, room.part, warp);
    const int64_t first = int64_t{kv_head} * rows + block_index().y * kRows;
    for (int i = thread_index(); i < kRows * (Dim + 2); i += kThreads<Dim>) {
        const int r = i / (Dim + 2);
        if (block_index().y * kRows + r < rows)
            s.partials[((first + r) * a.splits + split) * (Dim + 2) + i % (Dim + 2)] =
                room.part[r][i % (Dim + 2)];
    }
}

// The logit of a head's sink, in octaves; kNothing: it has none.
KVQ_DEVICE float sink_of(const kvq_cuda_sequence& s, int head) {
    return s.sink_logits ? s.sink_logits[head] * kLog2E : kNothing;
}

// A row's softmax over all splits and its head's sink, from its partial results: the largest logit,
// 1 / sum of weights.
struct Softmax {
    float top, inverse = 0;
    KVQ_DEVICE_MEMBER Softmax(const float* parts, int splits, int stride, float sink = kNothing)
        : top(sink) {
        for (int p = 0; p < splits; p++) top = fmaxf(top, parts[p * stride]);
        float sum = sink > kNothing ? share(sink) : 0.0f;
        for (int p = 0; p < splits; p++) sum += parts[p * stride + 1] * share(parts[p * stride]);
        if (sum > 0) inverse = 1.0f / sum;
    }
    // What counts of a part whose largest logit is this.
    KVQ_DEVICE_MEMBER float share(float part_top) const { return exp2_fast(part_top - top); }
};

// A block per row of a KV head, a thread per channel.
KVQ_KERNEL merge(kvq_cuda_attention a, kvq_cuda_sequence s) {
    const int group = a.heads / a.kv_heads, rows = s.tokens * group, stride = a.head_dim + 2;
    const int row = block_index().x, kv_head = block_index().y, i = thread_index();
    if (i >= a.head_dim) return;
    const float* parts = s.partials + (int64_t{kv_head} * rows + row) * a.splits * stride;
    const int head = kv_head * group + row % group;
    const Softmax softmax(parts, a.splits, stride, sink_of(s, head));
    float total = 0;
    for (int p = 0; p < a.splits; p++)
        total += parts[p * stride + 2 + i] * softmax.share(parts[p * stride]);
    s.out[(int64_t{row / group} * a.heads + head) * a.head_dim + i] = total * softmax.inverse;
}

}  // namespace kvq::cuda
