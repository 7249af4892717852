// The library as ONNX Runtime sees it: RegisterCustomOps adds domain "kvq" with the ops
// Attention and SharedAttention, those of short_conv_op.cpp and delta_net_op.cpp and those of
// linear_ops.cpp. Attention's inputs: qkv float [T, (heads + 2 kv_heads) * head_dim], positions
// int64 [T], cache int64 [S] and sequence_rows int64 [S], the caches of S sequences by handle and
// how many of the T rows each has, one sequence after the other, inv_freq float [pairs], and
// optionally q_norm and k_norm, float [head_dim], and sink_logits, float [heads]. Output: float [T,
// heads * head_dim]. Lengths and tables stay behind kvq.h. SharedAttention is of a layer that reads
// what layer `layer` has stored of the pass. Inputs: q float [R, heads * head_dim], rows int64 [R]
// of the T they are of, sequence by sequence, cache, sequence_rows, inv_freq and optionally q_norm.
// Output: float [R, heads * head_dim].
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache_ops.h"

namespace kvq::ort {
namespace {

constexpr char kName[] = "Attention";
constexpr int kMostHeads = 1 << 12;

OrtStatus* failed(const std::string& reason) {
    return ort::failed(kName, reason);
}

struct AttentionKernel {
    kvq_attention attributes{};
    Device* device;
};

OrtStatus* create(const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<AttentionKernel>();
    made->device = device_of(op);
    kvq_attention& a = made->attributes;
    if (OrtStatus* status = integers("Attention", info,
                                     {{"layer", &a.layer},
                                      {"num_heads", &a.heads},
                                      {"num_kv_heads", &a.kv_heads},
                                      {"head_dim", &a.head_dim},
                                      {"window_tokens", &a.window_tokens}}))
        return status;
    if (OrtStatus* status = floats(info, {{"scale", &a.scale},
                                          {"softcap", &a.softcap},
                                          {"rope_factor", &a.rope_factor},
                                          {"norm_eps", &a.norm_eps}}))
        return status;
    if (a.heads < 1 || a.kv_heads < 1 || a.head_dim < 1 || a.heads > kMostHeads ||
        a.kv_heads > kMostHeads || a.head_dim > kMaxHeadDim || a.heads % a.kv_heads)
        return failed("heads and head_dim are none of a cache's");
    *kernel = made.release();
    return nullptr;
}

enum InputIndex {
    kQkv,
    kPositions,
    kCache,
    kSequenceRows,
    kInvFreq,
    kQNorm,
    kKNorm,
    kSinkLogits,
    kInputs
};
constexpr ElementType kTypes[kInputs] = {kFloat, kInt64, kInt64, kInt64,
                                         kFloat, kFloat, kFloat, kFloat};

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
    kvq_attention a = static_cast<AttentionKernel*>(kernel)->attributes;
    Input given[kInputs];
    for (size_t i = 0; i < kInputs; i++)
        if (OrtStatus* status = read(context, i, given[i])) return status;
    const int64_t tokens = given[kPositions].count, sequences = given[kCache].count,
                  dim = a.head_dim;
    const int64_t width = (a.heads + 2 * a.kv_heads) * dim;
    if (given[kQkv].count != tokens * width || sequences < 1 ||
        given[kSequenceRows].count != sequences || 2 * given[kInvFreq].count > dim ||
        (given[kQNorm].data && given[kQNorm].count != dim) ||
        (given[kKNorm].data && given[kKNorm].count != dim) ||
        (given[kSinkLogits].data && given[kSinkLogits].count != a.heads))
        return failed("input shapes do not match the attributes");
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, a.heads * dim, &out)) return status;
    a.rotary_pairs = static_cast<int32_t>(given[kInvFreq].count);

    const int64_t* rows = given[kSequenceRows].as<int64_t>();
    if (OrtStatus* status = sum_to(kName, rows, sequences, tokens)) return status;
    std::vector<Inputs> inputs;
    int64_t first = 0;
    for (int64_t s = 0; s < sequences; first += rows[s++])
        inputs.push_back({static_cast<int>(rows[s]), given[kQkv].as<float>() + first * width,
                          given[kPositions].as<int64_t>() + first, given[kInvFreq].as<float>(),
                          given[kQNorm].as<float>(), given[kKNorm].as<float>(),
                          given[kSinkLogits].as<float>(), out + first * a.heads * dim});
    LockedCaches locked;
    if (OrtStatus* status = locked.lock(kName, given[kCache].as<int64_t>(), inputs.size()))
        return status;
    for (const Cache* cache : locked.caches)
        if (cache->device() != static_cast<AttentionKernel*>(kernel)->device)
            return failed("a cache lies on another device than the model");
    const int status = attend_together(a, locked.caches.data(), inputs.data(), inputs.size(),
                                       {run_units, context});
    return status ? failed(kvq_status_text(status)) : nullptr;
}

