// The device's memory and its errors; for the emulator, the host's.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

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
    cudaStream_t stream = nullptr;
    if (const int status = told(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)))
        return status;
    out.stream = stream;
    return KVQ_OK;
}

static int allocate(int64_t bytes, void** memory) {
    return told(cudaMalloc(memory, static_cast<size_t>(bytes)));
}
static void release(void* memory) {
    cudaFree(memory);
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

#else

constexpr int64_t kEmulatedBytes = int64_t{1} << 30;

static int outcome() {
    return *g_reason ? KVQ_DEVICE_FAILED : KVQ_OK;
}

static int open_device(kvq_cuda_device& out) {
    std::snprintf(out.name, sizeof out.name, "an emulated device");
    out.memory_bytes = out.free_bytes = kEmulatedBytes;
    out.capability = 80, out.units = 2, out.on_host = 1;
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
static int copy(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t row_bytes,
                int64_t rows, void*) {
    Emulator::now().copies++;
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(static_cast<char*>(to) + i * to_step,
                    static_cast<const char*>(from) + i * from_step, static_cast<size_t>(row_bytes));
    return KVQ_OK;
}
static int clear(void* at, int64_t bytes, void*) {
    Emulator::now().copies++;
    std::memset(at, 0, static_cast<size_t>(bytes));
    return KVQ_OK;
}
static int wait(void*) {
    return KVQ_OK;
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
KVQ_EXPORT void kvq_cuda_set_ops(kvq_cuda_add_ops add, void* user) {
    kvq::cuda::g_add_ops = add, kvq::cuda::g_ops_user = user;
}
KVQ_EXPORT void* RegisterCustomOps(void* options, const void* base) {
    return kvq::cuda::g_add_ops ? kvq::cuda::g_add_ops(options, base, kvq::cuda::g_ops_user)
                                : nullptr;
}

}  // extern "C"
