#include "twin.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "visibility.h"

namespace kvq {
namespace {

constexpr int kWarpPages = 4;      // pages that a block of threads reads at once
constexpr int kBlocksPerUnit = 4;  // blocks of threads that keep a multiprocessor busy
constexpr int64_t kRowBytes = 2;   // of one channel of a floating-point row

// The number of `delta` among `deltas` from `first` on, which it joins if it is new.
int turn_of(std::vector<int32_t>& deltas, size_t first, int32_t delta) {
    const auto found = std::find(deltas.begin() + static_cast<int64_t>(first), deltas.end(), delta);
    const auto turn = found - deltas.begin();
    if (found == deltas.end()) deltas.push_back(delta);
    return static_cast<int>(turn);
}

template <class T>
int64_t append(std::vector<uint8_t>& bytes, const std::vector<T>& part) {
    const size_t start = (bytes.size() + 7) / 8 * 8;
    bytes.resize(start + part.size() * sizeof(T));
    std::memcpy(bytes.data() + start, part.data(), part.size() * sizeof(T));
    return static_cast<int64_t>(start);
}

// What the tokens of a pass see of the floating-point rows, as visits to tiles of 64 rows that have
// moved alike.
struct Visits {
    std::vector<int32_t> tile_rows, tile_turns, deltas;
    std::vector<uint64_t> alike;

    void add(int tile, const int32_t* moved, int count) {
        for_alike(moved, count, [&](int32_t delta, uint64_t which) {
            tile_rows.push_back(tile);
            tile_turns.push_back(delta ? turn_of(deltas, 0, delta) : -1);
            alike.push_back(which);
        });
    }

    // One mask for every token and visit.
    std::vector<uint64_t> masks(const Tail& tail, int window, const int64_t* positions, int tokens,
                                const std::vector<int32_t>& stands) const {
        std::vector<uint64_t> out(static_cast<size_t>(tokens) * alike.size());
        for (int first = 0; first < tokens; first += kBlockRows) {
            Visibility sight(window);
            const int rows = std::min(kBlockRows, tokens - first);
            for (int t = first; t < first + rows; t++)
                sight.add(positions[t], tail.first_row() + t);
            for (size_t i = 0; i < alike.size(); i++) {
                const int from = tile_rows[i] * kPageTokens;
                const int count = std::min(kPageTokens, static_cast<int>(stands.size()) - from);
                const uint64_t* seen;
                const bool any = sight.tail(tail, from, stands.data() + from, count, seen);
                for (int r = 0; any && r < rows; r++)
                    out[static_cast<size_t>(first + r) * alike.size() + i] =
                        alike[i] & (seen ? seen[r] : ~uint64_t{0});
            }
        }
        return out;
    }
};

}  // namespace

Twin::Twin(Device& device, const Arena& arena, const uint8_t* host)
    : device_(device),
      arena_(arena),
      host_(host),
      tables_(device),
      chunk_(device),
      taken_(device),
      feedback_room_(device),
      counts_(device),
      told_(static_cast<size_t>(arena.config().layers)) {}

std::unique_ptr<Twin> Twin::open(Device& device, const Arena& arena, const uint8_t* host,
                                 int64_t bytes, int resident) {
    std::unique_ptr<Twin> twin(new Twin(device, arena, host));
    void* memory = nullptr;
    const int64_t fixed = arena.pool - host;
    twin->bytes_ = resident ? fixed + Tiers::device_bytes(arena, resident) : bytes;
    if (device.calls().allocate(twin->bytes_, &memory)) return nullptr;
    twin->memory_ = static_cast<uint8_t*>(memory);
    if (resident) {
        twin->tiers_ = Tiers::open(device, arena, resident, twin->memory_ + fixed);
        if (!twin->tiers_) return nullptr;
    }
    twin->copy(twin->of(arena.forms), arena.forms, arena.streams());
    return twin;
}

Twin::~Twin() {
    tiers_.reset();
    device_.wait();
    device_.calls().free(memory_);
}

int Twin::feed_back(const float* feedback) {
    std::lock_guard<std::mutex> turn(device_.turn);
    const int64_t dim = config().head_dim, bytes = 4 * arena_.streams() * dim * dim;
    uint8_t* room = feedback ? feedback_room_.at_least(bytes) : nullptr;
    if (feedback && !room) return KVQ_NO_MEMORY;
    feedback_ = reinterpret_cast<const float*>(room);
    if (room) copy(room, feedback, bytes);
    return status_;
}

void Twin::new_pass() {
    pass_ = {};
    if (!tiers_) return;
    tiers_->new_pass();
    auto* counts = reinterpret_cast<kvq_cuda_counts*>(counts_.data());
    if (!counts) return;
    note(device_.calls().clear(&counts->fetched_bytes, sizeof counts->fetched_bytes,
                               device_.facts().stream));
    counts_changed_ = true;
}

kvq_cuda_counts Twin::counts() const {
    if (!counts_changed_) return counted_;
    std::lock_guard<std::mutex> turn(device_.turn);
    counts_changed_ = device_.copy(&counted_, counts_.data(), sizeof counted_) || device_.wait();
    return counted_;
}

// Pages in tiers have places of their own.
void Twin::move(void* to, const void* from, int64_t bytes) {
    if (!tiers_) copy(of(static_cast<uint8_t*>(to)), of(static_cast<const uint8_t*>(from)), bytes);
}

void Twin::copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step,
                     int64_t row_bytes, int64_t rows) {
    if (rows > 0)
        note(device_.calls().copy(to, to_step, from, from_step, row_bytes, rows,
                                  device_.facts().stream));
}

