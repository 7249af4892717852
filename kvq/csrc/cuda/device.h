// What a kernel may use: the few names by which one source compiles with nvcc and, for proofs on
// any machine, against an emulated grid of threads. No kernel names anything of CUDA itself.
#pragma once
#include <cstdint>

#ifndef __CUDACC__
#include "cuda_emulator.h"  // of tests/support: these names and those of memory.h
#else
#include <cuda_fp16.h>

#define KVQ_KERNEL static __global__ void
#define KVQ_DEVICE static __device__ __forceinline__
#define KVQ_DEVICE_MEMBER __device__ __forceinline__
#define KVQ_SHARED __shared__
#define KVQ_DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8_t name[]
#define KVQ_UNROLL _Pragma("unroll")

namespace kvq::cuda {

struct Dim3 {
    int x = 1, y = 1, z = 1;
};

constexpr int kWarp = 32;

// What one thread reads or writes at once.
struct alignas(16) Quad {
    uint32_t words[4];
};
constexpr unsigned kAllLanes = 0xffffffffu;

KVQ_DEVICE int thread_index() {
    return static_cast<int>(threadIdx.x);
}
KVQ_DEVICE int thread_count() {
    return static_cast<int>(blockDim.x);
}
KVQ_DEVICE int3 block_index() {
    return make_int3(int(blockIdx.x), int(blockIdx.y), int(blockIdx.z));
}
KVQ_DEVICE void sync_block() {
    __syncthreads();
}
KVQ_DEVICE void sync_warp() {
    __syncwarp();
}
KVQ_DEVICE float shuffle_from(float x, int lane) {
    return __shfl_sync(kAllLanes, x, lane);
}
KVQ_DEVICE float shuffle_xor(float x, int mask) {
    return __shfl_xor_sync(kAllLanes, x, mask);
}
KVQ_DEVICE bool any_lane(bool x) {
    return __any_sync(kAllLanes, x);
}

KVQ_DEVICE int atomic_add(int* at, int x) {
    return atomicAdd(at, x);
}
KVQ_DEVICE void atomic_add(int64_t* at, int64_t x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(x));
}
// Of numbers that are not negative, whose bits rise with them.
KVQ_DEVICE void atomic_max(float* at, float x) {
    atomicMax(reinterpret_cast<int*>(at), __float_as_int(x));
}

// 8 or 16 bytes on their way to shared memory. They are there for the thread that asked once no
// more than so many of its groups of copies are awaited.
template <int Bytes>
KVQ_DEVICE void copy_ahead(void* shared, const void* global) {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
}
KVQ_DEVICE void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Awaited>
KVQ_DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Awaited) : "memory");
}
KVQ_DEVICE float half_value(uint16_t h) {
    return __half2float(__ushort_as_half(h));
}
KVQ_DEVICE uint16_t half_bits(float x) {
    return __half_as_ushort(__float2half_rn(x));
}
KVQ_DEVICE uint32_t word_of(__half2 x) {
    return *reinterpret_cast<uint32_t*>(&x);
}
KVQ_DEVICE __half2 pair_of(uint32_t x) {
    return *reinterpret_cast<__half2*>(&x);
}
KVQ_DEVICE uint32_t halves(float low, float high) {
    return word_of(__floats2half2_rn(low, high));
}
KVQ_DEVICE uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    return word_of(__hfma2(pair_of(a), pair_of(b), pair_of(c)));
}
KVQ_DEVICE float exp2_fast(float x) {
    return exp2f(x);
}
KVQ_DEVICE float add(float a, float b) {
    return __fadd_rn(a, b);
}
KVQ_DEVICE float sub(float a, float b) {
    return __fsub_rn(a, b);
}
KVQ_DEVICE float mul(float a, float b) {
    return __fmul_rn(a, b);
}
KVQ_DEVICE float divide(float a, float b) {
    return __fdiv_rn(a, b);
}
KVQ_DEVICE float fma_once(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
KVQ_DEVICE int32_t bits_of(float x) {
    return __float_as_int(x);
}
KVQ_DEVICE float float_of(int32_t x) {
    return __int_as_float(x);
}
KVQ_DEVICE float root(float x) {
    return __fsqrt_rn(x);
}

// C [16, 8] += A [16, 16] B [16, 8]; cuda_emulator.h says which lane holds what.
KVQ_DEVICE void mma(float* c, const uint32_t* a, const uint32_t* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Likewise C [16, 8] += A [16, 32] B [32, 8] of signed bytes.
KVQ_DEVICE void mma(int32_t* c, const uint32_t* a, const uint32_t* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// What a block may have beyond 48 KB it must ask for.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Dim3 grid, int threads, size_t shared_bytes,
            void* stream, const Arguments&... arguments) {
    if (shared_bytes > size_t{48} << 10)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z));
    how.blockDim = dim3(unsigned(threads));
    how.dynamicSmemBytes = shared_bytes;
    how.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchKernelEx(&how, kernel, arguments...);  // what it returns, cudaGetLastError tells
}

}  // namespace kvq::cuda
#endif
