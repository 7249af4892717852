// Which pages a step reads: of those a token sees a KV head's best share, by what their keys could at
// most be worth (`page_bounds` and `chosen_pages` of kvq/reference/stored.py). Their constants are on the
// device; of planes in the host's memory those that are chosen come over, and no others.
#pragma once
#include "attend.h"
#include "best.h"

namespace kvq::cuda {

constexpr int kBoundWarps = 4, kChooseThreads = 256, kFetchThreads = 128;

// Of a query head of a token the bounds of all views, [view_count].
KVQ_DEVICE float* bounds_of(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, int kv_head,
                            int token, int head) {
    const int group = a.heads / a.kv_heads;
    return s.bounds +
           ((int64_t{kv_head} * s.tokens + token) * group + head) * int64_t{s.view_count};
}

// Grid: blocks of kBoundWarps views, tokens, KV heads; a warp per view. kNothing: it is not seen.
KVQ_KERNEL bound_pages(kvq_cuda_attention a, kvq_cuda_sequence s) {
    const int view = block_index().x * kBoundWarps + thread_index() / kWarp;
    const int token = block_index().y, kv_head = block_index().z, lane = thread_index() % kWarp;
    if (view >= s.view_count) return;
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const Entry& e = entry_of(s, kv_head, view);
    const bool seen = e.k_bits && sees(s.positions[token], static_cast<const View*>(s.views)[view],
                                       a.window_tokens);
    const uint8_t* grid = s.pool + int64_t{seen ? e.constants : 0} * s.constant_bytes;
    const Line scales = scales_of(grid), mids = mids_of(grid, dim);
    const int64_t set = int64_t{1 + s.turn_of_view[view]} * a.heads * s.tokens;
    for (int head = 0; head < group; head++) {
        const int64_t row = (int64_t{kv_head} * s.tokens + token) * group + head;
        const float* query = s.queries + (set + row) * dim;
        float middle = 0, half = 0;
        for (int i = lane; i < dim && seen; i += kWarp) {
            middle += query[i] * mids.at(i);
            half += fabsf(query[i]) * scales.at(i);
        }
        const float bound = over_lanes(middle + (kReach + 0.5f) * half, kWarp, false);
        if (lane == 0) bounds_of(a, s, kv_head, token, head)[view] = seen ? bound : kNothing;
    }
}

// A block per token and KV head. A view is worth what it may be to one of the head's queries, each
// measured against what its best view may be; of equal ones the older is read.
KVQ_KERNEL choose_pages(kvq_cuda_attention a, kvq_cuda_sequence s) {
    KVQ_SHARED SelectRoom room;
    KVQ_SHARED int seen_count;
    const int token = block_index().x, kv_head = block_index().y, i = thread_index();
    const int group = a.heads / a.kv_heads, views = s.view_count;
    if (i == 0) seen_count = 0;
    sync_block();
    for (int head = i / kWarp; head < group; head += kChooseThreads / kWarp) {
        float* bounds = bounds_of(a, s, kv_head, token, head);
        float best = kNothing;
        for (int v = i % kWarp; v < views; v += kWarp) best = fmaxf(best, bounds[v]);
        best = over_lanes(best, kWarp, true);
        int seen = 0;
        for (int v = i % kWarp; v < views; v += kWarp)
            if (bounds[v] > kNothing) bounds[v] -= best, seen++;
        if (head == 0) atomic_add(&seen_count, seen);
    }
    sync_block();
    const auto worth = [&](int view) {
        float most = kNothing;
        for (int head = 0; head < group; head++)
            most = fmaxf(most, bounds_of(a, s, kv_head, token, head)[view]);
        return most;
    };
    const auto key = [&](int view) {
        const float most = worth(view);
        return most > kNothing ? order_key(most, view) : uint64_t{0};
    };
    const int seen = seen_count;
    const int kept =
        max(1, static_cast<int>(ceil(s.share * static_cast<float>(seen) - 1e-4f)));
    const uint64_t least = kept < seen ? least_of_best(key, views, kept, room) : uint64_t{1};
    uint8_t* chosen = s.chosen + (int64_t{kv_head} * s.tokens + token) * views;
    for (int v = i; v < views; v += kChooseThreads) {
        const uint64_t k = key(v);
        chosen[v] = k && k >= least;
    }
    if (i == 0) {
        atomic_add(&s.counts->seen, seen);
        atomic_add(&s.counts->read, min(kept, seen));
    }
}

// Grid: views, KV heads. The planes that attention will read of a page any token has chosen.
KVQ_KERNEL fetch_pages(kvq_cuda_sequence s) {
    const int view = block_index().x, kv_head = block_index().y;
    bool any = false;
    for (int token = 0; token < s.tokens; token++)
        any |= s.chosen[(int64_t{kv_head} * s.tokens + token) * s.view_count + view];
    const Entry& e = entry_of(s, kv_head, view);
    if (!any || e.granule[0] < s.away_slot) return;
    uint8_t* const here = const_cast<uint8_t*>(s.pool) + s.pool_bytes;
    for (int side = 0; side < 2; side++)
        for (int g = 0; g < granules(side_bits(s, e, side)); g++) {
            const int64_t slot = e.granule[side * kGranulesPerSide + g];
            const auto* from = reinterpret_cast<const Quad*>(
                s.away_end - (slot - s.away_slot + 1) * s.granule_bytes);
            auto* to = reinterpret_cast<Quad*>(here - (slot + 1) * s.granule_bytes);
            for (int i = thread_index(); i < s.granule_bytes / 16; i += kFetchThreads)
                to[i] = from[i];
            if (thread_index() == 0) atomic_add(&s.counts->fetched_bytes, s.granule_bytes);
        }
}

}  // namespace kvq::cuda
