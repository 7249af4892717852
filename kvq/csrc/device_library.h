// A device beside the processor: the library of kernels for it (cuda/kvq_cuda.h), loaded when it is
// asked for, and what its calls share.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kvq_cuda.h"
#include "kvq.h"

namespace kvq {

// Bytes on a device that grow as they are asked for and are never cleared.
class DeviceBytes {
public:
    explicit DeviceBytes(class Device& device) : device_(device) {}
    ~DeviceBytes();
    DeviceBytes(const DeviceBytes&) = delete;
    DeviceBytes& operator=(const DeviceBytes&) = delete;
    // Room for so many bytes, which hold nothing; null where there is no memory for them.
    uint8_t* at_least(int64_t bytes);
    uint8_t* data() const { return static_cast<uint8_t*>(memory_); }

private:
    Device& device_;
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
};

// The calls of a device's library: kvq_cuda.h has them with kvq_cuda_ before the name.
#define KVQ_DEVICE_CALLS(X)                                                            \
    X(error) X(abi) X(open) X(allocate) X(free) X(allocate_host) X(free_host) X(copy)  \
    X(clear) X(wait) X(after) X(set_ops) X(store) X(attend) X(close) X(narrow)         \
    X(narrow_keys) X(linear_run) X(gather) X(best)

class Device {
public:
    struct Calls {
#define KVQ_CALL_MEMBER(name) decltype(&kvq_cuda_##name) name;
        KVQ_DEVICE_CALLS(KVQ_CALL_MEMBER)
#undef KVQ_CALL_MEMBER
    };

    // Number of the device whose library lies at `path`, from 1 on: opened once, for as long as the
    // process lives. 0: `why` says why not.
    static int open(const char* path, std::string& why);
    static Device* find(int number);  // null: none has it

    const Calls& calls() const { return calls_; }
    const kvq_cuda_device& facts() const { return facts_; }
    bool on_host() const { return facts_.on_host; }
    // Why this thread's last call of a device failed; empty: none has.
    static std::string failure();

    // Queued like all that follows; a status.
    int copy(void* to, const void* from, int64_t bytes) {
        return calls_.copy(to, 0, from, 0, bytes, 1, facts_.stream);
    }
    int wait() { return calls_.wait(facts_.stream); }
    // See kvq_device_best.
    int best(const float* logits, int32_t rows, int32_t columns, int32_t count, int32_t* places,
             float* values);

    // Held by whoever queues work that uses `scratch`, until the last of it is queued: the stream
    // keeps the order then.
    std::mutex turn;
    DeviceBytes scratch{*this};

private:
    Device() = default;
    bool load(const char* path, std::string& why);

    Calls calls_{};
    kvq_cuda_device facts_{};
};

}  // namespace kvq
