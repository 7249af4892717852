// Saving a cache to bytes and back.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cache.h"

namespace kvq {

// A snapshot: this header, the states of the convolutions and of the delta nets, the streams' forms, the widths pages enter at, the columns, widths and history of every
// entry, the tail's rows in use, the probes, every page's bytes, then the convolutions' rows and what delta nets remember. It names no place in the
// arena, so what is held alone decides its bytes.
namespace {
struct Header {
    kvq_config config;
    int32_t columns, tail_used, tokens, views;
    int64_t budget, peak;
};
static_assert(sizeof(Header) == 144, "no padding may reach a file");
// Widths and history of an entry lie side by side.
constexpr int64_t kEntryBytes = 4;
static_assert(offsetof(Entry, mean_mass) == offsetof(Entry, k_bits) + 3);
}  // namespace

// Calls part(address, bytes) on the tail's rows in use, the probes and every page, in the file's
// order.
template <class Part>
void Cache::visit(Part&& part) const {
    for (int32_t* places : {arena_.tail_positions, arena_.tail_deltas, arena_.tail_tokens})
        part(places, int64_t{4} * tail_.used());
    for (int s = 0; s < arena_.streams(); s++)
        for (int side = 0; side < 2; side++)
            part(tail_.rows(s, side), int64_t{2} * tail_.used() * config().head_dim);
    if (probes_.kept()) {
        part(arena_.probes, static_cast<int64_t>(sizeof(Probe)) * probes_.records());
        part(arena_.probe_rows, probes_.row_bytes());
        part(arena_.layers, probes_.facts_of_all());
    }
    for (int s = 0; s < arena_.streams(); s++)
        for (int c = 0; c < pages_.columns(); c++)
            if (pages_.entry(s, c).k_bits) pages_.visit(pages_.entry(s, c), part);
    conv_.visit(part);
    delta_.visit(part);
}

int64_t Cache::state_bytes() const {
    int64_t bytes = sizeof(Header) + conv_.state_bytes() + delta_.state_bytes() + 3 * arena_.streams() +
                    pages_.views() * static_cast<int64_t>(sizeof(View)) +
                    kEntryBytes * arena_.streams() * pages_.columns();
    visit([&](const void*, int64_t count) { bytes += count; });
    return bytes;
}

int Cache::save(uint8_t* bytes, int64_t count) const {
    if (tail_.open() || state().broken) return KVQ_BAD_STATE;
    if (count != state_bytes()) return KVQ_BAD_ARGUMENT;
    fetch();
    const auto write = [&](const void* from, int64_t part) {
        std::memcpy(bytes, from, static_cast<size_t>(part));
        bytes += part;
    };
    const Header header{config(), pages_.columns(), tail_.used(), state().tokens,
                        pages_.views(), state().budget,   state().peak};
    write(&header, sizeof header);
    write(arena_.conv_state, conv_.state_bytes());
    write(arena_.delta_state, delta_.state_bytes());
    write(arena_.forms, arena_.streams());
    write(arena_.entering, 2 * arena_.streams());
    write(arena_.views, pages_.views() * static_cast<int64_t>(sizeof(View)));
    for (int s = 0; s < arena_.streams(); s++)
        for (int c = 0; c < pages_.columns(); c++) write(&pages_.entry(s, c).k_bits, kEntryBytes);
    visit(write);
    return KVQ_OK;
}

// Where the parts of a snapshot lie and what its pages take, once everything it says has been
// checked.
struct Cache::Parts {
    Header header;
    const uint8_t *conv, *delta, *entering, *views, *entries, *rest;
    int64_t pages = 0, planes = 0;
};

bool Cache::read_header(const uint8_t* bytes, int64_t count, Parts& parts) const {
    Header& h = parts.header;
    if (count < static_cast<int64_t>(sizeof h)) return false;
    std::memcpy(&h, bytes, sizeof h);
    h.config.splits = config().splits;  // how work is shared out is no part of the contents
    const int most_rows = quantized(config())
                              ? config().sink_tokens + config().tail_tokens + kPageTokens - 1
                              : config().tail_rows;
    if (std::memcmp(&h.config, &config(), sizeof(kvq_config)) || h.budget != state().budget ||
        h.columns < 0 || h.columns > arena_.sizes.max_columns || h.tail_used < 0 ||
        h.tail_used > most_rows || h.tokens < h.tail_used || h.tokens > config().context_tokens ||
        h.peak < 0 || h.peak > h.budget || h.views < h.columns || h.views > arena_.most_views())
        return false;
    const int64_t entries = int64_t{h.columns} * arena_.streams();
    parts.conv = bytes + sizeof h;
    parts.delta = parts.conv + conv_.state_bytes();
    const uint8_t* forms = parts.delta + delta_.state_bytes();
    parts.entering = forms + arena_.streams();
    parts.views = parts.entering + 2 * arena_.streams();
    parts.entries = parts.views + h.views * static_cast<int64_t>(sizeof(View));
    parts.rest = parts.entries + kEntryBytes * entries;
    return parts.rest - bytes + int64_t{12} * h.tail_used <= count &&
           (!conv_.any() || conv_.fits(parts.conv, h.tokens)) &&
           (!delta_.any() || delta_.fits(parts.delta, h.tokens)) &&
           !std::memcmp(forms, arena_.forms, static_cast<size_t>(arena_.streams()));
}

bool Cache::check_table(Parts& parts) const {
    const auto is_position = [](int64_t at) { return at >= 0 && at <= kMaxPosition; };
    for (int i = 0; quantized(config()) && i < 2 * arena_.streams(); i++)
        if (!valid_width(parts.entering[i]) ||
            parts.entering[i] > (i % 2 ? config().v_bits : config().k_bits))
            return false;
    if (!check_views(parts)) return false;
    for (int64_t i = 0; i < int64_t{parts.header.columns} * arena_.streams(); i++) {
        const int k_bits = parts.entries[kEntryBytes * i],
                  v_bits = parts.entries[kEntryBytes * i + 1];
        if (k_bits == 0 && v_bits == 0) continue;
        if (!valid_width(k_bits) || !valid_width(v_bits)) return false;
        parts.pages++;
        parts.planes += granules(k_bits) + granules(v_bits);
    }
    const int rows = parts.header.tail_used;
    for (int row = 0; row < rows; row++) {
        int32_t at, delta, token;
        std::memcpy(&at, parts.rest + 4 * row, 4);
        std::memcpy(&delta, parts.rest + 4 * (rows + row), 4);
        std::memcpy(&token, parts.rest + 4 * (2 * rows + row), 4);
        if (!is_position(at) || !is_position(int64_t{at} - delta) || token < 0 ||
            token >= parts.header.tokens)
            return false;
    }
    return true;
}

// Views come in their columns' order, at least one of each, and no two show the same slot.
bool Cache::check_views(const Parts& parts) const {
    int column = -1;
    uint64_t shown = 0;
    for (int i = 0; i < parts.header.views; i++) {
        View view;
        std::memcpy(&view, parts.views + i * sizeof view, sizeof view);
        if (view.column != column) shown = 0, column++;
        const int low = view.mask ? __builtin_ctzll(view.mask) : 0;
        const int high = view.mask ? 63 - __builtin_clzll(view.mask) : 0;
        const int64_t token = view.first_token, start = int64_t{view.pos0} + view.delta;
        if (view.column != column || (view.mask & shown) || token + low < 0 ||
            token + high >= parts.header.tokens || start + low < 0 || start + high > kMaxPosition)
            return false;
        shown |= view.mask;
    }
    return column == parts.header.columns - 1;
}

// Bytes behind the entries: rows, probes, pages.
int64_t Cache::rest_bytes(const Parts& parts) const {
    const int64_t rows =
        parts.header.tail_used * (12 + int64_t{4} * arena_.streams() * config().head_dim);
    const int64_t probes = probes_.kept()
                               ? static_cast<int64_t>(sizeof(Probe)) * probes_.records() +
                                     probes_.row_bytes() + probes_.facts_of_all()
                               : 0;
    return rows + probes + page_bytes(parts) + conv_bytes(parts) + delta_bytes(parts);
}

// Bytes of what delta nets remember, which comes last.
int64_t Cache::delta_bytes(const Parts& parts) const {
    return delta_.any() ? delta_.bytes_of(parts.delta) : 0;
}

// Bytes of the convolutions' rows, which come before.
int64_t Cache::conv_bytes(const Parts& parts) const {
    if (!conv_.any()) return 0;
    ConvState saved;
    std::memcpy(&saved, parts.conv, sizeof saved);
    return conv_.bytes_of_rows(saved);
}

// Whether rows and the constants of pages are numbers: none that is not finite is ever stored.
bool Cache::check_numbers(const Parts& parts) const {
    const auto finite = [](const uint8_t* halves, int64_t count) {
        bool all = true;
        for (int64_t i = 0; i < count; i++) {
            uint16_t half;
            std::memcpy(&half, halves + 2 * i, 2);
            all &= (half & 0x7c00) != 0x7c00;
        }
        return all;
    };
    const int64_t rows = parts.header.tail_used;
    if (!finite(parts.rest + 12 * rows, 2 * rows * arena_.streams() * config().head_dim))
        return false;
    const int64_t floats = conv_bytes(parts) + delta_bytes(parts);
    const uint8_t* others = parts.rest + rest_bytes(parts) - floats;
    for (const uint8_t* at = others; at < others + floats; at += sizeof(float)) {
        float number;
        std::memcpy(&number, at, sizeof number);
        if (!std::isfinite(number)) return false;
    }
    const uint8_t* page = others - page_bytes(parts);
    const int64_t second = static_cast<int64_t>(grid_bytes(config().head_dim));
    const int64_t entries = int64_t{parts.header.columns} * arena_.streams();
    for (const uint8_t* entry = parts.entries; entry < parts.entries + kEntryBytes * entries;
         entry += kEntryBytes) {
        if (!entry[0]) continue;
        if (!finite(page, 4) || !finite(page + second, 4)) return false;
        page += arena_.sizes.constant_bytes +
                (granules(entry[0]) + granules(entry[1])) * arena_.sizes.granule_bytes;
    }
    return true;
}

int64_t Cache::page_bytes(const Parts& parts) const {
    return parts.pages * arena_.sizes.constant_bytes + parts.planes * arena_.sizes.granule_bytes;
}

int Cache::load(const uint8_t* bytes, int64_t count) {
    Parts parts;
    if (!read_header(bytes, count, parts) || !check_table(parts) ||
        count != parts.rest - bytes + rest_bytes(parts) ||
        page_bytes(parts) > arena_.sizes.pool_bytes || !check_numbers(parts))
        return KVQ_BAD_ARGUMENT;
    pages_.clear();
    tail_.forget();
    std::copy(parts.entering, parts.views, arena_.entering);
    std::memcpy(arena_.views, parts.views, static_cast<size_t>(parts.entries - parts.views));
    state().views = parts.header.views;
    state().columns = parts.header.columns;
    state().tail_used = parts.header.tail_used;
    state().tokens = parts.header.tokens;
    state().broken = 0;
    std::memcpy(static_cast<void*>(arena_.conv_state), parts.conv,
                static_cast<size_t>(conv_.state_bytes()));
    std::memcpy(static_cast<void*>(arena_.delta_state), parts.delta,
                static_cast<size_t>(delta_.state_bytes()));
    const uint8_t* entry = parts.entries;
    for (int s = 0; s < arena_.streams(); s++)
        for (int c = 0; c < parts.header.columns; c++, entry += kEntryBytes)
            pages_.restore(s, c, entry);
    visit([&](void* to, int64_t part) {
        std::memcpy(to, parts.rest, static_cast<size_t>(part));
        parts.rest += part;
    });
    delta_.loaded();
    if (twin_) twin_->send(pages_);
    probes_.check();  // a damaged file must not make later evidence read beyond the arena
    state().peak = std::max(parts.header.peak, pages_.used_bytes());
    return KVQ_OK;
}

}  // namespace kvq
