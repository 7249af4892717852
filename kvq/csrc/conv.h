// What the short convolutions of one sequence remember, and what they compute: see
// kvq/reference/conv.py, whose places and numbers these are.
#pragma once
#include "attend.h"
#include "layout.h"
#include "tail.h"

namespace kvq {

class Convolutions {
public:
    explicit Convolutions(const Arena& arena) : arena_(arena) {}

    bool any() const { return config().conv_layers > 0; }
    // One layer of the pass under way: bcx float32 [tokens, 3 width], weight [width, taps], out
    // [tokens, width].
    int run(const Tail& tail, int layer, int tokens, const float* bcx, const float* weight,
            float* out, const Parallel& parallel);
    // The path `rows` (null: the first `count`) of the branch follows the committed tokens, which
    // do not count it yet.
    void keep(const Tail& tail, const int32_t* rows, int count);
    // How many of the committed tokens can be kept, `tokens` at most; no others are remembered
    // then.
    int trim(int tokens);
    // What is remembered of the first `tokens` tokens is worth keeping when they are passed.
    void mark(int tokens) const {
        if (any()) want(state(), tokens, conv_places(config()));
    }

    // Calls part(address, bytes) on the rows that a snapshot holds, in its order.
    template <class Part>
    void visit(Part&& part) const {
        const int64_t width = bytes_of(1);
        for (int layer = 0; layer < config().conv_layers; layer++) {
            for (int token = first_held(); token < arena_.state->tokens; token++)
                part(newest(layer, token), width);
            part(checkpoint(layer, 0), width * before() * state().checkpoints);
        }
    }
    int64_t state_bytes() const { return arena_.sizes.regions[KVQ_CONV_STATE]; }
    // Bytes that `visit` would tell of with such a state.
    int64_t bytes_of_rows(const ConvState& saved) const {
        return bytes_of(saved.held + int64_t{before()} * saved.checkpoints) * config().conv_layers;
    }
    // Whether a state of state_bytes() could be that of a cache of so many tokens.
    bool fits(const uint8_t* saved, int tokens) const;

private:
    const kvq_config& config() const { return arena_.config(); }
    ConvState& state() const { return *arena_.conv_state; }
    int32_t* places() const { return reinterpret_cast<int32_t*>(arena_.conv_state + 1); }
    int before() const { return config().conv_taps - 1; }
    int held_rows() const { return before() + kConvBackRows; }
    int first_held() const { return arena_.state->tokens - state().held; }
    int64_t bytes_of(int64_t rows) const { return rows * config().conv_width * int64_t{4}; }

    // Rows of a layer, one region behind the other: the newest committed ones in a ring, those of a
    // branch, the newest of a chunk, those before the wanted place in it, and of the checkpoints.
    float* row(int layer, int64_t index) const {
        return arena_.conv_rows + (layer * conv_rows(config()) + index) * config().conv_width;
    }
    float* newest(int layer, int token) const { return row(layer, token % held_rows()); }
    float* branch(int layer, int i) const { return row(layer, held_rows() + i); }
    float* ending(int layer, int i) const { return branch(layer, config().draft_tokens + i); }
    float* noted(int layer, int i) const { return ending(layer, held_rows() + i); }
    float* checkpoint(int layer, int i) const { return noted(layer, before() * (1 + i)); }

    // Of the rows of a chunk the first whose row is an ending one.
    int first_ending(int rows) const { return rows > held_rows() ? rows - held_rows() : 0; }
    // What row `row` of the branch sees `back` rows before itself, or null: nothing was there.
    const float* seen(const Tail& tail, int layer, int row, int back, const float* own) const;
    void remember(const Tail& tail, int layer, int tokens, const float* own, int channel,
                  int count) const;
    // Source: (layer, i) to the i-th of the rows before `place`, or null for zeros.
    template <class Source>
    void take(int place, Source&& source) const;
    void forget_one(int coming) const;
    void forget_behind(int tokens) const;

    const Arena& arena_;
};

}  // namespace kvq
