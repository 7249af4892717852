// The device's memory and its errors.
#pragma once
#include <cstdio>

#include "../kvq.h"
#include "device.h"
#include "kvq_cuda.h"

namespace kvq::cuda {

static thread_local char g_reason[256] = "";

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

}  // namespace kvq::cuda

extern "C" {

KVQ_EXPORT int kvq_cuda_allocate(int64_t bytes, void** memory) {
    *memory = nullptr;
    return kvq::cuda::told(cudaMalloc(memory, static_cast<size_t>(bytes)));
}
KVQ_EXPORT void kvq_cuda_free(void* memory) {
    cudaFree(memory);
}
KVQ_EXPORT int kvq_cuda_allocate_host(int64_t bytes, void** memory) {
    *memory = nullptr;
    return kvq::cuda::told(cudaMallocHost(memory, static_cast<size_t>(bytes)));
}
KVQ_EXPORT void kvq_cuda_free_host(void* memory) {
    cudaFreeHost(memory);
}
KVQ_EXPORT int kvq_cuda_copy(void* to, int64_t to_step, const void* from, int64_t from_step,
                             int64_t row_bytes, int64_t rows, void* stream) {
    if (!row_bytes || !rows) return KVQ_OK;
    const size_t width = static_cast<size_t>(row_bytes);
    const auto queue = static_cast<cudaStream_t>(stream);
    const cudaError_t error =
        rows == 1 ? cudaMemcpyAsync(to, from, width, cudaMemcpyDefault, queue)
                  : cudaMemcpy2DAsync(to, static_cast<size_t>(to_step), from,
                                      static_cast<size_t>(from_step), width,
                                      static_cast<size_t>(rows), cudaMemcpyDefault, queue);
    if (const int status = kvq::cuda::told(error)) return status;
    if (!kvq::cuda::g_reads_pages) return KVQ_OK;
    cudaPointerAttributes source{};
    cudaPointerGetAttributes(&source, from);
    return source.type == cudaMemoryTypeUnregistered ? kvq_cuda_wait(stream) : int{KVQ_OK};
}
KVQ_EXPORT int kvq_cuda_clear(void* at, int64_t bytes, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    return kvq::cuda::told(cudaMemsetAsync(at, 0, static_cast<size_t>(bytes), queue));
}
KVQ_EXPORT int kvq_cuda_wait(void* stream) {
    return kvq::cuda::told(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}
KVQ_EXPORT int kvq_cuda_after(void* later, void* earlier) {
    using kvq::cuda::told;
    cudaEvent_t event = nullptr;
    if (const int status = told(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)))
        return status;
    int status = told(cudaEventRecord(event, static_cast<cudaStream_t>(earlier)));
    if (!status) status = told(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0));
    cudaEventDestroy(event);  // it lives on until it has happened
    return status;
}

}  // extern "C"
