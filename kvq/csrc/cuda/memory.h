// The device's memory and its errors; for the emulator, the host's.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <vector>

#include "../kvq.h"
#include "device.h"
#include "kvq_cuda.h"

namespace kvq::cuda {

// Channels of heads that attention has kernels for.
constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256};

static thread_local char g_reason[256] = "";
static kvq_cuda_add_ops g_add_ops = nullptr;
static void* g_ops_user = nullptr;

#ifdef __CUDACC__

static int told(cudaError_t error) {
    if (error == cudaSuccess) return KVQ_OK;
    cudaGetLastError();  // it was told: the next launch is not to be taken for it
    std::snprintf(g_reason, sizeof g_reason, "%s: %s", cudaGetErrorName(error),
                  cudaGetErrorString(error));
    return error == cudaErrorMemoryAllocation ? KVQ_NO_MEMORY : KVQ_DEVICE_FAILED;
}

// Whether the device reads the host's pages itself, and then maybe later than a copy returns.
static bool g_reads_pages = false;

// Of the launch before it.
static int outcome() {
    return told(cudaGetLastError());
}

static int open_device(kvq_cuda_device& out) {
    if (const int status = told(cudaSetDevice(0))) return status;
    cudaDeviceProp properties;
    if (const int status = told(cudaGetDeviceProperties(&properties, 0))) return status;
    std::snprintf(out.name, sizeof out.name, "%s", properties.name);
    out.capability = 10 * properties.major + properties.minor;
    out.units = properties.multiProcessorCount;
    g_reads_pages = properties.pageableMemoryAccess;
    size_t free_bytes = 0, all = 0;
    if (const int status = told(cudaMemGetInfo(&free_bytes, &all))) return status;
    out.free_bytes = static_cast<int64_t>(free_bytes), out.memory_bytes = static_cast<int64_t>(all);
    for (void** made : {&out.stream, &out.copies}) {
        cudaStream_t stream = nullptr;
        if (const int status = told(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)))
            return status;
        *made = stream;
    }
    return KVQ_OK;
}

static int allocate(int64_t bytes, void** memory) {
    return told(cudaMalloc(memory, static_cast<size_t>(bytes)));
}
static void release(void* memory) {
    cudaFree(memory);
}
static int allocate_host(int64_t bytes, void** memory) {
    return told(cudaMallocHost(memory, static_cast<size_t>(bytes)));
}
static void release_host(void* memory) {
    cudaFreeHost(memory);
}
static int copy(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t row_bytes,
                int64_t rows, void* stream) {
    const size_t width = static_cast<size_t>(row_bytes);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (const int status = told(
            rows == 1 ? cudaMemcpyAsync(to, from, width, cudaMemcpyDefault, queue)
                      : cudaMemcpy2DAsync(to, static_cast<size_t>(to_step), from,
                                          static_cast<size_t>(from_step), width,
                                          static_cast<size_t>(rows), cudaMemcpyDefault, queue)))
        return status;
    cudaPointerAttributes source{};
    if (g_reads_pages) cudaPointerGetAttributes(&source, from);
    const bool lingers = g_reads_pages && source.type == cudaMemoryTypeUnregistered;
    return lingers ? told(cudaStreamSynchronize(queue)) : int{KVQ_OK};
}
static int clear(void* at, int64_t bytes, void* stream) {
    return told(
        cudaMemsetAsync(at, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}
static int wait(void* stream) {
    return told(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}
static int after(void* later, void* earlier) {
    cudaEvent_t event = nullptr;
    if (const int status = told(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)))
        return status;
    int status = told(cudaEventRecord(event, static_cast<cudaStream_t>(earlier)));
    if (!status) status = told(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0));
    cudaEventDestroy(event);  // it lives on until it has happened
    return status;
}

#else

constexpr int64_t kEmulatedBytes = int64_t{1} << 30;

// The stream beside the first one does what it is asked as late as it may: once somebody waits for
// it. So whoever does not reads what was there before. Where turns are taken in reverse it does it
// as early as it may: at once. It refuses a copy that does not wait for all kernels launched
// before.
static struct Copies {
    struct Copy {
        char* to;
        const char* from;
        int64_t to_step, from_step, row_bytes, rows;
        void run() const {
            for (int64_t i = 0; i < rows; i++)
                std::memcpy(to + i * to_step, from + i * from_step, static_cast<size_t>(row_bytes));
        }
    };
    std::vector<Copy> queued;
    bool waits_for_all = true;  // that the first stream was asked
    void run() {
        for (const Copy& copy : queued) copy.run();
        queued.clear();
    }
} g_copies;

static int outcome() {
    g_copies.waits_for_all = false;
    return *g_reason ? KVQ_DEVICE_FAILED : KVQ_OK;
}

static int open_device(kvq_cuda_device& out) {
    std::snprintf(out.name, sizeof out.name, "an emulated device");
    out.memory_bytes = out.free_bytes = kEmulatedBytes;
    out.capability = 80, out.units = 2, out.on_host = 1;
    out.copies = &g_copies;
    return KVQ_OK;
}

// Full of what nobody wrote.
static int allocate(int64_t bytes, void** memory) {
    *memory = bytes > kEmulatedBytes ? nullptr : std::malloc(static_cast<size_t>(bytes));
    if (!*memory) return KVQ_NO_MEMORY;
    std::memset(*memory, 0xff, static_cast<size_t>(bytes));
    return KVQ_OK;
}
static void release(void* memory) {
    std::free(memory);
}
static int allocate_host(int64_t bytes, void** memory) {
    return allocate(bytes, memory);
}
static void release_host(void* memory) {
    release(memory);
}
static int copy(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t row_bytes,
                int64_t rows, void* stream) {
    Emulator::now().copies++;
    const Copies::Copy copy{static_cast<char*>(to),
                            static_cast<const char*>(from),
                            to_step,
                            from_step,
                            row_bytes,
                            rows};
    if (stream != &g_copies) {
        copy.run();
        return KVQ_OK;
    }
    if (!g_copies.waits_for_all) {
        std::snprintf(g_reason, sizeof g_reason, "a copy may come before what it must wait for");
        return KVQ_DEVICE_FAILED;
    }
    if (Emulator::now().in_reverse()) copy.run();
    else g_copies.queued.push_back(copy);
    return KVQ_OK;
}
static int clear(void* at, int64_t bytes, void*) {
    Emulator::now().copies++;
    std::memset(at, 0, static_cast<size_t>(bytes));
    return KVQ_OK;
}
static int wait(void* stream) {
    if (stream == &g_copies) g_copies.run();
    return KVQ_OK;
}
static int after(void* later, void* earlier) {
    if (later == &g_copies) g_copies.waits_for_all = true;
    return wait(earlier);
}

#endif

}  // namespace kvq::cuda

