// A cache's arena once more, on a device: pages, floating-point rows and the tables that kernels
// read lie there at the places they have in the host's. The host keeps every table and decides;
// its own bytes of pages and rows say nothing, except after `fetch`, until the next change.
//
// What is asked of the device is queued, in the order of the calls. A failure is kept: `status`.
#pragma once
#include <memory>
#include <vector>

#include "attend.h"
#include "device_library.h"
#include "page_table.h"
#include "tail.h"
#include "tiers.h"

namespace kvq {

class Twin {
public:
    // `resident`: columns whose pages lie on the device, the others in a second tier (tiers.h); 0:
    // all of them. Null: no memory.
    static std::unique_ptr<Twin> open(Device& device, const Arena& arena, const uint8_t* host,
                                      int64_t bytes, int resident);
    ~Twin();

    Device& device() const { return device_; }
    int status() const { return status_; }

    // Addresses are the host arena's; both stay as they are there.
    void move(void* to, const void* from, int64_t bytes);
    // Pages and rows that are in use come from the device, or go there with all tables.
    void fetch(const PageTable& pages);
    void send(const PageTable& pages);

    // What was told of views and rows holds no more, or of entries.
    void new_pass();
    void entries_changed() { entries_++; }
    void column_dropped(int column) {
        if (tiers_) tiers_->drop(column);
    }
    // Null: all pages lie on the device.
    const Tiers* tiers() const { return tiers_.get(); }
    int64_t bytes() const { return bytes_; }

    // A pass of one layer; of `in` positions are on the host, all else on the device. `silent`:
    // keys and values are stored, nothing is asked.
    int attend(const PageTable& pages, const Tail& tail, const kvq_attention& a, const Inputs& in,
               const kvq_read& rule, bool silent);
    // Of passes that chose pages, a page counted once per token and KV head; waits for the newest.
    kvq_cuda_counts counts() const;
    // Calls `run` with the queries of `rows` alone, and all else of `in` but keys and values, on
    // the host.
    template <class Run>
    void bring(const kvq_attention& a, const Inputs& in, const std::vector<int>& rows, Run&& run);
    // Calls `run`, which returns a status, with `in` of the host on the device; `out` comes back.
    template <class Run>
    int take(const kvq_attention& a, const Inputs& in, Run&& run);
    // As Tail::keep_rows.
    void keep_rows(int first, const int32_t* rows, int count);
    // As Cache::feed_back; the device has a copy, beside the budget as weights are.
    int feed_back(const float* feedback);
    // As Tail::close_layer.
    int close_layer(PageTable& pages, const Tail& tail, int layer, const Tail::Closing& closed);
    // As PageTable::lower_side, of the two granules that become one: when all that lose bits
    // together are known, `narrow_all`.
    void narrow(uint8_t* first, const uint8_t* second) {
        narrowed_.push_back({of(first), of(second)});
    }
    // Likewise of keys that are rounded anew; pointers are the host's.
    void narrow_keys(kvq_cuda_keys keys);
    void narrow_all();

private:
    Twin(Device& device, const Arena& arena, const uint8_t* host);
    // What all layers with one window are told of a pass.
    struct PassTables {
        int window = -1;
        std::vector<int64_t> positions;
        int tiles = 0, turns = 0, row_turns = 0;
        const uint8_t* at = nullptr;  // on the device, one after the other:
        int64_t turn_of_view = 0, deltas = 0, tile_rows = 0, tile_turns = 0, masks = 0, places = 0;
    };

