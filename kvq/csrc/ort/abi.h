// The few declarations of ONNX Runtime's C ABI that the custom op needs, written down here because
// no wheel ships the header. The API is an append-only array of function pointers; the indices below
// were exercised on 1.31 (API version 18), and tests/test_onnx_op.py runs every one of them.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;

struct OrtApiBase {
    const void* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};

struct OrtCustomOp {
    uint32_t version;
    void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
    const char* (*GetName)(const OrtCustomOp*);
    const char* (*GetExecutionProviderType)(const OrtCustomOp*);
    int (*GetInputType)(const OrtCustomOp*, size_t);
    size_t (*GetInputTypeCount)(const OrtCustomOp*);
    int (*GetOutputType)(const OrtCustomOp*, size_t);
    size_t (*GetOutputTypeCount)(const OrtCustomOp*);
    void (*KernelCompute)(void*, OrtKernelContext*);
    void (*KernelDestroy)(void*);
    int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
    int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
    int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
    int (*GetVariadicInputMinArity)(const OrtCustomOp*);
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
    int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void**);
    OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
    OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
    int (*GetStartVersion)(const OrtCustomOp*);
    int (*GetEndVersion)(const OrtCustomOp*);
    size_t (*GetMayInplace)(int**, int**);
    void (*ReleaseMayInplace)(int*, int*);
    size_t (*GetAliasMap)(int**, int**);
    void (*ReleaseAliasMap)(int*, int*);
};

}  // extern "C"

namespace kvq::ort {

constexpr uint32_t kApiVersion = 18;
enum ElementType { kFloat = 1, kUint8 = 2, kInt64 = 7 };
enum Characteristic { kRequired = 0, kOptional = 1 };
constexpr int kFail = 1;
constexpr int kHostMemory = -2;  // of an input, whatever its provider's device

// One row per function used: its place in the API and its type.
#define KVQ_ORT_API(X)                                                                          \
    X(CreateStatus, 0, OrtStatus* (*)(int, const char*))                                        \
    X(CreateCustomOpDomain, 26, OrtStatus* (*)(const char*, OrtCustomOpDomain**))               \
    X(CustomOpDomain_Add, 27, OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*))           \
    X(AddCustomOpDomain, 28, OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*))            \
    X(GetTensorMutableData, 51, OrtStatus* (*)(OrtValue*, void**))                              \
    X(GetDimensionsCount, 61, OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*))        \
    X(GetDimensions, 62, OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t))    \
    X(GetTensorTypeAndShape, 65, OrtStatus* (*)(const OrtValue*, OrtTensorTypeAndShapeInfo**))  \
    X(KernelInfoGetAttribute_float, 85, OrtStatus* (*)(const OrtKernelInfo*, const char*, float*)) \
    X(KernelInfoGetAttribute_int64, 86, OrtStatus* (*)(const OrtKernelInfo*, const char*, int64_t*)) \
    X(KernelContext_GetInput, 90, OrtStatus* (*)(const OrtKernelContext*, size_t, const OrtValue**)) \
    X(KernelContext_GetOutput, 91,                                                              \
      OrtStatus* (*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**))            \
    X(ReleaseStatus, 93, void (*)(OrtStatus*))                                                 \
    X(ReleaseTensorTypeAndShapeInfo, 99, void (*)(OrtTensorTypeAndShapeInfo*))                  \
    X(HasSessionConfigEntry, 237,                                                               \
      OrtStatus* (*)(const OrtSessionOptions*, const char*, int*))                              \
    X(GetSessionConfigEntry, 238,                                                               \
      OrtStatus* (*)(const OrtSessionOptions*, const char*, char*, size_t*))                    \
    X(KernelContext_ParallelFor, 274,                                                           \
      OrtStatus* (*)(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*))

template <class T> using Pointer = T;

struct Api {
#define KVQ_ORT_MEMBER(name, index, type) Pointer<type> name;
    KVQ_ORT_API(KVQ_ORT_MEMBER)
#undef KVQ_ORT_MEMBER

    explicit Api(const void* table) {
        void* const* functions = static_cast<void* const*>(const_cast<void*>(table));
#define KVQ_ORT_LOAD(name, index, type) name = reinterpret_cast<Pointer<type>>(functions[index]);
        KVQ_ORT_API(KVQ_ORT_LOAD)
#undef KVQ_ORT_LOAD
    }
};

}  // namespace kvq::ort
