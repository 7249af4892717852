// kvq::ShortConv in ONNX Runtime: one convolution of a pass, of what its sequences' caches
// remember.
//
// Inputs: bcx float [T, 3 width], weight float [width, taps], cache int64 [S] and sequence_rows
// int64 [S], as of Attention. Attribute: layer, counted among convolutions. Output: float [T,
// width].
#include "cache_ops.h"

namespace kvq::ort {
namespace {

constexpr char kName[] = "ShortConv";

struct Kernel {
    int32_t layer = 0;
};

OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<Kernel>();
    if (OrtStatus* status = integers(kName, info, {{"layer", &made->layer}})) return status;
    *kernel = made.release();
    return nullptr;
}

enum InputIndex { kBcx, kWeight, kCache, kSequenceRows, kInputs };
constexpr ElementType kTypes[kInputs] = {kFloat, kFloat, kInt64, kInt64};

OrtStatus* compute(void* state, OrtKernelContext* context) {
    const int layer = static_cast<Kernel*>(state)->layer;
    Input given[kInputs];
    for (size_t i = 0; i < kInputs; i++)
        if (OrtStatus* status = read(context, i, given[i])) return status;
    const int64_t taps = given[kWeight].last, width = taps ? given[kWeight].count / taps : 0,
                  sequences = given[kCache].count;
    const int64_t tokens = width ? given[kBcx].count / (3 * width) : 0;
    if (tokens < 1 || given[kBcx].count != 3 * tokens * width || sequences < 1 ||
        given[kSequenceRows].count != sequences)
        return failed(kName, "input shapes do not belong together");
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, width, &out)) return status;
    const auto run = [&](Cache& cache, int64_t first, int count) {
        if (!cache.convolves(width, taps)) return failed(kName, "a cache is not of this model");
        const int status =
            cache.convolve(layer, count, given[kBcx].as<float>() + 3 * first * width,
                           given[kWeight].as<float>(), out + first * width, {run_units, context});
        return status ? failed(kName, kvq_status_text(status)) : nullptr;
    };
    return each_sequence(kName, given[kCache], given[kSequenceRows], tokens, run);
}

}  // namespace

Op short_conv_op() {
    return op_of<Kernel>(kName, kTypes, nullptr, create, compute);
}

}  // namespace kvq::ort
