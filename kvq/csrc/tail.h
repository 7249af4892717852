// The floating-point rows of one cache: the sinks, the newest committed tokens, and behind them the
// branch, rows that may be forgotten. A chunk that does not fit lies in the staging rows instead.
#pragma once
#include <vector>

#include "layout.h"
#include "page_table.h"

namespace kvq {

class Tail {
public:
    explicit Tail(const Arena& arena) : arena_(arena) {}

    int used() const { return arena_.state->tail_used; }
    const BranchState& branch() const { return arena_.state->branch; }
    bool open() const { return branch().rows > 0; }
    // The pass under way is a chunk of which not every row is kept.
    bool is_chunk() const { return branch().rows > config().draft_tokens; }
    // A pass is under way that not every layer has seen.
    bool unattended() const {
        return open() && (branch().attended < arena_.config().layers ||
                          branch().mixed < arena_.config().conv_layers + arena_.config().delta_layers);
    }

    uint16_t* rows(int stream, int side) const {  // side 0: K, 1: V; float16 [tail_rows, head_dim]
        return arena_.tail + (int64_t{stream} * 2 + side) * config().tail_rows * config().head_dim;
    }
    uint16_t* staging(int head, int side) const {
        return arena_.staging +
               (int64_t{head} * 2 + side) * config().chunk_tokens * config().head_dim;
    }
    // Where row r of the pass under way belongs, in its rows and positions.
    int64_t place(int r) const { return branch().staged ? r : used() + first_row() + r; }
    int32_t* positions() const {
        return branch().staged ? arena_.staging_positions : arena_.tail_positions;
    }

    // The branch row the pass under way begins with, what row r of the branch stands behind the
    // committed tokens, and which of the 64 rows from `from` on it sees.
    int first_row() const { return branch().rows - branch().pass_rows; }
    int depth(int row) const { return branch().chain ? row : arena_.branch[row].depth; }
    uint64_t sees(int row, int from) const;
    // Whether `row` is the newest of its depth: a tree may hold several.
    bool newest_of_depth(int row) const;

    // Pages of every stream that close when `tokens` more are committed.
    int closing_pages(int tokens) const;
    int add(int tokens, const int32_t* parents, bool staged, bool hi_view, int at);
    void saw_layer(int layer) const { arena_.state->branch.attended += layer == branch().attended; }
    void keep_branch_rows(int rows);
    // Whether `rows` (null: the first `count`) is a path from the root.
    bool is_path(const int32_t* rows, int count) const;
    // Runs of committed and kept rows, sinks left out, whose tokens and positions count up and that
    // have moved alike; as they would be without tokens `start` to `stop` and with those behind
    // moved by `by`.
    int stretches(const int32_t* rows, int count, int start, int stop, int by) const;
    // The path becomes committed rows; the branch ends.
    void keep(const int32_t* rows, int count);
    void forget() { arena_.state->branch = {}; }

    // Of the first `rows` rows, those that close, in the text's order, and those that stay.
    struct Closing {
        std::vector<int> rows, staying;
    };
    Closing closing(int pages, int rows) const;
    // Packs a layer's first tokens behind the sinks into `count` pages and moves what stays to the
    // tail's start; staged rows follow the tail's.
    int close_layer(PageTable& pages, int layer, int count) const;
    // Gives the closed pages their positions and the surviving rows theirs.
    void close_columns(PageTable& pages, int count, int rows);
    // Forgets tokens `start` to `stop` and moves those behind by `by`.
    void split(int start, int stop, int by);
    // The sinks stand `delta` further than their keys were rotated.
    int shift_sinks(int32_t delta) const;
    // Whether a row is one of tokens `start` to `stop`.
    bool holds(int start, int stop) const;

private:
    const kvq_config& config() const { return arena_.config(); }
    struct Place {
        int32_t position, delta, token;
    };
    Place place_of(int row) const {  // of the tail's rows, then the branch's
        if (row < used())
            return {arena_.tail_positions[row], arena_.tail_deltas[row], arena_.tail_tokens[row]};
        const int32_t at = branch().staged ? arena_.staging_positions[row - used()]
                                           : arena_.tail_positions[row];
        return {at, 0, branch().at + depth(row - used())};
    }
    void put(int row, const Place& place) const {
        arena_.tail_positions[row] = place.position;
        arena_.tail_deltas[row] = place.delta;
        arena_.tail_tokens[row] = place.token;
    }

    // Row first + rows[i] of every stream becomes row first + i; rows rise.
    void keep_rows(int first, const int32_t* rows, int count) const;

    const Arena& arena_;
};

}  // namespace kvq
