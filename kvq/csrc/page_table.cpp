#include "page_table.h"

#include <algorithm>
#include <cstring>

#include "platform.h"
#include "rotary.h"
#include "twin.h"

namespace kvq {

void PageTable::place() {
    pool_.place(&arena_.state->pool, arena_.pool, arena_.sizes.pool_bytes,
                arena_.sizes.constant_bytes, arena_.sizes.granule_bytes, arena_.constant_owners,
                arena_.granule_owners);
}

void PageTable::clear() {
    pool_.clear();
    arena_.state->columns = arena_.state->views = 0;
    for (int s = 0; s < arena_.streams(); s++) {
        arena_.entering[2 * s] = static_cast<uint8_t>(arena_.config().k_bits);
        arena_.entering[2 * s + 1] = static_cast<uint8_t>(arena_.config().v_bits);
    }
}

void PageTable::missing(int pages, int64_t& bytes, int32_t& columns) const {
    int64_t planes = 0;
    for (int s = 0; pages && s < arena_.streams(); s++)
        planes += granules(entering(s)[0]) + granules(entering(s)[1]);
    const int64_t needed = pages * (arena_.streams() * arena_.sizes.constant_bytes +
                                    planes * arena_.sizes.granule_bytes);
    bytes = std::max<int64_t>(0, pool_.used_bytes() + needed - arena_.sizes.pool_bytes);
    columns = std::max(0, this->columns() + pages - arena_.sizes.max_columns);
}

void PageTable::expect(const Entry& e) const {
    const uint8_t* file = arena_.end() - arena_.file_bytes;
    const auto read_ahead = [&](uint32_t first, uint32_t last) {  // the last granule lies lowest
        const uint8_t *begin = pool_.granule(last),
                      *end = pool_.granule(first) + arena_.sizes.granule_bytes;
        if (end > file)
            platform::read_ahead(reinterpret_cast<uintptr_t>(std::max(begin, file)),
                                 reinterpret_cast<uintptr_t>(end));
    };
    uint32_t first = kNone, last = 0, count = 0;
    for (const uint32_t g : e.granule)
        if (g != kNone) first = std::min(first, g), last = std::max(last, g), count++;
    // They are neighbours, unless an edit or a rollback left places here and there.
    if (count && last - first + 1 == count) return read_ahead(first, last);
    for (const uint32_t g : e.granule)
        if (g != kNone) read_ahead(g, g);
}

const Entry& PageTable::enter(int stream, int column) {
    Entry& e = entry_at(stream, column);
    take(e, entering(stream)[0], entering(stream)[1]);
    return e;
}

int PageTable::close(int stream, int column, const uint16_t* const* k, const uint16_t* const* v) {
    const Kernels& kernel = kernels();
    alignas(64) float x[kPageTokens * kMaxHeadDim];
    alignas(64) uint8_t planes[kPageTokens * kMaxHeadDim];
    Entry& e = entry_at(stream, column);
    enter(stream, column);
    uint8_t* stored = pool_.constant(e.constants);
    // Not every form fills the room for its grids.
    std::memset(stored, 0, static_cast<size_t>(arena_.sizes.constant_bytes));
    for (int i = 0; i < kPageTokens; i++) kernel.from_half(k[i], x + i * dim(), dim());
    if (form(stream) & kRotatedKeys) hadamard(x, kPageTokens, dim());
    if (!kernel.pack(x, dim(), false, true, e.k_bits, feedback(stream), planes, stored))
        return KVQ_NOT_FINITE;
    write_side(e, 0, e.k_bits, planes);
    for (int i = 0; i < kPageTokens; i++) kernel.from_half(v[i], x + i * dim(), dim());
    if (!kernel.pack(x, dim(), true, form(stream) & kChannelValues, e.v_bits, nullptr, planes,
                     stored + grid_bytes(dim())))
        return KVQ_NOT_FINITE;
    write_side(e, 1, e.v_bits, planes);
    return KVQ_OK;
}

int PageTable::first_view(int column) const {
    const View* begin = arena_.views;
    const auto before = [](const View& view, int wanted) { return view.column < wanted; };
    return static_cast<int>(std::lower_bound(begin, begin + views(), column, before) - begin);
}

namespace {

// Adds the slots of `view` to the one of `out` at the same place, or as a new one; the new count.
int join(View* out, int count, const View& view) {
    const auto same = [&](const View& other) {
        return other.pos0 == view.pos0 && other.delta == view.delta &&
               other.first_token == view.first_token;
    };
    View* found = std::find_if(out, out + count, same);
    if (found == out + count) *found = view;
    else found->mask |= view.mask;
    return std::max(count, static_cast<int>(found - out) + 1);
}

}  // namespace

void PageTable::append(const int32_t* positions, const int32_t* deltas, const int32_t* tokens) {
    View* views = arena_.views + this->views();
    int count = 0;
    for (int i = 0; i < kPageTokens; i++)
        count = join(views, count,
                     {columns(), positions[i] - deltas[i] - i, deltas[i], tokens[i] - i,
                      uint64_t{1} << i});
    arena_.state->views += count;
    arena_.state->columns++;
}

// The views of one column after an edit, at most 64 in `out`; slots of a page are no more.
int PageTable::split_column(int first, int last, int start, int stop, int by, View* out) const {
    int count = 0;
    for (int i = first; i < last; i++) {
        View before = view_at(i), behind = before;
        const int64_t token = before.first_token;
        before.mask &= low_bits(start - token);
        behind.mask &= ~low_bits(stop - token);
        if (before.mask) count = join(out, count, before);
        if (!behind.mask) continue;
        behind.delta += by, behind.first_token += by;
        count = join(out, count, behind);
    }
    return count;
}

int PageTable::views_while_split(int start, int stop, int by) const {
    View split[kPageTokens];
    int count = 0;
    for (int first = 0, last = 0; first < views(); first = last) {
        for (last = first; last < views() && view_at(last).column == view_at(first).column;) last++;
        count += std::max(last - first, split_column(first, last, start, stop, by, split));
    }
    return count;
}

void PageTable::split(int start, int stop, int by) {
    View split[kPageTokens];
    // From the last column to the first, so that a column that grows moves what is done already.
    for (int last = views(), first = last; last > 0; last = first) {
        for (first = last; first > 0 && view_at(first - 1).column == view_at(last - 1).column;)
            first--;
        const int count = split_column(first, last, start, stop, by, split);
        std::memmove(arena_.views + first + count, arena_.views + last,
                     sizeof(View) * static_cast<size_t>(views() - last));
        std::copy(split, split + count, arena_.views + first);
        arena_.state->views += count - (last - first);
    }
}

bool PageTable::shows(int start, int stop) const {
    return std::any_of(arena_.views, arena_.views + views(), [&](const View& view) {
        const int64_t token = view.first_token;
        return (view.mask & low_bits(stop - token) & ~low_bits(start - token)) != 0;
    });
}

void PageTable::drop_unseen() {
    for (int c = columns() - 1; c >= 0; c--)
        if (first_view(c) == first_view(c + 1)) drop_column(c);
}

void PageTable::take(Entry& e, int k_bits, int v_bits) {
    const uint32_t index = static_cast<uint32_t>(&e - arena_.entries);
    const auto moved = [this](int kind, uint32_t from, uint32_t to, uint32_t owner) {
        move_item(kind, from, to, owner);
    };
    changed();
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
    arena_.state->peak = std::max(arena_.state->peak, used_bytes());
}

// What the device was told of entries holds no more.
void PageTable::changed() const {
    if (arena_.twin) arena_.twin->entries_changed();
}

void PageTable::move_item(int kind, uint32_t from, uint32_t to, uint32_t owner) {
    arena_.move(pool_.address(kind, to), pool_.address(kind, from), pool_.slot_bytes(kind));
    if (kind == 0) arena_.entries[owner].constants = to;
    else arena_.entries[owner / 8].granule[owner % 8] = to;
}

void PageTable::release(Entry& e) {
    if (!e.k_bits) return;
    changed();
    for (uint32_t& g : e.granule) {
        if (g != kNone) pool_.give_granule(g);
        g = kNone;
    }
    pool_.give_constant(e.constants);
    e.constants = kNone;
    e.k_bits = e.v_bits = e.peak_weight = e.mean_mass = 0;
}

// Stores one side of a page from its hi4 and lo4 planes, of which 6 and 2 bits change one.
void PageTable::write_side(Entry& e, int side, int bits, uint8_t* planes) {
    const size_t bytes = granule_bytes(dim());
    if (halves_plane(bits)) kernels().narrow(planes + halved(bits) * bytes, dim());
    for (int g = 0; g < granules(bits); g++)
        std::memcpy(pool_.granule(e.granule[side * kGranulesPerSide + g]),
                    planes + static_cast<size_t>(g) * bytes, bytes);
}

// Drops planes of one side; of the one that is halved both granules go into the first.
// Keys that have feedback are rounded anew.
void PageTable::lower_side(Entry& e, int side, int from, int to, const float* feedback) {
    const size_t bytes = granule_bytes(dim());
    uint32_t* granule = e.granule + side * kGranulesPerSide;
    if (from > to) changed();
    if (feedback && from > to && arena_.twin) {
        kvq_cuda_keys keys{};
        for (int g = 0; g < granules(from); g++) keys.granules[g] = pool_.granule(granule[g]);
        keys.grid = constants(e), keys.feedback = feedback, keys.from = from, keys.to = to;
        arena_.twin->narrow_keys(keys);
    } else if (feedback && from > to) {
        alignas(64) uint8_t planes[kPageTokens * kMaxHeadDim];
        for (int g = 0; g < granules(from); g++)
            std::memcpy(planes + g * bytes, pool_.granule(granule[g]), bytes);
        kernels().narrow_keys(planes, dim(), from, to, constants(e), feedback);
        write_side(e, side, to, planes);
    } else if (halves_plane(to) && from > to && arena_.twin) {
        const uint32_t* of = granule + halved(to);
        arena_.twin->narrow(pool_.granule(of[0]), pool_.granule(of[1]));
    } else if (halves_plane(to) && from > to) {
        alignas(64) uint8_t plane[32 * kMaxHeadDim];
        const uint32_t* of = granule + halved(to);
        for (int i = 0; i < 2; i++) std::memcpy(plane + i * bytes, pool_.granule(of[i]), bytes);
        kernels().narrow(plane, dim());
        std::memcpy(pool_.granule(of[0]), plane, bytes);
    }
    for (int g = granules(to); g < granules(from); g++) {
        pool_.give_granule(granule[g]);
        granule[g] = kNone;
    }
}

bool PageTable::may_lower(const kvq_action& a) const {
    const kvq_config& c = arena_.config();
    if (a.layer < 0 || a.layer >= c.layers || a.head < 0 || a.head >= c.kv_heads || a.column < 0 ||
        a.column >= columns())
        return false;
    if (a.k_bits == 0 && a.v_bits == 0) return true;
    const Entry& e = entry(a.layer * c.kv_heads + a.head, a.column);
    return valid_width(a.k_bits) && valid_width(a.v_bits) && a.k_bits <= e.k_bits &&
           a.v_bits <= e.v_bits;
}

int PageTable::demote(const kvq_action* actions, int count) {
    for (int i = 0; i < count; i++)
        if (!may_lower(actions[i])) return KVQ_BAD_ARGUMENT;
    for (int i = 0; i < count; i++) {
        const kvq_action& a = actions[i];
        const int stream = a.layer * arena_.config().kv_heads + a.head;
        Entry& e = entry_at(stream, a.column);
        if (!a.k_bits) {
            release(e);
            continue;
        }
        if (a.k_bits > e.k_bits || a.v_bits > e.v_bits) continue;  // an earlier action went lower
        lower_side(e, 0, e.k_bits, a.k_bits, feedback(stream));
        lower_side(e, 1, e.v_bits, a.v_bits, nullptr);
        e.k_bits = static_cast<uint8_t>(a.k_bits);
        e.v_bits = static_cast<uint8_t>(a.v_bits);
    }
    if (arena_.twin) arena_.twin->narrow_all();
    for (int c = columns() - 1; c >= 0; c--) {
        bool alive = false;
        for (int s = 0; s < arena_.streams() && !alive; s++) alive = entry(s, c).k_bits != 0;
        if (!alive) drop_column(c);
    }
    return KVQ_OK;
}

int PageTable::demote_entering(const uint8_t* widths) {
    const int count = 2 * arena_.streams();
    for (int i = 0; i < count; i++)
        if (!valid_width(widths[i]) || widths[i] > arena_.entering[i]) return KVQ_BAD_ARGUMENT;
    std::copy(widths, widths + count, arena_.entering);
    return KVQ_OK;
}

void PageTable::drop_column(int column) {
    changed();
    if (arena_.twin) arena_.twin->column_dropped(column);
    const size_t after = static_cast<size_t>(columns() - column - 1);
    for (int s = 0; s < arena_.streams(); s++) {
        release(entry_at(s, column));
        if (after)
            std::memmove(&entry_at(s, column), &entry_at(s, column + 1), sizeof(Entry) * after);
    }
    const int first = first_view(column), last = first_view(column + 1);
    std::memmove(arena_.views + first, arena_.views + last,
                 sizeof(View) * static_cast<size_t>(views() - last));
    arena_.state->views -= last - first;
    for (int i = first; i < views(); i++) arena_.views[i].column--;
    arena_.state->columns--;
    // Owners name entries by index: those behind the gap have moved down by one.
    for (int s = 0; s < arena_.streams(); s++) {
        for (int c = column; c < columns(); c++) {
            const Entry& e = entry(s, c);
            if (!e.k_bits) continue;
            const uint32_t index = static_cast<uint32_t>(&e - arena_.entries);
            arena_.constant_owners[e.constants] = index;
            for (uint32_t g = 0; g < 8; g++)
                if (e.granule[g] != kNone) arena_.granule_owners[e.granule[g]] = index * 8 + g;
        }
    }
}

int PageTable::shift(int column, int32_t delta) {
    if (column < 0 || column >= columns()) return KVQ_BAD_ARGUMENT;
    for (int i = first_view(column); i < first_view(column + 1); i++) arena_.views[i].delta = delta;
    return KVQ_OK;
}

int PageTable::mask(int column, uint64_t mask) {
    if (column < 0 || column >= columns() || first_view(column + 1) - first_view(column) != 1)
        return KVQ_BAD_ARGUMENT;
    arena_.views[first_view(column)].mask &= mask;
    return KVQ_OK;
}

void PageTable::remember(int stream, int column, uint8_t peak_weight, uint8_t mean_mass) {
    Entry& e = entry_at(stream, column);
    e.peak_weight = peak_weight;
    e.mean_mass = mean_mass;
}

PageView PageTable::view(int stream, const Entry& e, bool hi_view) const {
    PageView page;
    for (int g = 0; g < granules(e.k_bits); g++) page.k[g] = pool_.granule(e.granule[g]);
    for (int g = 0; g < granules(e.v_bits); g++)
        page.v[g] = pool_.granule(e.granule[kGranulesPerSide + g]);
    page.k_grid = constants(e);
    page.v_grid = page.k_grid + grid_bytes(dim());
    page.channel_values = form(stream) & kChannelValues;
    const int widest = hi_view ? 4 : 8;
    page.k_bits = std::min(widest, int{e.k_bits});
    page.v_bits = std::min(widest, int{e.v_bits});
    return page;
}

void PageTable::restore(int stream, int column, const uint8_t* widths_and_history) {
    Entry& e = entry_at(stream, column);
    if (widths_and_history[0]) {
        take(e, widths_and_history[0], widths_and_history[1]);
        e.peak_weight = widths_and_history[2];
        e.mean_mass = widths_and_history[3];
        return;
    }
    e = {};
    for (uint32_t& g : e.granule) g = kNone;
    e.constants = kNone;
}

}  // namespace kvq
