// Which experts of a model lie in memory, within a number of bytes. Their weights are views of a
// file: a page that is read appears in memory, and one that is forgotten is read from the file when
// it is wanted again. What a product gives does not depend on it.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../kvq.h"

namespace kvq {

class Residency {
public:
    explicit Residency(int64_t budget_bytes);

    // The experts of one layer; each is two parts, its gate_up and its down.
    struct Layer {
        struct Part {
            uintptr_t begin, end;  // of all experts, whole pages
            uintptr_t first;       // of the first expert
            size_t bytes;          // of one expert
            uintptr_t at(int expert) const { return first + expert * bytes; }
        } parts[2];
        Layer(const kvq_experts& call);
        bool operator==(const Layer& other) const;
        std::vector<float> use;     // how often each is chosen, newest passes first
        std::vector<uint8_t> held;  // whether it is in memory
    };

    // The layer of a call, known by where its weights lie. KVQ_NOT_MAPPED: they are no view of a file;
    // KVQ_BAD_ARGUMENT: those that lie there had other shapes.
    int find_layer(const kvq_experts& call, Layer*& layer);
    // A pass that comes to a layer chose `experts` of it, each once.
    void choose(Layer& layer, const std::vector<int>& experts);
    // An expert is read next: others are forgotten until there is room for it.
    void enter(Layer& layer, int expert);
    // It was read: what came into memory with it, and is of no expert that stays, is forgotten.
    void leave(Layer& layer, int expert);

    void stats(kvq_residency_stats& out);

private:
    // In memory, whole pages.
    static int64_t bytes(const Layer& layer, int expert);
    static void forget(const Layer& layer, const Layer::Part& part, int expert);
    void forget_least();

    std::mutex mutex_;  // passes of one model may run in several threads
    std::unordered_map<const uint8_t*, std::unique_ptr<Layer>> layers_;
    std::vector<std::pair<Layer*, int>> held_;
    kvq_residency_stats stats_{};
};

}  // namespace kvq
