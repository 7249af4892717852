// The pages of one cache: a column of the table is one page of every stream (layer, KV head).
// Closes, demotes and evicts as told; decides nothing.
#pragma once
#include "kernels/kernels.h"
#include "layout.h"

namespace kvq {

class PageTable {
public:
    explicit PageTable(const Arena& arena) : arena_(arena) {}
    void place();
    void clear();

    int columns() const { return arena_.state->columns; }
    int views() const { return arena_.state->views; }
    // Of all columns in their order; those of column c are the ones from first_view(c) to
    // first_view(c + 1).
    const View& view_at(int i) const { return arena_.views[i]; }
    int first_view(int column) const;
    const Entry& entry(int stream, int c) const { return entry_at(stream, c); }
    int form(int stream) const { return arena_.forms[stream]; }
    const uint8_t* entering(int stream) const { return arena_.entering + 2 * stream; }
    int64_t used_bytes() const { return arena_.sizes.fixed_bytes + pool_.used_bytes(); }

    // Bytes and columns still missing before so many pages of every stream can close.
    void missing(int pages, int64_t& bytes, int32_t& columns) const;
    const Pool& pool() const { return pool_; }

    // The page of a column that is yet to come, with room for its bytes and none of them written.
    const Entry& enter(int stream, int column);
    // Packs 64 rows of K and V, float16 [head_dim] each, as such a page.
    int close(int stream, int column, const uint16_t* const* k, const uint16_t* const* v);
    // The column of 64 rows that stand at these positions, one view for every place they came from.
    void append(const int32_t* positions, const int32_t* deltas, const int32_t* tokens);

    // Actions on held pages, all or none: widths only fall, 0 and 0 evict.
    int demote(const kvq_action* actions, int count);
    int demote_entering(const uint8_t* widths);
    // Tokens `start` to `stop` are seen no more, those behind move by `by`. A view that holds both
    // sides becomes two, views of a page that come to the same place become one.
    void split(int start, int stop, int by);
    // The most views there are on the way.
    int views_while_split(int start, int stop, int by) const;
    // Whether any of tokens `start` to `stop` is visible.
    bool shows(int start, int stop) const;
    // Forgets columns that show nothing any more.
    void drop_unseen();
    int shift(int column, int32_t delta);
    int mask(int column, uint64_t mask);
    // What was seen of a page: its history of attention received.
    void remember(int stream, int column, uint8_t peak_weight, uint8_t mean_mass);

    // `hi_view`: 8- and 6-bit sides are read by their hi plane, which is how 4 bits are read.
    PageView view(int stream, const Entry& e, bool hi_view) const;
    const uint8_t* constants(const Entry& e) const { return pool_.constant(e.constants); }

    // Takes room for a page that a snapshot holds; calls part(address, bytes) on a page's bytes.
    void restore(int stream, int column, const uint8_t* widths_and_history);
    template <class Part>
    void visit(const Entry& e, Part&& part) const {
        part(pool_.constant(e.constants), arena_.sizes.constant_bytes);
        for (uint32_t g : e.granule)
            if (g != kNone) part(pool_.granule(g), arena_.sizes.granule_bytes);
    }

    // The page is about to be read: what of it lies in the file may be on its way.
    void expect(const Entry& e) const;

private:
    int dim() const { return arena_.config().head_dim; }
    Entry& entry_at(int stream, int c) const {
        return arena_.entries[int64_t{stream} * arena_.sizes.max_columns + c];
    }
    bool may_lower(const kvq_action& action) const;
    void take(Entry& e, int k_bits, int v_bits);
    void release(Entry& e);
    void write_side(Entry& e, int side, int bits, uint8_t* planes);
    void lower_side(Entry& e, int side, int from, int to, const float* feedback);
    const float* feedback(int stream) const {
        return arena_.feedback ? arena_.feedback + int64_t{stream} * dim() * dim() : nullptr;
    }
    void move_item(int kind, uint32_t from, uint32_t to, uint32_t owner);
    void changed() const;
    void drop_column(int column);
    int split_column(int first, int last, int start, int stop, int by, View* out) const;

    const Arena& arena_;
    Pool pool_;
};

}  // namespace kvq
