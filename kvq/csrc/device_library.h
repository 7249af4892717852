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

class Device {
public:
    // The calls of a device's library, each under its name in kvq_cuda.h.
    struct Calls {
        decltype(&kvq_cuda_error) error;
        decltype(&kvq_cuda_abi) abi;
        decltype(&kvq_cuda_open) open;
        decltype(&kvq_cuda_allocate) allocate;
        decltype(&kvq_cuda_free) free;
        decltype(&kvq_cuda_allocate_host) allocate_host;
        decltype(&kvq_cuda_free_host) free_host;
        decltype(&kvq_cuda_copy) copy;
        decltype(&kvq_cuda_clear) clear;
        decltype(&kvq_cuda_wait) wait;
        decltype(&kvq_cuda_after) after;
        decltype(&kvq_cuda_set_ops) set_ops;
        decltype(&kvq_cuda_store) store;
        decltype(&kvq_cuda_attend) attend;
        decltype(&kvq_cuda_close) close;
        decltype(&kvq_cuda_narrow) narrow;
        decltype(&kvq_cuda_narrow_keys) narrow_keys;
        decltype(&kvq_cuda_linear_run) linear;
        decltype(&kvq_cuda_gather) gather;
        decltype(&kvq_cuda_best) best;
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
