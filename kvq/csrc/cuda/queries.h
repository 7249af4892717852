// What attention begins with: norms, rotations, and queries turned for the pages they will meet.
#pragma once
#include "../format.h"
#include "device.h"
#include "kvq_cuda.h"

namespace kvq::cuda {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kMostChannels = 256;  // of a head; heads of more have no kernels here

// The largest or the sum of `x` over so many neighbouring lanes, a power of two.
KVQ_DEVICE float over_lanes(float x, int lanes, bool largest) {
    for (int mask = 1; mask < lanes; mask *= 2) {
        const float other = shuffle_xor(x, mask);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}
// What `join` makes of the `x` of a block's threads; `room` float per thread.
template <class Join>
KVQ_DEVICE float over_block(float x, float* room, const Join& join) {
    const int i = thread_index();
    room[i] = x;
    sync_block();
    for (int half = thread_count() / 2; half > 0; half /= 2) {
        if (i < half) room[i] = join(room[i], room[i + half]);
        sync_block();
    }
    const float all = room[0];
    sync_block();
    return all;
}
KVQ_DEVICE float block_sum(float x, float* room) {
    return over_block(x, room, [](float a, float b) { return a + b; });
}

// The row x [dim] in place: pairs (i, i + pairs) turned to `position`.
KVQ_DEVICE void rotate(float* x, const float* inv_freq, int pairs, float position, float factor) {
    const int i = thread_index();
    if (i < pairs) {
        const float angle = position * inv_freq[i];
        const float c = cosf(angle) * factor, s = sinf(angle) * factor;
        const float a = x[i], b = x[i + pairs];
        x[i] = a * c - b * s;
        x[i + pairs] = b * c + a * s;
    }
    sync_block();
}

// The orthonormal Hadamard transform of blocks of channels, in place; rotary.h says which.
KVQ_DEVICE void hadamard(float* x, int dim) {
    const int i = thread_index(), length = dim & -dim;
    for (int half = 1; half < length; half *= 2) {
        float mine = 0;
        if (i < dim) mine = i & half ? sub(x[i - half], x[i]) : add(x[i], x[i + half]);
        sync_block();
        if (i < dim) x[i] = mine;
        sync_block();
    }
    if (i < dim) x[i] = mul(x[i], divide(1.0f, root(static_cast<float>(length))));
    sync_block();
}

KVQ_DEVICE void normalize(float* x, const float* weight, int dim, float eps, float* room) {
    const int i = thread_index();
    const float mine = i < dim ? x[i] : 0.0f;
    const float mean = block_sum(mine * mine, room) / static_cast<float>(dim);
    if (i < dim) x[i] = mine * (1.0f / root(mean + eps)) * weight[i];
    sync_block();
}

// A block per token and head of qkv, a thread per channel (kMostChannels of them).
KVQ_KERNEL prepare(kvq_cuda_attention a, kvq_cuda_sequence s) {
    KVQ_SHARED float x[kMostChannels], turned[kMostChannels], room[kMostChannels];
    const int token = block_index().x, head = block_index().y, i = thread_index();
    const int group = a.heads / a.kv_heads, dim = a.head_dim;
    const bool is_query = head < a.heads, is_key = !is_query && head < a.heads + a.kv_heads;
    const int64_t stride = int64_t{a.heads + 2 * a.kv_heads} * dim;
    if (i < dim) x[i] = s.qkv[token * stride + int64_t{head} * dim + i];
    sync_block();
    if (is_query || is_key) {
        const float* norm = is_query ? s.q_norm : s.k_norm;
        if (norm) normalize(x, norm, dim, a.norm_eps, room);
        rotate(x, s.inv_freq, a.rotary_pairs, static_cast<float>(s.positions[token]),
               a.rope_factor);
    }
    if (!is_query) {
        const int kv_head = (head - a.heads) % a.kv_heads;
        const int64_t row = int64_t{kv_head} * s.tail_stride + s.tail_rows - s.tokens + token;
        if (i < dim) (is_key ? s.tail_keys : s.tail_values)[row * dim + i] = half_bits(x[i]);
        return;
    }
    const int kv_head = head / group;
    const int64_t rows = int64_t{a.heads} * s.tokens;
    const int64_t row = (int64_t{kv_head} * s.tokens + token) * group + head % group;
    if (i < dim) x[i] *= a.scale * kLog2E;
    if (i < dim) s.queries[row * dim + i] = x[i];
    sync_block();
    for (int turn = 0; turn < s.turns; turn++) {
        if (i < dim) turned[i] = x[i];
        sync_block();
        if (s.deltas[turn])
            rotate(turned, s.inv_freq, a.rotary_pairs, -static_cast<float>(s.deltas[turn]), 1.0f);
        if (turn >= s.row_turns && (s.forms[kv_head] & kRotatedKeys)) hadamard(turned, dim);
        if (i < dim) s.queries[((1 + turn) * rows + row) * dim + i] = turned[i];
        sync_block();
    }
}

}  // namespace kvq::cuda
