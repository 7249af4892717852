// Attention of new tokens over one cache, as independent units of work: (KV head, rows, page
// range); and which pages a step reads: of every view of one what its keys could at most be worth
// to a query, and of each KV head the best share of them. Sinks and tail are read always.
#pragma once
#include <atomic>
#include <vector>

#include "page_table.h"
#include "parallel.h"
#include "tail.h"

namespace kvq {

// How a cache reads, and how much it has read so far; not part of its arena or its snapshots.
struct Reading {
    kvq_read rule{1.0f, 0.0f};
    // Pages that steps could see, a page counted once per KV head and row block, and those they
    // read.
    std::atomic<int64_t> seen{0}, read{0};
    bool selects() const { return rule.share < 1.0f; }
};

// The pages chosen for the tokens of one pass in one layer.
class Selection {
public:
    // Nothing is chosen yet, and every page will be: `tokens` 0.
    Selection() = default;
    Selection(float share, int kv_heads, int tokens, int views);

    bool active() const { return tokens_ > 0; }
    int tokens() const { return tokens_; }
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

    float share_ = 1.0f;
    int tokens_ = 0, views_ = 0;
    std::vector<float> scores_;
};

// What a layer is given of one sequence; rows of qkv and out follow one another.
struct Inputs {
    int tokens;
    const float* qkv;              // [tokens, (heads + 2 kv_heads) * head_dim]
    const int64_t* positions;      // [tokens]
    const float* inv_freq;         // [rotary_pairs]
    const float *q_norm, *k_norm;  // [head_dim], or null
    const float* sink_logits;      // [heads], or null
    float* out;                    // [tokens, heads * head_dim]
    // Of a layer that reads what another has stored, and whose qkv are queries alone: which rows of the
    // pass they are of. Null: of all, each of which brings a key and a value.
    const int64_t* asking = nullptr;

    int row(int token) const { return asking ? static_cast<int>(asking[token]) : token; }
};

// Attends the block to up to 64 floating-point rows; `deltas`: how far each has moved, or null.
void attend_tile(Block& block, class Visibility& sight, class Rotated& rotated, const uint16_t* k,
                 const uint16_t* v, const int32_t* deltas, int count, const uint64_t* masks);

// Everything the units of one sequence share.
class AttendJob {
public:
    AttendJob(const Arena& arena, const PageTable& pages, const Tail& tail, Reading& reading,
              const kvq_attention& a, const Inputs& in);
    // Units that choose what is to be read: all of them before the first that attends.
    size_t choices() const { return static_cast<size_t>(a_.kv_heads * selection_.tokens()); }
    void choose(size_t unit);
    size_t units() const { return static_cast<size_t>(a_.kv_heads * blocks_ * splits_); }
    void run(size_t unit);
    // Joins the page ranges, once all units have run.
    void merge() const;

private:
    int group() const { return a_.heads / a_.kv_heads; }
    int stride() const { return (a_.heads + (in_.asking ? 0 : 2 * a_.kv_heads)) * a_.head_dim; }
    int rows() const { return in_.tokens * group(); }
    // Row r of a KV head is query head r % group of token r / group.
    const float* query(int kv_head, int row) const;
    float* output(int kv_head, int row) const;
    float* partial(int kv_head, int split, int row) const;
    void load_rows(Block& block, class Visibility& sight, int kv_head, int first, int most) const;
    void start_with_sinks(Block& block, int kv_head, int first) const;
    // Their keys alone, unless it `counts`.
    void attend_floats(Block& block, Visibility& sight, int kv_head, bool counts) const;
    void attend_pages(Block& block, Visibility& sight, int kv_head, int first, int begin,
                      int end) const;
    bool reads(const Block& block, int kv_head, int first, int view) const;
    void hide(const Block& block, int kv_head, int first, int view, const uint64_t*& masks,
              uint64_t* own) const;

    const Arena& arena_;
    const PageTable& pages_;
    const Tail& tail_;
    Reading& reading_;
    const kvq_attention& a_;
    Inputs in_;
    Selection selection_;
    int blocks_;  // of kBlockRows rows per KV head
    int splits_;
};

}  // namespace kvq
