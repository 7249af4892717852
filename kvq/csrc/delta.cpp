#include "delta.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace kvq {
namespace {

constexpr float kSquaresEps = 1e-6f;
// Rows that are computed together: those between two bases, of a tree maybe more in several goes.
constexpr int kTogether = kFoldTokens;

int base_of(int token) {
    return token - token % kFoldTokens;
}

// ln(1 + e^x), which neither overflows nor loses what is small.
float softplus(float x) {
    return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)));
}

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

}  // namespace

struct DeltaNets::Row {
    const float *k, *u, *total;  // [key_dim], [shared, value_dim], [shared]
};

struct DeltaNets::Group {
    int base;               // a token
    std::vector<int> path;  // of the branch's rows those before `base`, oldest first
    std::vector<int> rows;
    std::vector<int> behind;  // of each of `rows` how many tokens it stands behind `base`
};

struct DeltaNets::Work {
    const Tail& tail;
    const DeltaInputs& in;
    std::vector<Group> groups;
    bool chunk;
    Places places;
    std::atomic<bool> finite;
};

void DeltaNets::clear() {
    std::memset(static_cast<void*>(arena_.delta_state), 0, static_cast<size_t>(state_bytes()));
    for (int slot = 1; slot < config().delta_states; slot++) forget(slot);
    std::memset(slot_of(0, 0), 0, static_cast<size_t>(slot_bytes()));
    pending_ = noted_ = -1;
}

DeltaNets::Places DeltaNets::places(int rows) const {
    const int live = bases()[state().live];
    const int last = base_of(arena_.state->tokens + rows) - kFoldTokens;
    if (last <= live) return {-1, -1};
    // Of a token its base is wanted, which lies between these two.
    const int wanted = wanted_within(state(), live + kFoldTokens - 1, last - 1);
    return {wanted && config().delta_states > kLeastDeltaStates ? base_of(wanted) : -1, last};
}

int DeltaNets::free_slot(int after) const {
    int slot = after + 1;
    while (bases()[slot] >= 0) slot++;
    return slot;
}

