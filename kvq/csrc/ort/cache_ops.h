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

// The caches of a pass, locked until it ends.
struct LockedCaches {
    std::vector<Cache*> caches;

    // Turns are taken in the order of the handles, so that two passes never wait for each other.
    OrtStatus* lock(const char* op, const int64_t* handles, size_t count) {
        std::vector<size_t> order(count);
        std::iota(order.begin(), order.end(), size_t{0});
        std::sort(order.begin(), order.end(),
                  [&](size_t a, size_t b) { return handles[a] < handles[b]; });
        caches.resize(count);
        for (size_t i = 0; i < count; i++) {
            const size_t s = order[i];
            if (i > 0 && handles[order[i - 1]] == handles[s])
                return failed(op, "cache " + std::to_string(handles[s]) + " is given twice");
            open_.push_back(Handles<Cache>::all().find(handles[s]));
            caches[s] = open_.back().get();
            if (!caches[s])
                return failed(op, "no open cache has handle " + std::to_string(handles[s]));
        }
        for (size_t s : order) turns_.emplace_back(caches[s]->turn);
        return nullptr;
    }

private:
    std::vector<std::shared_ptr<Cache>> open_;
    std::vector<std::unique_lock<std::mutex>> turns_;
};

// One unit is not worth a dispatch.
inline void run_units(void* context, void (*work)(void*, size_t), size_t units, void* user) {
    units == 1 ? work(user, 0) : run_parallel(context, work, units, user);
}

// Whether the rows of a pass's sequences, one or more each, are all there are.
inline OrtStatus* sum_to(const char* op, const int64_t* rows, int64_t sequences, int64_t tokens) {
    int64_t left = tokens, s = 0;
    for (; s < sequences && rows[s] >= 1 && rows[s] <= left; s++) left -= rows[s];
    if (s == sequences && !left) return nullptr;
    return failed(op, "sequence_rows do not add up to the rows given, one or more each");
}

// Calls run(cache, first, count) for each sequence of a pass: its cache, and its rows.
template <class Run>
OrtStatus* each_sequence(const char* op, const Input& handles, const Input& sequence_rows,
                         int64_t tokens, Run&& run) {
    const int64_t* rows = sequence_rows.as<int64_t>();
    if (OrtStatus* status = sum_to(op, rows, handles.count, tokens)) return status;
    LockedCaches locked;
    if (OrtStatus* status = locked.lock(op, handles.as<int64_t>(), size_t(handles.count)))
        return status;
    int64_t first = 0;
    for (size_t s = 0; s < locked.caches.size(); first += rows[s++])
        if (OrtStatus* status = run(*locked.caches[s], first, static_cast<int>(rows[s])))
            return status;
    return nullptr;
}

}  // namespace kvq::ort
