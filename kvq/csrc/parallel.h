// How the units of a call are shared out.
#pragma once
#include <cstddef>

namespace kvq {

// Runs work(user, i) for every i below count, on as many threads as it has.
struct Parallel {
    void (*run)(void* context, void (*work)(void* user, size_t i), size_t count, void* user);
    void* context;
};

inline void run_in_order(void*, void (*work)(void*, size_t), size_t count, void* user) {
    for (size_t i = 0; i < count; i++) work(user, i);
}
constexpr Parallel kSerial{run_in_order, nullptr};

// Runs work(i) for every i below count.
template <class Work>
void each(const Parallel& parallel, size_t count, Work work) {
    const auto run = [](void* user, size_t i) { (*static_cast<Work*>(user))(i); };
    parallel.run(parallel.context, run, count, &work);
}

}  // namespace kvq
