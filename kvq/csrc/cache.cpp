#include "cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"

namespace kvq {

const Parallel kSerial{[](void*, void (*work)(void*, size_t), size_t count, void* user) {
                           for (size_t i = 0; i < count; i++) work(user, i);
                       },
                       nullptr};

namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;

}  // namespace

std::unique_ptr<Cache> Cache::open(const kvq_config& config, const Layout& layout, int64_t budget) {
    // A long context is read page by page from all over the arena; with 4 KiB system pages that
    // costs an address translation per granule.
    void* memory = nullptr;
    const size_t alignment = budget >= 2 * kHugePage ? kHugePage : kAlign;
    if (posix_memalign(&memory, alignment, static_cast<size_t>(budget))) return nullptr;
#ifdef MADV_HUGEPAGE
    if (budget >= 2 * kHugePage) {
        const size_t whole = static_cast<size_t>(budget) / kHugePage * kHugePage;
        madvise(memory, whole, MADV_HUGEPAGE);  // advice: a refusal changes nothing but speed
    }
#endif
    std::unique_ptr<Cache> cache(new Cache());
    cache->layout_ = layout;
    cache->place(static_cast<uint8_t*>(memory));
    std::memset(cache->state_, 0, sizeof(State));
    cache->state_->config = config;
    cache->state_->budget = budget;
    for (int s = 0; s < cache->streams(); s++) {
        cache->entering(s)[0] = static_cast<uint8_t>(config.k_bits);
        cache->entering(s)[1] = static_cast<uint8_t>(config.v_bits);
    }
    for (int slot = 0; config.probes && slot < kProbeSlots; slot++) cache->probes_[slot] = {-1, 0};
    if (config.probes)
        std::memset(cache->layer_facts_, 0, sizeof(LayerFacts) * static_cast<size_t>(config.layers));
    cache->pool_.clear();
    cache->note_peak();
    return cache;
}

Cache::~Cache() { std::free(arena_); }

void Cache::place(uint8_t* arena) {
    arena_ = arena;
    state_ = reinterpret_cast<State*>(arena);
    entering_ = arena + layout_.entering;
    columns_ = reinterpret_cast<Column*>(arena + layout_.columns);
    entries_ = reinterpret_cast<Entry*>(arena + layout_.entries);
    tail_positions_ = reinterpret_cast<int32_t*>(arena + layout_.tail_positions);
    tail_ = reinterpret_cast<uint16_t*>(arena + layout_.tail);
    probes_ = reinterpret_cast<Probe*>(arena + layout_.probes);
    probe_rows_ = reinterpret_cast<uint16_t*>(arena + layout_.probe_rows);
    layer_facts_ = reinterpret_cast<LayerFacts*>(arena + layout_.layer_facts);
    staging_positions_ = reinterpret_cast<int32_t*>(arena + layout_.staging_positions);
    staging_ = reinterpret_cast<uint16_t*>(arena + layout_.staging);
    rope_ = reinterpret_cast<float*>(arena + layout_.rope);
    partials_ = reinterpret_cast<float*>(arena + layout_.partials);
    pool_.place(&state_->pool, arena + layout_.pool, layout_.sizes.pool_bytes,
                layout_.sizes.constant_bytes, layout_.sizes.granule_bytes,
                reinterpret_cast<uint32_t*>(arena + layout_.constant_owner),
                reinterpret_cast<uint32_t*>(arena + layout_.granule_owner));
}

// A page closes when its 64 rows and the tail's newest stand behind the sinks, so which tokens are in
// pages depends on the number of tokens alone, never on how they arrived.
int Cache::closing_pages(int tokens) const {
    const int rows = state_->tail_used + tokens - config().sink_tokens - config().tail_tokens;
    return quantized(config()) ? std::max(0, rows) / kPageTokens : 0;
}

int Cache::missing(int tokens, int64_t& bytes, int32_t& columns) const {
    if (tokens < 0) return KVQ_BAD_ARGUMENT;
    const int pages = closing_pages(tokens);
    int64_t planes = 0;
    for (int s = 0; pages && s < streams(); s++)
        planes += granules(entering(s)[0]) + granules(entering(s)[1]);
    const int64_t needed = pages * (streams() * layout_.sizes.constant_bytes +
                                    planes * layout_.sizes.granule_bytes);
    bytes = std::max<int64_t>(0, pool_.used_bytes() + needed - layout_.sizes.pool_bytes);
    columns = std::max(0, state_->columns + pages - layout_.sizes.max_columns);
    return KVQ_OK;
}

