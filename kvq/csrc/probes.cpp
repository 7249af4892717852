// Probes are kept as float16 rows [slot][layer][head][D], normalised, rotated and scaled, so that
// their products with keys are natural logits. Nothing is computed until evidence is asked for.
#include "probes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

void Probes::clear() {
    for (int i = 0; i < slots(); i++) arena_.probes[i] = {-1, 0};
    if (kept())
        std::memset(arena_.layers, 0,
                    sizeof(LayerFacts) * static_cast<size_t>(arena_.config().layers));
}

int64_t Probes::row_bytes() const {
    const kvq_config& c = arena_.config();
    return int64_t{2} * slots() * c.layers * c.heads * c.head_dim;
}

int Probes::slot(int64_t token) const {
    const int draft = arena_.config().draft_tokens, recent = ring_slots(draft, kProbeStride);
    if (token % kProbeStride == 0) return static_cast<int>(token / kProbeStride % recent);
    const int64_t run = token / kPageTokens;
    if (token != sampled_token(run)) return -1;
    return recent + static_cast<int>(run % ring_slots(draft, kPageTokens));
}

void Probes::keep(const Tail& tail, const kvq_attention& a, int tokens, const float* qkv,
                  const int64_t* positions, const float* inv_freq, const float* q_norm) {
    LayerFacts& facts = arena_.layers[a.layer];
    facts.attention = a;
    std::memcpy(facts.inv_freq, inv_freq, sizeof(float) * static_cast<size_t>(a.rotary_pairs));
    const int dim = a.head_dim, stride = (a.heads + 2 * a.kv_heads) * dim;
    for (int t = 0; t < tokens; t++) {
        const int32_t token = arena_.state->tokens + tail.depth(tail.first_row() + t);
        const int at = slot(token);
        if (at < 0) continue;
        if (a.layer == 0) arena_.probes[at] = {token, static_cast<int32_t>(positions[t])};
        const float* cos = arena_.rope + int64_t{t} * 2 * a.rotary_pairs;
        for (int head = 0; head < a.heads; head++) {
            float q[kMaxHeadDim];
            std::memcpy(q, qkv + int64_t{t} * stride + head * dim,
                        sizeof(float) * static_cast<size_t>(dim));
            if (q_norm) normalize(q, q_norm, dim, a.norm_eps);
            rotate(q, cos, cos + a.rotary_pairs, a.rotary_pairs);
            for (int i = 0; i < dim; i++) q[i] *= a.scale;
            // A query that float16 cannot hold is no probe.
            if (!kernels().to_half(q, rows(at, a.layer) + head * dim, dim))
                arena_.probes[at].token = -1;
        }
    }
}

void Probes::forget_from(const Tail& tail, int kept_rows) {
    for (int row = kept_rows; kept() && row < tail.branch().rows; row++) {
        const int32_t token = arena_.state->tokens + tail.depth(row);
        const int at = slot(token);
        if (at >= 0 && arena_.probes[at].token == token) arena_.probes[at].token = -1;
    }
}

void Probes::settle(const Tail& tail, const int32_t* rows, int count) {
    if (!kept() || tail.branch().chain) return;
    for (int i = 0; i < count; i++) {
        const int at = slot(arena_.state->tokens + i);
        if (at >= 0 && !tail.newest_of_depth(rows ? rows[i] : i)) arena_.probes[at].token = -1;
    }
}

void Probes::check() {
    const kvq_config& c = arena_.config();
    for (int layer = 0; kept() && layer < c.layers; layer++) {
        const kvq_attention& a = arena_.layers[layer].attention;
        const bool sound = a.layer == layer && a.heads == c.heads && a.kv_heads == c.kv_heads &&
                           a.head_dim == c.head_dim && a.rotary_pairs >= 0 &&
                           a.rotary_pairs <= a.head_dim / 2;
        for (int i = 0; !sound && i < slots(); i++) arena_.probes[i].token = -1;
    }
}

// Fills `found` with the slots of the newest probes among the first `tokens` tokens, oldest first;
// one lost to a rollback is left out until its slot is written again.
int Probes::usable(int tokens, int* found) const {
    int count = 0;
    const auto use = [&](int64_t token) {
        const int slot = this->slot(token);
        if (arena_.probes[slot].token != token) return;
        int at = count++;
        for (; at > 0 && arena_.probes[found[at - 1]].token > token; at--)
            found[at] = found[at - 1];
        found[at] = slot;
    };
    if (tokens == 0) return 0;
    int sampled = 0;
    for (int64_t run = (tokens - 1) / kPageTokens; run >= 0 && sampled < kProbes; run--) {
        if (sampled_token(run) >= tokens) continue;
        use(sampled_token(run));
        sampled++;
    }
    const int64_t last = (tokens - 1) / kProbeStride;
    for (int64_t i = last; i >= 0 && i > last - kProbes; i--) use(i * kProbeStride);
    return count;
}

// Loads a KV head's probe rows into a block, the way attention loads queries: all of them, or as
// many evenly spaced ones as a block takes, so that probes and heads take turns.
void Probes::load(Block& block, Visibility& sight, const LayerFacts& layer, int kv_head,
                  const int* slots, int count) const {
    const kvq_attention& a = layer.attention;
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const float unit = a.softcap > 0 ? 1.0f / a.softcap : kLog2E;
    const int total = count * group;
    block.start(std::min(kBlockRows, total), dim, a.softcap);
    for (int r = 0; r < block.rows; r++) {
        const int row = r * total / block.rows;
        const int slot = slots[row / group];
        const int head = kv_head * group + row % group;
        kernels().from_half(rows(slot, a.layer) + head * dim, block.q + r * dim, dim);
        for (int i = 0; i < dim; i++) block.q[r * dim + i] *= unit;
        sight.add(arena_.probes[slot].position, -1);
    }
}

