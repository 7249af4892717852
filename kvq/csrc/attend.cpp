#include "attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "rotary.h"
#include "visibility.h"

namespace kvq {

namespace {

constexpr int kSplitColumns = 8;  // fewer pages than this per part are not worth a merge

// Neighbouring pages that have moved alike, to be read together. Where a run ends, the table alone
// says, so that a row gets the same whatever the other rows of its block see.
struct Run {
    PageView pages[kRunPages];
    const uint64_t* visible[kRunPages];
    uint64_t masks[kRunPages][kBlockRows];
    int32_t delta;
    int count = 0;

    void add(const Block& block, const PageView& page, int32_t moved, const uint64_t* seen) {
        if (seen && seen != masks[count]) std::copy(seen, seen + block.rows, masks[count]);
        visible[count] = seen ? masks[count] : nullptr;
        pages[count++] = page;
        delta = moved;
    }
    void attend(Block& block, Rotated& rotated, const Run& next) {
        if (count)
            kernels().pages(block, rotated.queries(block, delta), pages, visible, count, next.pages,
                            next.count);
        count = 0;
    }
};

}  // namespace

void attend_tile(Block& block, Visibility& sight, Rotated& rotated, const uint16_t* k,
                 const uint16_t* v, const int32_t* deltas, int count, const uint64_t* masks) {
    for_alike(deltas, count, [&](int32_t delta, uint64_t alike) {
        kernels().tile(block, rotated.queries(block, delta), k, v, count,
                       alike == low_bits(count) ? masks : sight.among(alike, masks));
    });
}

Selection::Selection(float share, int kv_heads, int tokens, int views)
    : share_(share), tokens_(tokens), views_(views) {
    scores_.assign(at(kv_heads, 0), kNothingSeen);
}

void Selection::choose(int kv_head, int token) {
    float* scores = this->scores(kv_head, token);
    const auto seen = views_ - std::count(scores, scores + views_, kNothingSeen);
    const auto kept = static_cast<size_t>(
        std::max(1.0f, std::ceil(share_ * static_cast<float>(seen) - 1e-4f)));
    if (kept >= static_cast<size_t>(seen)) return;
    std::vector<int> order(static_cast<size_t>(views_));
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                     [&](int a, int b) {
                         return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                     });
    for (size_t i = kept; i < order.size(); i++) scores[order[i]] = kNothingSeen;
}

