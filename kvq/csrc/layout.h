// How an arena's bytes divide: what a snapshot holds, then scratch, then the pool of pages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "format.h"
#include "kernels/kernels.h"
#include "kvq.h"
#include "pool.h"

namespace kvq {

constexpr int64_t kAlign = 64;
constexpr int64_t kDeviceAlign = 16;
inline bool quantized(const kvq_config& c) {
    return c.k_bits <= 8;
}

// The rows after the committed tokens: they stand behind the tail's, or in the staging rows.
struct BranchState {
    int32_t rows;
    int32_t pass_rows;  // the newest of them, which the pass under way added
    int32_t attended;   // layers that have seen those
    uint8_t staged;     // the rows of one chunk that does not fit the tail
    uint8_t chain;      // every row follows the one before it
    uint8_t hi_view;    // the pass reads 8- and 6-bit sides by their hi plane
    uint8_t in_gap;     // the rows fill a gap that an edit left, not the end
    int32_t at;         // token of the first row
    int32_t mixed;      // layers that do not attend which have seen the pass's rows
};

// A row of a branch that is no chain: the row it follows (-1: the last committed token), its place
// behind the committed tokens, and the rows it sees: its ancestors and itself.
struct BranchRow {
    int32_t parent, depth;
    uint64_t sees[2];
};
static_assert(8 * sizeof(BranchRow::sees) == KVQ_MOST_DRAFT_TOKENS);

// Everything a cache knows of itself besides tables, tail and pages; lies at the arena's start.
struct State {
    kvq_config config;
    int64_t budget;
    int32_t columns;
    int32_t tail_used;  // committed floating-point rows, sinks first
    int32_t tokens;     // committed tokens, evicted ones included
    int32_t broken;     // a chunk failed half-way: layers disagree
    BranchState branch;
    int32_t views;
    int64_t peak;
    PoolState pool;
};
static_assert(sizeof(State) == 200, "kvq/geometry.py counts these bytes too");

// Whose queries are kept: 1 for the layers', and 1 for each layer that reads the last one's keys.
constexpr int probe_kinds(const kvq_config& c) { return c.probes & (KVQ_SAMPLES - 1); }
constexpr int readers(const kvq_config& c) { return std::max(probe_kinds(c) - 1, 0); }

// The token a probe slot holds a query of, -1 for none, and the position it looked from.
struct Probe {
    int32_t token;
    int32_t position;
};

// What a layer's attention was last asked to compute: evidence repeats it. A head of more channels than
// 256 has more frequencies, and its layers' facts lie further apart.
struct LayerFacts {
    kvq_attention attention;
    float inv_freq[128];
};
constexpr int64_t facts_bytes(int head_dim) {
    return static_cast<int64_t>(sizeof(LayerFacts)) + (head_dim > 256 ? 4 * (head_dim / 2 - 128) : 0);
}

// Places of a sequence that are kept before others, at most.
constexpr int kMostWanted = 8;
// What convolutions remember, beside their rows; conv_checkpoints places follow, rising, of which
// `checkpoints` are in use and the others 0.
struct ConvState {
    int32_t held;  // committed tokens, the newest, whose rows are there
    int32_t checkpoints;
    // Places that were marked or gone back to, the one used last first, 0: none; see `want`.
    int32_t wanted[kMostWanted];
};
constexpr int kMostTaps = 16;
constexpr int kConvBackRows = 8, kConvStepTokens = 256;
// Rows of one convolution.
constexpr int64_t conv_rows(const kvq_config& c) {
    return 2 * int64_t{c.conv_taps - 1 + kConvBackRows} + c.draft_tokens +
           (c.conv_checkpoints + int64_t{1}) * (c.conv_taps - 1);
}

// What delta nets remember, beside rows and states; of each of delta_states slots the token whose
// state it holds follows, -1 where it is free.
struct DeltaState {
    int32_t held;  // committed tokens, the newest, whose rows are there
    int32_t live;  // the slot of the state that the next token is computed with
    int32_t wanted[kMostWanted];  // as of ConvState
};
// Of so many states the two newest are the next tokens'; the others may be those of wanted places.
constexpr int conv_places(const kvq_config& c) {
    return c.conv_checkpoints < 2 * kMostWanted ? (c.conv_checkpoints + 1) / 2 : kMostWanted;
}
constexpr int kLeastDeltaStates = 2;
constexpr int delta_places(const kvq_config& c) {
    const int places = c.delta_states - kLeastDeltaStates;
    return places < 1 ? 1 : places < kMostWanted ? places : kMostWanted;
}
// Notes that a place is wanted: where somebody went back to and could not at once, or will. Of more
// than `most` places the one that was used longest ago is wanted no longer.
template <class State>
void want(State& state, int place, int most) {
    if (!place) return;
    int at = 0;
    while (at < most - 1 && state.wanted[at] != place) at++;
    for (; at > 0; at--) state.wanted[at] = state.wanted[at - 1];
    state.wanted[0] = place;
}
// Whether `wanted` may be that of a cache of so many tokens at most.
template <class State>
bool valid_wanted(const State& state, int context_tokens) {
    for (const int place : state.wanted)
        if (place < 0 || place > context_tokens) return false;
    return true;
}
// The one used last of those wanted that lie behind `start` and not behind `stop`, 0: none.
template <class State>
int wanted_within(const State& state, int start, int stop) {
    for (const int place : state.wanted)
        if (place > start && place <= stop) return place;
    return 0;
}
// Which of rising `places` is given up for `coming`: that without which least is computed again, as
// mixed_rows.py of the tests has it. Of a wanted place base(place) is kept while it can be.
template <class State, class Base>
size_t least_missed(const State& state, const std::vector<int32_t>& places, int coming, Base base) {
    const auto is_wanted = [&](int at) {
        return std::any_of(std::begin(state.wanted), std::end(state.wanted),
                           [&](int place) { return place && base(place) == at; });
    };
    size_t least = 0;
    for (const int place : state.wanted)
        for (size_t i = 0; place && i < places.size(); i++)
            if (places[i] == base(place)) least = i;
    int64_t least_gap = 1, least_distance = 0;
    for (size_t i = 0; i < places.size(); i++) {
        const int64_t first = i ? places[i - 1] : 0;
        const int64_t next = i + 1 < places.size() ? places[i + 1] : coming;
        const int64_t gap = next - first, distance = coming - next + kConvStepTokens;
        if (is_wanted(places[i]) || gap * least_distance >= least_gap * distance) continue;
        least = i, least_gap = gap, least_distance = distance;
    }
    return least;
}
constexpr int kFoldTokens = 8, kMostDeltaDim = 256;
constexpr int64_t delta_conv_width(const kvq_config& c) {
    return 2 * int64_t{c.delta_key_heads} * c.delta_key_dim +
           int64_t{c.delta_value_heads} * c.delta_value_dim;
}
// What was convolved; then k, u and the sum of g.
constexpr int64_t delta_row_width(const kvq_config& c) {
    return delta_conv_width(c) + int64_t{c.delta_key_heads} * c.delta_key_dim +
           int64_t{c.delta_value_heads} * (c.delta_value_dim + int64_t{1});
}
// Committed rows of one delta net that are kept: at most, and by whether any place is; and the newest
// of a chunk, from the last base but one on at least.
constexpr int most_delta_newest(const kvq_config& c) {
    return c.delta_taps - 1 + 2 * kFoldTokens;
}
constexpr int delta_newest(const kvq_config& c) {
    if (c.delta_states > kLeastDeltaStates) return most_delta_newest(c);
    return c.delta_taps - 1 < kFoldTokens ? kFoldTokens : c.delta_taps - 1;
}
constexpr int delta_ending(const kvq_config& c) {
    return delta_newest(c) < 2 * kFoldTokens - 1 ? 2 * kFoldTokens - 1 : delta_newest(c);
}
// Rows of one delta net.
constexpr int64_t delta_rows(const kvq_config& c) {
    return int64_t{delta_newest(c)} + c.draft_tokens + delta_ending(c);
}
// One layer's state, and the rows that its convolution sees before it.
constexpr int64_t delta_slot_width(const kvq_config& c) {
    return int64_t{c.delta_value_heads} * c.delta_key_dim * c.delta_value_dim +
           (c.delta_taps - 1) * delta_conv_width(c);
}

// Views beyond one of every column: so many, and one more per column. Of them an edit leaves free
// what filling gaps may take.
constexpr int kSpareViews = 64, kGapViews = 32;

// Where the regions of an arena begin, in bytes, and their sizes.
struct Layout {
    int64_t starts[KVQ_REGIONS];
    int64_t pool;
    kvq_layout sizes;
};
bool forms_fit(const kvq_config& config, const uint8_t* forms);  // null: all 0
// `columns`: pages per stream that the table has room for.
int size_regions(const kvq_config& config, int columns, int64_t pool, int64_t* regions);
int lay_out(const kvq_config& config, int64_t budget, int columns, Layout& layout);

// The arena of one cache, region by region.
struct Arena {
    State* state;
    uint8_t* forms;     // of every stream
    uint8_t* entering;  // K and V bits the next pages of every stream close at
    View* views;  // of all columns, in their order
    Entry* entries;
    uint32_t *constant_owners, *granule_owners;
    // Of the tail's rows: where they stand now, how far they have moved, which tokens they are.
    int32_t *tail_positions, *tail_deltas, *tail_tokens;
    uint16_t* tail;
    BranchRow* branch;
    Probe* probes;
    uint16_t* probe_rows;
    uint8_t* layers;
    ConvState* conv_state;
    float* conv_rows;
    DeltaState* delta_state;
    float* delta_rows;
    float* delta_states;
    int32_t* staging_positions;
    uint16_t* staging;
    float* rope;  // of a pass's tokens: cosines, then sines
    float* partials;
    uint8_t* pool;
    kvq_layout sizes;
    int64_t file_bytes = 0;  // of the pool's end that are a view of a file
    class Twin* twin;  // null: pages and rows lie here, and nowhere else
    const float* feedback = nullptr;  // of every stream's keys [head_dim, head_dim], the caller's; null: none

    void place(uint8_t* bytes, const Layout& layout);
    const kvq_config& config() const { return state->config; }
    uint8_t* end() const { return pool + sizes.pool_bytes; }
    // Of pages, whose slots never overlap.
    void move(void* to, const void* from, int64_t bytes) const;
    int most_views() const { return 2 * sizes.max_columns + kSpareViews; }
    int streams() const { return config().layers * config().kv_heads; }
    LayerFacts& facts(int asker) const {  // a layer, or behind all of them a reader
        return *reinterpret_cast<LayerFacts*>(layers + asker * facts_bytes(config().head_dim));
    }
};

}  // namespace kvq