int Cache::begin(int tokens) {
    if (state_->broken || state_->pending) return KVQ_BAD_STATE;
    if (tokens < 1 || tokens > config().chunk_tokens ||
        tokens > config().context_tokens - state_->tokens)
        return KVQ_BAD_ARGUMENT;
    int64_t bytes;
    int32_t columns;
    missing(tokens, bytes, columns);
    if (bytes || columns) return KVQ_SHORT;
    const bool staged = state_->tail_used + tokens > config().tail_rows;
    if (staged && !quantized(config())) return KVQ_SHORT;
    state_->pending = tokens;
    state_->closing = closing_pages(tokens);
    state_->staged = staged;
    state_->attended = 0;
    return KVQ_OK;
}

int Cache::abort() {
    // Staged chunks have already moved rows in the layers that saw them.
    if (state_->pending && state_->staged && state_->attended) state_->broken = 1;
    forget_pass();
    return KVQ_OK;
}

void Cache::forget_pass() { state_->pending = state_->closing = state_->attended = state_->staged = 0; }

bool Cache::closing_rows_consecutive(int rows, int pages) const {
    const int first = config().sink_tokens;
    for (int p = 0; p < pages; p++) {
        const int start = first + p * kPageTokens;
        if (start + kPageTokens > rows) return false;
        for (int i = 1; i < kPageTokens; i++)
            if (row_position(start + i) != row_position(start) + i) return false;
    }
    return true;
}

int Cache::commit(int tokens) {
    if (!state_->pending) return KVQ_BAD_STATE;
    if (tokens < 0 || tokens > state_->pending) return KVQ_BAD_ARGUMENT;
    if (state_->attended < config().layers && tokens > 0) return KVQ_BAD_STATE;
    if (state_->staged) {
        if (tokens != state_->pending) return KVQ_BAD_ARGUMENT;
        state_->tokens += tokens;
        close_columns(state_->closing, state_->tail_used + tokens);
    } else {
        state_->tail_used += tokens;
        const int pages = closing_pages(0);
        if (!closing_rows_consecutive(state_->tail_used, pages)) {
            state_->tail_used -= tokens;
            return KVQ_BAD_ARGUMENT;
        }
        state_->tokens += tokens;
        for (int layer = 0; pages && layer < config().layers; layer++) {
            if (const int status = close_layer(layer, pages, 0)) {
                state_->broken = 1;
                return status;
            }
        }
        close_columns(pages, state_->tail_used);
    }
    forget_pass();
    return KVQ_OK;
}

// Gives the closed pages their positions and the surviving rows theirs.
void Cache::close_columns(int pages, int rows) {
    const int sinks = config().sink_tokens;
    const int first_token = state_->tokens - (rows - sinks);
    for (int p = 0; p < pages; p++) {
        columns_[state_->columns++] = {row_position(sinks + p * kPageTokens), 0,
                                       first_token + p * kPageTokens, 0, ~uint64_t{0}};
    }
    const int left = rows - pages * kPageTokens;
    for (int row = 0; row < left; row++)
        tail_positions_[row] = row_position(row < sinks ? row : row + pages * kPageTokens);
    state_->tail_used = left;
}

// Packs a layer's oldest rows into `pages` pages and moves its remaining rows to the tail's start.
int Cache::close_layer(int layer, int pages, int staged) {
    const int sinks = config().sink_tokens, dim = config().head_dim;
    const int rows = state_->tail_used + staged;
    for (int head = 0; head < config().kv_heads; head++) {
        const int stream = layer * config().kv_heads + head;
        const auto row = [&](int side, int i) {
            return i < state_->tail_used
                       ? tail_rows(stream, side) + int64_t{i} * dim
                       : staging_rows(head, side) + int64_t{i - state_->tail_used} * dim;
        };
        for (int p = 0; p < pages; p++) {
            const uint16_t *k[kPageTokens], *v[kPageTokens];
            for (int i = 0; i < kPageTokens; i++) {
                k[i] = row(0, sinks + p * kPageTokens + i);
                v[i] = row(1, sinks + p * kPageTokens + i);
            }
            if (const int status = close_page(stream, state_->columns + p, k, v)) return status;
        }
        // A row's new place is never behind its old one, so ascending copies lose nothing.
        for (int side = 0; side < 2; side++) {
            for (int to = 0; to < rows - pages * kPageTokens; to++) {
                const int from = to < sinks ? to : to + pages * kPageTokens;
                uint16_t* target = tail_rows(stream, side) + int64_t{to} * dim;
                if (target != row(side, from)) std::memcpy(target, row(side, from), size_t{2} * dim);
            }
        }
    }
    return KVQ_OK;
}