enum SharedInput { kQ, kRows, kShared, kSharedRows, kSharedFreq, kSharedNorm, kSharedInputs };
constexpr ElementType kSharedTypes[kSharedInputs] = {kFloat, kInt64, kInt64,
                                                     kInt64, kFloat, kFloat};

OrtStatus* compute_shared(void* kernel, OrtKernelContext* context) {
    kvq_attention a = static_cast<AttentionKernel*>(kernel)->attributes;
    Input given[kSharedInputs];
    for (size_t i = 0; i < kSharedInputs; i++)
        if (OrtStatus* status = read(context, i, given[i])) return status;
    const int64_t queries = given[kRows].count, sequences = given[kShared].count,
                  width = int64_t{a.heads} * a.head_dim;
    if (given[kQ].count != queries * width || sequences < 1 ||
        given[kSharedRows].count != sequences || 2 * given[kSharedFreq].count > a.head_dim ||
        (given[kSharedNorm].data && given[kSharedNorm].count != a.head_dim))
        return failed("input shapes do not match the attributes");
    float* out = nullptr;
    if (OrtStatus* status = output(context, queries, width, &out)) return status;
    a.rotary_pairs = static_cast<int32_t>(given[kSharedFreq].count);

    // Rows are numbered through all sequences; a cache numbers its own.
    std::vector<int64_t> rows(given[kRows].as<int64_t>(), given[kRows].as<int64_t>() + queries);
    std::vector<Inputs> inputs;
    int64_t first = 0, asked = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t begin = asked, end = first + given[kSharedRows].as<int64_t>()[s];
        for (; asked < queries && rows[asked] >= first && rows[asked] < end; asked++)
            rows[asked] -= first;
        inputs.push_back({static_cast<int>(asked - begin), given[kQ].as<float>() + begin * width,
                          nullptr, given[kSharedFreq].as<float>(), given[kSharedNorm].as<float>(),
                          nullptr, nullptr, out + begin * width, rows.data() + begin});
        first = end;
    }
    if (asked != queries) return failed("rows do not follow the sequences");
    LockedCaches locked;
    if (OrtStatus* status = locked.lock(kName, given[kShared].as<int64_t>(), inputs.size()))
        return status;
    const int status =
        read_together(a, locked.caches.data(), inputs.data(), inputs.size(), {run_units, context});
    return status ? failed(kvq_status_text(status)) : nullptr;
}

// The handle of what bounds the memory of experts, where the options name one.
OrtStatus* residency_of(const OrtSessionOptions* options, int64_t& handle) {
    constexpr char kEntry[] = "kvq.residency";
    int there = 0;
    if (OrtStatus* status = g_api->HasSessionConfigEntry(options, kEntry, &there)) return status;
    char text[32] = {};
    size_t size = sizeof text;
    if (there)
        if (OrtStatus* status = g_api->GetSessionConfigEntry(options, kEntry, text, &size))
            return status;
    handle = std::strtoll(text, nullptr, 10);
    return nullptr;
}

// Adds the device's domain, which is made once and lives as long as the process, like the library;
// one more for each residency.
OrtStatus* add_domain(OrtSessionOptions* options, Device* device) {
    int64_t residency = 0;
    if (OrtStatus* status = residency_of(options, residency)) return status;
    struct Domain {
        std::vector<Op> ops;
        OrtCustomOpDomain* domain = nullptr;
    };
    static std::mutex mutex;
    static auto* domains = new std::map<std::pair<Device*, int64_t>, Domain>;
    std::lock_guard<std::mutex> lock(mutex);
    Domain& made = (*domains)[{device, residency}];
    if (!made.domain) {
        OrtCustomOpDomain* domain = nullptr;
        if (OrtStatus* status = g_api->CreateCustomOpDomain("kvq", &domain)) return status;
        made.ops = linear_ops(device);
        made.ops.push_back(
            op_of<AttentionKernel, kQNorm>(kName, kTypes, device, create, compute));
        made.ops.push_back(op_of<AttentionKernel, kSharedNorm>("SharedAttention", kSharedTypes,
                                                               device, create, compute_shared));
        if (!device) made.ops.insert(made.ops.end(), {short_conv_op(), delta_net_op()});
        for (Op& op : made.ops) op.residency = residency;
        for (const Op& op : made.ops)
            if (OrtStatus* status = g_api->CustomOpDomain_Add(domain, &op)) return status;
        made.domain = domain;
    }
    return g_api->AddCustomOpDomain(options, made.domain);
}

}  // namespace

void* register_ops(void* options, const void* base, void* device) {
    const void* table = static_cast<const OrtApiBase*>(base)->GetApi(kApiVersion);
    if (!table) return nullptr;  // ONNX Runtime reports the op as unknown, with its own version
    static const Api api(table);
    g_api = &api;
    return add_domain(static_cast<OrtSessionOptions*>(options), static_cast<Device*>(device));
}

}  // namespace kvq::ort

extern "C" KVQ_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                   const OrtApiBase* base) {
    return static_cast<OrtStatus*>(kvq::ort::register_ops(options, base, nullptr));
}
