// Probes are kept as float16 rows [slot][layer][head][D], normalised, rotated and scaled, so that
// their products with keys are natural logits. Nothing is computed until evidence is asked for.
#include "probes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attend.h"
#include "rotary.h"
#include "visibility.h"

namespace kvq {
namespace {

// splitmix64: which token of a run is its sampled probe. Never an even one, which may be recent.
uint64_t hash(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

int64_t sampled_token(int64_t run) {
    return run * kPageTokens +
           static_cast<int64_t>(hash(static_cast<uint64_t>(run)) % kPageTokens | 1);
}

// A mass in steps of a sixteenth of an octave, 255 for 1; what is below 2^-15.8 reads as 1.
uint8_t mass_code(float mass) {
    const float code = 255.0f + 16.0f * std::log2(std::max(mass, 1e-9f));
    return static_cast<uint8_t>(std::lround(std::clamp(code, 1.0f, 255.0f)));
}
float mass_of(uint8_t code) {
    return code ? std::exp2((code - 255.0f) / 16.0f) : 0.0f;
}

constexpr int kPeakStep = 4;        // codes a peak falls per observation: half in four of them
constexpr float kMeanShare = 0.2f;  // of the newest observation in the running mean

}  // namespace

// Runs up to kSamples have a slot each. Whenever there are twice as many, every second sample goes,
// oldest first, as new ones come, now from every second run: after any number of runs each slot is
// taken and the samples span the text, all as far apart or half as far.
int sample_slot(int64_t run) {
    while (run >= kSamples) {
        int64_t stride = 1;
        while (run >= kSamples * stride) stride *= 2;
        if (run % stride) return -1;
        run = (2 * (run / stride - kSamples / 2) + 1) * (stride / 2);
    }
    return static_cast<int>(run);
}

void Probes::clear() {
    std::fill_n(arena_.probes, records(), Probe{-1, 0});
    if (!kept()) return;
    // All of it is part of a snapshot, slots that no query was kept in too.
    std::memset(arena_.probe_rows, 0, static_cast<size_t>(row_bytes()));
    std::memset(arena_.layers, 0, static_cast<size_t>(facts_of_all()));
}

int64_t Probes::row_bytes() const {
    const kvq_config& c = arena_.config();
    return int64_t{2} * slots() * (c.layers + readers()) * c.kv_heads * kept_heads(c) * c.head_dim;
}

int64_t Probes::facts_of_all() const {
    return (layers() + readers()) * facts_bytes(arena_.config().head_dim);
}

int Probes::slot(int64_t token) const {
    const int newest = newest_slots(arena_.config().draft_tokens);
    if (token % kProbeStride == 0) return static_cast<int>(token / kProbeStride % newest);
    const int64_t run = token / kPageTokens;
    const bool sampled = (arena_.config().probes & KVQ_SAMPLES) && token == sampled_token(run);
    const int sample = sampled ? sample_slot(run) : -1;
    return sample < 0 ? -1 : newest + sample;
}

void Probes::keep(const Tail& tail, const kvq_attention& a, const Inputs& in) {
    const int stride = (a.heads + 2 * a.kv_heads) * a.head_dim;
    for (int t = 0; t < in.tokens; t++) {
        const int32_t token = token_of(tail, t);
        const int at = slot(token);
        if (at < 0) continue;
        if (a.layer == 0) {
            // What readers asked at another token says nothing of this one.
            for (int reader = layers(); reader < layers() + readers(); reader++)
                record(reader, at).token = -1;
            record(0, at) = {token, static_cast<int32_t>(in.positions[t])};
        }
        keep_row(a.layer, at, a, in.qkv + int64_t{t} * stride, in, t);
    }
}

void Probes::keep_look(const Tail& tail, const kvq_attention& a, const Inputs& in) {
    if (a.layer != layers() - 1 || looks_ >= readers()) return;
    const int reader = layers() + looks_++;
    for (int t = 0; t < in.tokens; t++) {
        const int at = slot(token_of(tail, in.row(t)));
        // Rows that are not asked wrote nothing: what `settle` trusts is written by the newest alone.
        if (at < 0 || !tail.newest_of_depth(tail.first_row() + in.row(t))) continue;
        record(reader, at) = {token_of(tail, in.row(t)), static_cast<int32_t>(in.positions[t])};
        keep_row(reader, at, a, in.qkv + int64_t{t} * a.heads * a.head_dim, in, t);
    }
}

void Probes::keep_row(int asker, int slot, const kvq_attention& a, const float* queries,
                      const Inputs& in, int t) const {
    LayerFacts& facts = arena_.facts(asker);
    facts.attention = a;
    std::memcpy(facts.inv_freq, in.inv_freq, sizeof(float) * static_cast<size_t>(a.rotary_pairs));
    const int dim = a.head_dim, group = a.heads / a.kv_heads, kept = kept_heads(arena_.config());
    // Of many heads that share keys each probe keeps others, so that all are heard in turn.
    const int first = record(asker, slot).token / kProbeStride;
    const float* cos = arena_.rope + int64_t{t} * 2 * a.rotary_pairs;
    for (int row = 0; row < a.kv_heads * kept; row++) {
        const int head = row / kept * group + (row % kept * group / kept + first) % group;
        float q[kMaxHeadDim];
        std::memcpy(q, queries + head * dim, sizeof(float) * static_cast<size_t>(dim));
        if (in.q_norm) normalize(q, in.q_norm, dim, a.norm_eps);
        rotate(q, cos, cos + a.rotary_pairs, a.rotary_pairs);
        for (int i = 0; i < dim; i++) q[i] *= a.scale;
        // A query that float16 cannot hold is no probe.
        if (!kernels().to_half(q, rows(slot, asker) + row * dim, dim))
            record(asker, slot).token = -1;
    }
}

void Probes::forget_tokens(int first) {
    for (int i = 0; i < records(); i++)
        if (arena_.probes[i].token >= first) arena_.probes[i].token = -1;
}

void Probes::forget_from(const Tail& tail, int kept_rows) {
    for (int row = kept_rows; kept() && row < tail.branch().rows; row++) {
        const int32_t token = tail.branch().at + tail.depth(row);
        const int at = slot(token);
        for (int i = at; at >= 0 && i < records(); i += slots())
            if (arena_.probes[i].token == token) arena_.probes[i].token = -1;
    }
}

void Probes::settle(const Tail& tail, const int32_t* rows, int count) {
    if (!kept() || tail.branch().chain) return;
    for (int row = 0; row < count; row++) {
        const int at = slot(tail.branch().at + row);
        if (at < 0 || tail.newest_of_depth(rows ? rows[row] : row)) continue;
        for (int i = at; i < records(); i += slots()) arena_.probes[i].token = -1;
    }
}

void Probes::check() {
    const kvq_config& c = arena_.config();
    for (int asker = 0; kept() && asker < layers() + readers(); asker++) {
        const kvq_attention& a = arena_.facts(asker).attention;
        const bool sound = is_of(asker, a.layer) && a.heads == c.heads &&
                           a.kv_heads == c.kv_heads && a.head_dim == c.head_dim &&
                           a.rotary_pairs >= 0 && a.rotary_pairs <= a.head_dim / 2;
        for (int i = 0; !sound && i < slots(); i++) record(asker, i).token = -1;
    }
}

Probes::Chosen Probes::newest(int asker, int tokens) const {
    Chosen chosen;
    const int64_t last = (int64_t{tokens} + kProbeStride - 1) / kProbeStride;
    for (int64_t i = std::max<int64_t>(0, last - kNewest); i < last; i++)
        if (const int at = slot(i * kProbeStride); record(asker, at).token == i * kProbeStride)
            chosen.slots[chosen.count++] = at;
    return chosen;
}

Probes::Chosen Probes::samples(int asker, int tokens) const {
    // Of each slot the newest run that had it at most two drafts from now.
    int64_t newest[kSamples];
    std::fill(newest, newest + kSamples, int64_t{-1});
    const int64_t horizon = int64_t{tokens} + 2 * arena_.config().draft_tokens;
    for (int64_t run = 0; (arena_.config().probes & KVQ_SAMPLES) && sampled_token(run) < horizon; run++)
        if (const int at = sample_slot(run); at >= 0) newest[at] = sampled_token(run);
    Chosen chosen;
    for (int64_t token : newest) {
        if (token < 0 || token >= tokens || record(asker, slot(token)).token != token) continue;
        int at = chosen.count++;
        for (; at > 0 && record(asker, chosen.slots[at - 1]).token > token; at--)
            chosen.slots[at] = chosen.slots[at - 1];
        chosen.slots[at] = slot(token);
    }
    return chosen;
}

namespace {

// What the askers of a stream saw of a page, each in the mean over its rows, in sum.
struct Seen {
    bool any = false;
    float mass = 0, recent = 0, total = 0, peak = 0, key_error = 0, value_error = 0,
          evict_error = 0;

