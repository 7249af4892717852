#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "platform.h"
#include "rotary.h"

namespace kvq {

std::shared_ptr<Cache> Cache::open(const kvq_config& config, const Layout& layout, int64_t budget,
                                   const uint8_t* forms, Device* device, int resident, int file,
                                   int64_t file_bytes) {
    // A long context is read page by page from all over the arena; with 4 KiB system pages that
    // costs an address translation per granule.
    uint8_t* memory = file_bytes ? platform::allocate_over(file, budget, file_bytes)
                                 : platform::allocate(budget, !device);
    if (!memory) return nullptr;
    std::shared_ptr<Cache> cache(new Cache(memory, layout, file_bytes));
    cache->state() = {};
    cache->state().config = config;
    cache->state().budget = budget;
    for (int s = 0; s < cache->arena_.streams(); s++)
        cache->arena_.forms[s] = forms ? forms[s] : uint8_t{0};
    if (device) {
        cache->twin_ = Twin::open(*device, cache->arena_, cache->memory_, budget, resident);
        cache->arena_.twin = cache->twin_.get();
        if (!cache->twin_) return nullptr;
    }
    cache->pages_.place();
    cache->pages_.clear();
    cache->probes_.clear();
    if (cache->conv_.any())
        std::memset(static_cast<void*>(cache->arena_.conv_state), 0,
                    static_cast<size_t>(cache->conv_.state_bytes()));
    if (cache->delta_.any()) cache->delta_.clear();
    cache->state().peak = cache->pages_.used_bytes();
    return cache;
}

Cache::Cache(uint8_t* memory, const Layout& layout, int64_t file_bytes)
    : memory_(memory), arena_{}, pages_(arena_), tail_(arena_), conv_(arena_), delta_(arena_),
      probes_(arena_) {
    arena_.place(memory, layout);
    arena_.file_bytes = file_bytes;
}

Cache::~Cache() {
    if (arena_.file_bytes) platform::release_view(memory_, arena_.end() - memory_);
    else platform::release(memory_);
}

int Cache::feed_back(const float* feedback) {
    arena_.feedback = feedback;
    return twin_ ? twin_->feed_back(feedback) : KVQ_OK;
}

int Cache::read_by(const kvq_read& rule) {
    if (!(rule.share > 0 && rule.share <= 1) || !(rule.octaves >= 0)) return KVQ_BAD_ARGUMENT;
    reading_.rule = rule;
    if (arena_.file_bytes)
        platform::expect_jumps(arena_.end() - arena_.file_bytes, arena_.end(), reading_.selects());
    return KVQ_OK;
}

int Cache::missing(int tokens, int64_t& bytes, int32_t& columns) const {
    if (tokens < 0 || tokens > config().context_tokens) return KVQ_BAD_ARGUMENT;
    pages_.missing(tail_.closing_pages(tail_.branch().rows + tokens), bytes, columns);
    return KVQ_OK;
}

int Cache::begin(int tokens, const int32_t* parents, int view, int at, const uint8_t* silent) {
    const BranchState& branch = tail_.branch();
    if (state().broken || tail_.unattended() || branch.staged) return KVQ_BAD_STATE;
    const bool in_gap = tail_.open() ? branch.in_gap : at >= 0 && at != state().tokens;
    // What other layers remember is of the end alone.
    if (in_gap && (conv_.any() || delta_.any())) return KVQ_BAD_ARGUMENT;
    if (tokens < 1 || tokens > config().chunk_tokens || view < 0 || view > 1 ||
        (!in_gap && tokens > config().context_tokens - state().tokens - branch.rows) ||
        !begins_at(at, branch.rows + tokens))
        return KVQ_BAD_ARGUMENT;
    // More rows than a branch holds are a chunk of a prompt, which is kept whole or not at all.
    if (branch.rows + tokens > config().draft_tokens && (tail_.open() || parents))
        return KVQ_BAD_ARGUMENT;
    int64_t bytes;
    int32_t columns;
    missing(tokens, bytes, columns);
    if (bytes || columns) return KVQ_SHORT;
    const bool staged = tail_.used() + branch.rows + tokens > config().tail_rows;
    if (staged && !quantized(config())) return KVQ_SHORT;
    if (const int status = tail_.add(tokens, parents, staged, view == 1, in_gap ? at : -1))
        return status;
    silent_.assign(silent, silent ? silent + config().layers : silent);
    probes_.begin();
    if (twin_) twin_->new_pass();
    return KVQ_OK;
}

bool Cache::begins_at(int at, int rows) const {
    if (tail_.open() && at >= 0 && at != tail_.branch().at) return false;
    if (tail_.open() ? !tail_.branch().in_gap : at == -1 || at == state().tokens) return true;
    const int first = tail_.open() ? tail_.branch().at : at;
    return first >= 0 && rows <= state().tokens - first && !tail_.holds(first, first + rows) &&
           !pages_.shows(first, first + rows);
}

bool Cache::fits(int views, int stretches) const {
    return !quantized(config()) ||
           views - pages_.columns() + stretches <= arena_.sizes.max_columns + kSpareViews;
}

void Cache::fill_ropes(const kvq_attention& a, const Inputs& in) const {
    for (int t = 0; t < in.tokens; t++) {
        float* cos = arena_.rope + int64_t{t} * 2 * a.rotary_pairs;
        fill_rope(static_cast<float>(in.positions[t]), in.inv_freq, a.rotary_pairs, a.rope_factor,
                  cos, cos + a.rotary_pairs);
    }
}

int Cache::store_keys_values(const kvq_attention& a, const Inputs& in) const {
    const int dim = a.head_dim, stride = (a.heads + 2 * a.kv_heads) * dim;
    bool finite = true;
    for (int t = 0; t < in.tokens; t++) {
        const float* cos = arena_.rope + int64_t{t} * 2 * a.rotary_pairs;
        const int64_t row = tail_.place(t);
        for (int head = 0; head < a.kv_heads; head++) {
            const int stream = a.layer * a.kv_heads + head;
            const bool staged = tail_.branch().staged;
            uint16_t* keys = staged ? tail_.staging(head, 0) : tail_.rows(stream, 0);
            uint16_t* values = staged ? tail_.staging(head, 1) : tail_.rows(stream, 1);
            float k[kMaxHeadDim];
            const float* source = in.qkv + int64_t{t} * stride + (a.heads + head) * dim;
            std::memcpy(k, source, sizeof(float) * static_cast<size_t>(dim));
            if (in.k_norm) normalize(k, in.k_norm, dim, a.norm_eps);
            rotate(k, cos, cos + a.rotary_pairs, a.rotary_pairs);
            finite &= kernels().to_half(k, keys + row * dim, dim);
            finite &= kernels().to_half(source + a.kv_heads * dim, values + row * dim, dim);
        }
    }
    return finite ? KVQ_OK : KVQ_NOT_FINITE;
}

bool Cache::fits_shape(const kvq_attention& a) const {
    return a.layer >= 0 && a.layer < config().layers && a.heads == config().heads &&
           a.kv_heads == config().kv_heads && a.head_dim == config().head_dim &&
           a.rotary_pairs >= 0 && a.rotary_pairs <= a.head_dim / 2;
}

int Cache::prepare(const kvq_attention& a, const Inputs& in) {
    const BranchState& branch = tail_.branch();
    if (state().broken || in.tokens < 1 || in.tokens != branch.pass_rows) return KVQ_BAD_STATE;
    // A chunk closes a layer's pages as it passes, so each layer sees it once and in order.
    if (branch.staged && a.layer != branch.attended) return KVQ_BAD_STATE;
    if (!fits_shape(a)) return KVQ_BAD_ARGUMENT;
    for (int t = 0; t < in.tokens; t++)
        if (in.positions[t] < 0 || in.positions[t] > kMaxPosition) return KVQ_BAD_ARGUMENT;
    for (int t = 0; t < in.tokens; t++) {
        const int64_t row = tail_.place(t);
        tail_.positions()[row] = static_cast<int32_t>(in.positions[t]);
        if (!branch.staged) arena_.tail_deltas[row] = 0;
    }
    if (!twin_) {
        fill_ropes(a, in);
        if (const int status = store_keys_values(a, in)) return status;
    }
    if (branch.staged && !fits(pages_.views(), tail_.stretches(nullptr, in.tokens, 0, 0, 0)))
        return KVQ_BAD_ARGUMENT;
    if (probes_.kept()) keep_probes(a, in);
    return device_status();
}

int Cache::prepare_to_read(const kvq_attention& a, const Inputs& in,
                           std::vector<int64_t>& positions) {
    if (state().broken || !tail_.open() || tail_.unattended() || twin_) return KVQ_BAD_STATE;
    // Of a chunk the rows of the last layer alone are still as they came.
    if (!fits_shape(a) || (tail_.branch().staged && a.layer != config().layers - 1))
        return KVQ_BAD_ARGUMENT;
    // Rotations have room for the longest pass's rows.
    if (in.tokens < 0 || in.tokens > config().chunk_tokens) return KVQ_BAD_ARGUMENT;
    positions.resize(static_cast<size_t>(in.tokens));
    for (int i = 0; i < in.tokens; i++) {
        if (in.asking[i] < 0 || in.asking[i] >= tail_.branch().pass_rows) return KVQ_BAD_ARGUMENT;
        positions[static_cast<size_t>(i)] = tail_.positions()[tail_.place(in.row(i))];
    }
    Inputs placed = in;
    placed.positions = positions.data();
    fill_ropes(a, placed);
    if (silent_.empty()) probes_.keep_look(tail_, a, placed);
    return KVQ_OK;
}

void Cache::keep_probes(const kvq_attention& a, const Inputs& in) {
    if (!silent_.empty()) return probes_.forget_from(tail_, tail_.first_row());
    if (!twin_) return probes_.keep(tail_, a, in);
    std::vector<int> rows;
    for (int t = 0; t < in.tokens; t++)
        if (probes_.takes(tail_, t)) rows.push_back(t);
    if (rows.empty()) return;
    twin_->bring(a, in, rows, [&](const Inputs& here) {
        fill_ropes(a, here);
        probes_.keep(tail_, a, here);
    });
}

int Cache::run_on_device(const kvq_attention& a, const Inputs& in) {
    return twin_->attend(pages_, tail_, a, in, reading_.rule, is_silent(a.layer));
}

AttendJob Cache::job(const kvq_attention& a, const Inputs& in) {
    return AttendJob(arena_, pages_, tail_, reading_, a, in);
}

int Cache::finish(int layer) {
    tail_.saw_layer(layer);
    // The last layer's pages close with the commit: other layers may still read its rows.
    if (!tail_.branch().staged || (!twin_ && layer == config().layers - 1)) return KVQ_OK;
    return tail_.close_layer(pages_, layer, tail_.closing_pages(tail_.branch().rows));
}

int Cache::attend(const kvq_attention& a, const Inputs& in) {
    Cache* self = this;
    const auto attend = [&](const Inputs& inputs) {
        return attend_together(a, &self, &inputs, 1, kSerial);
    };
    return twin_ ? twin_->take(a, in, attend) : attend(in);
}

namespace {

// Runs the units of all jobs in one dispatch, or none if there are none.
template <size_t (AttendJob::*Units)() const, void (AttendJob::*Run)(size_t)>
void run_all(std::vector<AttendJob>& jobs, const Parallel& parallel) {
    std::vector<size_t> ends;  // of each job's units
    for (const AttendJob& job : jobs)
        ends.push_back((ends.empty() ? 0 : ends.back()) + (job.*Units)());
    if (ends.empty() || ends.back() == 0) return;
    each(parallel, ends.back(), [&](size_t unit) {
        const auto end = std::upper_bound(ends.begin(), ends.end(), unit);
        const size_t s = static_cast<size_t>(end - ends.begin());
        (jobs[s].*Run)(s ? unit - ends[s - 1] : unit);
    });
}

void run_jobs(std::vector<AttendJob>& jobs, const Parallel& parallel) {
    run_all<&AttendJob::choices, &AttendJob::choose>(jobs, parallel);
    run_all<&AttendJob::units, &AttendJob::run>(jobs, parallel);
    for (const AttendJob& job : jobs) job.merge();
}

}  // namespace

int attend_together(const kvq_attention& a, Cache* const* caches, const Inputs* inputs,
                    size_t count, const Parallel& parallel) {
    std::vector<AttendJob> jobs;
    for (size_t s = 0; s < count; s++) {
        if (const int status = caches[s]->prepare(a, inputs[s])) return status;
        const bool there = caches[s]->device() != nullptr;
        if (const int status = there ? caches[s]->run_on_device(a, inputs[s]) : int{KVQ_OK})
            return status;
        if (there) continue;
        if (caches[s]->is_silent(a.layer))
            std::fill_n(inputs[s].out, int64_t{inputs[s].tokens} * a.heads * a.head_dim, 0.0f);
        else
            jobs.push_back(caches[s]->job(a, inputs[s]));
    }
    run_jobs(jobs, parallel);
    int status = KVQ_OK;
    for (size_t s = 0; s < count; s++) {
        const int closed = caches[s]->finish(a.layer);
        if (!status) status = closed;
    }
    return status;
}

int read_together(const kvq_attention& a, Cache* const* caches, Inputs* inputs, size_t count,
                  const Parallel& parallel) {
    std::vector<AttendJob> jobs;
    std::vector<std::vector<int64_t>> positions(count);
    for (size_t s = 0; s < count; s++) {
        Inputs& in = inputs[s];
        if (const int status = caches[s]->prepare_to_read(a, in, positions[s])) return status;
        in.positions = positions[s].data();
        if (caches[s]->is_silent(a.layer))
            std::fill_n(in.out, int64_t{in.tokens} * a.heads * a.head_dim, 0.0f);
        else if (in.tokens)
            jobs.push_back(caches[s]->job(a, in));
    }
    run_jobs(jobs, parallel);
    return KVQ_OK;
}

int Cache::look(const kvq_attention& a, const Inputs& in) {
    Cache* self = this;
    Inputs own = in;
    return read_together(a, &self, &own, 1, kSerial);
}

int Cache::convolve(int layer, int tokens, const float* bcx, const float* weight, float* out,
                    const Parallel& parallel) {
    if (state().broken) return KVQ_BAD_STATE;
    return conv_.run(tail_, layer, tokens, bcx, weight, out, parallel);
}

int Cache::recur(const DeltaInputs& in, const Parallel& parallel) {
    if (state().broken) return KVQ_BAD_STATE;
    return delta_.run(tail_, in, parallel);
}

int Cache::commit(const int32_t* rows, int count) {
    if (!tail_.open()) return KVQ_BAD_STATE;
    if (count == 0) return rewind(0);
    if (count < 0 || count > tail_.branch().rows || !tail_.is_path(rows, count) ||
        !may_keep(count))
        return KVQ_BAD_ARGUMENT;
    if (tail_.unattended()) return KVQ_BAD_STATE;
    if (tail_.branch().staged)
        return count == tail_.branch().rows ? commit_chunk() : int{KVQ_BAD_ARGUMENT};
    const int pages = tail_.closing_pages(count);
    if (!fits(pages_.views(), tail_.stretches(rows, count, 0, 0, 0))) return KVQ_BAD_ARGUMENT;
    probes_.settle(tail_, rows, count);
    conv_.keep(tail_, rows, count);
    delta_.keep(tail_, rows, count);
    state().tokens += tail_.branch().in_gap ? 0 : count;
    tail_.keep(rows, count);
    for (int layer = 0; pages && layer < config().layers; layer++) {
        if (const int status = tail_.close_layer(pages_, layer, pages)) {
            state().broken = 1;
            return status;
        }
    }
    if (pages) tail_.close_columns(pages_, pages, tail_.used());
    return KVQ_OK;
}

// The layers' pages are closed already, here but for the last one's.
int Cache::commit_chunk() {
    const int count = tail_.branch().rows;
    if (!twin_) {
        const int last = config().layers - 1;
        if (const int status = tail_.close_layer(pages_, last, tail_.closing_pages(count))) {
            state().broken = 1;
            return status;
        }
    }
    conv_.keep(tail_, nullptr, count);
    delta_.keep(tail_, nullptr, count);
    state().tokens += tail_.branch().in_gap ? 0 : count;
    tail_.close_columns(pages_, tail_.closing_pages(count), tail_.used() + count);
    tail_.forget();
    return KVQ_OK;
}

int Cache::rewind(int rows) {
    const BranchState& branch = tail_.branch();
    if (rows < 0 || rows > branch.rows) return KVQ_BAD_ARGUMENT;
    if (rows == 0) {
        // A chunk has already moved rows in the layers that saw it.
        if (branch.staged && branch.attended) state().broken = 1;
        probes_.forget_from(tail_, 0);
        tail_.forget();
        return KVQ_OK;
    }
    if (branch.staged || (tail_.unattended() && rows > tail_.first_row())) return KVQ_BAD_STATE;
    if (!may_keep(rows)) return KVQ_BAD_ARGUMENT;
    probes_.forget_from(tail_, rows);
    tail_.keep_branch_rows(rows);
    return KVQ_OK;
}

int Cache::trim(int tokens) {
    if (tail_.open() || state().broken) return KVQ_BAD_STATE;
    if (tokens < 0 || tokens > state().tokens) return KVQ_BAD_ARGUMENT;
    tokens = delta_.trim(conv_.trim(tokens));
    tail_.split(tokens, state().tokens, 0);
    pages_.split(tokens, state().tokens, 0);
    pages_.drop_unseen();
    state().tokens = tokens;
    return KVQ_OK;
}

int Cache::mark(int tokens) {
    if (tokens < 1 || tokens > state().config.context_tokens) return KVQ_BAD_ARGUMENT;
    conv_.mark(tokens);
    delta_.mark(tokens);
    return KVQ_OK;
}

bool Cache::may_move(int first, int64_t by) const {
    const auto stays = [&](int64_t at) { return at + by >= 0 && at + by <= kMaxPosition; };
    for (int row = 0; row < tail_.used(); row++)
        if (arena_.tail_tokens[row] >= first && !stays(arena_.tail_positions[row])) return false;
    for (int i = 0; i < pages_.views(); i++) {
        const View& view = pages_.view_at(i);
        if (!view.mask || view.first_token + kPageTokens <= first) continue;
        const int64_t start = int64_t{view.pos0} + view.delta;
        const int low = std::max(__builtin_ctzll(view.mask), first - view.first_token);
        if (!stays(start + low) || !stays(start + kPageTokens - 1)) return false;
    }
    return true;
}

int Cache::edit(int start, int stop, int count) {
    // What other layers remember is not of the tokens that would stand before them.
    if (tail_.open() || state().broken || conv_.any() || delta_.any()) return KVQ_BAD_STATE;
    if (start < config().sink_tokens || start > stop || stop > state().tokens || count < 0)
        return KVQ_BAD_ARGUMENT;
    const int64_t by = int64_t{count} - (stop - start);
    if (state().tokens + by > config().context_tokens || !may_move(stop, by))
        return KVQ_BAD_ARGUMENT;
    const int moved = static_cast<int>(by);
    if (!fits(pages_.views_while_split(start, stop, moved),
              tail_.stretches(nullptr, 0, start, stop, moved) + kGapViews))
        return KVQ_SHORT;
    tail_.split(start, stop, moved);
    pages_.split(start, stop, moved);
    pages_.drop_unseen();
    probes_.forget_tokens(start);
    state().tokens += moved;
    return KVQ_OK;
}

// Between the passes of a branch pages may lose bits, to make room for what it may become.
int Cache::demote(const kvq_action* actions, int count) {
    if (tail_.unattended() || tail_.branch().staged) return KVQ_BAD_STATE;
    // Pages in two tiers keep their widths: whoever opens them has bytes for all.
    const auto narrows = [](const kvq_action& action) { return action.k_bits != 0; };
    if (twin_ && twin_->tiers() && std::any_of(actions, actions + count, narrows))
        return KVQ_BAD_ARGUMENT;
    return pages_.demote(actions, count);
}

int Cache::demote_entering(const uint8_t* widths) {
    if (tail_.unattended() || tail_.branch().staged || !quantized(config())) return KVQ_BAD_STATE;
    return pages_.demote_entering(widths);
}

int Cache::shift(int column, int32_t delta) {
    return tail_.open() ? int{KVQ_BAD_STATE} : pages_.shift(column, delta);
}

// Between the passes of a branch, too: room may be made for what it becomes.
int Cache::shift_sinks(int32_t delta) {
    if (tail_.unattended() || tail_.branch().staged) return KVQ_BAD_STATE;
    return tail_.shift_sinks(delta);
}

int Cache::mask(int column, uint64_t mask) {
    return tail_.open() ? int{KVQ_BAD_STATE} : pages_.mask(column, mask);
}

int Cache::evidence(int tokens, int columns, float* facts, float* queries) {
    if (tokens < 0 || tokens > state().tokens || columns != pages_.columns())
        return KVQ_BAD_ARGUMENT;
    if (!probes_.kept() || tail_.unattended() || tail_.branch().staged || state().broken)
        return KVQ_BAD_STATE;
    fetch();
    return probes_.evidence(pages_, tail_, tokens, facts, queries);
}

void Cache::stats(kvq_stats& out) const {
    out = {};
    out.columns = pages_.columns();
    out.views = pages_.views();
    out.tokens = state().tokens;
    out.tail_rows = tail_.used();
    out.branch_rows = tail_.branch().rows;
    out.used_bytes = pages_.used_bytes();
    out.peak_bytes = state().peak;
    out.pages_seen = reading_.seen;
    out.pages_read = reading_.read;
    out.offloaded_bytes = std::min(arena_.file_bytes, pages_.pool().granule_bytes());
    if (!twin_) return;
    const kvq_cuda_counts chosen = twin_->counts();
    out.pages_seen = chosen.seen, out.pages_read = chosen.read;
    out.device_bytes = twin_->bytes();
    if (!twin_->tiers()) return;
    out.offloaded_bytes = twin_->tiers()->offloaded_bytes();
    out.streamed_bytes = twin_->tiers()->streamed_bytes() + chosen.fetched_bytes;
}

int Cache::columns(int columns, int64_t* facts, uint8_t* widths) const {
    if (columns != pages_.columns()) return KVQ_BAD_ARGUMENT;
    int64_t shown = INT64_MIN;  // where the view that stands last begins
    for (int i = 0; i < pages_.views(); i++) {
        const View& view = pages_.view_at(i);
        int64_t* fact = facts + 4 * view.column;
        const bool first = i == 0 || pages_.view_at(i - 1).column != view.column;
        const int64_t begin = int64_t{view.pos0} + view.delta;
        const uint64_t mask = view.mask | (first ? 0 : static_cast<uint64_t>(fact[3]));
        if (first || begin > shown) {
            shown = begin;
            fact[0] = view.pos0, fact[1] = view.delta, fact[2] = view.first_token;
        }
        fact[3] = static_cast<int64_t>(mask);
    }
    for (int s = 0; s < arena_.streams(); s++) {
        for (int c = 0; c < columns; c++) {
            *widths++ = pages_.entry(s, c).k_bits;
            *widths++ = pages_.entry(s, c).v_bits;
        }
    }
    return KVQ_OK;
}

int Cache::views(int views, int64_t* facts) const {
    if (views != pages_.views()) return KVQ_BAD_ARGUMENT;
    for (int i = 0; i < views; i++) {
        const View& view = pages_.view_at(i);
        *facts++ = view.column, *facts++ = view.pos0, *facts++ = view.delta;
        *facts++ = view.first_token, *facts++ = static_cast<int64_t>(view.mask);
    }
    return KVQ_OK;
}

int Cache::places(int rows, int64_t* places) const {
    if (rows != tail_.used()) return KVQ_BAD_ARGUMENT;
    for (int row = 0; row < rows; row++) {
        *places++ = arena_.tail_tokens[row], *places++ = arena_.tail_positions[row];
        *places++ = arena_.tail_deltas[row];
    }
    return KVQ_OK;
}

void Cache::entering(uint8_t* widths) const {
    std::memcpy(widths, arena_.entering, size_t{2} * static_cast<size_t>(arena_.streams()));
}

int Cache::constants(int layer, int columns, float* keys, float* values) const {
    if (columns != pages_.columns() || layer < 0 || layer >= config().layers)
        return KVQ_BAD_ARGUMENT;
    fetch();
    const int dim = config().head_dim;
    for (int s = layer * config().kv_heads; s < (layer + 1) * config().kv_heads; s++) {
        for (int c = 0; c < columns; c++, keys += 2 * dim, values += 2 * kPageTokens) {
            std::memset(keys, 0, sizeof(float) * 2 * static_cast<size_t>(dim));
            std::memset(values, 0, sizeof(float) * 2 * kPageTokens);
            const Entry& e = pages_.entry(s, c);
            if (!e.k_bits) continue;
            const PageView page = pages_.view(s, e, false);
            kernels().read_grid(page.k_grid, dim, keys);
            if (!page.channel_values) {
                kernels().read_grid(page.v_grid, kPageTokens, values);
                continue;
            }
            float wide[2 * kMaxHeadDim];
            kernels().read_grid(page.v_grid, dim, wide);
            for (int part = 0; part < 2; part++) {
                double squares = 0;
                for (int i = 0; i < dim; i++)
                    squares += double{wide[part * dim + i]} * wide[part * dim + i];
                std::fill_n(values + part * kPageTokens, kPageTokens,
                            static_cast<float>(std::sqrt(squares / dim)));
            }
        }
    }
    return KVQ_OK;
}

// The squares of a key's products with the unit vectors.
int Cache::key_squares(int layer, int columns, float* squares) const {
    if (columns != pages_.columns() || layer < 0 || layer >= config().layers)
        return KVQ_BAD_ARGUMENT;
    fetch();
    const int dim = config().head_dim, heads = config().kv_heads;
    std::memset(squares, 0, sizeof(float) * size_t(heads) * size_t(columns) * kPageTokens);
    alignas(64) float products[kBlockRows * kPageTokens];
    Block block;
    for (int first = 0; first < dim; first += kBlockRows) {
        block.start(kBlockRows, dim, 0.0f);
        std::fill(block.q, block.q + kBlockRows * dim, 0.0f);
        for (int r = 0; r < kBlockRows; r++) block.q[r * dim + first + r] = 1.0f;
        for (int page = 0; page < heads * columns; page++) {
            const Entry& e = pages_.entry(layer * heads + page / columns, page % columns);
            if (!e.k_bits) continue;
            kernels().logits(pages_.view(layer * heads + page / columns, e, false), block, block.q, products);
            for (int i = 0; i < kBlockRows * kPageTokens; i++)
                squares[int64_t{page} * kPageTokens + i % kPageTokens] += products[i] * products[i];
        }
    }
    return KVQ_OK;
}

int64_t Cache::page(int layer, int head, int column, uint8_t* bytes) const {
    if (layer < 0 || layer >= config().layers || head < 0 || head >= config().kv_heads ||
        column < 0 || column >= pages_.columns())
        return -1;
    fetch();
    const Entry& e = pages_.entry(layer * config().kv_heads + head, column);
    uint8_t* at = bytes;
    if (e.k_bits)
        pages_.visit(
            e, [&](const uint8_t* part, int64_t count) { at = std::copy(part, part + count, at); });
    return at - bytes;
}

int Cache::tail(int layer, int head, int rows, uint16_t* k, uint16_t* v, int32_t* positions) const {
    if (layer < 0 || layer >= config().layers || head < 0 || head >= config().kv_heads ||
        rows != tail_.used())
        return KVQ_BAD_ARGUMENT;
    fetch();
    const size_t bytes = size_t{2} * static_cast<size_t>(rows) * config().head_dim;
    const int stream = layer * config().kv_heads + head;
    std::memcpy(k, tail_.rows(stream, 0), bytes);
    std::memcpy(v, tail_.rows(stream, 1), bytes);
    std::memcpy(positions, arena_.tail_positions, size_t{4} * static_cast<size_t>(rows));
    return KVQ_OK;
}

}  // namespace kvq