template <class Run>
void Twin::in_use(const PageTable& pages, Run&& run) const {
    const auto alike = [&](uint8_t* part, int64_t bytes) { run(part, of(part), bytes); };
    alike(reinterpret_cast<uint8_t*>(arena_.tail),
          arena_.streams() * int64_t{2} * config().tail_rows * config().head_dim * kRowBytes);
    if (!tiers_) return pages.pool().visit_used(alike);
    for (int i = 0; i < arena_.streams() * pages.columns(); i++) {
        const int stream = i / pages.columns(), column = i % pages.columns();
        const Entry& e = pages.entry(stream, column);
        if (!e.k_bits) continue;
        run(pages.pool().constant(e.constants), tiers_->constants(stream, column),
            arena_.sizes.constant_bytes);
        for (int slot = 0; slot < 2 * kGranulesPerSide; slot++)
            if (e.granule[slot] != kNone)
                run(pages.pool().granule(e.granule[slot]), tiers_->granule(stream, column, slot),
                    arena_.sizes.granule_bytes);
    }
}

void Twin::fetch(const PageTable& pages) {
    in_use(pages, [&](uint8_t* here, uint8_t* there, int64_t bytes) { copy(here, there, bytes); });
    note(device_.wait());
}

void Twin::send(const PageTable& pages) {
    // What was on its way is of no use any more.
    if (tiers_) note(device_.calls().after(device_.facts().stream, device_.facts().copies));
    if (tiers_) tiers_->place(pages.columns());
    in_use(pages, [&](uint8_t* here, uint8_t* there, int64_t bytes) { copy(there, here, bytes); });
    // Memory of the host's is not the arena's, which its owner may change at once.
    if (tiers_) note(device_.wait());
}

uint8_t* Twin::constants(const PageTable& pages, int stream, int column) const {
    if (tiers_) return tiers_->constants(stream, column);
    return of(pages.pool().constant(pages.entry(stream, column).constants));
}

uint8_t* Twin::granule(const PageTable& pages, int stream, int column, int slot) const {
    if (tiers_) return tiers_->granule(stream, column, slot);
    return of(pages.pool().granule(pages.entry(stream, column).granule[slot]));
}

uint16_t* Twin::rows(const Tail& tail, int stream, int side) const {
    if (!tail.branch().staged) return of(tail.rows(stream, side));
    auto* room = reinterpret_cast<uint16_t*>(chunk_.data());
    const int head = stream % config().kv_heads;
    return room + (int64_t{head} * 2 + side) * chunk_rows() * config().head_dim;
}

// The tail's rows of a layer, where the chunk's will follow them.
bool Twin::gather_chunk(const Tail& tail, int layer) {
    const int64_t row = config().head_dim * kRowBytes, heads = config().kv_heads;
    if (!chunk_.at_least(heads * 2 * chunk_rows() * row)) return false;
    const int first = layer * config().kv_heads;
    copy_rows(rows(tail, first, 0), chunk_rows() * row, of(tail.rows(first, 0)),
              config().tail_rows * row, tail.used() * row, 2 * heads);
    return true;
}

