// The library as ONNX Runtime sees it: RegisterCustomOps adds domain "kvq" with the op
// Attention and those of linear_ops.cpp.
// Inputs: qkv float [T, (heads + 2 kv_heads) * head_dim], positions int64 [T], cache int64 [S] and
// sequence_rows int64 [S], the caches of S sequences by handle and how many of the T rows each has,
// one sequence after the other, inv_freq float [pairs], and optionally q_norm and k_norm, float
// [head_dim]. Output: float [T, heads * head_dim]. Lengths and tables stay behind kvq.h.
#include <algorithm>
#include <climits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "../cache.h"
#include "abi.h"
#include "linear_ops.h"

namespace kvq::ort {
namespace {

constexpr int kMostHeads = 1 << 12;

std::unique_ptr<Api> g_api;  // set once, when ONNX Runtime loads the library

OrtStatus* failed(const std::string& reason) {
    return g_api->CreateStatus(kFail, ("kvq::Attention: " + reason).c_str());
}

struct AttentionKernel {
    kvq_attention attributes{};
};

OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<AttentionKernel>();
    kvq_attention& a = made->attributes;
    const struct {
        const char* name;
        int32_t* value;
    } integers[] = {{"layer", &a.layer},
                    {"num_heads", &a.heads},
                    {"num_kv_heads", &a.kv_heads},
                    {"head_dim", &a.head_dim},
                    {"window_tokens", &a.window_tokens}};
    for (const auto& attribute : integers) {
        int64_t value = 0;
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_int64(info, attribute.name, &value))
            return status;
        if (value < 0 || value > INT32_MAX)
            return failed(std::string(attribute.name) + " " + std::to_string(value) +
                          " is out of range");
        *attribute.value = static_cast<int32_t>(value);
    }
    const struct {
        const char* name;
        float* value;
    } floats[] = {{"scale", &a.scale},
                  {"softcap", &a.softcap},
                  {"rope_factor", &a.rope_factor},
                  {"norm_eps", &a.norm_eps}};
    for (const auto& attribute : floats) {
        if (OrtStatus* status =
                g_api->KernelInfoGetAttribute_float(info, attribute.name, attribute.value))
            return status;
    }
    if (a.heads < 1 || a.kv_heads < 1 || a.head_dim < 1 || a.heads > kMostHeads ||
        a.kv_heads > kMostHeads || a.head_dim > kMaxHeadDim || a.heads % a.kv_heads)
        return failed("heads and head_dim are none of a cache's");
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

// The caches of a pass, held until it ends.
struct Held {
    std::vector<std::shared_ptr<Cache>> caches;
    std::vector<std::unique_lock<std::mutex>> turns;

    // Turns are taken in the order of the handles, so that two passes never wait for each other.
    OrtStatus* hold(const int64_t* handles, size_t count) {
        std::vector<size_t> order(count);
        std::iota(order.begin(), order.end(), size_t{0});
        std::sort(order.begin(), order.end(),
                  [&](size_t a, size_t b) { return handles[a] < handles[b]; });
        caches.resize(count);
        for (size_t i = 0; i < count; i++) {
            const size_t s = order[i];
            if (i > 0 && handles[order[i - 1]] == handles[s])
                return failed("cache " + std::to_string(handles[s]) + " is given twice");
            caches[s] = find_cache(handles[s]);
            if (!caches[s]) return failed("no open cache has handle " + std::to_string(handles[s]));
        }
        for (size_t s : order) turns.emplace_back(caches[s]->turn);
        return nullptr;
    }
};

// Work units go to ONNX Runtime's own threads.
Parallel threads_of(OrtKernelContext* context) {
    return {[](void* ort_context, void (*work)(void*, size_t), size_t units, void* user) {
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
}

enum Input { kQkv, kPositions, kCache, kSequenceRows, kInvFreq, kQNorm, kKNorm, kInputs };

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
    kvq_attention a = static_cast<AttentionKernel*>(kernel)->attributes;
    const void* data[kInputs];
    int64_t count[kInputs];
    for (size_t i = 0; i < kInputs; i++)
        if (OrtStatus* status = input(context, i, &data[i], &count[i])) return status;
    const int64_t tokens = count[kPositions], sequences = count[kCache], dim = a.head_dim;
    const int64_t width = (a.heads + 2 * a.kv_heads) * dim;
    if (count[kQkv] != tokens * width || sequences < 1 || count[kSequenceRows] != sequences ||
        2 * count[kInvFreq] > dim || (data[kQNorm] && count[kQNorm] != dim) ||
        (data[kKNorm] && count[kKNorm] != dim))
        return failed("input shapes do not match the attributes");
    const int64_t out_dims[2] = {tokens, a.heads * dim};
    OrtValue* output = nullptr;
    if (OrtStatus* status = g_api->KernelContext_GetOutput(context, 0, out_dims, 2, &output))
        return status;
    void* out = nullptr;
    if (OrtStatus* status = g_api->GetTensorMutableData(output, &out)) return status;
    a.rotary_pairs = static_cast<int32_t>(count[kInvFreq]);

    const int64_t* rows = static_cast<const int64_t*>(data[kSequenceRows]);
    std::vector<Inputs> inputs;
    int64_t first = 0;
    for (int64_t s = 0; s < sequences; first += rows[s++]) {
        if (rows[s] < 1 || rows[s] > tokens - first) break;
        inputs.push_back(
            {static_cast<int>(rows[s]), static_cast<const float*>(data[kQkv]) + first * width,
             static_cast<const int64_t*>(data[kPositions]) + first,
             static_cast<const float*>(data[kInvFreq]), static_cast<const float*>(data[kQNorm]),
             static_cast<const float*>(data[kKNorm]),
             static_cast<float*>(out) + first * a.heads * dim});
    }
    if (inputs.size() != static_cast<size_t>(sequences) || first != tokens)
        return failed("sequence_rows do not add up to the rows given, one or more each");
    Held held;
    if (OrtStatus* status = held.hold(static_cast<const int64_t*>(data[kCache]), inputs.size()))
        return status;
    std::vector<Cache*> caches;
    for (const auto& cache : held.caches) caches.push_back(cache.get());
    const int status =
        attend_together(a, caches.data(), inputs.data(), inputs.size(), threads_of(context));
    return status ? failed(kvq_status_text(status)) : nullptr;
}

const OrtCustomOp* attention_op() {
    static const OrtCustomOp op = [] {
        OrtCustomOp o{};
        o.version = kApiVersion;
        o.GetName = [](const OrtCustomOp*) { return "Attention"; };
        o.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
        o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{kInputs}; };
        o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
            return i >= kPositions && i <= kSequenceRows ? kInt64 : kFloat;
        };
        o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
            return i >= kQNorm ? kOptional : kRequired;
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
