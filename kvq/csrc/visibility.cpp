#include "visibility.h"

#include <algorithm>

namespace kvq {
namespace {

struct Span {
    int64_t first, last;
};

Span span_of(const int32_t* positions, int count) {
    Span span{positions[0], positions[0]};
    for (int t = 1; t < count; t++) {
        span.first = std::min<int64_t>(span.first, positions[t]);
        span.last = std::max<int64_t>(span.last, positions[t]);
    }
    return span;
}

}  // namespace

// Rows of one token stand side by side and see the same.
template <class Bits>
bool Visibility::fill(Bits&& bits, const uint64_t*& masks) {
    uint64_t any = 0;
    for (int r = 0; r < rows_; r++) {
        const bool again = r > 0 && at_[r] == at_[r - 1] && row_[r] == row_[r - 1];
        masks_[r] = again ? masks_[r - 1] : bits(r);
        any |= masks_[r];
    }
    masks = masks_;
    return any != 0;
}

bool Visibility::page(const View& view, const uint64_t*& masks) {
    const int64_t start = int64_t{view.pos0} + view.delta, end = start + kPageTokens - 1;
    masks = nullptr;
    const bool windowed = window_ > 0 && start <= last_ - window_;
    if (end <= first_ && !windowed && view.mask == ~uint64_t{0}) return true;
    if (start > last_ || (windowed && end <= first_ - window_)) return false;
    return fill(
        [&](int r) {
            const uint64_t outside = window_ > 0 ? low_bits(begin(r) - start) : 0;
            return view.mask & low_bits(at_[r] - start + 1) & ~outside;
        },
        masks);
}

const uint64_t* Visibility::among(uint64_t keys, const uint64_t* masks) {
    for (int r = 0; r < rows_; r++) among_[r] = masks ? masks[r] & keys : keys;
    return among_;
}

bool Visibility::committed(const int32_t* positions, int count, const uint64_t*& masks) {
    const Span span = span_of(positions, count);
    masks = nullptr;
    const bool windowed = window_ > 0 && span.first <= last_ - window_;
    if (span.last <= first_ && !windowed) return true;
    if (span.first > last_) return false;
    return fill(
        [&](int r) {
            uint64_t bits = 0;
            for (int t = 0; t < count; t++)
                bits |= static_cast<uint64_t>(positions[t] >= begin(r) && positions[t] <= at_[r])
                        << t;
            return bits;
        },
        masks);
}

bool Visibility::tail(const Tail& tail, int from, const int32_t* positions, int count,
                      const uint64_t*& masks) {
    const int old = std::clamp(tail.used() - from, 0, count);
    if (old == count) return committed(positions, count, masks);
    return branch(tail, from - tail.used(), old, positions, count, masks);
}

bool Visibility::staged(const Tail& tail, int from, const int32_t* positions, int count,
                        const uint64_t*& masks) {
    return branch(tail, from, 0, positions, count, masks);
}

// The first `committed` keys are committed ones, key t behind them is row from + t of the branch.
bool Visibility::branch(const Tail& tail, int from, int committed, const int32_t* positions,
                        int count, const uint64_t*& masks) {
    return fill(
        [&](int r) {
            uint64_t bits = tail.sees(row_[r], from) & low_bits(count) & ~low_bits(committed);
            for (int t = 0; t < committed; t++)
                bits |= static_cast<uint64_t>(positions[t] <= at_[r]) << t;
            for (int t = 0; window_ > 0 && t < count; t++)
                if (positions[t] < begin(r)) bits &= ~(uint64_t{1} << t);
            return bits;
        },
        masks);
}

}  // namespace kvq
