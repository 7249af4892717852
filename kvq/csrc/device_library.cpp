#include "device_library.h"

#include <algorithm>
#include <memory>

#include "ort/kernel.h"
#include "platform.h"

namespace kvq {
namespace {

struct Opened {
    std::mutex mutex;
    std::vector<std::pair<std::string, Device*>> devices;
};

// Never freed: a thread may still run kernels when the process ends.
Opened& opened() {
    static Opened* instance = new Opened;
    return *instance;
}

}  // namespace

DeviceBytes::~DeviceBytes() {
    if (memory_) device_.calls().free(memory_);
}

uint8_t* DeviceBytes::at_least(int64_t bytes) {
    if (bytes <= bytes_) return static_cast<uint8_t*>(memory_);
    // What was queued may still read the old ones. Half more than there was: what grows by a page at
    // a time seldom comes here.
    device_.wait();
    if (memory_) device_.calls().free(memory_);
    bytes = std::max(bytes, bytes_ + bytes_ / 2);
    bytes_ = 0;
    if (device_.calls().allocate(bytes, &memory_)) return nullptr;
    bytes_ = bytes;
    return static_cast<uint8_t*>(memory_);
}

int Device::open(const char* path, std::string& why) {
    std::lock_guard<std::mutex> lock(opened().mutex);
    auto& devices = opened().devices;
    for (size_t i = 0; i < devices.size(); i++)
        if (devices[i].first == path) return static_cast<int>(i) + 1;
    std::unique_ptr<Device> device(new Device);
    if (!device->load(path, why)) return 0;
    devices.emplace_back(path, device.release());
    return static_cast<int>(devices.size());
}

Device* Device::find(int number) {
    std::lock_guard<std::mutex> lock(opened().mutex);
    const auto& devices = opened().devices;
    const bool known = number > 0 && static_cast<size_t>(number) <= devices.size();
    return known ? devices[static_cast<size_t>(number) - 1].second : nullptr;
}

bool Device::load(const char* path, std::string& why) {
    void* library = platform::open_library(path, why);
    if (!library) return false;
    bool whole = true;
#define KVQ_CALL_LOAD(name)                              \
    calls_.name = reinterpret_cast<decltype(calls_.name)>( \
        platform::find_symbol(library, "kvq_cuda_" #name)); \
    whole &= calls_.name != nullptr;
    KVQ_DEVICE_CALLS(KVQ_CALL_LOAD)
#undef KVQ_CALL_LOAD
    if (!whole || calls_.abi() != KVQ_ABI)
        return why = "it belongs to another version of kvq: reinstall kvq-runtime", false;
    if (calls_.open(&facts_)) return why = calls_.error(), false;
    calls_.set_ops(ort::register_ops, this);
    return true;
}

int Device::best(const float* logits, int32_t rows, int32_t columns, int32_t count, int32_t* places,
                 float* values) {
    std::lock_guard<std::mutex> lock(turn);
    const int64_t bytes = int64_t{4} * rows * count;
    uint8_t* there = scratch.at_least(2 * bytes);
    if (!there) return KVQ_NO_MEMORY;
    auto* found = reinterpret_cast<int32_t*>(there);
    auto* their = reinterpret_cast<float*>(there + bytes);
    if (const int status = calls_.best(logits, rows, columns, count, found, their, facts_.stream))
        return status;
    if (const int status = copy(places, found, bytes)) return status;
    if (const int status = copy(values, their, bytes)) return status;
    return wait();
}

std::string Device::failure() {
    std::lock_guard<std::mutex> lock(opened().mutex);
    for (const auto& [path, device] : opened().devices)
        if (*device->calls().error()) return device->calls().error();
    return "";
}

}  // namespace kvq
