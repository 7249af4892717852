#include "layout.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "probes.h"
#include "twin.h"

namespace kvq {
namespace {

int64_t align(int64_t n) {
    return (n + kAlign - 1) / kAlign * kAlign;
}

template <class T>
int64_t size_of(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T));
}

bool within(int64_t value, int64_t least, int64_t most) {
    return value >= least && value <= most;
}

bool valid_convolutions(const kvq_config& c) {
    if (c.conv_layers == 0) return !c.conv_width && !c.conv_taps && !c.conv_checkpoints;
    return within(c.conv_layers, 1, 1 << 16) && within(c.conv_width, 1, 1 << 20) &&
           within(c.conv_taps, 2, kMostTaps) && within(c.conv_checkpoints, 1, 1 << 12);
}

bool valid_delta_nets(const kvq_config& c) {
    if (c.delta_layers == 0)
        return !c.delta_key_heads && !c.delta_value_heads && !c.delta_key_dim &&
               !c.delta_value_dim && !c.delta_taps && !c.delta_states && !c.delta_fold;
    const auto fits = [](int dim) { return within(dim, 16, kMostDeltaDim) && dim % 16 == 0; };
    return within(c.delta_layers, 1, 1 << 16) && within(c.delta_key_heads, 1, 1 << 12) &&
           within(c.delta_value_heads, 1, 1 << 12) &&
           c.delta_value_heads % c.delta_key_heads == 0 && fits(c.delta_key_dim) &&
           fits(c.delta_value_dim) && within(c.delta_taps, 2, kMostTaps) &&
           within(c.delta_states, kLeastDeltaStates, 1 << 8) && c.delta_fold == kFoldTokens;
}

// The bounds keep every size below in 64 bits.
bool valid(const kvq_config& c) {
    const bool widths =
        (valid_width(c.k_bits) && valid_width(c.v_bits)) || (c.k_bits == 16 && c.v_bits == 16);
    return widths && within(c.layers, 1, 1 << 16) && within(c.kv_heads, 1, 1 << 12) &&
           within(c.heads, 1, 1 << 12) && c.heads % c.kv_heads == 0 &&
           within(c.head_dim, 16, kMaxHeadDim) && c.head_dim % 16 == 0 &&
           within(c.sink_tokens, 0, kPageTokens) && within(c.tail_tokens, 0, kPageTokens) &&
           within(c.draft_tokens, 1, KVQ_MOST_DRAFT_TOKENS) &&
           within(c.context_tokens, 1, 1 << 30) &&
           int64_t{c.layers} * c.kv_heads * c.tail_rows <= int64_t{1} << 50 &&
           within(c.chunk_tokens, c.draft_tokens, 1 << 20) && within(c.splits, 1, 1 << 12) &&
           within(probe_kinds(c), c.probes ? 1 : 0, 1 + (1 << 16)) && within(c.probes, 0, 2 * KVQ_SAMPLES - 1) && valid_convolutions(c) && valid_delta_nets(c) &&
           !(c.conv_layers && c.delta_layers) && c.page_version == kPageVersion &&
           (c.value_groups == kPageTokens || c.value_groups == std::max(kPageTokens, c.head_dim)) &&
           within(c.tail_rows,
                  quantized(c) ? c.sink_tokens + c.tail_tokens + kPageTokens + c.draft_tokens
                               : c.context_tokens,
                  1 << 30);
}

// Sets starts and sizes of all regions for a table of so many columns; returns where the pool
// begins.
int64_t place(const kvq_config& c, int64_t columns, int64_t pool, Layout& out) {
    const int64_t streams = int64_t{c.layers} * c.kv_heads, dim = c.head_dim;
    const int64_t slots = probe_slots(c);
    const int64_t askers = int64_t{c.layers} + readers(c);
    const int64_t split_rows = int64_t{c.heads} * c.splits * c.draft_tokens;
    const int64_t sizes[KVQ_REGIONS] = {
        size_of<State>(1),
        streams,
        streams * 2,
        size_of<View>(2 * columns + kSpareViews),
        size_of<Entry>(columns * streams),
        columns * streams * 4,
        pool / static_cast<int64_t>(granule_bytes(c.head_dim)) * 4,
        int64_t{c.tail_rows} * 12,
        streams * 2 * c.tail_rows * dim * 2,
        size_of<BranchRow>(c.draft_tokens),
        size_of<Probe>(slots * probe_kinds(c)),
        slots * askers * c.kv_heads * kept_heads(c) * dim * 2,
        slots ? askers * facts_bytes(c.head_dim) : 0,
        c.conv_layers ? size_of<ConvState>(1) + size_of<int32_t>(c.conv_checkpoints) : 0,
        c.conv_layers ? size_of<float>(c.conv_layers * conv_rows(c) * c.conv_width) : 0,
        c.delta_layers ? size_of<DeltaState>(1) + size_of<int32_t>(c.delta_states) : 0,
        c.delta_layers ? size_of<float>(c.delta_layers * delta_rows(c) * delta_row_width(c)) : 0,
        size_of<float>(int64_t{c.delta_states} * c.delta_layers *
                       (c.delta_layers ? delta_slot_width(c) : 0)),
        int64_t{c.chunk_tokens} * 4,
        quantized(c) ? int64_t{c.kv_heads} * 2 * c.chunk_tokens * dim * 2 : 0,
        int64_t{c.chunk_tokens} * dim * 4,
        split_rows * (dim + 2) * 4,
    };
    out.pool = 0;
    for (int i = 0; i < KVQ_REGIONS; i++) {
        out.starts[i] = out.pool;
        out.sizes.regions[i] = sizes[i];
        out.pool = align(out.pool + sizes[i]);
    }
    return out.pool;
}

}  // namespace