int Cache::close_page(int stream, int column, const uint16_t* const* k, const uint16_t* const* v) {
    const int dim = config().head_dim;
    const Kernels& kernel = kernels();
    alignas(64) float x[kPageTokens * kMaxHeadDim];
    alignas(64) uint8_t planes[kPageTokens * kMaxHeadDim];
    uint16_t constants[2 * kMaxHeadDim];
    Entry& e = entry(stream, column);
    take(e, entering(stream)[0], entering(stream)[1]);
    uint8_t* stored = pool_.constant(e.constants);
    for (int i = 0; i < kPageTokens; i++) kernel.from_half(k[i], x + i * dim, dim);
    if (!kernel.pack_k(x, kPageTokens, dim, planes, constants)) return KVQ_NOT_FINITE;
    std::memcpy(stored, constants, k_constant_bytes(dim));
    write_side(e, 0, e.k_bits, planes);
    for (int i = 0; i < kPageTokens; i++) kernel.from_half(v[i], x + i * dim, dim);
    if (!kernel.pack_v(x, kPageTokens, dim, planes, constants)) return KVQ_NOT_FINITE;
    std::memcpy(stored + k_constant_bytes(dim), constants, v_constant_bytes());
    write_side(e, 1, e.v_bits, planes);
    return KVQ_OK;
}

void Cache::take(Entry& e, int k_bits, int v_bits) {
    const uint32_t index = static_cast<uint32_t>(&e - entries_);
    const auto moved = [this](int kind, uint32_t, uint32_t to, uint32_t owner) {
        move_item(kind, to, owner);
    };
    e = {};
    for (uint32_t& g : e.granule) g = kNone;
    e.constants = pool_.take_constant(index, moved);
    for (int side = 0; side < 2; side++) {
        for (int g = 0; g < granules(side ? v_bits : k_bits); g++) {
            const int slot = side * kGranulesPerSide + g;
            e.granule[slot] = pool_.take_granule(index * 8 + static_cast<uint32_t>(slot), moved);
        }
    }
    e.k_bits = static_cast<uint8_t>(k_bits);
    e.v_bits = static_cast<uint8_t>(v_bits);
    note_peak();
}

void Cache::move_item(int kind, uint32_t to, uint32_t owner) {
    if (kind == 0) entries_[owner].constants = to;
    else entries_[owner / 8].granule[owner % 8] = to;
}

void Cache::release(Entry& e) {
    if (!e.k_bits) return;
    for (uint32_t& g : e.granule) {
        if (g != kNone) pool_.give_granule(g);
        g = kNone;
    }
    pool_.give_constant(e.constants);
    e.constants = kNone;
    e.k_bits = e.v_bits = e.peak_mass = e.mean_mass = 0;
}

void Cache::write_side(Entry& e, int side, int bits, const uint8_t* planes) {
    const size_t bytes = granule_bytes(config().head_dim);
    uint32_t* granule = e.granule + side * kGranulesPerSide;
    if (bits == 2) {
        alignas(64) uint8_t plane[32 * kMaxHeadDim];
        std::memcpy(plane, planes, 2 * bytes);
        kvq_repack(plane, config().head_dim);
        std::memcpy(pool_.granule(granule[0]), plane, bytes);
        return;
    }
    for (int g = 0; g < granules(bits); g++)
        std::memcpy(pool_.granule(granule[g]), planes + static_cast<size_t>(g) * bytes, bytes);
}

// Drops planes of one side. 4 to 2 repacks the top bits of both granules into the first.
void Cache::lower_side(Entry& e, int side, int from, int to) {
    const size_t bytes = granule_bytes(config().head_dim);
    uint32_t* granule = e.granule + side * kGranulesPerSide;
    if (to == 2 && from > 2) {
        alignas(64) uint8_t plane[32 * kMaxHeadDim];
        std::memcpy(plane, pool_.granule(granule[0]), bytes);
        std::memcpy(plane + bytes, pool_.granule(granule[1]), bytes);
        kvq_repack(plane, config().head_dim);
        std::memcpy(pool_.granule(granule[0]), plane, bytes);
    }
    for (int g = granules(to); g < granules(from); g++) {
        pool_.give_granule(granule[g]);
        granule[g] = kNone;
    }
}

