// One sequence's cache: page table, floating-point tail and pool, all inside one arena of exactly
// the budget's bytes. Decides nothing: which page loses bits is told from outside.
#pragma once
#include <cstdint>
#include <memory>

#include "format.h"
#include "kernels/kernels.h"
#include "kvq.h"
#include "pool.h"

namespace kvq {

constexpr int64_t kAlign = 64;
inline bool quantized(const kvq_config& c) { return c.k_bits <= 8; }
inline bool valid_width(int bits) { return bits == 8 || bits == 4 || bits == 2; }

// Everything a snapshot must hold besides tables, tail and pages; lies at the arena's start.
struct State {
    kvq_config config;
    int64_t budget;
    int32_t columns;
    int32_t tail_used;   // committed floating-point rows, sinks first
    int32_t tokens;      // committed tokens, evicted ones included
    int32_t pending;     // tokens between begin and commit
    int32_t closing;     // pages those tokens will close
    int32_t attended;    // layers that have seen the pending tokens
    int32_t staged;      // pending tokens lie in the staging rows, not in the tail
    int32_t broken;      // a chunk failed half-way: layers disagree
    int64_t peak;
    PoolState pool;
};
static_assert(sizeof(State) == 128, "kvq/sizing.py counts these bytes too");

// How parallel work is run: `run` calls work(user, i) for every i below count.
struct Parallel {
    void (*run)(void* context, void (*work)(void* user, size_t i), size_t count, void* user);
    void* context;
};
extern const Parallel kSerial;

// The token a probe slot holds a query of, -1 for none, and the position it looked from.
struct Probe {
    int32_t token;
    int32_t position;
};

// What a layer's attention was last asked to compute: evidence repeats it.
struct LayerFacts {
    kvq_attention attention;
    float inv_freq[kMaxHeadDim / 2];
};

struct Layout {
    int64_t entering, columns, entries, constant_owner, granule_owner, tail_positions, tail;  // offsets
    int64_t probes, probe_rows, layer_facts;
    int64_t scratch, staging_positions, staging, rope, partials, pool;
    kvq_layout sizes;
};
int lay_out(const kvq_config& config, int64_t budget, Layout& layout);

class Cache {
public:
    // Null: no memory.
    static std::unique_ptr<Cache> open(const kvq_config& config, const Layout& layout,
                                       int64_t budget);
    ~Cache();

    int missing(int tokens, int64_t& bytes, int32_t& columns) const;
    int begin(int tokens);
    int attend(const kvq_attention& a, int tokens, const float* qkv, const int64_t* positions,
               const float* inv_freq, const float* q_norm, const float* k_norm, float* out,
               const Parallel& parallel);
    int commit(int tokens);
    int abort();
    int trim(int tokens);
    int demote(const kvq_action* actions, int count);
    int shift(int column, int32_t delta);
    int mask(int column, uint64_t mask);

    int evidence(int tokens, float* facts, float* queries);
    void constants(uint16_t* keys, uint16_t* values) const;
    void stats(kvq_stats& out) const;
    void columns(int64_t* facts, uint8_t* widths) const;
    void entering(uint8_t* widths) const;
    int64_t page(int layer, int head, int column, uint8_t* bytes) const;
    int tail(int layer, int head, uint16_t* k, uint16_t* v, int32_t* positions) const;
    int64_t state_bytes() const;
    int save(uint8_t* bytes) const;
    int load(const uint8_t* bytes, int64_t count);

private:
    friend struct AttendJob;
    Cache() = default;
    void place(uint8_t* arena);

    const kvq_config& config() const { return state_->config; }
    int streams() const { return config().layers * config().kv_heads; }
    int closing_pages(int tokens) const;
    Entry& entry(int stream, int column) const {
        return entries_[int64_t{stream} * layout_.sizes.max_columns + column];
    }
    uint16_t* tail_rows(int stream, int side) const {  // side 0: K, 1: V
        return tail_ + (int64_t{stream} * 2 + side) * config().tail_rows * config().head_dim;
    }
    uint16_t* staging_rows(int head, int side) const {
        return staging_ + (int64_t{head} * 2 + side) * config().chunk_tokens * config().head_dim;
    }
    int32_t row_position(int row) const {  // of tail rows followed by pending staged rows
        return row < state_->tail_used ? tail_positions_[row]
                                       : staging_positions_[row - state_->tail_used];
    }
    uint16_t* probe_rows(int slot, int layer) const {  // [heads][head_dim]
        return probe_rows_ + (int64_t{slot} * config().layers + layer) * config().heads *
                                 config().head_dim;
    }
    uint8_t* entering(int stream) const { return entering_ + 2 * stream; }  // K and V bits
    LayerFacts* layer_facts(int layer) const { return layer_facts_ + layer; }
    PageView page_view(const Entry& e, const Column& column) const;
    static int probe_slot(int64_t token);  // -1: not a probe
    void keep_probes(const kvq_attention& a, int tokens, const float* qkv, const int64_t* positions,
                     const float* inv_freq, const float* q_norm);
    int usable_probes(int tokens, int* slots) const;
    void load_probes(Block& block, const LayerFacts& layer, int kv_head, const int* slots,
                     int count) const;
    void observe(Block& block, const LayerFacts& layer, int stream, float unit, float* facts,
                 int64_t pages) const;
    bool closing_rows_consecutive(int rows, int pages) const;
    int store_keys_values(const kvq_attention& a, int tokens, const float* qkv,
                          const int64_t* positions, const float* k_norm);
    int close_layer(int layer, int pages, int staged);
    int close_page(int stream, int column, const uint16_t* const* k, const uint16_t* const* v);
    void close_columns(int pages, int rows);
    void write_side(Entry& e, int side, int bits, const uint8_t* planes);
    void lower_side(Entry& e, int side, int from, int to);
    void take(Entry& e, int k_bits, int v_bits);
    void release(Entry& e);
    template <class Part> void visit(Part&& part) const;
    int64_t probe_bytes() const;
    void drop_column(int column);
    void note_peak();
    void move_item(int kind, uint32_t to, uint32_t owner);

    Layout layout_{};
    uint8_t* arena_ = nullptr;
    State* state_ = nullptr;
    uint8_t* entering_ = nullptr;
    Column* columns_ = nullptr;
    Entry* entries_ = nullptr;
    int32_t* tail_positions_ = nullptr;
    uint16_t* tail_ = nullptr;
    Probe* probes_ = nullptr;
    uint16_t* probe_rows_ = nullptr;
    LayerFacts* layer_facts_ = nullptr;
    int32_t* staging_positions_ = nullptr;
    uint16_t* staging_ = nullptr;
    float* rope_ = nullptr;
    float* partials_ = nullptr;
    Pool pool_;
};

// q . (R_delta k) = (R_-delta q) . k, so a moved page costs a rotation of the query: the block's rows
// turned back by `delta`.
void counter_rotate(const Block& block, int32_t delta, const float* inv_freq, int pairs, float* rows);

// The cache a handle names, or null.
Cache* find_cache(int64_t handle);

}  // namespace kvq