void Twin::tell_entries(const PageTable& pages, int layer) {
    uint64_t& told = told_[static_cast<size_t>(layer)];
    if (told == entries_ || !pages.columns()) return;
    const int first = layer * config().kv_heads;
    const int64_t step = arena_.sizes.max_columns * static_cast<int64_t>(sizeof(Entry));
    const int64_t bytes = pages.columns() * static_cast<int64_t>(sizeof(Entry));
    for (int head = 0; tiers_ && head < config().kv_heads; head++) {
        std::vector<Entry> entries;
        for (int c = 0; c < pages.columns(); c++)
            entries.push_back(tiers_->told(first + head, c, pages.entry(first + head, c)));
        copy(of(&pages.entry(first + head, 0)), entries.data(), bytes);
    }
    if (!tiers_)
        copy_rows(of(&pages.entry(first, 0)), step, &pages.entry(first, 0), step, bytes,
                  config().kv_heads);
    told = entries_;
}

bool Twin::tell_tables(const PageTable& pages, const Tail& tail, const kvq_attention& a,
                       const Inputs& in) {
    const std::vector<int64_t> positions(in.positions, in.positions + in.tokens);
    if (pass_.window == a.window_tokens && pass_.positions == positions) return true;
    const bool staged = tail.branch().staged;
    const int behind = staged ? in.tokens : tail.branch().rows, total = tail.used() + behind;
    std::vector<int32_t> stands(arena_.tail_positions,
                                arena_.tail_positions + total - (staged ? behind : 0));
    std::vector<int32_t> moved(arena_.tail_deltas, arena_.tail_deltas + stands.size());
    if (staged)
        stands.insert(stands.end(), arena_.staging_positions, arena_.staging_positions + behind);
    moved.resize(stands.size());
    Visits visits;
    for (int i = 0; i < total; i += kPageTokens)
        visits.add(i / kPageTokens, moved.data() + i, std::min(kPageTokens, total - i));
    pass_ = {a.window_tokens, positions};
    pass_.row_turns = static_cast<int>(visits.deltas.size());
    std::vector<int32_t> turn_of_view;
    for (int i = 0; i < pages.views(); i++)
        turn_of_view.push_back(
            turn_of(visits.deltas, static_cast<size_t>(pass_.row_turns), pages.view_at(i).delta));
    pass_.turns = static_cast<int>(visits.deltas.size());
    pass_.tiles = static_cast<int>(visits.alike.size());
    std::vector<uint8_t> bytes;
    pass_.turn_of_view = append(bytes, turn_of_view);
    pass_.deltas = append(bytes, visits.deltas);
    pass_.tile_rows = append(bytes, visits.tile_rows);
    pass_.tile_turns = append(bytes, visits.tile_turns);
    pass_.masks =
        append(bytes, visits.masks(tail, a.window_tokens, in.positions, in.tokens, stands));
    pass_.places = append(bytes, positions);
    uint8_t* room = tables_.at_least(static_cast<int64_t>(bytes.size()));
    if (!room) return false;
    pass_.at = room;
    copy(room, bytes.data(), static_cast<int64_t>(bytes.size()));
    copy(of(arena_.views), arena_.views, pages.views() * static_cast<int64_t>(sizeof(View)));
    return true;
}

int Twin::splits(const kvq_attention& a, int rows, int work) const {
    const int step = kvq_cuda_rows_of_block(rows), blocks = a.kv_heads * ((rows + step - 1) / step);
    const int wanted = kBlocksPerUnit * device_.facts().units / blocks;
    return std::clamp(wanted, 1, std::max(1, work / kWarpPages));
}

int Twin::choose(const kvq_attention& a, const kvq_read& rule, uint8_t* room,
                 kvq_cuda_sequence& s) {
    const auto stream = device_.facts().stream;
    if (!counts_.data()) {
        if (!counts_.at_least(sizeof(kvq_cuda_counts))) return KVQ_NO_MEMORY;
        note(device_.calls().clear(counts_.data(), sizeof(kvq_cuda_counts), stream));
    }
    counts_changed_ = true;
    s.share = rule.share;
    s.counts = reinterpret_cast<kvq_cuda_counts*>(counts_.data());
    s.bounds = reinterpret_cast<float*>(room);
    s.chosen = room + int64_t{4} * a.heads * s.tokens * s.view_count;
    Tiers::Away away{};
    if (tiers_) note(tiers_->lend(a.layer, away));
    s.away_end = away.end, s.away_slot = away.slot;
    return status_;
}

