// What the ops share that work on the caches of a pass.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "../cache.h"
#include "../handles.h"
#include "kernel.h"

namespace kvq::ort {

// The caches of a pass, held until it ends.
struct Held {
    std::vector<std::shared_ptr<Cache>> caches;
    std::vector<std::unique_lock<std::mutex>> turns;

    // Turns are taken in the order of the handles, so that two passes never wait for each other.
    OrtStatus* hold(const char* op, const int64_t* handles, size_t count) {
        std::vector<size_t> order(count);
        std::iota(order.begin(), order.end(), size_t{0});
        std::sort(order.begin(), order.end(),
                  [&](size_t a, size_t b) { return handles[a] < handles[b]; });
        caches.resize(count);
        for (size_t i = 0; i < count; i++) {
            const size_t s = order[i];
            if (i > 0 && handles[order[i - 1]] == handles[s])
                return failed(op, "cache " + std::to_string(handles[s]) + " is given twice");
            caches[s] = Handles<Cache>::all().find(handles[s]);
            if (!caches[s])
                return failed(op, "no open cache has handle " + std::to_string(handles[s]));
        }
        for (size_t s : order) turns.emplace_back(caches[s]->turn);
        return nullptr;
    }
};

// One unit is not worth a dispatch.
inline void run_units(void* context, void (*work)(void*, size_t), size_t units, void* user) {
    units == 1 ? work(user, 0) : run_parallel(context, work, units, user);
}

// Whether the rows of a pass's sequences, one or more each, are all there are.
inline OrtStatus* sum_to(const char* op, const int64_t* rows, int64_t sequences, int64_t tokens) {
    int64_t first = 0;
    for (int64_t s = 0; s < sequences; first += rows[s++])
        if (rows[s] < 1 || rows[s] > tokens - first)
            return failed(op, "sequence_rows do not add up to the rows given, one or more each");
    if (first != tokens) return failed(op, "sequence_rows do not add up to the rows given");
    return nullptr;
}

// kvq::ShortConv and kvq::DeltaNet, which compute on the processor alone.
Op short_conv_op();
Op delta_net_op();

}  // namespace kvq::ort