// Forgets states until so many slots are free: the beginning, which is known anyway, then that
// without which least is computed again.
void DeltaNets::make_free(int count) const {
    int32_t* const end = bases() + config().delta_states;
    const int live = bases()[state().live];
    std::vector<int32_t> known;
    std::copy_if(bases(), end, std::back_inserter(known),
                 [&](int base) { return base >= 0 && base != live; });
    std::sort(known.begin(), known.end());
    for (int free = config().delta_states - 1 - static_cast<int>(known.size()); free < count;
         free++) {
        const size_t i = known[0] ? least_missed(state(), known, live, base_of) : 0;
        *std::find(bases(), end, known[i]) = -1;
        known.erase(known.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

DeltaNets::Row DeltaNets::committed(int layer, int head, int token) const {
    const float* k = newest(layer, token) + conv_width();
    const float* u = k + int64_t{config().delta_key_heads} * key_dim();
    const float* total = u + int64_t{config().delta_value_heads} * value_dim();
    return {k + int64_t{head} * key_dim(), u + int64_t{head} * shared() * value_dim(),
            total + int64_t{head} * shared()};
}

namespace {

// Folds kFoldTokens rows into a value head's state, the `own`-th of those that share a key head.
template <class Row>
void fold(const float* from, float* to, const Row* rows, int own, int key_dim, int value_dim,
          float* keys) {
    const float* u[kFoldTokens];
    const float total = rows[kFoldTokens - 1].total[own];
    for (int j = 0; j < kFoldTokens; j++) {
        const float fades = std::exp(total - rows[j].total[own]);
        for (int d = 0; d < key_dim; d++) keys[j * key_dim + d] = fades * rows[j].k[d];
        u[j] = rows[j].u + int64_t{own} * value_dim;
    }
    kernels().delta_fold(from, to, key_dim, value_dim, std::exp(total), keys, u, kFoldTokens);
}

}  // namespace

int DeltaNets::run(const Tail& tail, const DeltaInputs& in, const Parallel& parallel) {
    BranchState& b = arena_.state->branch;
    if (!any() || in.tokens < 1 || in.tokens != b.pass_rows) return KVQ_BAD_STATE;
    if (in.layer < 0 || in.layer >= config().delta_layers) return KVQ_BAD_ARGUMENT;
    // Of a chunk the first layer makes room for states, so each layer sees it once and in order.
    if (tail.is_chunk() && in.layer != b.mixed) return KVQ_BAD_STATE;
    Work work{tail, in, {}, tail.is_chunk(), {-1, -1}, {true}};
    if (work.chunk) {
        work.places = places(b.rows);
        if (in.layer == 0) {
            make_free(work.places.count());
            noted_ = work.places.wanted < 0 ? -1 : free_slot(-1);
            pending_ = work.places.last < 0 ? -1 : free_slot(noted_);
        }
    }
    for (int row = tail.first_row(); row < b.rows; row++) {
        const int token = arena_.state->tokens + tail.depth(row), base = base_of(token);
        std::vector<int> path;
        const int before = std::max(0, base - arena_.state->tokens);
        if (!work.chunk)
            for (int at = row; at >= 0; at = b.chain ? at - 1 : arena_.branch[at].parent)
                if (tail.depth(at) < before) path.push_back(at);
        std::reverse(path.begin(), path.end());
        auto found = std::find_if(work.groups.begin(), work.groups.end(), [&](const Group& one) {
            return one.base == base && one.path == path;
        });
        if (found == work.groups.end()) {
            work.groups.push_back({base, path, {}, {}});
            found = work.groups.end() - 1;
        }
        found->rows.push_back(row);
        found->behind.push_back(token - base);
    }
    // A row's ancestors come before it.
    std::stable_sort(work.groups.begin(), work.groups.end(),
                     [](const Group& x, const Group& y) { return x.base < y.base; });
    each(parallel, static_cast<size_t>(config().delta_key_heads),
         [&](size_t head) { run_head(work, static_cast<int>(head)); });
    if (!work.finite) return KVQ_NOT_FINITE;
    b.mixed += in.layer == b.mixed;
    return KVQ_OK;
}

// One key head and the value heads that share it, over all rows of the pass.
void DeltaNets::run_head(Work& w, int head) const {
    const DeltaInputs& in = w.in;
    const BranchState& b = w.tail.branch();
    const int tokens = arena_.state->tokens, first = w.tail.first_row(), heads = shared();
    const int64_t keys = key_dim(), values = int64_t{heads} * value_dim(), taps = before() + 1;
    const int64_t all_keys = config().delta_key_heads * keys;
    const int64_t width = conv_width() + config().delta_value_heads * int64_t{value_dim()};
    const int64_t channels = 2 * keys + values;
    // Where a part of the channels begins among all, and how many it has: q, k, v.
    const int64_t starts[3] = {head * keys, all_keys + head * keys, 2 * all_keys + head * values};
    const int64_t counts[3] = {keys, keys, values};
    const bool folds = w.groups.back().base > base_of(tokens);
    std::vector<float> room(static_cast<size_t>(
        taps * channels + kTogether * (3 * keys + values + 2 * value_dim()) +
        kFoldTokens * (keys + values + heads) + (folds ? heads * keys * value_dim() : 0)));
    float* at = room.data();
    const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    float* weights = take(taps * channels);  // a tap's of all channels side by side
    float* queries = take(2 * kTogether * keys);  // rows of keys, then of queries
    float* given = take(kTogether * values);
    float* looked = take(2 * kTogether * int64_t{value_dim()});
    float* folded = take(kTogether * keys);
    float* newest_k = take(kFoldTokens * keys);  // of a chunk, by their tokens
    float* newest_u = take(kFoldTokens * values);
    float* newest_total = take(kFoldTokens * int64_t{heads});
    float* own_state = folds ? take(heads * keys * value_dim()) : nullptr;
    for (int64_t k = 0; k < taps; k++) {
        float* to = weights + k * channels;
        for (int part = 0; part < 3; part++)
            for (int64_t c = 0; c < counts[part]; c++)
                *to++ = in.conv[(starts[part] + c) * taps + k];
    }
    const auto stored = [&](float* row) -> Row {
        const float* k = row + conv_width();
        const float* u = k + all_keys;
        const float* total = u + config().delta_value_heads * int64_t{value_dim()};
        return {k + head * keys, u + head * values, total + head * heads};
    };
    const auto of_chunk = [&](int token) -> Row {
        const int64_t place = token % kFoldTokens;
        return {newest_k + place * keys, newest_u + place * values, newest_total + place * heads};
    };
    const auto row_of = [&](int row) {
        return w.chunk ? of_chunk(tokens + row) : stored(branch(in.layer, row));
    };
    // What row `row` convolves with `back` rows before it, or null: nothing was there.
    const auto seen = [&](int row, int back) -> const float* {
        while (back && row >= 0) row = b.chain ? row - 1 : arena_.branch[row].parent, back--;
        if (row >= first) return in.rows + (row - first) * width;
        if (row >= 0) return branch(in.layer, row);
        const int token = tokens - 1 - back;
        return token >= 0 ? newest(in.layer, token) : nullptr;
    };
    // The rows of a path, of the branch's `path`, from token `from` on.
    const auto on_path = [&](const std::vector<int>& path, int from, int count, Row* to) {
        for (int token = from; token < from + count; token++)
            *to++ = token < tokens ? committed(in.layer, head, token)
                    : w.chunk      ? of_chunk(token)
                                   : row_of(path[static_cast<size_t>(token - tokens)]);
    };
    bool finite = true;
    int state_base = base_of(tokens);  // whose state own_state is, of a chunk
    for (const Group& group : w.groups) {
        const bool live = group.base == base_of(tokens);
        if (!w.chunk) state_base = base_of(tokens);
        for (; state_base < group.base; state_base += kFoldTokens) {
            Row rows[kFoldTokens];
            on_path(group.path, state_base, kFoldTokens, rows);
            for (int own = 0; own < heads; own++) {
                float* to = own_state + own * keys * value_dim();
                const float* from = state_base == base_of(tokens)
                                        ? state_of(state().live, in.layer, head * heads + own)
                                        : to;
                fold(from, to, rows, own, key_dim(), value_dim(), folded);
                const int base = state_base + kFoldTokens;
                for (const auto& [place, slot] :
                     {std::pair{w.places.wanted, noted_}, std::pair{w.places.last, pending_}})
                    if (place == base)
                        std::memcpy(state_of(slot, in.layer, head * heads + own), to,
                                    sizeof(float) * static_cast<size_t>(keys * value_dim()));
            }
        }
        for (size_t start = 0; start < group.rows.size(); start += kTogether) {
            const int count =
                static_cast<int>(std::min<size_t>(kTogether, group.rows.size() - start));
            for (int i = 0; i < count; i++) {
                const int row = group.rows[start + static_cast<size_t>(i)];
                float mixed[2 * kMostDeltaDim];
                float* sums[3] = {mixed, mixed + keys, given + i * values};
                for (int64_t k = taps - 1; k >= 0; k--) {
                    const float* from = seen(row, static_cast<int>(taps - 1 - k));
                    const float* weight = weights + k * channels;
                    for (int part = 0; part < 3; weight += counts[part++])
                        for (int64_t c = 0; c < counts[part]; c++) {
                            const float x = from ? from[starts[part] + c] * weight[c] : 0.0f;
                            sums[part][c] = k == taps - 1 ? x : sums[part][c] + x;
                        }
                }
                for (int part = 0; part < 3; part++)
                    kernels().silu(sums[part], sums[part], static_cast<int>(counts[part]));
                for (int part = 0; part < 2; part++) {
                    const float squares =
                        kernels().dot(sums[part], sums[part], static_cast<int>(keys));
                    const float unit = (1.0f / std::sqrt(squares + kSquaresEps)) *
                                       (part ? 1.0f : 1.0f / std::sqrt(static_cast<float>(keys)));
                    float* to = queries + (2 * i + 1 - part) * keys;
                    for (int64_t d = 0; d < keys; d++) to[d] = unit * sums[part][d];
                }
            }
            const auto k_of = [&](int i) { return queries + 2 * i * keys; };
            const auto q_of = [&](int i) { return k_of(i) + keys; };
            for (int i = 0; i < count; i++) {
                const Row kept = row_of(group.rows[start + static_cast<size_t>(i)]);
                std::copy_n(k_of(i), keys, const_cast<float*>(kept.k));
            }
            for (int own = 0; own < heads; own++) {
                const int value_head = head * heads + own;
                const float* s = live ? state_of(state().live, in.layer, value_head)
                                      : own_state + own * keys * value_dim();
                kernels().delta_read(s, key_dim(), value_dim(), queries, 2 * count, looked);
                const float forgets = -std::exp(in.decay[value_head]);
                for (int i = 0; i < count; i++) {
                    const size_t index = start + static_cast<size_t>(i);
                    const int row = group.rows[index], behind = group.behind[index];
                    // Its own path, from the base on.
                    Row rows[kFoldTokens];
                    int filled = behind;
                    for (int up = row, left = behind; left > 0; left--) {
                        up = up < 0 ? up : b.chain ? up - 1 : arena_.branch[up].parent;
                        const int token = group.base + left - 1;
                        rows[--filled] = up >= 0 ? row_of(up) : committed(in.layer, head, token);
                    }
                    const float* gates =
                        in.gates + int64_t{row - first} * 2 * config().delta_value_heads;
                    const float beta = sigmoid(gates[value_head]);
                    const float a = gates[config().delta_value_heads + value_head];
                    const float g = forgets * softplus(a + in.dt_bias[value_head]);
                    const float total = behind ? rows[behind - 1].total[own] + g : g;
                    float* known = looked + 2 * i * int64_t{value_dim()};
                    float* output = known + value_dim();
                    const float faded = std::exp(total);
                    for (int e = 0; e < 2 * value_dim(); e++) known[e] *= faded;
                    for (int j = 0; j < behind; j++) {
                        const float fades = std::exp(total - rows[j].total[own]);
                        const float* u = rows[j].u + int64_t{own} * value_dim();
                        kernels().add(known, fades * kernels().dot(rows[j].k, k_of(i), key_dim()), u,
                                      value_dim());
                        kernels().add(output, fades * kernels().dot(rows[j].k, q_of(i), key_dim()), u,
                                      value_dim());
                    }
                    const Row kept = row_of(row);
                    float* u = const_cast<float*>(kept.u) + int64_t{own} * value_dim();
                    const float* v = given + i * values + int64_t{own} * value_dim();
                    for (int e = 0; e < value_dim(); e++) {
                        u[e] = beta * (v[e] - known[e]);
                        finite &= std::isfinite(u[e]);
                    }
                    const_cast<float*>(kept.total)[own] = total;
                    finite &= std::isfinite(total);
                    kernels().add(output, kernels().dot(k_of(i), q_of(i), key_dim()), u,
                                  value_dim());
                    const float* row_in = in.rows + int64_t{row - first} * width;
                    const float* z = row_in + conv_width() + int64_t{value_head} * value_dim();
                    float* out = in.out + (int64_t{row - first} * config().delta_value_heads +
                                           value_head) * value_dim();
                    const float mean = kernels().dot(output, output, value_dim()) /
                                       static_cast<float>(value_dim());
                    const float unit = 1.0f / std::sqrt(mean + in.norm_eps);
                    kernels().silu(z, out, value_dim());
                    for (int e = 0; e < value_dim(); e++)
                        out[e] *= (output[e] * unit) * in.scale[e];
                }
            }
            // What the branch keeps of these rows, and of a chunk its end.
            for (int i = 0; i < count; i++) {
                const int row = group.rows[start + static_cast<size_t>(i)];
                const float* from = in.rows + int64_t{row - first} * width;
                const Row now = row_of(row);
                const auto put = [&](float* to) {
                    for (int part = 0; part < 3; part++)
                        std::copy_n(from + starts[part], counts[part], to + starts[part]);
                    const Row there = stored(to);
                    if (there.k == now.k) return;
                    std::copy_n(now.k, keys, const_cast<float*>(there.k));
                    std::copy_n(now.u, values, const_cast<float*>(there.u));
                    std::copy_n(now.total, heads, const_cast<float*>(there.total));
                };
                for (int part = 0; part < 3; part++)
                    for (int64_t c = 0; c < counts[part]; c++)
                        finite &= std::isfinite(from[starts[part] + c]);
                if (row < config().draft_tokens) put(branch(in.layer, row));
                if (w.chunk && row >= first_ending(b.rows))
                    put(ending(in.layer, row - first_ending(b.rows)));
            }
        }
    }
    // The rows that the convolutions behind a chunk's places see.
    for (const auto& [place, slot] :
         {std::pair{w.places.wanted, noted_}, std::pair{w.places.last, pending_}})
        for (int i = 0; w.chunk && place >= 0 && i < before(); i++) {
            const int token = place - before() + i;
            const float* from = token >= tokens ? in.rows + int64_t{token - tokens} * width
                                : token >= 0    ? newest(in.layer, token)
                                                : nullptr;
            float* to = before_of(slot, in.layer) + i * conv_width();
            for (int part = 0; part < 3; part++)
                for (int64_t c = starts[part]; c < starts[part] + counts[part]; c++)
                    to[c] = from ? from[c] : 0.0f;
        }
    if (!finite) w.finite = false;
}

// The state of the newest base becomes that of the next one, in a slot of its own.
void DeltaNets::fold_newest() const {
    DeltaState& s = state();
    make_free(1);
    const int base = bases()[s.live], slot = free_slot(-1);
    std::vector<float> folded(static_cast<size_t>(kFoldTokens * key_dim()));
    for (int layer = 0; layer < config().delta_layers; layer++) {
        for (int head = 0; head < config().delta_key_heads; head++) {
            Row rows[kFoldTokens];
            for (int j = 0; j < kFoldTokens; j++) rows[j] = committed(layer, head, base + j);
            for (int own = 0; own < shared(); own++)
                fold(state_of(s.live, layer, head * shared() + own),
                     state_of(slot, layer, head * shared() + own), rows, own, key_dim(),
                     value_dim(), folded.data());
        }
        for (int i = 0; i < before(); i++) {
            const int token = base + kFoldTokens - before() + i;
            float* to = before_of(slot, layer) + i * conv_width();
            if (token >= 0) std::copy_n(newest(layer, token), conv_width(), to);
            else std::fill_n(to, conv_width(), 0.0f);
        }
    }
    bases()[slot] = base + kFoldTokens;
    s.live = slot;
}

void DeltaNets::keep(const Tail& tail, const int32_t* rows, int count) {
    if (!any()) return;
    DeltaState& s = state();
    const int tokens = arena_.state->tokens;
    const bool chunk = tail.is_chunk() && count == tail.branch().rows;
    if (chunk) {
        const Places kept = places(count);
        if (kept.wanted >= 0) bases()[noted_] = kept.wanted;
        if (kept.last >= 0) bases()[pending_] = kept.last, s.live = pending_;
    }
    pending_ = noted_ = -1;
    for (int i = chunk ? first_ending(count) : 0; i < count; i++) {
        for (int layer = 0; layer < config().delta_layers; layer++)
            std::memcpy(newest(layer, tokens + i),
                        chunk ? ending(layer, i - first_ending(count))
                              : branch(layer, rows ? rows[i] : i),
                        static_cast<size_t>(row_bytes()));
        if (tokens + i + 1 == bases()[s.live] + kFoldTokens) fold_newest();
    }
    s.held = std::min(held_rows(), s.held + count);
}

int DeltaNets::trim(int tokens) {
    if (!any()) return tokens;
    DeltaState& s = state();
    int best = -1;
    for (int slot = 0; slot < config().delta_states; slot++) {
        if (bases()[slot] > tokens) forget(slot);
        if (bases()[slot] >= 0 && (best < 0 || bases()[slot] > bases()[best])) best = slot;
    }
    if (best < 0) {
        best = 0;
        bases()[0] = 0;
        std::memset(slot_of(0, 0), 0, static_cast<size_t>(slot_bytes()));
    }
    const int base = bases()[best];
    if (base == base_of(tokens) &&
        first_held() <= std::max(0, std::min(base, tokens - before()))) {
        s.held = tokens - first_held();
        s.live = best;
        return tokens;
    }
    want(s, tokens, delta_places(config()));
    s.live = best;
    s.held = std::min(base, before());
    for (int layer = 0; layer < config().delta_layers; layer++)
        for (int i = before() - s.held; i < before(); i++) {
            float* to = newest(layer, base - before() + i);
            std::fill_n(to, row_width(), 0.0f);
            std::copy_n(before_of(best, layer) + i * conv_width(), conv_width(), to);
        }
    return base;
}

int64_t DeltaNets::bytes_of(const uint8_t* saved) const {
    DeltaState s;
    std::memcpy(&s, saved, sizeof s);
    int64_t bytes = config().delta_layers * s.held * row_bytes();
    for (int slot = 0; slot < config().delta_states; slot++) {
        int32_t base;
        std::memcpy(&base, saved + sizeof s + sizeof base * static_cast<size_t>(slot), sizeof base);
        if (base >= 0) bytes += slot_bytes();
    }
    return bytes;
}

bool DeltaNets::fits(const uint8_t* saved, int tokens) const {
    DeltaState s;
    std::memcpy(&s, saved, sizeof s);
    const int needed = std::min(tokens, std::max(tokens % kFoldTokens, before()));
    if (s.held < needed || s.held > std::min(tokens, most_delta_newest(config())) ||
        !valid_wanted(s, config().context_tokens) || s.live < 0 ||
        s.live >= config().delta_states)
        return false;
    std::vector<int32_t> known;
    for (int slot = 0; slot < config().delta_states; slot++) {
        int32_t base;
        std::memcpy(&base, saved + sizeof s + sizeof base * static_cast<size_t>(slot), sizeof base);
        if (slot == s.live && base != base_of(tokens)) return false;
        if (base == -1) continue;
        if (base < 0 || base > tokens || base % kFoldTokens ||
            std::find(known.begin(), known.end(), base) != known.end())
            return false;
        known.push_back(base);
    }
    return true;
}

}  // namespace kvq