int Twin::attend(const PageTable& pages, const Tail& tail, const kvq_attention& a, const Inputs& in,
                 const kvq_read& rule, bool silent) {
    std::lock_guard<std::mutex> turn(device_.turn);
    const bool staged = tail.branch().staged;
    if ((staged && !gather_chunk(tail, a.layer)) || !tell_tables(pages, tail, a, in))
        return KVQ_NO_MEMORY;
    tell_entries(pages, a.layer);
    const int stream = a.layer * a.kv_heads, rows = in.tokens * (a.heads / a.kv_heads);
    const int split = splits(a, rows, pages.views() + pass_.tiles);
    const int64_t queries = int64_t{1 + pass_.turns} * a.heads * in.tokens * a.head_dim;
    const int64_t partials = int64_t{a.heads} * in.tokens * split * (a.head_dim + 2);
    // A step chooses, a prompt does not.
    const bool chooses = rule.share < 1 && !silent && pages.views() &&
                         in.tokens <= config().draft_tokens;
    const int64_t bounds = chooses ? int64_t{a.heads} * in.tokens * pages.views() : 0;
    const int64_t chosen = chooses ? int64_t{a.kv_heads} * in.tokens * pages.views() : 0;
    auto* scratch = reinterpret_cast<float*>(
        device_.scratch.at_least(4 * (queries + partials + bounds) + chosen));
    if (!scratch) return KVQ_NO_MEMORY;
    const kvq_cuda_attention call{a.heads,   a.kv_heads,    a.head_dim, a.rotary_pairs,  a.scale,
                                  a.softcap, a.rope_factor, a.norm_eps, a.window_tokens, split};
    kvq_cuda_sequence s{};
    s.tokens = in.tokens;
    s.view_count = pages.views(), s.most_columns = arena_.sizes.max_columns;
    s.tail_rows = tail.used() + (staged ? in.tokens : tail.branch().rows);
    s.tail_stride = static_cast<int32_t>(2 * (staged ? chunk_rows() : config().tail_rows));
    s.turns = pass_.turns, s.row_turns = pass_.row_turns, s.tiles = pass_.tiles;
    s.hi_view = tail.branch().hi_view;
    s.pool_bytes = tiers_ ? tiers_->room().bytes() : arena_.sizes.pool_bytes;
    s.constant_bytes = arena_.sizes.constant_bytes, s.granule_bytes = arena_.sizes.granule_bytes;
    s.pool = of(arena_.pool), s.forms = of(arena_.forms + stream);
    if (chooses) {
        auto* room = reinterpret_cast<uint8_t*>(scratch + queries + partials);
        if (const int status = choose(a, rule, room, s)) return status;
    } else if (tiers_ && !silent) {
        note(tiers_->bring(a.layer));
    }
    s.entries = of(arena_.entries + int64_t{stream} * arena_.sizes.max_columns);
    s.views = of(arena_.views);
    const auto table = [&](auto*& member, int64_t start) {
        member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(pass_.at + start);
    };
    table(s.turn_of_view, pass_.turn_of_view), table(s.deltas, pass_.deltas);
    table(s.tile_rows, pass_.tile_rows), table(s.tile_turns, pass_.tile_turns);
    table(s.tail_masks, pass_.masks), table(s.positions, pass_.places);
    s.tail_keys = this->rows(tail, stream, 0), s.tail_values = this->rows(tail, stream, 1);
    s.qkv = in.qkv, s.inv_freq = in.inv_freq, s.q_norm = in.q_norm, s.k_norm = in.k_norm;
    s.sink_logits = in.sink_logits;
    s.queries = scratch, s.partials = scratch + queries, s.out = in.out;
    const auto run = silent ? device_.calls().store : device_.calls().attend;
    note(run(&call, &s, device_.facts().stream));
    if (silent)
        note(device_.calls().clear(in.out, int64_t{4} * in.tokens * a.heads * a.head_dim,
                                   device_.facts().stream));
    return status_;
}

const uint8_t* Twin::table(const void* bytes, int64_t count) {
    uint8_t* room = device_.scratch.at_least(count);
    if (room) copy(room, bytes, count);
    else note(KVQ_NO_MEMORY);
    return room;
}