int Cache::demote(const kvq_action* actions, int count) {
    if (state_->pending) return KVQ_BAD_STATE;
    for (int i = 0; i < count; i++) {
        const kvq_action& a = actions[i];
        if (a.layer < 0 || a.layer >= config().layers || a.head < 0 ||
            a.head >= config().kv_heads || a.column < 0 || a.column > state_->columns)
            return KVQ_BAD_ARGUMENT;
        const int stream = a.layer * config().kv_heads + a.head;
        const bool held = a.column < state_->columns;
        const uint8_t* widths = held ? &entry(stream, a.column).k_bits : entering(stream);
        const bool evicts = held && a.k_bits == 0 && a.v_bits == 0;
        if (!evicts && (!valid_width(a.k_bits) || !valid_width(a.v_bits) || a.k_bits > widths[0] ||
                        a.v_bits > widths[1]))
            return KVQ_BAD_ARGUMENT;
    }
    for (int i = 0; i < count; i++) {
        const kvq_action& a = actions[i];
        const int stream = a.layer * config().kv_heads + a.head;
        if (a.column == state_->columns) {
            entering(stream)[0] = std::min(entering(stream)[0], static_cast<uint8_t>(a.k_bits));
            entering(stream)[1] = std::min(entering(stream)[1], static_cast<uint8_t>(a.v_bits));
            continue;
        }
        Entry& e = entry(stream, a.column);
        if (!a.k_bits) {
            release(e);
            continue;
        }
        if (a.k_bits > e.k_bits || a.v_bits > e.v_bits) continue;  // an earlier action went lower
        lower_side(e, 0, e.k_bits, a.k_bits);
        lower_side(e, 1, e.v_bits, a.v_bits);
        e.k_bits = static_cast<uint8_t>(a.k_bits);
        e.v_bits = static_cast<uint8_t>(a.v_bits);
    }
    for (int column = state_->columns - 1; column >= 0; column--) {
        bool alive = false;
        for (int s = 0; s < streams() && !alive; s++) alive = entry(s, column).k_bits != 0;
        if (!alive) drop_column(column);
    }
    return KVQ_OK;
}

void Cache::drop_column(int column) {
    const int after = state_->columns - column - 1;
    for (int s = 0; s < streams(); s++) {
        release(entry(s, column));
        if (after == 0) continue;
        std::memmove(&entry(s, column), &entry(s, column + 1), sizeof(Entry) * static_cast<size_t>(after));
    }
    std::memmove(columns_ + column, columns_ + column + 1, sizeof(Column) * static_cast<size_t>(after));
    state_->columns--;
    // Owners name entries by index: those behind the gap have moved down by one.
    uint32_t* constant_owner = reinterpret_cast<uint32_t*>(arena_ + layout_.constant_owner);
    uint32_t* granule_owner = reinterpret_cast<uint32_t*>(arena_ + layout_.granule_owner);
    for (int s = 0; s < streams(); s++) {
        for (int c = column; c < state_->columns; c++) {
            const Entry& e = entry(s, c);
            if (!e.k_bits) continue;
            const uint32_t index = static_cast<uint32_t>(&e - entries_);
            constant_owner[e.constants] = index;
            for (uint32_t g = 0; g < 8; g++)
                if (e.granule[g] != kNone) granule_owner[e.granule[g]] = index * 8 + g;
        }
    }
}

int Cache::trim(int tokens) {
    if (state_->pending || state_->broken) return KVQ_BAD_STATE;
    if (tokens < 0 || tokens > state_->tokens) return KVQ_BAD_ARGUMENT;
    const int sinks = std::min(state_->tail_used, config().sink_tokens);
    const int first_in_tail = state_->tokens - (state_->tail_used - sinks);
    if (tokens >= first_in_tail) {
        state_->tail_used -= state_->tokens - tokens;
    } else {
        state_->tail_used = std::min(tokens, sinks);
        while (state_->columns) {
            Column& last = columns_[state_->columns - 1];
            const int kept = tokens - last.first_token;
            if (kept > 0 && kept < kPageTokens) last.mask &= (uint64_t{1} << kept) - 1;
            if (kept > 0 && last.mask) break;
            drop_column(state_->columns - 1);
        }
    }
    state_->tokens = tokens;
    return KVQ_OK;
}

