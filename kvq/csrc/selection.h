// Which pages a step reads: of every view of one what its keys could at most be worth to a query, and
// of each KV head the best share of them. Sinks and tail are read always.
#pragma once
#include <atomic>
#include <vector>

#include "kernels/kernels.h"
#include "kvq.h"

namespace kvq {

// How a cache reads, and how much it has read so far; not part of its arena or its snapshots.
struct Reading {
    kvq_read rule{1.0f, 1.0f, 0.0f, 0};
    // Pages that steps could see, a page counted once per KV head and row block, and those they read.
    std::atomic<int64_t> seen{0}, read{0};
    bool selects() const { return rule.share < 1.0f; }
};

// The pages chosen for the tokens of one pass in one layer.
class Selection {
public:
    // Nothing is chosen yet, and every page will be: `tokens` 0.
    Selection() = default;
    Selection(const kvq_read& rule, int kv_heads, int tokens, int views);

    bool active() const { return tokens_ > 0; }
    int tokens() const { return tokens_; }
    const kvq_read& rule() const { return rule_; }
    // Scores of a token's pages in one KV head, kNothingSeen for one it cannot see.
    float* scores(int kv_head, int token) { return scores_.data() + at(kv_head, token); }
    // Keeps the best share of them, of equal ones the older; all others are left out.
    void choose(int kv_head, int token);
    bool reads(int kv_head, int token, int view) const {
        return scores_[at(kv_head, token) + static_cast<size_t>(view)] > kNothingSeen;
    }

private:
    size_t at(int kv_head, int token) const {
        return (static_cast<size_t>(kv_head) * static_cast<size_t>(tokens_) +
                static_cast<size_t>(token)) *
               static_cast<size_t>(views_);
    }

    kvq_read rule_{1.0f, 1.0f, 0.0f, 0};
    int tokens_ = 0, views_ = 0;
    std::vector<float> scores_;
};

// Sets all channels of a query but the `kept` largest to 0; 0 keeps all.
void keep_loudest(float* q, int dim, int kept);

}  // namespace kvq