void Twin::keep_rows(int first, const int32_t* rows, int count) {
    std::lock_guard<std::mutex> turn(device_.turn);
    const uint8_t* from = table(rows, count * static_cast<int64_t>(sizeof(int32_t)));
    if (!from) return;
    uint16_t* tail = of(arena_.tail);
    const int64_t stride = int64_t{config().tail_rows} * config().head_dim;
    const kvq_cuda_rows call{tail, tail, stride, stride, 2 * arena_.streams(), config().head_dim,
                             first, count, reinterpret_cast<const int32_t*>(from)};
    note(device_.calls().gather(&call, device_.facts().stream));
}

kvq_cuda_page Twin::page_at(const PageTable& pages, int stream, int column) const {
    const Entry& e = pages.entry(stream, column);
    kvq_cuda_page page{};
    for (int slot = 0; slot < 2 * kGranulesPerSide; slot++)
        if (e.granule[slot] != kNone) page.granules[slot] = granule(pages, stream, column, slot);
    page.constants = constants(pages, stream, column);
    page.k_bits = e.k_bits, page.v_bits = e.v_bits;
    return page;
}

int Twin::close_layer(PageTable& pages, const Tail& tail, int layer, const Tail::Closing& closed) {
    std::lock_guard<std::mutex> turn(device_.turn);
    const int dim = config().head_dim, heads = config().kv_heads, first = layer * heads;
    const int count = static_cast<int>(closed.rows.size()) / kPageTokens;
    for (int p = 0; tiers_ && p < count; p++) note(tiers_->enter(pages.columns() + p));
    for (int i = 0; i < heads * count; i++)
        pages.enter(first + i / count, pages.columns() + i % count);
    // All have entered: none makes another move.
    std::vector<kvq_cuda_page> work;
    for (int i = 0; i < heads * count; i++)
        work.push_back(page_at(pages, first + i / count, pages.columns() + i % count));
    std::vector<uint8_t> bytes;
    const int64_t work_at = append(bytes, work), rows_at = append(bytes, closed.rows),
                  staying_at = append(bytes, closed.staying);
    const uint8_t* told = table(bytes.data(), static_cast<int64_t>(bytes.size()));
    if (!told) return status_;
    const auto numbers = [&](int64_t at) { return reinterpret_cast<const int32_t*>(told + at); };
    const int64_t tail_rows = config().tail_rows,
                  stride = tail.branch().staged ? chunk_rows() : tail_rows;
    const uint16_t* from = rows(tail, first, 0);
    const kvq_cuda_closing call{
        count, heads, dim, from, stride, numbers(rows_at),
        reinterpret_cast<const kvq_cuda_page*>(told + work_at), of(arena_.forms + first),
        feedback_ ? feedback_ + int64_t{first} * dim * dim : nullptr,
        arena_.sizes.constant_bytes};
    note(device_.calls().close(&call, device_.facts().stream));
    const kvq_cuda_rows staying{of(tail.rows(first, 0)), from, tail_rows * dim, stride * dim,
                                2 * heads, dim, 0, static_cast<int32_t>(closed.staying.size()),
                                numbers(staying_at)};
    if (staying.count) note(device_.calls().gather(&staying, device_.facts().stream));
    return status_;
}

void Twin::narrow_keys(kvq_cuda_keys keys) {
    for (uint8_t*& granule : keys.granules) granule = granule ? of(granule) : nullptr;
    keys.grid = of(keys.grid), keys.feedback = feedback_ + (keys.feedback - arena_.feedback);
    // What a page becomes is read again when it loses more.
    for (const kvq_cuda_keys& before : narrowed_keys_)
        if (before.granules[0] == keys.granules[0]) {
            narrow_all();
            break;
        }
    narrowed_keys_.push_back(keys);
}

void Twin::narrow_all() {
    std::lock_guard<std::mutex> turn(device_.turn);
    const auto queue = [&](const auto& run, const auto& work) {
        if (work.empty()) return;
        const auto count = static_cast<int32_t>(work.size());
        const uint8_t* told = table(work.data(), count * static_cast<int64_t>(sizeof work[0]));
        if (told)
            note(run(reinterpret_cast<decltype(work.data())>(told), count, config().head_dim,
                     device_.facts().stream));
    };
    queue(device_.calls().narrow, std::exchange(narrowed_, {}));
    queue(device_.calls().narrow_keys, std::exchange(narrowed_keys_, {}));
}

}  // namespace kvq