    template <class T>
    T* of(const T* host) const {
        return reinterpret_cast<T*>(memory_ + (reinterpret_cast<const uint8_t*>(host) - host_));
    }
    const kvq_config& config() const { return arena_.config(); }
    void note(int status) {
        if (!status_) status_ = status;
    }
    void copy(void* to, const void* from, int64_t bytes) { note(device_.copy(to, from, bytes)); }
    void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step,
                   int64_t row_bytes, int64_t rows);
    // Calls run(place in the host's arena, place of the bytes, count).
    template <class Run>
    void in_use(const PageTable& pages, Run&& run) const;
    // Of a page that the table has an entry of; `slot` is one of the entry's.
    uint8_t* constants(const PageTable& pages, int stream, int column) const;
    uint8_t* granule(const PageTable& pages, int stream, int column, int slot) const;
    // Keys (0) or values (1) of a stream's rows, where a pass or its closing reads them: the tail,
    // or for a chunk the room where it follows the tail's rows.
    uint16_t* rows(const Tail& tail, int stream, int side) const;
    int64_t chunk_rows() const { return int64_t{config().tail_rows} + config().chunk_tokens; }
    // A table for what is queued next, in scratch; null, and noted, where there is no memory.
    const uint8_t* table(const void* bytes, int64_t count);
    kvq_cuda_page page_at(const PageTable& pages, int stream, int column) const;
    bool gather_chunk(const Tail& tail, int layer);
    bool tell_tables(const PageTable& pages, const Tail& tail, const kvq_attention& a,
                     const Inputs& in);
    void tell_entries(const PageTable& pages, int layer);
    int splits(const kvq_attention& a, int rows, int work) const;
    // Has attention choose pages: what `s` says of that, with scratch from `room` on.
    int choose(const kvq_attention& a, const kvq_read& rule, uint8_t* room, kvq_cuda_sequence& s);

    Device& device_;
    const Arena& arena_;
    const uint8_t* host_;
    uint8_t* memory_ = nullptr;
    int64_t bytes_ = 0;
    std::unique_ptr<Tiers> tiers_;
    DeviceBytes tables_, chunk_, taken_, feedback_room_, counts_;
    const float* feedback_ = nullptr;
    std::vector<kvq_cuda_plane> narrowed_;
    std::vector<kvq_cuda_keys> narrowed_keys_;
    PassTables pass_;
    uint64_t entries_ = 1;
    std::vector<uint64_t> told_;  // per layer: `entries_` as the device has them
    mutable kvq_cuda_counts counted_{};
    mutable bool counts_changed_ = false;  // on the device, since `counted_`
    int status_ = 0;
};

template <class Run>
void Twin::bring(const kvq_attention& a, const Inputs& in, const std::vector<int>& rows,
                 Run&& run) {
    const int64_t width = (a.heads + 2 * a.kv_heads) * a.head_dim;
    std::vector<float> qkv(static_cast<size_t>(in.tokens * width));
    std::vector<float> inv_freq(static_cast<size_t>(a.rotary_pairs));
    std::vector<float> q_norm(static_cast<size_t>(in.q_norm ? a.head_dim : 0));
    for (int t : rows)
        copy(qkv.data() + t * width, in.qkv + t * width, int64_t{4} * a.heads * a.head_dim);
    copy(inv_freq.data(), in.inv_freq, int64_t{4} * a.rotary_pairs);
    if (in.q_norm) copy(q_norm.data(), in.q_norm, int64_t{4} * a.head_dim);
    note(device_.wait());
    Inputs here = in;
    here.qkv = qkv.data(), here.inv_freq = inv_freq.data();
    here.q_norm = in.q_norm ? q_norm.data() : nullptr;
    run(here);
}

template <class Run>
int Twin::take(const kvq_attention& a, const Inputs& in, Run&& run) {
    const int64_t row = int64_t{4} * a.head_dim;
    const int64_t qkv = in.tokens * (a.heads + 2 * a.kv_heads) * row,
                  out = in.tokens * a.heads * row;
    uint8_t* room = taken_.at_least(qkv + out + 3 * row + int64_t{4} * a.heads);
    if (!room) return KVQ_NO_MEMORY;
    const auto there = [&](int64_t start) { return reinterpret_cast<float*>(room + start); };
    Inputs inputs = in;
    const auto give = [&](const float*& part, int64_t start, int64_t bytes) {
        if (!part || !bytes) return;
        copy(room + start, part, bytes);
        part = there(start);
    };
    give(inputs.qkv, 0, qkv);
    give(inputs.inv_freq, qkv + out, int64_t{4} * a.rotary_pairs);
    give(inputs.q_norm, qkv + out + row, row);
    give(inputs.k_norm, qkv + out + 2 * row, row);
    give(inputs.sink_logits, qkv + out + 3 * row, int64_t{4} * a.heads);
    inputs.out = there(qkv);
    const int status = run(inputs);
    if (!status) copy(in.out, inputs.out, out);
    note(device_.wait());
    return status ? status : status_;
}

}  // namespace kvq
