#include "attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rotary.h"
#include "visibility.h"

namespace kvq {

const Parallel kSerial{[](void*, void (*work)(void*, size_t), size_t count, void* user) {
                           for (size_t i = 0; i < count; i++) work(user, i);
                       },
                       nullptr};

namespace {

constexpr int kSplitColumns = 8;  // fewer pages than this per part are not worth a merge

}  // namespace

void attend_tile(Block& block, Visibility& sight, Rotated& rotated, const uint16_t* k,
                 const uint16_t* v, const int32_t* deltas, int count, const uint64_t* masks) {
    // Rows that have moved alike meet the same queries.
    uint64_t left = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    while (left) {
        const int32_t delta = deltas ? deltas[__builtin_ctzll(left)] : 0;
        uint64_t alike = 0;
        for (int t = 0; t < count; t++)
            alike |= static_cast<uint64_t>(!deltas || deltas[t] == delta) << t;
        const bool all = alike == left && __builtin_popcountll(left) == count;
        kernels().tile(block, rotated.queries(block, delta), k, v, count,
                       all ? masks : sight.among(alike, masks));
        left &= ~alike;
    }
}

AttendJob::AttendJob(const Arena& arena, const PageTable& pages, const Tail& tail,
                     const kvq_attention& a, const Inputs& in)
    : arena_(arena), pages_(pages), tail_(tail), a_(a), in_(in) {
    const kvq_config& c = arena.config();
    blocks_ = (rows() + kBlockRows - 1) / kBlockRows;
    // Long passes have blocks enough to share out.
    const bool splits = in.tokens <= c.draft_tokens;
    splits_ = splits ? std::clamp(pages.columns() / kSplitColumns, 1, int{c.splits}) : 1;
}

const float* AttendJob::query(int kv_head, int row) const {
    return in_.qkv + int64_t{row / group()} * stride() +
           (kv_head * group() + row % group()) * a_.head_dim;
}

float* AttendJob::output(int kv_head, int row) const {
    return in_.out +
           (int64_t{row / group()} * a_.heads + kv_head * group() + row % group()) * a_.head_dim;
}

// The running maximum, the sum and the weighted values of one row over one page range.
float* AttendJob::partial(int kv_head, int split, int row) const {
    const int64_t rows = int64_t{arena_.config().draft_tokens} * group();
    return arena_.partials +
           ((int64_t{kv_head} * splits_ + split) * rows + row) * (a_.head_dim + 2);
}

void AttendJob::load_rows(Block& block, Visibility& sight, int kv_head, int first) const {
    const float scale = a_.softcap > 0 ? a_.scale / a_.softcap : a_.scale * kLog2E;
    block.start(std::min(kBlockRows, rows() - first), a_.head_dim, a_.softcap);
    for (int r = 0; r < block.rows; r++) {
        const int token = (first + r) / group();
        float* q = block.q + r * a_.head_dim;
        std::memcpy(q, query(kv_head, first + r), sizeof(float) * static_cast<size_t>(a_.head_dim));
        if (in_.q_norm) normalize(q, in_.q_norm, a_.head_dim, a_.norm_eps);
        const float* cos = arena_.rope + int64_t{token} * 2 * a_.rotary_pairs;
        rotate(q, cos, cos + a_.rotary_pairs, a_.rotary_pairs);
        for (int i = 0; i < a_.head_dim; i++) q[i] *= scale;
        sight.add(in_.positions[token], tail_.first_row() + token);
    }
}

void AttendJob::attend_floats(Block& block, Visibility& sight, int kv_head) const {
    const int64_t dim = a_.head_dim;
    Rotated rotated(in_.inv_freq, a_.rotary_pairs);
    const auto tiles = [&](const uint16_t* k, const uint16_t* v, const int32_t* where, int total,
                           bool staged) {
        for (int i = 0; i < total; i += kPageTokens) {
            const int count = std::min(kPageTokens, total - i);
            const uint64_t* masks;
            if (staged ? sight.staged(tail_, i, where + i, count, masks)
                       : sight.tail(tail_, i, where + i, count, masks))
                attend_tile(block, sight, rotated, k + i * dim, v + i * dim,
                            staged ? nullptr : arena_.tail_deltas + i, count, masks);
        }
    };
    const int stream = a_.layer * a_.kv_heads + kv_head;
    const bool staged = tail_.branch().staged;
    tiles(tail_.rows(stream, 0), tail_.rows(stream, 1), arena_.tail_positions,
          tail_.used() + (staged ? 0 : tail_.branch().rows), false);
    if (staged)
        tiles(tail_.staging(kv_head, 0), tail_.staging(kv_head, 1), arena_.staging_positions,
              in_.tokens, true);
}

void AttendJob::attend_pages(Block& block, Visibility& sight, int kv_head, int begin,
                             int end) const {
    const int stream = a_.layer * a_.kv_heads + kv_head;
    const bool hi_view = tail_.branch().hi_view;
    Rotated rotated(in_.inv_freq, a_.rotary_pairs, pages_.form(stream));
    int view = pages_.first_view(begin);
    for (int c = begin; c < end; c++) {
        const Entry& e = pages_.entry(stream, c);
        if (!e.k_bits) continue;
        if (c + 1 < end) pages_.prefetch(pages_.entry(stream, c + 1), hi_view);
        const PageView page = pages_.view(stream, e, hi_view);
        for (; view < pages_.views() && pages_.view_at(view).column <= c; view++) {
            const uint64_t* masks;
            if (pages_.view_at(view).column == c && sight.page(pages_.view_at(view), masks))
                kernels().page(block, rotated.queries(block, pages_.view_at(view).delta), page,
                               masks);
        }
    }
}

void AttendJob::run(size_t unit) const {
    const int split = static_cast<int>(unit) % splits_;
    const int first = static_cast<int>(unit) / splits_ % blocks_ * kBlockRows;
    const int kv_head = static_cast<int>(unit) / splits_ / blocks_;
    Block block;
    Visibility sight(a_.window_tokens);
    load_rows(block, sight, kv_head, first);
    // The newest keys and the sinks come first: they set a maximum that makes many pages
    // negligible.
    if (split == 0) attend_floats(block, sight, kv_head);
    attend_pages(block, sight, kv_head, pages_.columns() * split / splits_,
                 pages_.columns() * (split + 1) / splits_);
    for (int r = 0; r < block.rows; r++) {
        const float* acc = block.acc + r * a_.head_dim;
        if (splits_ == 1) {
            const float inverse = block.sum[r] > 0 ? 1.0f / block.sum[r] : 0.0f;
            float* target = output(kv_head, first + r);
            for (int i = 0; i < a_.head_dim; i++) target[i] = acc[i] * inverse;
        } else {
            float* target = partial(kv_head, split, first + r);
            target[0] = block.maximum[r];
            target[1] = block.sum[r];
            std::memcpy(target + 2, acc, sizeof(float) * static_cast<size_t>(a_.head_dim));
        }
    }
}

void AttendJob::merge() const {
    for (int unit = 0; splits_ > 1 && unit < a_.kv_heads * rows(); unit++) {
        const int kv_head = unit / rows(), row = unit % rows();
        float top = kNothingSeen, sum = 0;
        for (int s = 0; s < splits_; s++) top = std::max(top, partial(kv_head, s, row)[0]);
        float* target = output(kv_head, row);
        std::memset(target, 0, sizeof(float) * static_cast<size_t>(a_.head_dim));
        for (int s = 0; s < splits_; s++) {
            const float* part = partial(kv_head, s, row);
            const float weight = std::exp2(part[0] - top);
            sum += part[1] * weight;
            for (int i = 0; i < a_.head_dim; i++) target[i] += part[2 + i] * weight;
        }
        const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
        for (int i = 0; i < a_.head_dim; i++) target[i] *= inverse;
    }
}

}  // namespace kvq
