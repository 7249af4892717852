// What probe rows, whose softmax is complete, see of every page: kvq/reference.py's page_errors
// and masses, so that policies on the host decide by a few numbers and no page has to leave the
// device.
#pragma once
#include "attend.h"

namespace kvq::cuda {

constexpr int kProbeRows = 16, kEvidenceThreads = 2 * kPageTokens, kViewFacts = 6;
constexpr float kObservedMass = 1.0f / 4096.0f;

// A block per token (a probe row) and KV head, a thread per channel: probes kept as natural logits
// become queries of every turn.
KVQ_KERNEL turn_probes(kvq_cuda_attention a, kvq_cuda_sequence s, const uint16_t* probes) {
    KVQ_SHARED float x[kMostChannels];
    const int kv_head = block_index().y, i = thread_index(), dim = a.head_dim;
    const int64_t row = int64_t{kv_head} * s.tokens + block_index().x;
    const int64_t rows = int64_t{a.kv_heads} * s.tokens;
    for (int turn = -1; turn < s.turns; turn++) {
        if (i < dim) x[i] = half_value(probes[row * dim + i]) * kLog2E;
        sync_block();
        if (turn >= 0 && s.deltas[turn])
            rotate(x, s.inv_freq, a.rotary_pairs, -static_cast<float>(s.deltas[turn]), 1.0f);
        if (turn >= s.row_turns && (s.forms[kv_head] & kRotatedKeys)) hadamard(x, dim);
        if (i < dim) s.queries[((1 + turn) * rows + row) * dim + i] = x[i];
        sync_block();
    }
}

// A code less the middle of its range, in steps of that range.
template <int Dim>
KVQ_DEVICE float code_at(const SideRoom<Dim>& side, int bits, bool values, int token, int channel) {
    const int group = values ? channel / 8 : token / 8, row = values ? channel % 8 : token % 8;
    const int column = values ? token : channel, columns = values ? kPageTokens : Dim;
    if (bits == 2) {
        const int at = group * columns * 2 + column / 16 * 32 + 4 * row + column % 4;
        return static_cast<float>(side.planes[at] >> column % 16 / 4 * 2 & 3) - 1.5f;
    }
    const int at = group * columns * 4 + column / 8 * 32 + 4 * row + column % 4;
    const int code = side.planes[at] >> (column & 4) & 15;
    if (bits == 4) return static_cast<float>(code) - 7.5f;
    if (bits == 8)
        return static_cast<float>(16 * code + (side.planes[32 * Dim + at] >> (column & 4) & 15)) -
               127.5f;
    const int low = group * columns * 2 + column / 16 * 32 + 4 * row + column % 4;
    return static_cast<float>(4 * code + (side.planes[32 * Dim + low] >> column % 16 / 4 * 2 & 3)) -
           31.5f;
}

template <int Dim>
struct EvidenceRoom {
    SideRoom<Dim> keys, values;
    float weights[kProbeRows][kPageTokens];
    float top[kProbeRows], inverse[kProbeRows];  // of the softmax: largest logit, 1 / sum
    float mass[kProbeRows], peak[kProbeRows], squares[kProbeRows], value_noise[kProbeRows];
    // Of each warp's channels: what the output changes without the page, second moments . output,
    // output squared, lengths of values, noise of logits.
    float sums[kEvidenceThreads / kWarp][kProbeRows][5];
};

// Attention weights of the page's tokens: two threads share a token, half of its channels each.
template <int Dim>
KVQ_DEVICE void probe_weights(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, int view,
                              int k_bits, const float* queries, EvidenceRoom<Dim>& room) {
    const int i = thread_index(), token = i % kPageTokens, half = i / kPageTokens;
    const Line scales = scales_of(room.keys.grid), mids = mids_of(room.keys.grid, Dim);
    const float unit = static_cast<float>(1 << (8 - k_bits));
    float logits[kProbeRows] = {};
    for (int c = half * (Dim / 2); c < (half + 1) * (Dim / 2); c++) {
        const float key =
            mids.at(c) + scales.at(c) * unit * code_at<Dim>(room.keys, k_bits, false, token, c);
        KVQ_UNROLL for (int r = 0; r < kProbeRows; r++) if (r < s.tokens) logits[r] +=
            queries[r * Dim + c] * key;
    }
    if (half) KVQ_UNROLL for (int r = 0; r < kProbeRows; r++) room.weights[r][token] = logits[r];
    sync_block();
    if (half) return;
    KVQ_UNROLL for (int r = 0; r < kProbeRows; r++) {
        float x = logits[r] + room.weights[r][token];
        if (a.softcap > 0) x = a.softcap * kLog2E * tanh(x / (a.softcap * kLog2E));
        const bool seen = r < s.tokens && (seen_by(a, s, view, r) >> token & 1);
        room.weights[r][token] = seen ? exp2_fast(x - room.top[r]) * room.inverse[r] : 0.0f;
    }
}

// Of row r, by one thread: sums over the page's weights.
template <int Dim>
KVQ_DEVICE void sum_row(bool channels, int r, EvidenceRoom<Dim>& room) {
    const Line scales = scales_of(room.values.grid);
    float mass = 0, peak = 0, squares = 0, noise = 0;
    for (int t = 0; t < kPageTokens; t++) {
        const float weight = room.weights[r][t], step = channels ? 0.0f : scales.at(t);
        mass += weight, peak = fmaxf(peak, weight), squares += weight * weight;
        noise += weight * weight * step * step * Dim;
    }
    for (int c = 0; channels && c < Dim; c++) noise += squares * scales.at(c) * scales.at(c);
    room.mass[r] = mass, room.peak[r] = peak, room.squares[r] = squares;
    room.value_noise[r] = noise;
}

// Sums over channels, a thread per channel.
template <int Dim>
KVQ_DEVICE void probe_channels(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, int kv_head,
                               int v_bits, const float* queries, EvidenceRoom<Dim>& room) {
    const bool channels = s.forms[kv_head] & kChannelValues;
    const int warp = thread_index() / kWarp, groups = channels ? Dim : kPageTokens;
    const Line scales = scales_of(room.values.grid), mids = mids_of(room.values.grid, groups);
    const Line key_scales = scales_of(room.keys.grid);
    const float unit = static_cast<float>(1 << (8 - v_bits));
    for (int first = 0; first < Dim; first += kEvidenceThreads) {
        const int channel = first + thread_index(), c = min(channel, Dim - 1);
        for (int r = 0; r < s.tokens; r++) {
            if (room.mass[r] < kObservedMass) continue;
            float mean = 0, second = 0, lengths = 0;
            for (int t = 0; t < kPageTokens; t++) {
                const int at = channels ? c : t;
                const float weight = room.weights[r][t];
                const float value = mids.at(at) + scales.at(at) * unit *
                                                      code_at<Dim>(room.values, v_bits, true, t, c);
                mean += weight * value, second += weight * weight * value;
                lengths += weight * weight * value * value;
            }
            const float x = s.out[(int64_t{r} * a.kv_heads + kv_head) * Dim + c];
            const float moved = mean - room.mass[r] * x;
            const float noise = queries[r * Dim + c] / kLog2E * key_scales.at(c);
            float sums[5] = {moved * moved, second * x, x * x, lengths, noise * noise};
            for (int k = 0; k < 5; k++) {
                if (channel >= Dim) sums[k] = 0;
                for (int mask = 1; mask < kWarp; mask *= 2) sums[k] += shuffle_xor(sums[k], mask);
                if (thread_index() % kWarp == 0)
                    room.sums[warp][r][k] = (first ? room.sums[warp][r][k] : 0.0f) + sums[k];
            }
        }
    }
}

// Adds a row to what one thread knows of a view: mass, peak, errors of keys and values at 8 bits,
// of eviction, rows.
template <int Dim>
KVQ_DEVICE void add_row(const EvidenceRoom<Dim>& room, int r, float* facts) {
    facts[0] += room.mass[r];
    facts[1] = fmaxf(facts[1], room.peak[r]);
    facts[5] += 1;
    if (room.mass[r] < kObservedMass) return;
    float sums[5] = {};
    for (int warp = 0; warp < kEvidenceThreads / kWarp; warp++)
        for (int k = 0; k < 5; k++) sums[k] += room.sums[warp][r][k];
    const float spread = sums[3] - 2.0f * sums[1] + sums[2] * room.squares[r];
    const float left = fmaxf(1.0f - room.mass[r], 0.0625f);
    facts[2] += sums[4] / 12.0f * fmaxf(spread, 0.0f);
    facts[3] += room.value_noise[r] / 12.0f;
    facts[4] += sums[0] / (left * left);
}

// Grid: views, KV heads. facts [kv_heads, views, 6].
template <int Dim>
KVQ_KERNEL observe(kvq_cuda_attention a, kvq_cuda_sequence s, float* facts) {
    KVQ_DYNAMIC_SHARED(bytes);
    auto& room = *reinterpret_cast<EvidenceRoom<Dim>*>(bytes);
    const int view = block_index().x, kv_head = block_index().y, i = thread_index();
    float found[kViewFacts] = {};
    float* out = facts + (int64_t{kv_head} * s.view_count + view) * kViewFacts;
    const Entry& e = entry_of(s, kv_head, view);
    if (e.k_bits) {
        stage_side(s, e, kv_head, false, i, kEvidenceThreads, room.keys);
        stage_side(s, e, kv_head, true, i, kEvidenceThreads, room.values);
        commit_copies();
        wait_copies<0>();
        if (i < s.tokens) {
            const int64_t row = int64_t{kv_head} * s.tokens + i;
            const Softmax softmax(s.partials + row * a.splits * (Dim + 2), a.splits, Dim + 2);
            room.top[i] = softmax.top, room.inverse[i] = softmax.inverse;
        }
        sync_block();
        const int64_t turn = 1 + s.turn_of_view[view];
        const float* queries = s.queries + (turn * a.kv_heads + kv_head) * s.tokens * Dim;
        probe_weights<Dim>(a, s, view, side_bits(s, e, false), queries, room);
        sync_block();
        if (i < s.tokens) sum_row<Dim>(s.forms[kv_head] & kChannelValues, i, room);
        sync_block();
        probe_channels<Dim>(a, s, kv_head, side_bits(s, e, true), queries, room);
        sync_block();
        for (int r = 0; r < s.tokens && i == 0; r++)
            if (seen_by(a, s, view, r)) add_row<Dim>(room, r, found);
    }
    if (i == 0)
        for (int k = 0; k < kViewFacts; k++) out[k] = found[k];
}

}  // namespace kvq::cuda