    // Of one asker's newest rows and of its sampled ones, `sampled_rows` in all.
    void add(const PageEvidence& newest, const PageEvidence& sampled, int sampled_rows) {
        const int rows = newest.rows + sampled.rows;
        if (!rows) return;
        const float share = newest.rows ? 1.0f / static_cast<float>(newest.rows) : 0.0f;
        any = true;
        mass += (newest.mass + sampled.mass) / static_cast<float>(rows);
        recent += newest.mass * share;
        if (sampled_rows) total += sampled.mass / static_cast<float>(sampled_rows);
        peak = std::max({peak, newest.peak, sampled.peak});
        key_error += newest.key_error * share;
        value_error += newest.value_error * share;
        evict_error += newest.evict_error * share;
    }
};

// The same as facts of a page, whose history remembers the mean over so many askers: a byte counts up to 1.
template <class Fact>
void record(PageTable& pages, int stream, int column, const Seen& seen, int askers, Fact&& fact) {
    const auto of_all = static_cast<float>(askers);
    if (seen.any) {
        fact(KVQ_MASS) = seen.mass;
        fact(KVQ_RECENT_MASS) = seen.recent;
        fact(KVQ_TOTAL_MASS) = seen.total;
        fact(KVQ_KEY_ERROR) = seen.key_error;
        fact(KVQ_VALUE_ERROR) = seen.value_error;
        fact(KVQ_EVICT_ERROR) = seen.evict_error;
        const Entry& e = pages.entry(stream, column);
        const float recent = seen.recent / of_all;
        const float before = e.mean_mass ? mass_of(e.mean_mass) : recent;
        pages.remember(
            stream, column,
            static_cast<uint8_t>(std::max({1, int{mass_code(seen.peak)}, e.peak_weight - kPeakStep})),
            mass_code(before + kMeanShare * (recent - before)));
    }
    const Entry& e = pages.entry(stream, column);
    fact(KVQ_PEAK_WEIGHT) = e.k_bits ? mass_of(e.peak_weight) : 0.0f;
    fact(KVQ_MEAN_MASS) = e.k_bits ? mass_of(e.mean_mass) * of_all : 0.0f;
}

}  // namespace

// One stream's pages as a block of probe rows sees them.
struct Observation {
    const LayerFacts& layer;
    const PageTable& pages;
    int stream;
    Block block;
    Visibility sight{layer.attention.window_tokens};
    Rotated rotated{layer.inv_freq, layer.attention.rotary_pairs, pages.form(stream)};

