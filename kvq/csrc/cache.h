// One sequence's cache: page table, floating-point tail and probes, all inside one arena of exactly
// the budget's bytes. Decides nothing: which page loses bits is told from outside.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "attend.h"
#include "conv.h"
#include "delta.h"
#include "layout.h"
#include "page_table.h"
#include "probes.h"
#include "tail.h"
#include "twin.h"

namespace kvq {

class Cache {
public:
    std::mutex turn;  // held for the length of every call

    // `device`: where pages and rows lie and passes run, null: here. `resident`: see Twin::open.
    // `file_bytes`: of the arena's end that lie in this file. Null: no memory.
    static std::shared_ptr<Cache> open(const kvq_config& config, const Layout& layout,
                                       int64_t budget, const uint8_t* forms, Device* device,
                                       int resident, int file, int64_t file_bytes);
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    int read_by(const kvq_read& rule);
    int feed_back(const float* feedback);
    int missing(int tokens, int64_t& bytes, int32_t& columns) const;
    int begin(int tokens, const int32_t* parents, int view, int at, const uint8_t* silent);
    // What one layer does: `prepare` stores keys and values, the job's units run, `finish` closes.
    int prepare(const kvq_attention& a, const Inputs& in);
    AttendJob job(const kvq_attention& a, const Inputs& in);
    // Whether the rows of the pass under way ask nothing in this layer.
    bool is_silent(int layer) const {
        return !silent_.empty() && silent_[static_cast<size_t>(layer)];
    }
    int finish(int layer);
    // For `job`s of a layer that reads what `a.layer` has stored of the pass under way, where every layer
    // has seen it. `positions` become the queries'.
    int prepare_to_read(const kvq_attention& a, const Inputs& in, std::vector<int64_t>& positions);
    // On a device `in` lies there, but for positions, and this is all of it.
    Device* device() const { return twin_ ? &twin_->device() : nullptr; }
    int run_on_device(const kvq_attention& a, const Inputs& in);
    // KVQ_OK, or why the device can do nothing more for this cache.
    int device_status() const { return twin_ ? twin_->status() : int{KVQ_OK}; }
    // All of `in` lies here.
    int attend(const kvq_attention& a, const Inputs& in);
    int look(const kvq_attention& a, const Inputs& in);
    // Whether it has convolutions of this shape; one of the pass under way, see Convolutions::run.
    bool convolves(int64_t width, int64_t taps) const {
        return conv_.any() && config().conv_width == width && config().conv_taps == taps;
    }
    int convolve(int layer, int tokens, const float* bcx, const float* weight, float* out,
                 const Parallel& parallel);
    // Whether it has delta nets of these sizes; one of the pass under way.
    bool recurs(int64_t rows, int64_t gates, int64_t conv, int64_t scale, int key_heads) const {
        const kvq_config& c = config();
        return delta_.any() && conv == delta_conv_width(c) * c.delta_taps &&
               scale == c.delta_value_dim && key_heads == c.delta_key_heads &&
               gates == 2 * int64_t{c.delta_value_heads} &&
               rows == delta_conv_width(c) + int64_t{c.delta_value_heads} * c.delta_value_dim;
    }
    int recur(const DeltaInputs& in, const Parallel& parallel);
    int commit(const int32_t* rows, int count);
    int rewind(int rows);

    int trim(int tokens);
    int mark(int tokens);
    int edit(int start, int stop, int count);
    int demote(const kvq_action* actions, int count);
    int demote_entering(const uint8_t* widths);
    int shift(int column, int32_t delta);
    int shift_sinks(int32_t delta);
    int mask(int column, uint64_t mask);

    // `columns` and `rows` are what the caller has room for: refused unless it is what there is.
    int evidence(int tokens, int columns, float* facts, float* queries);
    int constants(int layer, int columns, float* keys, float* values) const;
    int key_squares(int layer, int columns, float* squares) const;
    int columns(int columns, int64_t* facts, uint8_t* widths) const;
    int views(int views, int64_t* facts) const;
    int places(int rows, int64_t* places) const;
    int tail(int layer, int head, int rows, uint16_t* k, uint16_t* v, int32_t* positions) const;
    int64_t page(int layer, int head, int column, uint8_t* bytes) const;
    void entering(uint8_t* widths) const;
    void stats(kvq_stats& out) const;

    int64_t state_bytes() const;
    int save(uint8_t* bytes, int64_t count) const;
    int load(const uint8_t* bytes, int64_t count);

private:
    Cache(uint8_t* memory, const Layout& layout, int64_t file_bytes);
    const kvq_config& config() const { return arena_.config(); }
    State& state() const { return *arena_.state; }
    bool fits_shape(const kvq_attention& a) const;
    void fill_ropes(const kvq_attention& a, const Inputs& in) const;
    int store_keys_values(const kvq_attention& a, const Inputs& in) const;
    void keep_probes(const kvq_attention& a, const Inputs& in);
    // Pages and rows are read here in what follows.
    void fetch() const {
        if (twin_) twin_->fetch(pages_);
    }
    int commit_chunk();
    // Whether the branch's first `rows` rows, or so many of a path, are still there.
    bool may_keep(int rows) const {
        return (!conv_.any() && !delta_.any()) || !tail_.is_chunk() ||
               rows == tail_.branch().rows || rows <= config().draft_tokens;
    }
    // Whether a branch of so many rows can begin at token `at`, -1 for where it goes on.
    bool begins_at(int at, int rows) const;
    // Whether so many views and stretches of rows leave every page to come the views it needs.
    bool fits(int views, int stretches) const;
    // Whether all tokens from `first` on still have a position when they move by `by`.
    bool may_move(int first, int64_t by) const;
    struct Parts;
    bool read_header(const uint8_t* bytes, int64_t count, Parts& parts) const;
    bool check_table(Parts& parts) const;
    bool check_views(const Parts& parts) const;
    bool check_numbers(const Parts& parts) const;
    int64_t rest_bytes(const Parts& parts) const;
    int64_t page_bytes(const Parts& parts) const;
    int64_t conv_bytes(const Parts& parts) const;
    int64_t delta_bytes(const Parts& parts) const;
    template <class Part>
    void visit(Part&& part) const;

    uint8_t* memory_;
    Arena arena_;
    PageTable pages_;
    Tail tail_;
    Convolutions conv_;
    DeltaNets delta_;
    Probes probes_;
    Reading reading_;
    std::unique_ptr<Twin> twin_;  // null: there is no device
    std::vector<uint8_t> silent_;  // per layer, or empty: none
};

// One layer over several sequences, in one dispatch: `caches` are all held, no two the same.
int attend_together(const kvq_attention& a, Cache* const* caches, const Inputs* inputs,
                    size_t count, const Parallel& parallel);

// Likewise one layer that reads what layer `a.layer` of these caches has stored: `asking` of the inputs is
// set, and their positions are the caches'.
int read_together(const kvq_attention& a, Cache* const* caches, Inputs* inputs, size_t count,
                  const Parallel& parallel);

}  // namespace kvq