extern "C" {

KVQ_EXPORT const char* kvq_cuda_error(void) {
    return kvq::cuda::g_reason;
}
KVQ_EXPORT int kvq_cuda_abi(void) {
    return KVQ_ABI;
}
KVQ_EXPORT int kvq_cuda_open(kvq_cuda_device* device) {
    *device = {};
    std::copy(std::begin(kvq::cuda::kHeadDims), std::end(kvq::cuda::kHeadDims), device->head_dims);
    return kvq::cuda::open_device(*device);
}
KVQ_EXPORT int kvq_cuda_allocate(int64_t bytes, void** memory) {
    *memory = nullptr;
    return kvq::cuda::allocate(bytes, memory);
}
KVQ_EXPORT void kvq_cuda_free(void* memory) {
    kvq::cuda::release(memory);
}
KVQ_EXPORT int kvq_cuda_allocate_host(int64_t bytes, void** memory) {
    *memory = nullptr;
    return kvq::cuda::allocate_host(bytes, memory);
}
KVQ_EXPORT void kvq_cuda_free_host(void* memory) {
    kvq::cuda::release_host(memory);
}
KVQ_EXPORT int kvq_cuda_copy(void* to, int64_t to_step, const void* from, int64_t from_step,
                             int64_t row_bytes, int64_t rows, void* stream) {
    if (!row_bytes || !rows) return KVQ_OK;
    return kvq::cuda::copy(to, to_step, from, from_step, row_bytes, rows, stream);
}
KVQ_EXPORT int kvq_cuda_clear(void* at, int64_t bytes, void* stream) {
    return kvq::cuda::clear(at, bytes, stream);
}
KVQ_EXPORT int kvq_cuda_wait(void* stream) {
    return kvq::cuda::wait(stream);
}
KVQ_EXPORT int kvq_cuda_after(void* later, void* earlier) {
    return kvq::cuda::after(later, earlier);
}
KVQ_EXPORT void kvq_cuda_set_ops(kvq_cuda_add_ops add, void* user) {
    kvq::cuda::g_add_ops = add, kvq::cuda::g_ops_user = user;
}
KVQ_EXPORT void* RegisterCustomOps(void* options, const void* base) {
    return kvq::cuda::g_add_ops ? kvq::cuda::g_add_ops(options, base, kvq::cuda::g_ops_user)
                                : nullptr;
}

}  // extern "C"
