// What probe queries see of every page: the evidence that policies decide by.
//
// Probes are kept as float16 rows [slot][layer][head][D], normalised, rotated and scaled, so that
// their products with keys are natural logits. Nothing is computed until evidence is asked for.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache.h"
#include "kernels/kernels.h"

namespace kvq {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

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
float mass_of(uint8_t code) { return code ? std::exp2((code - 255.0f) / 16.0f) : 0.0f; }

constexpr int kPeakStep = 4;        // codes a peak falls per observation: half in four of them
constexpr float kMeanShare = 0.2f;  // of the newest observation in the running mean

}  // namespace

int Cache::probe_slot(int64_t token) {
    if (token % kProbeStride == 0) return static_cast<int>(token / kProbeStride % kRingSlots);
    const int64_t run = token / kPageTokens;
    return token == sampled_token(run) ? kRingSlots + static_cast<int>(run % kRingSlots) : -1;
}

// Fills `slots` with the newest probes among the first `tokens` tokens, oldest first; one lost to a
// rollback is left out until its slot is written again.
int Cache::usable_probes(int tokens, int* slots) const {
    int count = 0;
    const auto use = [&](int64_t token) {
        const int slot = probe_slot(token);
        if (probes_[slot].token != token) return;
        int at = count++;
        for (; at > 0 && probes_[slots[at - 1]].token > token; at--) slots[at] = slots[at - 1];
        slots[at] = slot;
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

// Loads a KV head's probe rows into a block, the way attention loads queries: all of them, or as many
// evenly spaced ones as a block takes, so that probes and heads take turns.
void Cache::load_probes(Block& block, const LayerFacts& layer, int kv_head, const int* slots,
                        int count) const {
    const kvq_attention& a = layer.attention;
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const float unit = a.softcap > 0 ? 1.0f / a.softcap : kLog2E;
    const int rows = count * group;
    block.rows = std::min(kBlockRows, rows);
    block.head_dim = dim;
    block.softcap_log2 = a.softcap * kLog2E;
    block.window = a.window_tokens;
    for (int r = 0; r < block.rows; r++) {
        const int row = r * rows / block.rows;
        const int slot = slots[row / group];
        const int head = kv_head * group + row % group;
        kernels().from_half(probe_rows(slot, a.layer) + head * dim, block.q + r * dim, dim);
        for (int i = 0; i < dim; i++) block.q[r * dim + i] *= unit;
        block.position[r] = probes_[slot].position;
        block.maximum[r] = kNothingSeen;
        block.sum[r] = 0;
    }
    std::memset(block.acc, 0, sizeof(float) * static_cast<size_t>(block.rows * dim));
}

int Cache::evidence(int tokens, float* facts, float* queries) {
    if (tokens < 0 || tokens > state_->tokens) return KVQ_BAD_ARGUMENT;
    if (!config().probes || state_->pending || state_->broken) return KVQ_BAD_STATE;
    int slots[kProbeSlots];
    const int count = usable_probes(tokens, slots);
    const int64_t columns = state_->columns, heads = config().kv_heads, dim = config().head_dim;
    const int64_t pages = streams() * columns;
    std::memset(facts, 0, sizeof(float) * static_cast<size_t>(KVQ_EVIDENCE_FACTS * pages));
    std::memset(queries, 0, sizeof(float) * static_cast<size_t>(3 * streams() * dim));
    for (int s = 0; s < streams(); s++) {
        const LayerFacts& layer = *layer_facts(s / static_cast<int>(heads));
        float* mean = queries + s * dim;
        float* square = queries + (streams() + s) * dim;
        float* output = queries + (2 * streams() + s) * dim;
        float* page_facts = facts + s * columns;
        if (count == 0) continue;
        Block block;
        load_probes(block, layer, s % static_cast<int>(heads), slots, count);
        const float unit = layer.attention.softcap > 0 ? layer.attention.softcap : 1.0f / kLog2E;
        observe(block, layer, s, unit, page_facts, pages);
        const float share = 1.0f / static_cast<float>(block.rows);
        for (int r = 0; r < block.rows; r++) {
            for (int64_t i = 0; i < dim; i++) {
                const float q = block.q[r * dim + i] * unit, x = block.acc[r * dim + i];
                mean[i] += q * share;
                square[i] += q * q * share;
                output[i] += x * x * share;
            }
        }
        for (int64_t c = 0; c < columns; c++) {
            Entry& e = entry(s, static_cast<int>(c));
            if (!e.k_bits) continue;
            const auto fact = [&](int which) -> float& { return page_facts[which * pages + c]; };
            // What was summed over rows becomes a mean; KVQ_MEAN_MASS held the count of rows.
            const float rows = std::max(fact(KVQ_MEAN_MASS), 1.0f);
            for (int which : {KVQ_MASS, KVQ_KEY_ERROR, KVQ_VALUE_ERROR, KVQ_EVICT_ERROR})
                fact(which) /= rows;
            if (fact(KVQ_MEAN_MASS) > 0) {
                const int fallen = std::max(1, e.peak_mass - kPeakStep);
                e.peak_mass = std::max(mass_code(fact(KVQ_MASS)), static_cast<uint8_t>(fallen));
                const float before = e.mean_mass ? mass_of(e.mean_mass) : fact(KVQ_MASS);
                e.mean_mass = mass_code(before + kMeanShare * (fact(KVQ_MASS) - before));
            }
            fact(KVQ_PEAK_MASS) = mass_of(e.peak_mass);
            fact(KVQ_MEAN_MASS) = mass_of(e.mean_mass);
        }
    }
    return KVQ_OK;
}

// Adds one block of probe rows to the facts of a stream's pages: attention once over everything for
// the weights' denominator and the output, then once more over the pages for their parts of both.
void Cache::observe(Block& block, const LayerFacts& layer, int stream, float unit, float* facts,
                    int64_t pages) const {
    const Kernels& kernel = kernels();
    const int dim = block.head_dim;
    alignas(64) float shifted[kBlockRows * kMaxHeadDim];
    for (int i = 0; i < state_->tail_used; i += kPageTokens)
        kernel.tile(block, tail_rows(stream, 0) + int64_t{i} * dim,
                    tail_rows(stream, 1) + int64_t{i} * dim, tail_positions_ + i,
                    std::min(kPageTokens, state_->tail_used - i));
    int32_t shift = 0;
    const auto queries = [&](const Column& column) {
        if (column.delta == 0) return static_cast<const float*>(block.q);
        if (column.delta != shift) {
            shift = column.delta;
            counter_rotate(block, shift, layer.inv_freq, layer.attention.rotary_pairs, shifted);
        }
        return static_cast<const float*>(shifted);
    };
    for (int c = 0; c < state_->columns; c++) {
        const Entry& e = entry(stream, c);
        if (e.k_bits) kernel.page(block, queries(columns_[c]), page_view(e, columns_[c]));
    }
    for (int r = 0; r < block.rows; r++) {
        const float inverse = block.sum[r] > 0 ? 1.0f / block.sum[r] : 0.0f;
        for (int i = 0; i < dim; i++) block.acc[r * dim + i] *= inverse;
    }
    for (int c = 0; c < state_->columns; c++) {
        const Entry& e = entry(stream, c);
        if (!e.k_bits) continue;
        PageEvidence seen;
        kernel.evidence(block, queries(columns_[c]), page_view(e, columns_[c]), unit, seen);
        facts[KVQ_MASS * pages + c] += seen.mass;
        facts[KVQ_MEAN_MASS * pages + c] += static_cast<float>(seen.rows);
        facts[KVQ_KEY_ERROR * pages + c] += seen.key_error;
        facts[KVQ_VALUE_ERROR * pages + c] += seen.value_error;
        facts[KVQ_EVICT_ERROR * pages + c] += seen.evict_error;
    }
}

void Cache::constants(uint16_t* keys, uint16_t* values) const {
    const size_t key_bytes = k_constant_bytes(config().head_dim);
    uint8_t* key = reinterpret_cast<uint8_t*>(keys);
    uint8_t* value = reinterpret_cast<uint8_t*>(values);
    for (int s = 0; s < streams(); s++) {
        for (int c = 0; c < state_->columns; c++, key += key_bytes, value += v_constant_bytes()) {
            const Entry& e = entry(s, c);
            if (e.k_bits) {
                const uint8_t* stored = pool_.constant(e.constants);
                std::memcpy(key, stored, key_bytes);
                std::memcpy(value, stored + key_bytes, v_constant_bytes());
            } else {
                std::memset(key, 0, key_bytes);
                std::memset(value, 0, v_constant_bytes());
            }
        }
    }
}

}  // namespace kvq
