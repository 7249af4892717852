// Attention of new tokens over the cache: rotates, stores keys and values, splits the work over
// (KV head, rows, page range) and merges parts by log-sum-exp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache.h"
#include "kernels/kernels.h"

namespace kvq {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kSplitColumns = 8;  // fewer pages than this per part are not worth a merge

// RMSNorm over one head, in place.
void normalize(float* x, const float* weight, int dim, float eps) {
    double squares = 0;
    for (int i = 0; i < dim; i++) squares += static_cast<double>(x[i]) * x[i];
    const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / dim) + eps);
    for (int i = 0; i < dim; i++) x[i] = x[i] * inverse * weight[i];
}

// Rotates pairs (i, i + pairs) of one head, in place.
void rotate(float* x, const float* cos, const float* sin, int pairs) {
    for (int i = 0; i < pairs; i++) {
        const float a = x[i], b = x[i + pairs];
        x[i] = a * cos[i] - b * sin[i];
        x[i + pairs] = b * cos[i] + a * sin[i];
    }
}

void fill_rope(float position, const float* inv_freq, int pairs, float factor, float* cos,
               float* sin) {
    for (int i = 0; i < pairs; i++) {
        const float angle = position * inv_freq[i];
        cos[i] = std::cos(angle) * factor;
        sin[i] = std::sin(angle) * factor;
    }
}

}  // namespace

void counter_rotate(const Block& block, int32_t delta, const float* inv_freq, int pairs,
                    float* rows) {
    float cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
    fill_rope(-static_cast<float>(delta), inv_freq, pairs, 1.0f, cos, sin);
    std::memcpy(rows, block.q, sizeof(float) * static_cast<size_t>(block.rows * block.head_dim));
    for (int r = 0; r < block.rows; r++) rotate(rows + r * block.head_dim, cos, sin, pairs);
}

// Everything the parallel parts of one attend call share.
struct AttendJob {
    const Cache& cache;
    const kvq_attention& a;
    int tokens;
    const float* qkv;
    const int64_t* positions;
    const float* inv_freq;
    const float* q_norm;
    float* out;
    int blocks;  // of kBlockRows rows per KV head
    int splits;

    int group() const { return a.heads / a.kv_heads; }
    int stride() const { return (a.heads + 2 * a.kv_heads) * a.head_dim; }
    int rows() const { return tokens * group(); }

    // Row r of a KV head is query head r % group of token r / group.
    const float* query(int kv_head, int row) const {
        return qkv + int64_t{row / group()} * stride() +
               (kv_head * group() + row % group()) * a.head_dim;
    }
    float* output(int kv_head, int row) const {
        return out + (int64_t{row / group()} * a.heads + kv_head * group() + row % group()) *
                         a.head_dim;
    }
    float* partial(int kv_head, int split, int row) const {
        return cache.partials_ + ((int64_t{kv_head} * splits + split) * cache.config().draft_tokens * group() + row) *
                                     (a.head_dim + 2);
    }

    void load_rows(Block& block, int kv_head, int first) const {
        const float scale = a.softcap > 0 ? a.scale / a.softcap : a.scale * kLog2E;
        block.rows = std::min(kBlockRows, rows() - first);
        block.head_dim = a.head_dim;
        block.softcap_log2 = a.softcap * kLog2E;
        block.window = a.window_tokens;
        for (int r = 0; r < block.rows; r++) {
            const int token = (first + r) / group();
            float* q = block.q + r * a.head_dim;
            std::memcpy(q, query(kv_head, first + r), sizeof(float) * static_cast<size_t>(a.head_dim));
            if (q_norm) normalize(q, q_norm, a.head_dim, a.norm_eps);
            const float* cos = cache.rope_ + int64_t{token} * 2 * a.rotary_pairs;
            rotate(q, cos, cos + a.rotary_pairs, a.rotary_pairs);
            for (int i = 0; i < a.head_dim; i++) q[i] *= scale;
            block.position[r] = positions[token];
            block.maximum[r] = kNothingSeen;
            block.sum[r] = 0;
        }
        std::memset(block.acc, 0, sizeof(float) * static_cast<size_t>(block.rows * a.head_dim));
    }

    void attend_pages(Block& block, int kv_head, int begin, int end) const {
        const Kernels& kernel = kernels();
        const int stream = a.layer * a.kv_heads + kv_head;
        alignas(64) float shifted[kBlockRows * kMaxHeadDim];
        int32_t shift = 0;
        for (int c = begin; c < end; c++) {
            const Entry& e = cache.entry(stream, c);
            if (!e.k_bits) continue;
            if (c + 1 < end) prefetch(cache.entry(stream, c + 1));
            const Column& column = cache.columns_[c];
            if (column.delta != 0 && column.delta != shift) {
                shift = column.delta;
                counter_rotate(block, shift, inv_freq, a.rotary_pairs, shifted);
            }
            kernel.page(block, column.delta ? shifted : block.q, cache.page_view(e, column));
        }
    }

