// kvq::Experts in ONNX Runtime: shapes checked here, arithmetic in ../linear/experts.cpp.
//
// out [T, columns] = residual + the experts of each token, see kvq.h. Inputs: x float [T, columns],
// logits float [T, count], the panels of all experts' gate_up and down, uint8 [panels,
// panel_bytes], then optionally residual float [T, columns], and as of Linear weights_view int64
// [1] and layer_modes int64 [layers]: a layer that is skipped, or makes keys and values alone,
// gives the residual or zeros. Then, optionally too, gate_up_bias float [count, 2 * width],
// down_bias float [count, columns] and choice_bias float [count]. The attribute `scoring` may be
// left out: 0.
#include <cstring>
#include <memory>

#include "../linear/linear.h"
#include "kernel.h"

namespace kvq::ort {
namespace {

constexpr char kName[] = "Experts";
constexpr ElementType kTypes[] = {kFloat, kFloat, kUint8, kUint8, kFloat,
                                  kInt64, kInt64, kFloat, kFloat, kFloat};

struct Kernel {
    kvq_experts call{};
    int32_t layer = 0;
};

OrtStatus* create(const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<Kernel>();
    kvq_experts& call = made->call;
    int32_t width = 0, columns = 0;
    if (OrtStatus* status = integers(kName, info,
                                     {{"columns", &columns},
                                      {"width", &width},
                                      {"count", &call.count},
                                      {"chosen", &call.chosen},
                                      {"normalised", &call.normalised},
                                      {"activation", &call.activation},
                                      {"layer", &made->layer},
                                      {"gate_up_bits", &call.gate_up.bits},
                                      {"gate_up_block", &call.gate_up.block},
                                      {"gate_up_grid", &call.gate_up.grid},
                                      {"down_bits", &call.down.bits},
                                      {"down_block", &call.down.block},
                                      {"down_grid", &call.down.grid}}))
        return status;
    int64_t scoring = KVQ_SOFTMAX;
    if (OrtStatus* status = g_api->KernelInfoGetAttribute_int64(info, "scoring", &scoring))
        g_api->ReleaseStatus(status);
    call.scoring = scoring == KVQ_SIGMOID ? KVQ_SIGMOID : KVQ_SOFTMAX;
    if (width > INT32_MAX / 2) return failed(kName, "no matrix has these attributes");
    call.gate_up.rows = 2 * width, call.gate_up.columns = columns;
    call.down.rows = columns, call.down.columns = width;
    if (!is_stackable(call.gate_up) || !is_stackable(call.down) || call.chosen < 1 ||
        call.chosen > call.count)
        return failed(kName, "no experts have these attributes");
    call.residency = static_cast<const Op*>(op)->residency;
    *kernel = made.release();
    return nullptr;
}

bool holds(const Input& panels, const kvq_matrix& matrix, int64_t count) {
    const PanelLayout layout(matrix);
    return panels.count == count * layout.panels * int64_t(layout.panel_bytes);
}

OrtStatus* compute(void* state, OrtKernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    kvq_experts call = kernel.call;
    Input x, logits, gate_up, down, residual, view, modes, gate_up_bias, down_bias, choice_bias;
    size_t index = 0;
    for (Input* input : {&x, &logits, &gate_up, &down, &residual, &view, &modes, &gate_up_bias,
                         &down_bias, &choice_bias})
        if (OrtStatus* status = read(context, index++, *input)) return status;
    const int64_t columns = call.gate_up.columns, tokens = x.count / columns;
    if (x.count != tokens * columns || logits.count != tokens * call.count ||
        !holds(gate_up, call.gate_up, call.count) || !holds(down, call.down, call.count) ||
        (residual.data && residual.count != x.count) ||
        (modes.data && modes.count <= kernel.layer) ||
        (gate_up_bias.data && gate_up_bias.count != int64_t{call.count} * call.gate_up.rows) ||
        (down_bias.data && down_bias.count != call.count * columns) ||
        (choice_bias.data && choice_bias.count != call.count))
        return failed(kName, "input shapes do not match the attributes");
    const int64_t asked_view = view.integer(KVQ_FULL);
    if (asked_view < KVQ_FULL || asked_view > KVQ_HI)
        return failed(kName, "weights_view is out of range");
    call.x = x.as<float>(), call.logits = logits.as<float>();
    call.gate_up_panels = gate_up.as<uint8_t>(), call.down_panels = down.as<uint8_t>();
    call.residual = residual.as<float>(), call.gate_up_bias = gate_up_bias.as<float>();
    call.down_bias = down_bias.as<float>(), call.choice_bias = choice_bias.as<float>();
    call.tokens = static_cast<int32_t>(tokens), call.view = static_cast<int32_t>(asked_view);
    if (OrtStatus* status = output(context, tokens, columns, &call.out)) return status;
    if (modes.data && modes.as<int64_t>()[kernel.layer]) {
        const size_t bytes = sizeof(float) * x.count;
        if (call.residual)
            std::memcpy(call.out, call.residual, bytes);
        else
            std::memset(call.out, 0, bytes);
        return nullptr;
    }
    const int status = run_experts(call, {run_parallel, context});
    return status ? failed(kName, kvq_status_text(status)) : nullptr;
}

}  // namespace

Op experts_op() {
    return op_of<Kernel, 4>(kName, kTypes, nullptr, create, compute);
}

}  // namespace kvq::ort
