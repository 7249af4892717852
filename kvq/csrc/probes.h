// Query rows kept as probes of what attention looks at, and what they see of every page: the
// evidence that policies decide by.
#pragma once
#include "page_table.h"
#include "tail.h"

namespace kvq {

struct Inputs;

// Probes are the newest of every kProbeStride tokens and, for policies that ask for it, a sample of the
// whole text: of runs of kPageTokens, evenly spaced, one token each, chosen by a hash. Evidence is asked for as of a token
// up to a draft ago, and a rejected draft may follow: the newest have room for what both may
// overwrite, and a sample that both might have is not used, so that evidence is that of sequential
// decoding.
constexpr int kProbeStride = 8;
constexpr int kNewest = 4;   // that are used
constexpr int kSamples = 8;  // at most, and half as many at least once there are so many runs

constexpr int newest_slots(int draft_tokens) {
    return kNewest + 2 * ((draft_tokens + kProbeStride - 1) / kProbeStride);
}
constexpr int probe_slots(const kvq_config& c) {
    return c.probes ? newest_slots(c.draft_tokens) + (c.probes & KVQ_SAMPLES ? kSamples : 0) : 0;
}
// Query heads of a KV head that a probe keeps: as many as a block takes of the newest together.
constexpr int kept_heads(const kvq_config& c) {
    return std::min(c.heads / c.kv_heads, kBlockRows / kNewest);
}

// Where the sample of a run of tokens is kept among kSamples slots, -1: the run has none.
int sample_slot(int64_t run);

class Probes {
public:
    explicit Probes(const Arena& arena) : arena_(arena) {}
    void clear();
    bool kept() const { return arena_.config().probes; }
    int slots() const { return probe_slots(arena_.config()); }
    // What slots hold, of all layers together and then of every reader.
    int records() const { return slots() * probe_kinds(arena_.config()); }
    int64_t row_bytes() const;     // of all slots
    int64_t facts_of_all() const;  // bytes
    // Whether row t of the pass under way is a probe.
    bool takes(const Tail& tail, int t) const { return slot(token_of(tail, t)) >= 0; }

    // A pass begins: its first look at the last layer will be the first reader's.
    void begin() { looks_ = 0; }
    // Keeps those rows of a layer's pass that are probes; `rope` holds their cosines and sines.
    void keep(const Tail& tail, const kvq_attention& a, const Inputs& in);
    // Likewise of the next reader's, if `a.layer` is one whose readers are heard.
    void keep_look(const Tail& tail, const kvq_attention& a, const Inputs& in);
    // Rows of the branch from `kept` on are forgotten.
    void forget_from(const Tail& tail, int kept);
    // Tokens from `first` on are no longer those that were seen.
    void forget_tokens(int first);
    // A path is committed: a slot that another row of the same depth wrote last holds no probe.
    void settle(const Tail& tail, const int32_t* rows, int count);
    // Checks what a snapshot brought: no probe is used of layers that do not fit the cache.
    void check();

    int evidence(PageTable& pages, const Tail& tail, int tokens, float* facts,
                 float* queries) const;

private:
    int layers() const { return arena_.config().layers; }
    int readers() const { return kvq::readers(arena_.config()); }
    // An asker is a layer or, behind all of them, a reader.
    Probe& record(int asker, int slot) const {
        return arena_.probes[(asker < layers() ? 0 : asker - layers() + 1) * slots() + slot];
    }
    bool is_of(int asker, int layer) const {
        return asker == layer || (asker >= layers() && layer == layers() - 1);
    }
    void keep_row(int asker, int slot, const kvq_attention& a, const float* q, const Inputs& in,
                  int t) const;
    int slot(int64_t token) const;               // -1: not a probe
    static int32_t token_of(const Tail& tail, int t) {
        return tail.branch().at + tail.depth(tail.first_row() + t);
    }
    uint16_t* rows(int slot, int asker) const {  // float16 [kv_heads, kept_heads, head_dim]
        const kvq_config& c = arena_.config();
        return arena_.probe_rows + (int64_t{slot} * (c.layers + readers()) + asker) * c.kv_heads *
                                       kept_heads(c) * c.head_dim;
    }
    // Slots in order of their tokens; one lost to a rollback is left out until it is written again.
    struct Chosen {
        int count = 0;
        int slots[kSamples];
    };
    Chosen newest(int asker, int tokens) const;
    Chosen samples(int asker, int tokens) const;
    int block_rows(const Chosen& chosen) const;
    void load(struct Observation& to, int asker, int kv_head, const Chosen& chosen) const;

    const Arena& arena_;
    int looks_ = 0;  // of the pass under way, at the last layer
};

}  // namespace kvq
