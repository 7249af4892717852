// What the delta nets of one sequence remember, and what they compute: see kvq/reference/delta.py,
// whose places these are.
#pragma once
#include <algorithm>

#include "attend.h"
#include "layout.h"
#include "tail.h"

namespace kvq {

// One delta net of the pass under way.
struct DeltaInputs {
    int layer, tokens;
    const float* rows;     // [tokens, convolved channels + value channels]
    const float* gates;    // [tokens, 2 value heads]: b, then a
    const float* conv;     // [convolved channels, taps]
    const float* decay;    // [value heads]
    const float* dt_bias;  // [value heads]
    const float* scale;    // [channels of a value head]
    float norm_eps;
    float* out;            // [tokens, value channels]
};

class DeltaNets {
public:
    explicit DeltaNets(const Arena& arena) : arena_(arena) {}

    bool any() const { return config().delta_layers > 0; }
    void clear();
    int run(const Tail& tail, const DeltaInputs& in, const Parallel& parallel);
    // As of Convolutions.
    void keep(const Tail& tail, const int32_t* rows, int count);
    int trim(int tokens);
    void mark(int tokens) const {
        if (any()) want(state(), tokens, delta_places(config()));
    }

    // Calls part(address, bytes) on the rows and states that a snapshot holds, in its order.
    template <class Part>
    void visit(Part&& part) const {
        for (int layer = 0; layer < config().delta_layers; layer++)
            for (int token = first_held(); token < arena_.state->tokens; token++)
                part(newest(layer, token), row_bytes());
        for (int slot = 0; slot < config().delta_states; slot++)
            if (bases()[slot] >= 0) part(state_of(slot, 0, 0), slot_bytes());
    }
    int64_t state_bytes() const { return arena_.sizes.regions[KVQ_DELTA_STATE]; }
    // Bytes that `visit` would tell of with such a state.
    int64_t bytes_of(const uint8_t* saved) const;
    // Whether a state of state_bytes() could be that of a cache of so many tokens.
    bool fits(const uint8_t* saved, int tokens) const;
    // A snapshot that was visited may have had more rows than are kept here.
    void loaded() const {
        if (any()) state().held = std::min(state().held, held_rows());
    }

private:
    struct Work;
    struct Row;    // of a token, one key head's part
    struct Group;  // rows of a pass that are computed with one state
    const kvq_config& config() const { return arena_.config(); }
    DeltaState& state() const { return *arena_.delta_state; }
    // The token whose state a slot holds, -1 of a free one.
    int32_t* bases() const { return reinterpret_cast<int32_t*>(arena_.delta_state + 1); }

    int key_dim() const { return config().delta_key_dim; }
    int value_dim() const { return config().delta_value_dim; }
    int shared() const { return config().delta_value_heads / config().delta_key_heads; }
    int before() const { return config().delta_taps - 1; }
    int64_t conv_width() const { return delta_conv_width(config()); }
    int64_t row_width() const { return delta_row_width(config()); }
    int64_t row_bytes() const { return row_width() * int64_t{4}; }
    int64_t slot_bytes() const { return config().delta_layers * delta_slot_width(config()) * 4; }
    int held_rows() const { return delta_newest(config()); }
    int first_held() const { return arena_.state->tokens - state().held; }

    // Rows of a layer, one region behind the other: the newest committed ones in a ring, those of a
    // branch, the newest of a chunk.
    float* row(int layer, int64_t index) const {
        return arena_.delta_rows + (layer * delta_rows(config()) + index) * row_width();
    }
    float* newest(int layer, int token) const { return row(layer, token % held_rows()); }
    float* branch(int layer, int i) const { return row(layer, held_rows() + i); }
    float* ending(int layer, int i) const { return branch(layer, config().draft_tokens + i); }
    float* slot_of(int slot, int layer) const {
        return arena_.delta_states +
               (int64_t{slot} * config().delta_layers + layer) * delta_slot_width(config());
    }
    float* state_of(int slot, int layer, int head) const {
        return slot_of(slot, layer) + int64_t{head} * key_dim() * value_dim();
    }
    // The convolved rows before a slot's base, oldest first.
    float* before_of(int slot, int layer) const {
        return state_of(slot, layer, config().delta_value_heads);
    }

    int first_ending(int rows) const { return std::max(0, rows - delta_ending(config())); }
    // The bases within a chunk of so many rows whose states are kept, -1 where there is none.
    struct Places {
        int wanted, last;
        int count() const { return (wanted >= 0) + (last >= 0); }
    };
    Places places(int rows) const;
    int free_slot(int after) const;
    void make_free(int count) const;
    void forget(int slot) const { bases()[slot] = -1; }
    Row committed(int layer, int head, int token) const;
    void fold_newest() const;
    void run_head(Work& work, int head) const;

    const Arena& arena_;
    int pending_ = -1, noted_ = -1;  // slots of a chunk's `Places`
};

}  // namespace kvq
