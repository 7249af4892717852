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
    const int64_t* rows = given[kSequenceRows].as<int64_t>();
    if (OrtStatus* status = sum_to(kName, rows, sequences, tokens)) return status;
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, width, &out)) return status;
    Held held;
    if (OrtStatus* status = held.hold(kName, given[kCache].as<int64_t>(), size_t(sequences)))
        return status;
    const float* bcx = given[kBcx].as<float>();
    for (size_t s = 0; s < held.caches.size(); s++) {
        Cache& cache = *held.caches[s];
        if (!cache.convolves(width, taps)) return failed(kName, "a cache is not of this model");
        const int status = cache.convolve(layer, static_cast<int>(rows[s]), bcx,
                                          given[kWeight].as<float>(), out, {run_units, context});
        if (status) return failed(kName, kvq_status_text(status));
        bcx += 3 * rows[s] * width, out += rows[s] * width;
    }
    return nullptr;
}

}  // namespace

Op short_conv_op() {
    return mixer_op<Kernel, kName, kInputs>(create, compute);
}

}  // namespace kvq::ort
