// The library as ONNX Runtime sees it: RegisterCustomOps adds domain "kvq" with the op Attention and
// those of linear_ops.cpp.
// Inputs: qkv float [T, (heads + 2 kv_heads) * head_dim], positions int64 [T], cache int64 [1],
// inv_freq float [pairs], and optionally q_norm and k_norm, float [head_dim]. Output: float
// [T, heads * head_dim]. The cache is named by a handle; lengths and tables stay behind kvq.h.
#include <memory>
#include <string>

#include "../cache.h"
#include "abi.h"
#include "linear_ops.h"

namespace kvq::ort {
namespace {

std::unique_ptr<Api> g_api;  // set once, when ONNX Runtime loads the library

const char* describe(int status) {
    switch (status) {
        case KVQ_SHORT: return "the budget has no room for these tokens";
        case KVQ_BAD_ARGUMENT: return "shape, layer or positions do not fit the cache";
        case KVQ_NOT_FINITE: return "a key or value is not finite in float16";
        case KVQ_BAD_STATE: return "begin() was not called for this many tokens";
        default: return "the cache refused";
    }
}

OrtStatus* failed(const std::string& reason) {
    return g_api->CreateStatus(kFail, ("kvq::Attention: " + reason).c_str());
}

struct AttentionKernel {
    kvq_attention attributes{};
};

OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<AttentionKernel>();
    kvq_attention& a = made->attributes;
    const struct { const char* name; int32_t* value; } integers[] = {
        {"layer", &a.layer}, {"num_heads", &a.heads}, {"num_kv_heads", &a.kv_heads},
        {"head_dim", &a.head_dim}, {"window_tokens", &a.window_tokens}};
    for (const auto& attribute : integers) {
        int64_t value = 0;
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_int64(info, attribute.name, &value))
            return status;
        *attribute.value = static_cast<int32_t>(value);
    }
    const struct { const char* name; float* value; } floats[] = {
        {"scale", &a.scale}, {"softcap", &a.softcap}, {"rope_factor", &a.rope_factor},
        {"norm_eps", &a.norm_eps}};
    for (const auto& attribute : floats) {
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_float(info, attribute.name, attribute.value))
            return status;
    }
    *kernel = made.release();
    return nullptr;
}

// Data and element count of input `index`; null data where an optional input is absent.
OrtStatus* input(const OrtKernelContext* context, size_t index, const void** data, int64_t* count) {
    const OrtValue* value = nullptr;
    *data = nullptr;
    *count = 0;
    if (OrtStatus* status = g_api->KernelContext_GetInput(context, index, &value)) return status;
    if (!value) return nullptr;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    if (OrtStatus* status = g_api->GetTensorTypeAndShape(value, &info)) return status;
    size_t rank = 0;
    int64_t dims[8] = {};
    OrtStatus* status = g_api->GetDimensionsCount(info, &rank);
    if (!status && rank <= 8) status = g_api->GetDimensions(info, dims, rank);
    g_api->ReleaseTensorTypeAndShapeInfo(info);
    if (status) return status;
    *count = rank <= 8 ? 1 : 0;
    for (size_t i = 0; i < rank && i < 8; i++) *count *= dims[i];
    void* pointer = nullptr;
    status = g_api->GetTensorMutableData(const_cast<OrtValue*>(value), &pointer);
    *data = pointer;
    return status;
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
    kvq_attention a = static_cast<AttentionKernel*>(kernel)->attributes;
    const void* data[6];
    int64_t count[6];
    for (size_t i = 0; i < 6; i++)
        if (OrtStatus* status = input(context, i, &data[i], &count[i])) return status;
    const int64_t tokens = count[1];
    const int64_t dim = a.head_dim;
    if (count[0] != tokens * (a.heads + 2 * a.kv_heads) * dim || count[2] != 1 ||
        (data[4] && count[4] != dim) || (data[5] && count[5] != dim))
        return failed("input shapes do not match the attributes");
    const int64_t out_dims[2] = {tokens, a.heads * dim};
    OrtValue* output = nullptr;
    if (OrtStatus* status = g_api->KernelContext_GetOutput(context, 0, out_dims, 2, &output))
        return status;
    void* out = nullptr;
    if (OrtStatus* status = g_api->GetTensorMutableData(output, &out)) return status;
    const int64_t handle = *static_cast<const int64_t*>(data[2]);
    Cache* cache = find_cache(handle);
    if (!cache) return failed("no open cache has handle " + std::to_string(handle));
    a.rotary_pairs = static_cast<int32_t>(count[3]);
    const Parallel parallel{
        [](void* ort_context, void (*work)(void*, size_t), size_t units, void* user) {
            if (units == 1) return work(user, 0);
            // A failed dispatch has run nothing; the serial loop gives the same result.
            OrtStatus* status = g_api->KernelContext_ParallelFor(
                static_cast<OrtKernelContext*>(ort_context), work, units, 0, user);
            if (status) {
                g_api->ReleaseStatus(status);
                kSerial.run(nullptr, work, units, user);
            }
        },
        context};
    const int status = cache->attend(
        a, static_cast<int>(tokens), static_cast<const float*>(data[0]),
        static_cast<const int64_t*>(data[1]), static_cast<const float*>(data[3]),
        static_cast<const float*>(data[4]), static_cast<const float*>(data[5]),
        static_cast<float*>(out), parallel);
    return status ? failed(describe(status)) : nullptr;
}

const OrtCustomOp* attention_op() {
    static const OrtCustomOp op = [] {
        OrtCustomOp o{};
        o.version = kApiVersion;
        o.GetName = [](const OrtCustomOp*) { return "Attention"; };
        o.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
        o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{6}; };
        o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
            return i == 1 || i == 2 ? kInt64 : kFloat;
        };
        o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
            return i >= 4 ? kOptional : kRequired;
        };
        o.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
        o.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
        o.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
        o.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
        o.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
        o.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
        o.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
        o.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
        o.KernelDestroy = [](void* kernel) { delete static_cast<AttentionKernel*>(kernel); };
        o.CreateKernelV2 = create;
        o.KernelComputeV2 = compute;
        o.GetStartVersion = [](const OrtCustomOp*) { return 1; };
        o.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
        return o;
    }();
    return &op;
}

}  // namespace
}  // namespace kvq::ort

extern "C" KVQ_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                   const OrtApiBase* base) {
    using namespace kvq::ort;
    const void* table = base->GetApi(kApiVersion);
    if (!table) return nullptr;  // ONNX Runtime reports the op as unknown, with its own version
    g_api = std::make_unique<Api>(table);
    OrtCustomOpDomain* domain = nullptr;  // lives as long as the process, like the library
    if (OrtStatus* status = g_api->CreateCustomOpDomain("kvq", &domain)) return status;
    if (OrtStatus* status = g_api->CustomOpDomain_Add(domain, attention_op())) return status;
    if (OrtStatus* status = add_linear_ops(*g_api, domain)) return status;
    return g_api->AddCustomOpDomain(options, domain);
}
