// Saving a cache to bytes and back.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cache.h"

namespace kvq {

// A snapshot: this header, the widths pages enter at, the columns, widths and history of every entry,
// the tail's rows in use, the probes, then every page's bytes. It names no place in the arena, so what
// is held alone decides its bytes.
namespace {
struct Header {
    kvq_config config;
    int32_t columns, tail_used, tokens, reserved;
    int64_t budget, peak;
};
static_assert(sizeof(Header) == 88, "no padding may reach a file");
// Widths and history of an entry lie side by side.
constexpr int64_t kEntryBytes = 4;
static_assert(offsetof(Entry, mean_mass) == offsetof(Entry, k_bits) + 3);
}  // namespace

// Calls part(address, bytes) on the tail's rows in use, the probes and every page, in the file's
// order.
template <class Part> void Cache::visit(Part&& part) const {
    part(tail_positions_, int64_t{4} * state_->tail_used);
    for (int s = 0; s < streams(); s++)
        for (int side = 0; side < 2; side++)
            part(tail_rows(s, side), int64_t{2} * state_->tail_used * config().head_dim);
    if (config().probes) {
        const int64_t facts = int64_t{sizeof(LayerFacts)} * config().layers;
        const int64_t slots = int64_t{sizeof(Probe)} * kProbeSlots;
        part(probes_, slots);
        part(probe_rows_, probe_bytes() - slots - facts);
        part(layer_facts_, facts);
    }
    for (int s = 0; s < streams(); s++) {
        for (int c = 0; c < state_->columns; c++) {
            const Entry& e = entry(s, c);
            if (!e.k_bits) continue;
            part(pool_.constant(e.constants),
                 static_cast<int64_t>(k_constant_bytes(config().head_dim) + v_constant_bytes()));
            for (uint32_t g : e.granule)
                if (g != kNone) part(pool_.granule(g), layout_.sizes.granule_bytes);
        }
    }
}

int64_t Cache::probe_bytes() const {
    if (!config().probes) return 0;
    const int64_t rows = int64_t{kProbeSlots} * config().layers * config().heads * config().head_dim;
    return int64_t{sizeof(Probe)} * kProbeSlots + 2 * rows +
           int64_t{sizeof(LayerFacts)} * config().layers;
}

int64_t Cache::state_bytes() const {
    int64_t bytes = sizeof(Header) + 2 * streams() +
                    state_->columns * static_cast<int64_t>(sizeof(Column)) +
                    kEntryBytes * streams() * state_->columns;
    visit([&](const void*, int64_t count) { bytes += count; });
    return bytes;
}

int Cache::save(uint8_t* bytes) const {
    if (state_->pending || state_->broken) return KVQ_BAD_STATE;
    const auto write = [&](const void* from, int64_t count) {
        std::memcpy(bytes, from, static_cast<size_t>(count));
        bytes += count;
    };
    const Header header{config(), state_->columns, state_->tail_used,
                        state_->tokens, 0, state_->budget, state_->peak};
    write(&header, sizeof header);
    write(entering_, 2 * streams());
    write(columns_, state_->columns * static_cast<int64_t>(sizeof(Column)));
    for (int s = 0; s < streams(); s++)
        for (int c = 0; c < state_->columns; c++) write(&entry(s, c).k_bits, kEntryBytes);
    visit(write);
    return KVQ_OK;
}

int Cache::load(const uint8_t* bytes, int64_t count) {
    Header header;
    if (count < static_cast<int64_t>(sizeof header)) return KVQ_BAD_ARGUMENT;
    std::memcpy(&header, bytes, sizeof header);
    header.config.splits = config().splits;  // how work is shared out is no part of the contents
    const int64_t columns = header.columns, rows = header.tail_used;
    if (std::memcmp(&header.config, &config(), sizeof(kvq_config)) ||
        header.budget != state_->budget || columns < 0 || columns > layout_.sizes.max_columns ||
        rows < 0 || rows > config().tail_rows || header.tokens < 0 || header.peak > header.budget)
        return KVQ_BAD_ARGUMENT;
    int64_t expected = sizeof header + 2 * streams() + columns * static_cast<int64_t>(sizeof(Column)) +
                       kEntryBytes * streams() * columns + probe_bytes() +
                       rows * (4 + int64_t{4} * streams() * config().head_dim);
    if (count < expected) return KVQ_BAD_ARGUMENT;
    const uint8_t* const entering = bytes + sizeof header;
    for (int i = 0; quantized(config()) && i < 2 * streams(); i++)
        if (!valid_width(entering[i]) ||
            entering[i] > (i % 2 ? config().v_bits : config().k_bits))
            return KVQ_BAD_ARGUMENT;
    const uint8_t* const held = entering + 2 * streams();
    const uint8_t* widths = held + columns * static_cast<int64_t>(sizeof(Column));
    int64_t pages = 0, planes = 0;
    for (int64_t i = 0; i < streams() * columns; i++) {
        const int k_bits = widths[kEntryBytes * i], v_bits = widths[kEntryBytes * i + 1];
        if (k_bits == 0 && v_bits == 0) continue;
        if (!valid_width(k_bits) || !valid_width(v_bits)) return KVQ_BAD_ARGUMENT;
        pages++;
        planes += granules(k_bits) + granules(v_bits);
    }
    expected += pages * static_cast<int64_t>(k_constant_bytes(config().head_dim) + v_constant_bytes()) +
                planes * layout_.sizes.granule_bytes;
    if (count != expected || pages * layout_.sizes.constant_bytes +
                                     planes * layout_.sizes.granule_bytes > layout_.sizes.pool_bytes)
        return KVQ_BAD_ARGUMENT;

    pool_.clear();
    std::memcpy(entering_, entering, size_t{2} * static_cast<size_t>(streams()));
    std::memcpy(columns_, held, sizeof(Column) * static_cast<size_t>(columns));
    state_->columns = header.columns;
    state_->tail_used = header.tail_used;
    state_->tokens = header.tokens;
    state_->pending = state_->broken = 0;
    for (int s = 0; s < streams(); s++) {
        for (int c = 0; c < columns; c++, widths += kEntryBytes) {
            Entry& e = entry(s, c);
            if (widths[0]) {
                take(e, widths[0], widths[1]);
                e.peak_mass = widths[2];
                e.mean_mass = widths[3];
                continue;
            }
            e = {};
            for (uint32_t& g : e.granule) g = kNone;
            e.constants = kNone;
        }
    }
    bytes = widths;
    visit([&](void* to, int64_t part) {
        std::memcpy(to, bytes, static_cast<size_t>(part));
        bytes += part;
    });
    // A damaged file must not make later evidence read beyond the arena.
    for (int layer = 0; config().probes && layer < config().layers; layer++) {
        kvq_attention& a = layer_facts(layer)->attention;
        const bool sound = a.layer == layer && a.heads == config().heads &&
                           a.kv_heads == config().kv_heads && a.head_dim == config().head_dim &&
                           a.rotary_pairs >= 0 && 2 * a.rotary_pairs <= a.head_dim;
        for (int slot = 0; !sound && slot < kProbeSlots; slot++) probes_[slot].token = -1;
    }
    state_->peak = std::max(header.peak, layout_.sizes.fixed_bytes + pool_.used_bytes());
    return KVQ_OK;
}

}  // namespace kvq