    // Pages lie anywhere in the pool, where no hardware prefetcher expects them. Into the second level:
    // a page is more lines than the first level can have in flight.
    void prefetch(const Entry& e) const {
        const int64_t bytes = static_cast<int64_t>(granule_bytes(a.head_dim));
        for (uint32_t granule : e.granule) {
            if (granule == kNone) continue;
            const uint8_t* start = cache.pool_.granule(granule);
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(start + i, 0, 2);
        }
        if (e.constants == kNone) return;
        const uint8_t* constants = cache.pool_.constant(e.constants);
        for (int64_t i = 0; i < static_cast<int64_t>(constant_bytes(a.head_dim)); i += 64)
            __builtin_prefetch(constants + i, 0, 2);
        // Without an effect the compiler can name, it would drop this function.
        asm volatile("" ::: "memory");
    }

    void attend_floats(Block& block, const uint16_t* k, const uint16_t* v, const int32_t* where,
                       int count) const {
        for (int i = 0; i < count; i += kPageTokens)
            kernels().tile(block, k + int64_t{i} * a.head_dim, v + int64_t{i} * a.head_dim, where + i,
                           std::min(kPageTokens, count - i));
    }

    void run(size_t unit) const {
        const int split = static_cast<int>(unit) % splits;
        const int first = static_cast<int>(unit) / splits % blocks * kBlockRows;
        const int kv_head = static_cast<int>(unit) / splits / blocks;
        Block block;
        load_rows(block, kv_head, first);
        const State& state = *cache.state_;
        // The newest keys and the sinks come first: they set a maximum that makes many pages
        // negligible.
        if (split == 0) {
            const int stream = a.layer * a.kv_heads + kv_head;
            attend_floats(block, cache.tail_rows(stream, 0), cache.tail_rows(stream, 1),
                          cache.tail_positions_, state.tail_used + (state.staged ? 0 : tokens));
            if (state.staged)
                attend_floats(block, cache.staging_rows(kv_head, 0), cache.staging_rows(kv_head, 1),
                              cache.staging_positions_, tokens);
        }
        attend_pages(block, kv_head, state.columns * split / splits,
                     state.columns * (split + 1) / splits);
        for (int r = 0; r < block.rows; r++) {
            const float* acc = block.acc + r * a.head_dim;
            if (splits == 1) {
                const float inverse = block.sum[r] > 0 ? 1.0f / block.sum[r] : 0.0f;
                float* target = output(kv_head, first + r);
                for (int i = 0; i < a.head_dim; i++) target[i] = acc[i] * inverse;
            } else {
                float* target = partial(kv_head, split, first + r);
                target[0] = block.maximum[r];
                target[1] = block.sum[r];
                std::memcpy(target + 2, acc, sizeof(float) * static_cast<size_t>(a.head_dim));
            }
        }
    }

    void merge() const {
        for (int kv_head = 0; kv_head < a.kv_heads; kv_head++) {
            for (int row = 0; row < rows(); row++) {
                float top = kNothingSeen, sum = 0;
                for (int s = 0; s < splits; s++) top = std::max(top, partial(kv_head, s, row)[0]);
                float* target = output(kv_head, row);
                std::memset(target, 0, sizeof(float) * static_cast<size_t>(a.head_dim));
                for (int s = 0; s < splits; s++) {
                    const float* part = partial(kv_head, s, row);
                    const float weight = std::exp2(part[0] - top);
                    sum += part[1] * weight;
                    for (int i = 0; i < a.head_dim; i++) target[i] += part[2 + i] * weight;
                }
                const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
                for (int i = 0; i < a.head_dim; i++) target[i] *= inverse;
            }
        }
    }
};

