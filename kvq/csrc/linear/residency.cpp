#include "residency.h"

#include <algorithm>

#include "../handles.h"
#include "../platform.h"
#include "linear.h"

namespace kvq {
namespace {

// What the system has read ahead it may bring into memory with one fault, in blocks of up to so
// many bytes: with an expert come neighbours that nobody asked for.
constexpr uintptr_t kBlock = uintptr_t{1} << 21;
// Weight of the newest pass in how often an expert is chosen.
constexpr float kNewest = 1.0f / 16;

uintptr_t page_of(uintptr_t address) {
    static const uintptr_t page = platform::page_bytes();
    return address / page * page;
}
uintptr_t page_behind(uintptr_t address) {
    return page_of(address + platform::page_bytes() - 1);
}

}  // namespace

Residency::Residency(int64_t budget_bytes) {
    stats_.budget_bytes = budget_bytes;
}

Residency::Layer::Layer(const kvq_experts& call)
    : use(static_cast<size_t>(call.count)), held(static_cast<size_t>(call.count)) {
    const kvq_matrix* matrices[] = {&call.gate_up, &call.down};
    const uint8_t* panels[] = {call.gate_up_panels, call.down_panels};
    for (int i = 0; i < 2; i++) {
        const PanelLayout layout(*matrices[i]);
        parts[i].first = reinterpret_cast<uintptr_t>(panels[i]);
        parts[i].bytes = layout.panels * layout.panel_bytes;
        parts[i].begin = page_of(parts[i].first);
        parts[i].end = page_behind(parts[i].at(call.count));
    }
}

bool Residency::Layer::operator==(const Layer& other) const {
    return held.size() == other.held.size() &&
           std::equal(parts, parts + 2, other.parts, [](const Part& a, const Part& b) {
               return a.first == b.first && a.bytes == b.bytes;
           });
}

int Residency::find_layer(const kvq_experts& call, Layer*& layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Layer>& known = layers_[call.gate_up_panels];
    auto fresh = std::make_unique<Layer>(call);
    if (known && !(*known == *fresh)) return KVQ_BAD_ARGUMENT;
    for (const Layer::Part& part : fresh->parts)
        if (!known && !platform::views_file(part.begin, part.end)) return KVQ_NOT_MAPPED;
    if (!known) known = std::move(fresh);
    layer = known.get();
    return KVQ_OK;
}

void Residency::choose(Layer& layer, const std::vector<int>& experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (float& use : layer.use) use *= 1 - kNewest;
    stats_.chosen += static_cast<int64_t>(experts.size());
    for (const int expert : experts) {
        layer.use[expert] += kNewest;
        if (layer.held[expert]) continue;
        stats_.fetched++;
        for (const Layer::Part& part : layer.parts) {
            platform::read_ahead(page_of(part.at(expert)), page_behind(part.at(expert + 1)));
        }
    }
}

void Residency::enter(Layer& layer, int expert) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (layer.held[expert]) return;
    const int64_t wanted = bytes(layer, expert);
    while (!held_.empty() && stats_.held_bytes + wanted > stats_.budget_bytes) forget_least();
    layer.held[expert] = 1;
    held_.emplace_back(&layer, expert);
    stats_.held_bytes += wanted;
}

void Residency::leave(Layer& layer, int expert) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int count = static_cast<int>(layer.held.size());
    for (const Layer::Part& part : layer.parts) {
        // Neighbours with a byte in a block that has one of the expert's.
        const uintptr_t begin = part.at(expert) / kBlock * kBlock;
        const uintptr_t end = (part.at(expert + 1) + kBlock - 1) / kBlock * kBlock;
        int first = expert, last = expert;
        while (first > 0 && part.at(first) > begin) first--;
        while (last + 1 < count && part.at(last + 1) < end) last++;
        for (int i = first; i <= last; i++)
            if (!layer.held[i]) forget(layer, part, i);
    }
}

void Residency::forget_least() {
    const auto least = std::min_element(held_.begin(), held_.end(), [](auto& a, auto& b) {
        return a.first->use[a.second] < b.first->use[b.second];
    });
    Layer& layer = *least->first;
    const int expert = least->second;
    layer.held[expert] = 0;
    for (const Layer::Part& part : layer.parts) forget(layer, part, expert);
    stats_.held_bytes -= bytes(layer, expert);
    *least = held_.back();
    held_.pop_back();
}

void Residency::forget(const Layer& layer, const Layer::Part& part, int expert) {
    const int last = static_cast<int>(layer.held.size()) - 1;
    const uintptr_t first_byte = part.at(expert), behind = part.at(expert + 1);
    // A page that a neighbour in memory has a part of stays.
    const bool after_held = expert > 0 && layer.held[expert - 1];
    const bool before_held = expert < last && layer.held[expert + 1];
    const uintptr_t begin = after_held ? page_behind(first_byte) : page_of(first_byte);
    const uintptr_t end = before_held ? page_of(behind) : page_behind(behind);
    if (begin < end) platform::forget(begin, end);
}

int64_t Residency::bytes(const Layer& layer, int expert) {
    int64_t sum = 0;
    for (const Layer::Part& part : layer.parts)
        sum += static_cast<int64_t>(page_behind(part.at(expert + 1)) - page_of(part.at(expert)));
    return sum;
}

void Residency::stats(kvq_residency_stats& out) {
    std::lock_guard<std::mutex> lock(mutex_);
    out = stats_;
}

}  // namespace kvq

extern "C" {

int kvq_residency_open(int64_t budget_bytes, int64_t* handle) {
    if (budget_bytes < 1) return KVQ_BAD_ARGUMENT;
    if (!kvq::platform::forgets()) return KVQ_NOT_MAPPED;
    auto made = std::make_shared<kvq::Residency>(budget_bytes);
    *handle = kvq::Handles<kvq::Residency>::all().add(std::move(made));
    return KVQ_OK;
}

int kvq_residency_close(int64_t handle) {
    return kvq::Handles<kvq::Residency>::all().erase(handle) ? KVQ_OK : KVQ_CLOSED;
}

int kvq_residency_stats_of(int64_t handle, kvq_residency_stats* out) {
    const auto found = kvq::Handles<kvq::Residency>::all().find(handle);
    if (!found) return KVQ_CLOSED;
    found->stats(*out);
    return KVQ_OK;
}
}