    Observation(const LayerFacts& of, const PageTable& table, int at)
        : layer(of), pages(table), stream(at) {}

    // What a product of the block's queries and a key times this is, is a natural logit.
    float unit() const {
        return layer.attention.softcap > 0 ? layer.attention.softcap : 1.0f / kLog2E;
    }

    template <class Look>
    void page(int c, Look&& look) {
        const Entry& e = pages.entry(stream, c);
        if (!block.rows || !e.k_bits) return;
        for (int i = pages.first_view(c); i < pages.views() && pages.view_at(i).column == c; i++) {
            const View& view = pages.view_at(i);
            const uint64_t* masks;
            if (sight.page(view, masks))
                look(rotated.queries(block, view.delta), pages.view(stream, e, false), masks);
        }
    }

    // Attention over everything, for the weights' denominator and the output.
    void attend(const Tail& tail, const int32_t* positions, const int32_t* deltas) {
        const Kernels& kernel = kernels();
        const int dim = block.head_dim;
        Rotated unturned(layer.inv_freq, layer.attention.rotary_pairs);
        for (int i = 0; block.rows && i < tail.used(); i += kPageTokens) {
            const int count = std::min(kPageTokens, tail.used() - i);
            const uint64_t* masks;
            if (sight.committed(positions + i, count, masks))
                attend_tile(block, sight, unturned, tail.rows(stream, 0) + int64_t{i} * dim,
                            tail.rows(stream, 1) + int64_t{i} * dim, deltas + i, count, masks);
        }
        for (int c = 0; c < pages.columns(); c++)
            page(c, [&](const float* q, const PageView& view, const uint64_t* masks) {
                kernel.pages(block, q, &view, &masks, 1, nullptr, 0);
            });
        for (int r = 0; r < block.rows; r++) {
            const float inverse = block.sum[r] > 0 ? 1.0f / block.sum[r] : 0.0f;
            for (int i = 0; i < dim; i++) block.acc[r * dim + i] *= inverse;
        }
    }