AttendJob::AttendJob(const Arena& arena, const PageTable& pages, const Tail& tail,
                     Reading& reading, const kvq_attention& a, const Inputs& in)
    : arena_(arena), pages_(pages), tail_(tail), reading_(reading), a_(a), in_(in) {
    const kvq_config& c = arena.config();
    blocks_ = (rows() + kBlockRows - 1) / kBlockRows;
    // Long passes have blocks enough to share out.
    const bool splits = in.tokens <= c.draft_tokens;
    splits_ = splits ? std::clamp(pages.columns() / kSplitColumns, 1, int{c.splits}) : 1;
    if (splits && reading.selects() && pages.views())
        selection_ = Selection(reading.rule.share, a.kv_heads, in.tokens, pages.views());
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

void AttendJob::load_rows(Block& block, Visibility& sight, int kv_head, int first,
                          int most) const {
    const float scale = a_.softcap > 0 ? a_.scale / a_.softcap : a_.scale * kLog2E;
    block.start(std::min({kBlockRows, most, rows() - first}), a_.head_dim, a_.softcap);
    for (int r = 0; r < block.rows; r++) {
        const int token = (first + r) / group();
        float* q = block.q + r * a_.head_dim;
        std::memcpy(q, query(kv_head, first + r), sizeof(float) * static_cast<size_t>(a_.head_dim));
        if (in_.q_norm) normalize(q, in_.q_norm, a_.head_dim, a_.norm_eps);
        const float* cos = arena_.rope + int64_t{token} * 2 * a_.rotary_pairs;
        rotate(q, cos, cos + a_.rotary_pairs, a_.rotary_pairs);
        // What is not finite makes the row's sum, and so its result, NaN; four sums add faster.
        float nothing[4] = {};
        for (int i = 0; i < a_.head_dim; i++) q[i] *= scale, nothing[i % 4] += 0.0f * q[i];
        block.sum[r] = (nothing[0] + nothing[1]) + (nothing[2] + nothing[3]);
        sight.add(in_.positions[token], tail_.first_row() + in_.row(token));
    }
}

// A head's sink weighs as a token would whose value is zero: it is seen first, by one part alone.
void AttendJob::start_with_sinks(Block& block, int kv_head, int first) const {
    for (int r = 0; in_.sink_logits && r < block.rows; r++) {
        block.maximum[r] = in_.sink_logits[kv_head * group() + (first + r) % group()] * kLog2E;
        block.sum[r] += 1.0f;
    }
}

void AttendJob::attend_floats(Block& block, Visibility& sight, int kv_head, bool counts) const {
    const int64_t dim = a_.head_dim;
    Rotated rotated(in_.inv_freq, a_.rotary_pairs);
    const auto tiles = [&](const uint16_t* k, const uint16_t* v, const int32_t* where, int total,
                           bool staged) {
        for (int i = 0; i < total; i += kPageTokens) {
            const int count = std::min(kPageTokens, total - i);
            const uint64_t* masks;
            if (staged ? sight.staged(tail_, i, where + i, count, masks)
                       : sight.tail(tail_, i, where + i, count, masks))
                attend_tile(block, sight, rotated, k + i * dim, counts ? v + i * dim : nullptr,
                            staged ? nullptr : arena_.tail_deltas + i, count, masks);
        }
    };
    const int stream = a_.layer * a_.kv_heads + kv_head;
    const bool staged = tail_.branch().staged;
    tiles(tail_.rows(stream, 0), tail_.rows(stream, 1), arena_.tail_positions,
          tail_.used() + (staged ? 0 : tail_.branch().rows), false);
    if (staged)
        tiles(tail_.staging(kv_head, 0), tail_.staging(kv_head, 1), arena_.staging_positions,
              tail_.branch().rows, true);
}

// A view of a page is worth what it may be to one of the head's queries, each measured against what
// its best view may be.
void AttendJob::choose(size_t unit) {
    const int kv_head = static_cast<int>(unit) / in_.tokens;
    const int token = static_cast<int>(unit) % in_.tokens, views = pages_.views();
    const int stream = a_.layer * a_.kv_heads + kv_head;
    float* scores = selection_.scores(kv_head, token);
    std::vector<float> bounds(static_cast<size_t>(kBlockRows) * static_cast<size_t>(views));
    for (int done = 0; done < group(); done += kBlockRows) {
        Block block;
        Visibility sight(a_.window_tokens);
        load_rows(block, sight, kv_head, token * group() + done, group() - done);
        Rotated rotated(in_.inv_freq, a_.rotary_pairs, pages_.form(stream));
        float best[kBlockRows];
        std::fill(best, best + kBlockRows, kNothingSeen);
        const uint64_t* masks;
        const auto seen = [&](int i) {
            const View& view = pages_.view_at(i);
            return pages_.entry(stream, view.column).k_bits && sight.page(view, masks);
        };
        for (int i = 0; i < views; i++) {
            if (!seen(i)) continue;
            const View& view = pages_.view_at(i);
            float* own = bounds.data() + int64_t{i} * kBlockRows;
            kernels().bounds(block, rotated.queries(block, view.delta),
                             pages_.view(stream, pages_.entry(stream, view.column), false), own);
            for (int r = 0; r < block.rows; r++) best[r] = std::max(best[r], own[r]);
        }
        for (int i = 0; i < views; i++)
            for (int r = 0; seen(i) && r < block.rows; r++)
                scores[i] = std::max(scores[i],
                                     bounds[static_cast<size_t>(i * kBlockRows + r)] - best[r]);
    }
    selection_.choose(kv_head, token);
    for (int i = 0; arena_.file_bytes && i < views; i++)
        if (selection_.reads(kv_head, token, i))
            pages_.expect(pages_.entry(stream, pages_.view_at(i).column));
}

// Whether the token of any row has chosen the view.
bool AttendJob::reads(const Block& block, int kv_head, int first, int view) const {
    bool any = !selection_.active();
    for (int r = 0; !any && r < block.rows; r++)
        any = selection_.reads(kv_head, (first + r) / group(), view);
    return any;
}

// Rows whose token has not chosen the view do not see it.
void AttendJob::hide(const Block& block, int kv_head, int first, int view, const uint64_t*& masks,
                     uint64_t* own) const {
    if (!selection_.active()) return;
    for (int r = 0; r < block.rows; r++) {
        const bool reads = selection_.reads(kv_head, (first + r) / group(), view);
        own[r] = reads ? (masks ? masks[r] : ~uint64_t{0}) : 0;
    }
    masks = own;
}

void AttendJob::attend_pages(Block& block, Visibility& sight, int kv_head, int first, int begin,
                             int end) const {
    const int stream = a_.layer * a_.kv_heads + kv_head;
    const bool hi_view = tail_.branch().hi_view, step = in_.tokens <= arena_.config().draft_tokens;
    Rotated rotated(in_.inv_freq, a_.rotary_pairs, pages_.form(stream));
    int64_t seen = 0, read = 0;
    const int last = pages_.first_view(end);
    // A run is attended to when the one after it is known.
    Run runs[2], *run = &runs[0], *before = &runs[1];
    const auto end_run = [&] {
        before->attend(block, rotated, *run);
        std::swap(run, before);
    };
    for (int i = pages_.first_view(begin); i < last; i++) {
        const View& view = pages_.view_at(i);
        const Entry& e = pages_.entry(stream, view.column);
        const uint64_t* masks;
        if (i % kRunPages == 0 || pages_.view_at(i - 1).delta != view.delta)
            end_run();
        if (!e.k_bits || !sight.page(view, masks)) continue;
        seen++;
        if (!reads(block, kv_head, first, i)) continue;
        hide(block, kv_head, first, i, masks, run->masks[run->count]);
        run->add(block, pages_.view(stream, e, hi_view), view.delta, masks);
        read++;
    }
    end_run();
    end_run();
    if (step) reading_.seen += seen, reading_.read += read;
}

void AttendJob::run(size_t unit) {
    const int split = static_cast<int>(unit) % splits_;
    const int first = static_cast<int>(unit) / splits_ % blocks_ * kBlockRows;
    const int kv_head = static_cast<int>(unit) / splits_ / blocks_;
    Block block;
    Visibility sight(a_.window_tokens);
    load_rows(block, sight, kv_head, first, kBlockRows);
    // The newest keys and the sinks come first: they tell which pages weigh anything. Every part asks
    // them, one counts them.
    const float octaves = reading_.rule.octaves;
    if (split == 0 || octaves > 0) {
        start_with_sinks(block, kv_head, first);
        attend_floats(block, sight, kv_head, split == 0);
    }
    for (int r = 0; octaves > 0 && r < block.rows; r++) block.least[r] = block.maximum[r] - octaves;
    if (split) std::fill(block.sum, block.sum + block.rows, 0.0f);
    attend_pages(block, sight, kv_head, first, pages_.columns() * split / splits_,
                 pages_.columns() * (split + 1) / splits_);
    for (int r = 0; r < block.rows; r++) {
        const float* acc = block.acc + r * a_.head_dim;
        if (splits_ == 1) {
            const float inverse = block.sum[r] == 0 ? 0.0f : 1.0f / block.sum[r];
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
        const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
        for (int i = 0; i < a_.head_dim; i++) target[i] *= inverse;
    }
}

}  // namespace kvq
