// kvq::DeltaNet in ONNX Runtime: one gated delta net of a pass, of what its sequences' caches
// remember.
//
// Inputs: rows float [T, convolved + value channels], gates float [T, 2 value heads], conv float
// [convolved channels, 1, taps], decay and dt_bias float [value heads], scale float [channels of a
// value head], cache int64 [S] and sequence_rows int64 [S], as of Attention. Attributes: layer,
// counted among delta nets, key_heads and norm_eps. Output: float [T, value channels].
#include "cache_ops.h"

namespace kvq::ort {
namespace {

constexpr char kName[] = "DeltaNet";

struct Kernel {
    int32_t layer = 0, key_heads = 0;
    float norm_eps = 0;
};

OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<Kernel>();
    if (OrtStatus* status =
            integers(kName, info, {{"layer", &made->layer}, {"key_heads", &made->key_heads}}))
        return status;
    if (OrtStatus* status =
            g_api->KernelInfoGetAttribute_float(info, "norm_eps", &made->norm_eps))
        return status;
    *kernel = made.release();
    return nullptr;
}

enum InputIndex {
    kRows, kGates, kConv, kDecay, kDtBias, kScale, kCache, kSequenceRows, kInputs
};

OrtStatus* compute(void* state, OrtKernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Input given[kInputs];
    for (size_t i = 0; i < kInputs; i++)
        if (OrtStatus* status = read(context, i, given[i])) return status;
    const int64_t width = given[kRows].last, heads = given[kDecay].count,
                  dim = given[kScale].count, sequences = given[kCache].count;
    const int64_t tokens = width ? given[kRows].count / width : 0;
    if (tokens < 1 || heads < 1 || given[kDtBias].count != heads || given[kGates].last != 2 * heads ||
        given[kGates].count != tokens * 2 * heads || sequences < 1 ||
        given[kSequenceRows].count != sequences)
        return failed(kName, "input shapes do not belong together");
    const int64_t* rows = given[kSequenceRows].as<int64_t>();
    if (OrtStatus* status = sum_to(kName, rows, sequences, tokens)) return status;
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, heads * dim, &out)) return status;
    Held held;
    if (OrtStatus* status = held.hold(kName, given[kCache].as<int64_t>(), size_t(sequences)))
        return status;
    DeltaInputs in{kernel.layer,
                   0,
                   given[kRows].as<float>(),
                   given[kGates].as<float>(),
                   given[kConv].as<float>(),
                   given[kDecay].as<float>(),
                   given[kDtBias].as<float>(),
                   given[kScale].as<float>(),
                   kernel.norm_eps,
                   out};
    for (size_t s = 0; s < held.caches.size(); s++) {
        Cache& cache = *held.caches[s];
        if (!cache.recurs(width, 2 * heads, given[kConv].count, dim, kernel.key_heads))
            return failed(kName, "a cache is not of this model");
        in.tokens = static_cast<int>(rows[s]);
        if (const int status = cache.recur(in, {run_units, context}))
            return failed(kName, kvq_status_text(status));
        in.rows += rows[s] * width, in.gates += rows[s] * 2 * heads, in.out += rows[s] * heads * dim;
    }
    return nullptr;
}

}  // namespace

Op delta_net_op() {
    return mixer_op<Kernel, kName, kInputs>(create, compute);
}

}  // namespace kvq::ort