int Cache::shift(int column, int32_t delta) {
    if (state_->pending) return KVQ_BAD_STATE;
    if (column < 0 || column >= state_->columns) return KVQ_BAD_ARGUMENT;
    columns_[column].delta = delta;
    return KVQ_OK;
}

int Cache::mask(int column, uint64_t mask) {
    if (state_->pending) return KVQ_BAD_STATE;
    if (column < 0 || column >= state_->columns) return KVQ_BAD_ARGUMENT;
    columns_[column].mask = mask;
    return KVQ_OK;
}

void Cache::note_peak() {
    state_->peak = std::max(state_->peak, layout_.sizes.fixed_bytes + pool_.used_bytes());
}

void Cache::stats(kvq_stats& out) const {
    out = {};
    out.columns = state_->columns;
    out.tokens = state_->tokens;
    out.tail_rows = state_->tail_used;
    out.pending = state_->pending;
    out.used_bytes = layout_.sizes.fixed_bytes + pool_.used_bytes();
    out.peak_bytes = state_->peak;
    out.used_granules = state_->pool.granules.used;
    out.used_constants = state_->pool.constants.used;
    out.broken = state_->broken;
}

void Cache::columns(int64_t* facts, uint8_t* widths) const {
    for (int c = 0; c < state_->columns; c++) {
        facts[4 * c] = columns_[c].pos0;
        facts[4 * c + 1] = columns_[c].delta;
        facts[4 * c + 2] = columns_[c].first_token;
        std::memcpy(facts + 4 * c + 3, &columns_[c].mask, 8);
    }
    for (int s = 0; s < streams(); s++) {
        for (int c = 0; c < state_->columns; c++) {
            *widths++ = entry(s, c).k_bits;
            *widths++ = entry(s, c).v_bits;
        }
    }
}

void Cache::entering(uint8_t* widths) const {
    std::memcpy(widths, entering_, size_t{2} * static_cast<size_t>(streams()));
}

PageView Cache::page_view(const Entry& e, const Column& column) const {
    PageView page;
    for (int g = 0; g < granules(e.k_bits); g++) page.k[g] = pool_.granule(e.granule[g]);
    for (int g = 0; g < granules(e.v_bits); g++)
        page.v[g] = pool_.granule(e.granule[kGranulesPerSide + g]);
    const uint8_t* constants = pool_.constant(e.constants);
    page.k_constants = reinterpret_cast<const uint16_t*>(constants);
    page.v_constants =
        reinterpret_cast<const uint16_t*>(constants + k_constant_bytes(config().head_dim));
    page.k_bits = e.k_bits;
    page.v_bits = e.v_bits;
    page.position = int64_t{column.pos0} + column.delta;
    page.mask = column.mask;
    return page;
}

int64_t Cache::page(int layer, int head, int column, uint8_t* bytes) const {
    if (layer < 0 || layer >= config().layers || head < 0 || head >= config().kv_heads ||
        column < 0 || column >= state_->columns)
        return -1;
    const Entry& e = entry(layer * config().kv_heads + head, column);
    if (!e.k_bits) return 0;
    uint8_t* at = bytes;
    const size_t constants = k_constant_bytes(config().head_dim) + v_constant_bytes();
    std::memcpy(at, pool_.constant(e.constants), constants);
    at += constants;
    for (uint32_t g : e.granule) {
        if (g == kNone) continue;
        std::memcpy(at, pool_.granule(g), granule_bytes(config().head_dim));
        at += granule_bytes(config().head_dim);
    }
    return at - bytes;
}

int Cache::tail(int layer, int head, uint16_t* k, uint16_t* v, int32_t* positions) const {
    if (layer < 0 || layer >= config().layers || head < 0 || head >= config().kv_heads)
        return KVQ_BAD_ARGUMENT;
    const size_t bytes = size_t{2} * static_cast<size_t>(state_->tail_used) * config().head_dim;
    const int stream = layer * config().kv_heads + head;
    std::memcpy(k, tail_rows(stream, 0), bytes);
    std::memcpy(v, tail_rows(stream, 1), bytes);
    std::memcpy(positions, tail_positions_, size_t{4} * static_cast<size_t>(state_->tail_used));
    return KVQ_OK;
}

}  // namespace kvq