bool forms_fit(const kvq_config& c, const uint8_t* forms) {
    for (int s = 0; forms && s < c.layers * c.kv_heads; s++)
        if (forms[s] >= kForms || ((forms[s] & kChannelValues) && c.head_dim > c.value_groups))
            return false;
    return true;
}

int size_regions(const kvq_config& c, int columns, int64_t pool, int64_t* regions) {
    if (!valid(c) || !within(columns, 0, 1 << 24)) return KVQ_BAD_ARGUMENT;
    Layout layout{};
    place(c, columns, pool, layout);
    std::copy(std::begin(layout.sizes.regions), std::end(layout.sizes.regions), regions);
    return KVQ_OK;
}

int lay_out(const kvq_config& c, int64_t budget, int columns, Layout& out) {
    out = {};
    if (!valid(c)) return KVQ_BAD_ARGUMENT;
    const int64_t streams = int64_t{c.layers} * c.kv_heads;
    const int64_t granule = static_cast<int64_t>(granule_bytes(c.head_dim));
    const int64_t constant = static_cast<int64_t>(constant_bytes(c.head_dim, c.value_groups));
    out.sizes.granule_bytes = granule;
    out.sizes.constant_bytes = constant;
    const int64_t paged = int64_t{c.context_tokens} - c.sink_tokens - c.tail_tokens;
    const int64_t wanted = quantized(c) && paged > 0 ? (paged + kPageTokens - 1) / kPageTokens : 0;
    const int64_t row = size_of<View>(2) + streams * (size_of<Entry>(1) + size_of<uint32_t>(1));
    const int64_t full_page =
        wanted ? streams * (constant + (granules(c.k_bits) + granules(c.v_bits)) * granule) : 0;
    // The most pages per stream that a draft closes when it is kept.
    const int64_t first =
        std::min(wanted, (int64_t{c.draft_tokens} + kPageTokens - 1) / kPageTokens);
    const int64_t bare = place(c, 0, 0, out), slack = 8 * kAlign;
    const int64_t least = first * (row + full_page);
    // The table of granule owners takes 4 bytes for each granule of the room it lies in itself.
    out.sizes.minimum_bytes = bare + least + 4 * (least / (granule - 4) + 1) + slack;
    if (budget < out.sizes.minimum_bytes) return KVQ_TOO_SMALL;
    if (columns < first || columns > wanted) return KVQ_BAD_ARGUMENT;
    out.sizes.fixed_bytes = place(c, columns, budget - bare - slack, out);
    out.sizes.max_columns = columns;
    out.sizes.pool_bytes = budget - out.pool;
    if (out.sizes.pool_bytes < first * full_page) return KVQ_TOO_SMALL;
    return KVQ_OK;
}

void Arena::place(uint8_t* bytes, const Layout& layout) {
    const int64_t* start = layout.starts;
    const auto next = [&](auto*& region) {
        region = reinterpret_cast<std::remove_reference_t<decltype(region)>>(bytes + *start++);
    };
    next(state), next(forms), next(entering), next(views), next(entries);
    next(constant_owners), next(granule_owners);
    next(tail_positions), next(tail), next(branch);
    next(probes), next(probe_rows), next(layers), next(conv_state), next(conv_rows);
    next(delta_state), next(delta_rows), next(delta_states);
    next(staging_positions), next(staging), next(rope), next(partials);
    tail_deltas = tail_positions + layout.sizes.regions[KVQ_PLACES] / 12;
    tail_tokens = tail_deltas + layout.sizes.regions[KVQ_PLACES] / 12;
    pool = bytes + layout.pool;
    sizes = layout.sizes;
}

void Arena::move(void* to, const void* from, int64_t bytes) const {
    if (twin) twin->move(to, from, bytes);
    else std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace kvq