namespace {

// One stream's pages as a block of probe rows sees them.
struct Observation {
    Block& block;
    Visibility& sight;
    const LayerFacts& layer;
    const PageTable& pages;
    int stream;
    Rotated rotated;

    template <class Look>
    void each_page(Look&& look) {
        for (int c = 0; c < pages.columns(); c++) {
            const Entry& e = pages.entry(stream, c);
            const uint64_t* masks;
            if (e.k_bits && sight.page(pages.column(c), masks))
                look(c, rotated.queries(block, pages.column(c).delta), pages.view(stream, e, false),
                     masks);
        }
    }

    // Attention over everything, for the weights' denominator and the output.
    void attend(const Tail& tail, const int32_t* positions) {
        const Kernels& kernel = kernels();
        const int dim = block.head_dim;
        for (int i = 0; i < tail.used(); i += kPageTokens) {
            const int count = std::min(kPageTokens, tail.used() - i);
            const uint64_t* masks;
            if (sight.committed(positions + i, count, masks))
                kernel.tile(block, tail.rows(stream, 0) + int64_t{i} * dim,
                            tail.rows(stream, 1) + int64_t{i} * dim, count, masks);
        }
        each_page([&](int, const float* q, const PageView& page, const uint64_t* masks) {
            kernel.page(block, q, page, masks);
        });
        for (int r = 0; r < block.rows; r++) {
            const float inverse = block.sum[r] > 0 ? 1.0f / block.sum[r] : 0.0f;
            for (int i = 0; i < dim; i++) block.acc[r * dim + i] *= inverse;
        }
    }
};

// Adds what the block's rows say of a stream's queries, as `rows`, and outputs to their means [dim].
void average(const Block& block, const float* rows, float unit, float* mean, float* square, float* output) {
    const float share = 1.0f / static_cast<float>(block.rows);
    for (int r = 0; r < block.rows; r++) {
        for (int i = 0; i < block.head_dim; i++) {
            const float q = rows[r * block.head_dim + i] * unit;
            const float x = block.acc[r * block.head_dim + i];
            mean[i] += q * share;
            square[i] += q * q * share;
            output[i] += x * x * share;
        }
    }
}

}  // namespace

int Probes::evidence(PageTable& pages, const Tail& tail, int tokens, float* facts,
                     float* queries) const {
    int slots[probe_slots(KVQ_MOST_DRAFT_TOKENS)];
    const int count = usable(tokens, slots);
    const int64_t columns = pages.columns(), heads = arena_.config().kv_heads;
    const int64_t dim = arena_.config().head_dim, streams = arena_.streams();
    std::memset(facts, 0,
                sizeof(float) * static_cast<size_t>(KVQ_EVIDENCE_FACTS * streams * columns));
    std::memset(queries, 0, sizeof(float) * static_cast<size_t>(3 * streams * dim));
    for (int s = 0; s < streams; s++) {
        if (count == 0) continue;
        const LayerFacts& layer = arena_.layers[s / heads];
        Block block;
        Visibility sight(layer.attention.window_tokens);
        load(block, sight, layer, s % static_cast<int>(heads), slots, count);
        Observation seen_by{block, sight, layer,
                            pages, s,     Rotated(layer.inv_freq, layer.attention.rotary_pairs, pages.form(s))};
        seen_by.attend(tail, arena_.tail_positions);
        const float unit = layer.attention.softcap > 0 ? layer.attention.softcap : 1.0f / kLog2E;
        average(block, seen_by.rotated.queries(block, 0), unit, queries + s * dim, queries + (streams + s) * dim,
                queries + (2 * streams + s) * dim);
        const auto fact = [&](int which, int64_t c) -> float& {
            return facts[(which * streams + s) * columns + c];
        };
        seen_by.each_page([&](int c, const float* q, const PageView& page, const uint64_t* masks) {
            PageEvidence seen;
            kernels().evidence(block, q, page, masks, unit, seen);
            if (!seen.rows) return;
            // What was summed over rows becomes a mean.
            const float rows = static_cast<float>(seen.rows), mass = seen.mass / rows;
            fact(KVQ_MASS, c) = mass;
            fact(KVQ_KEY_ERROR, c) = seen.key_error / rows;
            fact(KVQ_VALUE_ERROR, c) = seen.value_error / rows;
            fact(KVQ_EVICT_ERROR, c) = seen.evict_error / rows;
            const Entry& e = pages.entry(s, c);
            const uint8_t fallen = static_cast<uint8_t>(std::max(1, e.peak_mass - kPeakStep));
            const float before = e.mean_mass ? mass_of(e.mean_mass) : mass;
            pages.remember(s, c, std::max(mass_code(mass), fallen),
                           mass_code(before + kMeanShare * (mass - before)));
        });
        for (int64_t c = 0; c < columns; c++) {
            const Entry& e = pages.entry(s, static_cast<int>(c));
            fact(KVQ_PEAK_MASS, c) = e.k_bits ? mass_of(e.peak_mass) : 0.0f;
            fact(KVQ_MEAN_MASS, c) = e.k_bits ? mass_of(e.mean_mass) : 0.0f;
        }
    }
    return KVQ_OK;
}

}  // namespace kvq
