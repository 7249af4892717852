#include "tail.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "twin.h"

namespace kvq {

// A page closes when its 64 rows and the tail's stand behind the sinks: 64 rows of the first
// tokens, so that the text's end stays in floating point, and what is encoded again in its middle
// does not.
int Tail::closing_pages(int tokens) const {
    const int rows = used() + tokens - config().sink_tokens - config().tail_tokens;
    return quantized(config()) ? std::max(0, rows) / kPageTokens : 0;
}

uint64_t Tail::sees(int row, int from) const {
    const auto from_bit = [](uint64_t word, int bit) {
        if (bit >= 64 || bit <= -64) return uint64_t{0};
        return bit >= 0 ? word >> bit : word << -bit;
    };
    if (!branch().chain) {
        const uint64_t* sees = arena_.branch[row].sees;
        return from_bit(sees[0], from) | from_bit(sees[1], from - 64);
    }
    const uint64_t bits = low_bits(row - from + 1);  // of a chain: all rows up to this one
    return from >= 0 ? bits : bits & from_bit(~uint64_t{0}, from);
}

bool Tail::newest_of_depth(int row) const {
    for (int later = row + 1; later < branch().rows; later++)
        if (depth(later) == depth(row)) return false;
    return true;
}

int Tail::add(int tokens, const int32_t* parents, bool staged, bool hi_view, int at) {
    BranchState& b = arena_.state->branch;
    for (int i = 0; parents && i < tokens; i++)
        if (parents[i] < -1 || parents[i] >= b.rows + i) return KVQ_BAD_ARGUMENT;
    bool chain = b.chain || !b.rows;
    // Of a chunk, too: it may be rewound to so many rows, and these become a tree.
    for (int i = 0; i < tokens && b.rows + i < config().draft_tokens; i++) {
        const int row = b.rows + i, parent = parents ? parents[i] : row - 1;
        BranchRow& added = arena_.branch[row];
        added = {parent, 0, {0, 0}};
        if (parent >= 0)
            added = {parent,
                     arena_.branch[parent].depth + 1,
                     {arena_.branch[parent].sees[0], arena_.branch[parent].sees[1]}};
        added.sees[row / 64] |= uint64_t{1} << row % 64;
        chain &= parent == row - 1;
    }
    if (!b.rows) b.at = at < 0 ? arena_.state->tokens : at, b.in_gap = at >= 0;
    b = {b.rows + tokens, tokens, 0, staged, chain, hi_view, b.in_gap, b.at, 0};
    return KVQ_OK;
}

void Tail::keep_branch_rows(int rows) {
    BranchState& b = arena_.state->branch;
    if (rows == 0) return forget();
    if (rows == b.rows) return;
    bool chain = true;
    for (int row = 0; !b.chain && row < rows; row++) chain &= arena_.branch[row].parent == row - 1;
    b = {rows, 0, config().layers, 0, chain, 0, b.in_gap, b.at,
         config().conv_layers + config().delta_layers};
}

bool Tail::is_path(const int32_t* rows, int count) const {
    for (int i = 0; i < count; i++) {
        const int row = rows ? rows[i] : i, before = i == 0 ? -1 : rows ? rows[i - 1] : i - 1;
        if (row < 0 || row >= branch().rows) return false;
        if ((branch().chain ? row - 1 : arena_.branch[row].parent) != before) return false;
    }
    return true;
}

int Tail::stretches(const int32_t* rows, int count, int start, int stop, int by) const {
    int found = 0;
    Place last{};
    for (int row = config().sink_tokens; row < used() + count; row++) {
        Place place = place_of(row < used() || !rows ? row : used() + rows[row - used()]);
        if (place.token >= start && place.token < stop) continue;
        if (place.token >= stop) place.token += by, place.position += by, place.delta += by;
        found += !found || place.token != last.token + 1 || place.position != last.position + 1 ||
                 place.delta != last.delta;
        last = place;
    }
    return found;
}

// A row's new place is never behind its old one, so ascending copies lose nothing.
void Tail::keep_rows(int first, const int32_t* rows, int count) const {
    if (count == 0 || rows[count - 1] == count - 1) return;  // they rise: all stay where they are
    if (arena_.twin) return arena_.twin->keep_rows(first, rows, count);
    const int64_t dim = config().head_dim;
    for (int s = 0; s < 2 * arena_.streams(); s++) {
        uint16_t* start = this->rows(s / 2, s % 2) + first * dim;
        for (int i = 0; i < count; i++)
            if (rows[i] != i)
                std::memcpy(start + i * dim, start + rows[i] * dim, size_t{2} * config().head_dim);
    }
}

void Tail::keep(const int32_t* rows, int count) {
    if (rows) keep_rows(used(), rows, count);
    for (int i = 0; i < count; i++) put(used() + i, place_of(used() + (rows ? rows[i] : i)));
    arena_.state->tail_used += count;
    forget();
}

Tail::Closing Tail::closing(int pages, int rows) const {
    Closing found;
    found.staying.resize(static_cast<size_t>(rows));
    std::iota(found.staying.begin(), found.staying.end(), 0);
    const auto first = found.staying.begin() + std::min(rows, config().sink_tokens);
    const auto end = first + int64_t{pages} * kPageTokens;
    const auto before = [&](int a, int b) { return place_of(a).token < place_of(b).token; };
    if (pages && !std::is_sorted(first, found.staying.end(), before)) {
        std::sort(first, found.staying.end(), before);
        std::sort(end, found.staying.end());
    }
    found.rows.assign(first, end);
    found.staying.erase(first, end);
    return found;
}

int Tail::close_layer(PageTable& pages, int layer, int count) const {
    const int dim = config().head_dim;
    const Closing closed = closing(count, used() + (branch().staged ? branch().rows : 0));
    if (arena_.twin) return arena_.twin->close_layer(pages, *this, layer, closed);
    for (int head = 0; head < config().kv_heads; head++) {
        const int stream = layer * config().kv_heads + head;
        const auto row = [&](int side, int i) {
            return i < used() ? rows(stream, side) + int64_t{i} * dim
                              : staging(head, side) + int64_t{i - used()} * dim;
        };
        for (int p = 0; p < count; p++) {
            const uint16_t *k[kPageTokens], *v[kPageTokens];
            for (int i = 0; i < kPageTokens; i++) {
                k[i] = row(0, closed.rows[p * kPageTokens + i]);
                v[i] = row(1, closed.rows[p * kPageTokens + i]);
            }
            if (const int status = pages.close(stream, pages.columns() + p, k, v)) return status;
        }
        // As in `keep_rows`, ascending copies lose nothing.
        for (int side = 0; side < 2; side++) {
            uint16_t* target = rows(stream, side);
            for (const int from : closed.staying) {
                if (target != row(side, from))
                    std::memcpy(target, row(side, from), size_t{2} * dim);
                target += dim;
            }
        }
    }
    return KVQ_OK;
}

void Tail::close_columns(PageTable& pages, int count, int rows) {
    const Closing closed = closing(count, rows);
    for (int p = 0; p < count; p++) {
        int32_t positions[kPageTokens], deltas[kPageTokens], tokens[kPageTokens];
        for (int i = 0; i < kPageTokens; i++) {
            const Place place = place_of(closed.rows[p * kPageTokens + i]);
            positions[i] = place.position, deltas[i] = place.delta, tokens[i] = place.token;
        }
        pages.append(positions, deltas, tokens);
    }
    int row = 0;
    for (const int from : closed.staying) put(row++, place_of(from));
    arena_.state->tail_used = row;
}

void Tail::split(int start, int stop, int by) {
    std::vector<int32_t> kept;
    for (int row = 0; row < used(); row++)
        if (!(arena_.tail_tokens[row] >= start && arena_.tail_tokens[row] < stop))
            kept.push_back(row);
    keep_rows(0, kept.data(), static_cast<int>(kept.size()));
    int to = 0;
    for (const int from : kept) {
        Place place = place_of(from);
        if (place.token >= stop) place.token += by, place.position += by, place.delta += by;
        put(to++, place);
    }
    arena_.state->tail_used = to;
}

int Tail::shift_sinks(int32_t delta) const {
    const int sinks = std::min(used(), config().sink_tokens);
    for (int row = 0; row < sinks; row++) {
        const Place at = place_of(row);
        const int64_t position = int64_t{at.position} - at.delta + delta;
        if (position < 0 || position > kMaxPosition) return KVQ_BAD_ARGUMENT;
    }
    for (int row = 0; row < sinks; row++) {
        const Place at = place_of(row);
        put(row, {at.position - at.delta + delta, delta, at.token});
    }
    return KVQ_OK;
}

bool Tail::holds(int start, int stop) const {
    return std::any_of(arena_.tail_tokens, arena_.tail_tokens + used(),
                       [&](int32_t token) { return token >= start && token < stop; });
}

}  // namespace kvq
