// How an arena's bytes divide: what a snapshot holds, then scratch, then the pool of pages.
#include <algorithm>

#include "cache.h"

namespace kvq {
namespace {

int64_t align(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

bool valid(const kvq_config& c) {
    const bool widths = (valid_width(c.k_bits) && valid_width(c.v_bits)) ||
                        (c.k_bits == 16 && c.v_bits == 16);
    return c.layers > 0 && c.kv_heads > 0 && c.heads > 0 && c.heads % c.kv_heads == 0 &&
           c.head_dim >= 16 && c.head_dim <= kMaxHeadDim && c.head_dim % 16 == 0 && widths &&
           c.sink_tokens >= 0 && c.sink_tokens <= kPageTokens && c.tail_tokens >= 0 &&
           c.tail_tokens <= kPageTokens && c.draft_tokens >= 1 &&
           c.draft_tokens <= KVQ_MOST_DRAFT_TOKENS && c.chunk_tokens >= c.draft_tokens &&
           c.context_tokens > 0 && c.splits >= 1 && (c.probes == 0 || c.probes == 1) &&
           c.tail_rows >= (quantized(c) ? c.sink_tokens + c.tail_tokens + kPageTokens + c.draft_tokens
                                        : c.context_tokens);
}

}  // namespace

int lay_out(const kvq_config& c, int64_t budget, Layout& out) {
    if (!valid(c)) return KVQ_BAD_ARGUMENT;
    const int64_t streams = int64_t{c.layers} * c.kv_heads;
    const int64_t granule = static_cast<int64_t>(granule_bytes(c.head_dim));
    const int64_t constant = static_cast<int64_t>(constant_bytes(c.head_dim));
    const int64_t tail = streams * 2 * c.tail_rows * c.head_dim * 2;
    const int64_t slots = c.probes ? kProbeSlots : 0;
    const int64_t staging = quantized(c) ? int64_t{c.kv_heads} * 2 * c.chunk_tokens * c.head_dim * 2 : 0;
    const int64_t rope = int64_t{c.chunk_tokens} * c.head_dim * 4;
    const int64_t partials = int64_t{c.kv_heads} * c.splits * c.draft_tokens *
                             (c.heads / c.kv_heads) * (c.head_dim + 2) * 4;
    const auto place = [&](int64_t columns, int64_t pool) {
        int64_t at = 0, *size = out.sizes.regions;
        const auto region = [&](int64_t bytes) {
            const int64_t start = at;
            *size++ = bytes;
            at = align(at + bytes);
            return start;
        };
        region(sizeof(State));
        out.entering = region(streams * 2);
        out.columns = region(columns * static_cast<int64_t>(sizeof(Column)));
        out.entries = region(columns * streams * static_cast<int64_t>(sizeof(Entry)));
        out.constant_owner = region(columns * streams * 4);
        out.granule_owner = region(pool / granule * 4);
        out.tail_positions = region(int64_t{c.tail_rows} * 4);
        out.tail = region(tail);
        out.probes = region(slots * static_cast<int64_t>(sizeof(Probe)));
        out.probe_rows = region(slots * c.layers * c.heads * c.head_dim * 2);
        out.layer_facts = region(slots ? c.layers * static_cast<int64_t>(sizeof(LayerFacts)) : 0);
        out.scratch = out.staging_positions = region(int64_t{c.chunk_tokens} * 4);
        out.staging = region(staging);
        out.rope = region(rope);
        out.partials = region(partials);
        out.pool = at;
        return at;
    };
    out.sizes = {};
    out.sizes.granule_bytes = granule;
    out.sizes.constant_bytes = constant;
    // The table has room for every page the context needs, or the pool could hold at two bits.
    const int64_t paged = c.context_tokens - c.sink_tokens - c.tail_tokens;
    const int64_t wanted = quantized(c) && paged > 0 ? (paged + kPageTokens - 1) / kPageTokens : 0;
    const int64_t row = static_cast<int64_t>(sizeof(Column)) +
                        streams * static_cast<int64_t>(sizeof(Entry) + sizeof(uint32_t));
    const int64_t smallest_page = streams * (constant + 2 * granule);
    const int64_t full_page =
        wanted ? streams * (constant + (granules(c.k_bits) + granules(c.v_bits)) * granule) : 0;
    // The most pages per stream that a draft closes when it is kept.
    const int64_t first =
        std::min(wanted, (int64_t{c.draft_tokens} + kPageTokens - 1) / kPageTokens);
    const int64_t bare = place(0, 0), slack = 8 * kAlign;
    const int64_t least = first * (row + full_page);
    // The table of granule owners takes 4 bytes for each granule of the room it lies in itself.
    out.sizes.minimum_bytes = bare + least + 4 * (least / (granule - 4) + 1) + slack;
    if (budget < out.sizes.minimum_bytes) return KVQ_TOO_SMALL;
    const int64_t room = budget - bare - slack;
    const int64_t free = room - room / granule * 4;
    // No more rows than leave those pages of every stream at full width.
    const int64_t columns =
        std::min({wanted, free / (row + smallest_page), (free - first * full_page) / row});
    out.sizes.fixed_bytes = place(columns, room);
    out.sizes.max_columns = static_cast<int32_t>(columns);
    out.sizes.pool_bytes = budget - out.pool;
    return KVQ_OK;
}

}  // namespace kvq
