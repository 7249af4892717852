// Which keys the query rows of a block may see, as the 64-bit masks that kernels take: the one
// place that knows positions, sliding windows, masked tokens and branches.
//
// A row sees the committed tokens that do not stand behind it, of its branch its ancestors and
// itself, and of both what its window holds.
#pragma once
#include "kernels/kernels.h"
#include "tail.h"

namespace kvq {

// Calls call(delta, which) for each number that any of up to 64 rows has moved by, `which` being
// the rows that have: such rows meet the same queries. No `deltas`: none has moved.
template <class Call>
void for_alike(const int32_t* deltas, int count, Call&& call) {
    if (!deltas) return call(0, low_bits(count));
    uint64_t left = low_bits(count);
    while (left) {
        const int32_t delta = deltas[__builtin_ctzll(left)];
        uint64_t alike = 0;
        for (int t = 0; t < count; t++) alike |= static_cast<uint64_t>(deltas[t] == delta) << t;
        call(delta, alike);
        left &= ~alike;
    }
}

class Visibility {
public:
    explicit Visibility(int window) : window_(window) {}

    // `branch_row`: its row in the branch, -1 for a row that is part of none.
    void add(int64_t position, int branch_row) {
        row_[rows_] = branch_row;
        at_[rows_] = position;
        first_ = rows_ == 0 || position < first_ ? position : first_;
        last_ = rows_ == 0 || position > last_ ? position : last_;
        rows_++;
    }

    // Of a page's view, of up to 64 committed rows, of up to 64 rows from row `from` of the tail on, where
    // committed ones may end and the branch begin. False: no row sees any key. `masks` is null
    // where every row sees every key, else one mask per row, until the next call.
    bool page(const View& view, const uint64_t*& masks);
    bool committed(const int32_t* positions, int count, const uint64_t*& masks);
    bool tail(const Tail& tail, int from, const int32_t* positions, int count,
              const uint64_t*& masks);
    bool staged(const Tail& tail, int from, const int32_t* positions, int count,
                const uint64_t*& masks);

    // What `masks`, the answer of a call above, leaves of `keys`.
    const uint64_t* among(uint64_t keys, const uint64_t* masks);

private:
    int64_t begin(int r) const { return window_ > 0 ? at_[r] - window_ + 1 : INT64_MIN; }
    template <class Bits>
    bool fill(Bits&& bits, const uint64_t*& masks);
    bool branch(const Tail& tail, int from, int committed, const int32_t* positions, int count,
                const uint64_t*& masks);

    int window_, rows_ = 0;
    int64_t first_ = 0, last_ = 0;  // positions of the rows
    int64_t at_[kBlockRows];
    int row_[kBlockRows];
    uint64_t masks_[kBlockRows];
    uint64_t among_[kBlockRows];
};

}  // namespace kvq
