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
    if (OrtStatus* status = floats(info, {{"norm_eps", &made->norm_eps}})) return status;
    *kernel = made.release();
    return nullptr;
}

enum InputIndex {
    kRows, kGates, kConv, kDecay, kDtBias, kScale, kCache, kSequenceRows, kInputs
};
constexpr ElementType kTypes[kInputs] = {kFloat, kFloat, kFloat, kFloat,
                                         kFloat, kFloat, kInt64, kInt64};

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
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, heads * dim, &out)) return status;
    const auto run = [&](Cache& cache, int64_t first, int count) {
        if (!cache.recurs(width, 2 * heads, given[kConv].count, dim, kernel.key_heads))
            return failed(kName, "a cache is not of this model");
        const DeltaInputs in{kernel.layer,
                             count,
                             given[kRows].as<float>() + first * width,
                             given[kGates].as<float>() + first * 2 * heads,
                             given[kConv].as<float>(),
                             given[kDecay].as<float>(),
                             given[kDtBias].as<float>(),
                             given[kScale].as<float>(),
                             kernel.norm_eps,
                             out + first * heads * dim};
        const int status = cache.recur(in, {run_units, context});
        return status ? failed(kName, kvq_status_text(status)) : nullptr;
    };
    return each_sequence(kName, given[kCache], given[kSequenceRows], tokens, run);
}

}  // namespace

Op delta_net_op() {
    return op_of<Kernel>(kName, kTypes, nullptr, create, compute);
}

}  // namespace kvq::ort
