// What callers of kvq.h have open, by handle.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kvq {

template <class T>
class Handles {
public:
    // The process's. Never freed, as devices are not: a thread may still run passes when it ends.
    static Handles& all() {
        static Handles* instance = new Handles;
        return *instance;
    }
    int64_t add(std::shared_ptr<T> opened) {
        std::lock_guard<std::mutex> lock(mutex_);
        open_.emplace(next_, std::move(opened));
        return next_++;
    }
    // Null: it was closed.
    std::shared_ptr<T> find(int64_t handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = open_.find(handle);
        return found == open_.end() ? nullptr : found->second;
    }
    // Whether it was open.
    bool erase(int64_t handle) {
        const std::shared_ptr<T> last = find(handle);  // outside the lock: memory may go with it
        std::lock_guard<std::mutex> lock(mutex_);
        return open_.erase(handle) != 0;
    }

private:
    std::mutex mutex_;
    std::unordered_map<int64_t, std::shared_ptr<T>> open_;
    int64_t next_ = 1;  // a handle is never used twice, so a stale one finds nothing
};

}  // namespace kvq