int Cache::store_keys_values(const kvq_attention& a, int tokens, const float* qkv,
                             const int64_t* positions, const float* k_norm) {
    const int dim = a.head_dim, stride = (a.heads + 2 * a.kv_heads) * dim;
    bool finite = true;
    for (int t = 0; t < tokens; t++) {
        const float* cos = rope_ + int64_t{t} * 2 * a.rotary_pairs;
        const int64_t row = state_->staged ? t : state_->tail_used + t;
        (state_->staged ? staging_positions_ : tail_positions_)[row] =
            static_cast<int32_t>(positions[t]);
        for (int head = 0; head < a.kv_heads; head++) {
            const int stream = a.layer * a.kv_heads + head;
            uint16_t* keys = state_->staged ? staging_rows(head, 0) : tail_rows(stream, 0);
            uint16_t* values = state_->staged ? staging_rows(head, 1) : tail_rows(stream, 1);
            float k[kMaxHeadDim];
            const float* source = qkv + int64_t{t} * stride + (a.heads + head) * dim;
            std::memcpy(k, source, sizeof(float) * static_cast<size_t>(dim));
            if (k_norm) normalize(k, k_norm, dim, a.norm_eps);
            rotate(k, cos, cos + a.rotary_pairs, a.rotary_pairs);
            finite &= kernels().to_half(k, keys + row * dim, dim);
            finite &= kernels().to_half(source + a.kv_heads * dim, values + row * dim, dim);
        }
    }
    return finite ? KVQ_OK : KVQ_NOT_FINITE;
}

void Cache::keep_probes(const kvq_attention& a, int tokens, const float* qkv,
                        const int64_t* positions, const float* inv_freq, const float* q_norm) {
    LayerFacts& facts = *layer_facts(a.layer);
    facts.attention = a;
    std::memcpy(facts.inv_freq, inv_freq, sizeof(float) * static_cast<size_t>(a.rotary_pairs));
    const int dim = a.head_dim, stride = (a.heads + 2 * a.kv_heads) * dim;
    for (int t = 0; t < tokens; t++) {
        const int32_t token = state_->tokens + t;
        const int slot = probe_slot(token);
        if (slot < 0) continue;
        if (a.layer == 0) probes_[slot] = {token, static_cast<int32_t>(positions[t])};
        const float* cos = rope_ + int64_t{t} * 2 * a.rotary_pairs;
        for (int head = 0; head < a.heads; head++) {
            float q[kMaxHeadDim];
            std::memcpy(q, qkv + int64_t{t} * stride + head * dim,
                        sizeof(float) * static_cast<size_t>(dim));
            if (q_norm) normalize(q, q_norm, dim, a.norm_eps);
            rotate(q, cos, cos + a.rotary_pairs, a.rotary_pairs);
            for (int i = 0; i < dim; i++) q[i] *= a.scale;
            // A query that float16 cannot hold is no probe.
            if (!kernels().to_half(q, probe_rows(slot, a.layer) + head * dim, dim))
                probes_[slot].token = -1;
        }
    }
}

int Cache::attend(const kvq_attention& a, int tokens, const float* qkv, const int64_t* positions,
                  const float* inv_freq, const float* q_norm, const float* k_norm, float* out,
                  const Parallel& parallel) {
    if (state_->broken || tokens != state_->pending) return KVQ_BAD_STATE;
    // A chunk closes a layer's pages as it passes, so each layer sees it once and in order.
    if (state_->staged && a.layer != state_->attended) return KVQ_BAD_STATE;
    if (a.layer < 0 || a.layer >= config().layers || a.heads != config().heads ||
        a.kv_heads != config().kv_heads || a.head_dim != config().head_dim ||
        a.rotary_pairs < 0 || 2 * a.rotary_pairs > a.head_dim)
        return KVQ_BAD_ARGUMENT;
    for (int t = 0; t < tokens; t++) {
        if (positions[t] < 0 || positions[t] > INT32_MAX) return KVQ_BAD_ARGUMENT;
        float* cos = rope_ + int64_t{t} * 2 * a.rotary_pairs;
        fill_rope(static_cast<float>(positions[t]), inv_freq, a.rotary_pairs, a.rope_factor, cos,
                  cos + a.rotary_pairs);
    }
    if (const int status = store_keys_values(a, tokens, qkv, positions, k_norm)) return status;
    if (state_->staged && !closing_rows_consecutive(state_->tail_used + tokens, state_->closing))
        return KVQ_BAD_ARGUMENT;
    if (config().probes) keep_probes(a, tokens, qkv, positions, inv_freq, q_norm);
    AttendJob job{*this, a, tokens, qkv, positions, inv_freq, q_norm, out, 1, 1};
    job.blocks = (job.rows() + kBlockRows - 1) / kBlockRows;
    if (tokens <= config().draft_tokens)
        job.splits = std::clamp(state_->columns / kSplitColumns, 1, int{config().splits});
    parallel.run(
        parallel.context, [](void* user, size_t i) { static_cast<AttendJob*>(user)->run(i); },
        static_cast<size_t>(a.kv_heads * job.blocks * job.splits), &job);
    if (job.splits > 1) job.merge();
    state_->attended += a.layer == state_->attended;
    return state_->staged ? close_layer(a.layer, state_->closing, tokens) : KVQ_OK;
}

}  // namespace kvq