    PageEvidence look(int c, bool errors) {
        // What views of one page see adds up; the rows are those that see most of them.
        PageEvidence seen;
        seen.errors = errors;
        int rows = 0;
        page(c, [&](const float* q, const PageView& view, const uint64_t* masks) {
            const int before = seen.rows;
            kernels().evidence(block, q, view, masks, unit(), seen);
            rows = std::max(rows, seen.rows - before);
        });
        seen.rows = rows;
        return seen;
    }

    // Adds what the rows say of the stream's queries, as pages' keys are met, and of outputs, each row a `share` of the means.
    void average(float share, float* mean, float* square, float* output) {
        const float* rows = rotated.queries(block, 0);
        for (int i = 0; i < block.rows * block.head_dim; i++) {
            const int channel = i % block.head_dim;
            const float q = rows[i] * unit(), x = block.acc[i];
            mean[channel] += q * share;
            square[channel] += q * q * share;
            output[channel] += x * x * share;
        }
    }
};

// Of so many probes' rows as many as a block takes.
int Probes::block_rows(const Chosen& chosen) const {
    return std::min(kBlockRows, chosen.count * kept_heads(arena_.config()));
}

// Loads a KV head's probe rows into a block, the way attention loads queries: all of them, or as
// many evenly spaced ones as a block takes, so that probes and heads take turns.
void Probes::load(Observation& to, int asker, int kv_head, const Chosen& chosen) const {
    const kvq_attention& a = to.layer.attention;
    const int kept = kept_heads(arena_.config()), dim = a.head_dim, total = chosen.count * kept;
    const float inverse = 1.0f / to.unit();
    to.block.start(block_rows(chosen), dim, a.softcap);
    for (int r = 0; r < to.block.rows; r++) {
        const int row = r * total / to.block.rows;
        const int slot = chosen.slots[row / kept];
        float* q = to.block.q + r * dim;
        kernels().from_half(rows(slot, asker) + (kv_head * kept + row % kept) * dim, q, dim);
        for (int i = 0; i < dim; i++) q[i] *= inverse;
        to.sight.add(record(asker, slot).position, -1);
    }
}

int Probes::evidence(PageTable& pages, const Tail& tail, int tokens, float* facts,
                     float* queries) const {
    const int heads = arena_.config().kv_heads, askers = layers() + readers();
    const int64_t columns = pages.columns(), streams = arena_.streams();
    const int64_t dim = arena_.config().head_dim;
    std::memset(facts, 0,
                sizeof(float) * static_cast<size_t>(KVQ_EVIDENCE_FACTS * streams * columns));
    std::memset(queries, 0, sizeof(float) * static_cast<size_t>(3 * streams * dim));
    struct Asker {
        int number;
        Chosen newest, samples;
    };
    for (int layer = 0; layer < layers(); layer++) {
        std::vector<Asker> asking;
        int rows = 0, all = 0;
        for (int asker = 0; asker < askers; asker++) {
            if (!is_of(asker, layer)) continue;
            all++;
            const Chosen newest = this->newest(asker, tokens), samples = this->samples(asker, tokens);
            if (newest.count + samples.count) asking.push_back({asker, newest, samples});
            rows += block_rows(newest) + block_rows(samples);
        }
        if (asking.empty()) continue;
        const float share = 1.0f / static_cast<float>(rows);
        for (int head = 0; head < heads; head++) {
            const int s = layer * heads + head;
            std::vector<Seen> seen(static_cast<size_t>(columns));
            for (const Asker& one : asking) {
                const LayerFacts& asked = arena_.facts(one.number);
                Observation recent(asked, pages, s), spread(asked, pages, s);
                load(recent, one.number, head, one.newest);
                load(spread, one.number, head, one.samples);
                for (Observation* kind : {&recent, &spread}) {
                    kind->attend(tail, arena_.tail_positions, arena_.tail_deltas);
                    kind->average(share, queries + s * dim, queries + (streams + s) * dim,
                                  queries + (2 * streams + s) * dim);
                }
                for (int c = 0; c < columns; c++)
                    seen[static_cast<size_t>(c)].add(recent.look(c, true), spread.look(c, false),
                                                     spread.block.rows);
            }
            for (int c = 0; c < columns; c++)
                kvq::record(pages, s, c, seen[static_cast<size_t>(c)], all,
                            [&](int which) -> float& {
                                return facts[(which * streams + s) * columns + c];
                            });
        }
    }
    return KVQ_OK;
}

}  // namespace kvq
