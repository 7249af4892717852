// kvq::Linear and kvq::Embed in ONNX Runtime: shapes checked here, arithmetic in ../linear.
//
// Linear: out [T, rows] = residual + bias + weights . input. Inputs: x float [T, columns], panels
// uint8 [panels, panel_bytes], then optionally norm float [columns] (the input is x's RMS norm),
// bias float [rows], residual float [T, rows], and data of the pass: weights_view int64 [1] (0
// full, 1 hi), exact_rows int64 [1] (0: all; else the view hi, but exact in what can be each row's
// best so many), layer_modes int64 [layers] (0 full, 1 skip, 2 kv) and head_rows int64 [1] (0: all;
// else out is [T, head_rows], of the matrix's first rows). With an activation x is [T, 2 * columns]
// and the input activation(first half) * second half. A layer that is skipped gives
// residual or zeros and reads no weight; with kv, rows before the attribute first_kept do so. One
// with a norm and nothing kept leaves `out` as it is: only a product left out as well reads it. With kv the rows
// kept may have weights of their own: map uint8 [panels, panel_bytes], of 8 bits, and map_bias float
// [rows - first_kept], both empty where there are none.
//
// Embed: out [T, columns] = sum over k of weights[t, k] * row ids[t, k]. Inputs: ids int64 [T, K],
// weights float [T, K], panels.
#include "linear_ops.h"

#include <algorithm>
#include <memory>

#include "../linear/linear.h"
#include "kernel.h"

namespace kvq::ort {
namespace {

enum LayerMode { kFullLayer, kSkip, kKeysAndValues };

constexpr int kDeviceTokens = 16;  // of one product of a device

struct Kernel {
    kvq_matrix matrix{};
    int32_t activation = 0, layer = 0, first_kept = 0;
    float norm_eps = 0;
    Device* device = nullptr;
};

template <bool Linear>
OrtStatus* create(const OrtCustomOp* o, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<Kernel>();
    made->device = device_of(o);
    kvq_matrix& m = made->matrix;
    const char* op = Linear ? "Linear" : "Embed";
    if (OrtStatus* status = integers(
            op, info,
            {{"rows", &m.rows}, {"columns", &m.columns}, {"bits", &m.bits}, {"block", &m.block}}))
        return status;
    if (m.rows < 1 || m.columns < 1 || (m.bits != 4 && m.bits != 8) ||
        (m.block != 32 && m.block != 64 && m.block != 128))
        return failed(op, "no matrix has these attributes");
    if (Linear) {
        if (OrtStatus* status = integers(op, info,
                                         {{"activation", &made->activation},
                                          {"layer", &made->layer},
                                          {"first_kept", &made->first_kept}}))
            return status;
        if (OrtStatus* status =
                g_api->KernelInfoGetAttribute_float(info, "norm_eps", &made->norm_eps))
            return status;
    }
    *kernel = made.release();
    return nullptr;
}

bool holds(const Input& panels, const PanelLayout& layout) {
    return panels.count == int64_t(layout.panels) * int64_t(layout.panel_bytes);
}

// As run_linear, of numbers on the device. `exact_rows` asks for less than all being exact, which
// they are.
int run_linear_on(Device& device, const kvq_linear& call) {
    std::lock_guard<std::mutex> turn(device.turn);
    const PanelLayout layout(call.matrix);
    const int rows = call.matrix.rows, columns = call.matrix.columns, kept = rows - call.first_row;
    const int64_t width = int64_t{columns} * (call.activation ? 2 : 1), skipped = 4 * call.first_row;
    const int64_t inputs = int64_t{2} * kDeviceTokens * columns, tops = 4 * kDeviceTokens;
    // Products of a part of the rows come to lie apart from the others.
    const int64_t apart = call.first_row ? int64_t{4} * kDeviceTokens * kept : 0;
    uint8_t* scratch = device.scratch.at_least(inputs + tops + 2 * apart);
    if (!scratch) return KVQ_NO_MEMORY;
    auto* products = reinterpret_cast<float*>(scratch + inputs + tops);
    auto* residuals = products + apart / 4;
    void* stream = device.facts().stream;
    const int64_t step = int64_t{4} * rows;
    int status = KVQ_OK;
    if (call.first_row && call.residual)
        status = device.copy(call.out, call.residual, step * call.tokens);
    else if (call.first_row) status = device.calls().clear(call.out, step * call.tokens, stream);
    for (int first = 0; !status && kept > 0 && first < call.tokens; first += kDeviceTokens) {
        const int tokens = std::min(kDeviceTokens, call.tokens - first);
        float* out = call.out + int64_t{first} * rows;
        const float* residual = call.residual ? call.residual + int64_t{first} * rows : nullptr;
        kvq_cuda_linear part{};
        part.rows = kept, part.columns = columns;
        part.bits = call.matrix.bits, part.block = call.matrix.block;
        part.panels = call.panels + call.first_row / kPanelRows * int64_t(layout.panel_bytes);
        part.x = call.x + first * width, part.norm = call.norm, part.norm_eps = call.norm_eps;
        part.bias = call.bias ? call.bias + call.first_row : nullptr;
        part.out = apart ? products : out;
        part.residual = apart && residual ? residuals : residual;
        part.tokens = tokens, part.activation = call.activation;
        part.view = call.exact_rows ? int{KVQ_FULL} : call.view;
        part.inputs = reinterpret_cast<uint16_t*>(scratch);
        part.tops = reinterpret_cast<float*>(scratch + inputs);
        const int64_t row = int64_t{4} * kept;
        if (apart && residual)
            status = device.calls().copy(residuals, row, residual + call.first_row, step, row,
                                         tokens, stream);
        if (!status) status = device.calls().linear(&part, stream);
        if (!status && apart)
            status = device.calls().copy(reinterpret_cast<uint8_t*>(out) + skipped, step, products,
                                         row, row, tokens, stream);
    }
    return status;
}

OrtStatus* compute_linear(void* state, OrtKernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Input x, panels, norm, bias, residual, view, exact, modes, head_rows, map, map_bias;
    size_t index = 0;
    for (Input* input :
         {&x, &panels, &norm, &bias, &residual, &view, &exact, &modes, &head_rows, &map, &map_bias})
        if (OrtStatus* status = read(context, index++, *input)) return status;
    const kvq_matrix& m = kernel.matrix;
    const int64_t width = int64_t(m.columns) * (kernel.activation ? 2 : 1);
    const int64_t tokens = x.count / width;
    if (x.count % width || (x.count && x.last != width) || !holds(panels, PanelLayout(m)) ||
        (norm.data && norm.count != m.columns) || (bias.data && bias.count != m.rows) ||
        (residual.data && residual.count != tokens * m.rows) ||
        (modes.data && modes.count <= kernel.layer))
        return failed("Linear", "input shapes do not match the attributes");
    kvq_linear call{};
    call.matrix = m;
    const int64_t asked_head = head_rows.integer(0);
    if (asked_head < 0 || asked_head > m.rows || (asked_head && residual.data))
        return failed("Linear", "head_rows is out of range");
    if (asked_head) call.matrix.rows = static_cast<int32_t>(asked_head);
    call.panels = panels.as<uint8_t>();
    call.x = x.as<float>();
    call.norm = norm.as<float>();
    call.bias = bias.as<float>();
    call.residual = residual.as<float>();
    call.tokens = static_cast<int32_t>(tokens);
    call.activation = kernel.activation;
    call.norm_eps = kernel.norm_eps;
    const int64_t mode = modes.data ? modes.as<int64_t>()[kernel.layer] : int64_t{kFullLayer};
    const int64_t asked_view = view.integer(KVQ_FULL), asked_rows = exact.integer(0);
    if (mode < kFullLayer || mode > kKeysAndValues || asked_view < KVQ_FULL ||
        asked_view > KVQ_HI || asked_rows < 0)
        return failed("Linear", "weights_view, exact_rows or layer_modes is out of range");
    call.view = static_cast<int32_t>(asked_view);
    if (mode == kKeysAndValues && map.count > 0) {
        kvq_matrix kept = m;
        kept.rows -= kernel.first_kept, kept.bits = 8;
        const PanelLayout layout(kept);
        if (kernel.first_kept % kPanelRows || !holds(map, layout) || map_bias.count != kept.rows)
            return failed("Linear", "a map is none of this product's");
        // Rows before first_kept are never read: the panels begin where theirs would.
        call.matrix.bits = 8, call.view = KVQ_FULL;
        call.panels = map.as<uint8_t>() - kernel.first_kept / kPanelRows * layout.panel_bytes;
        call.bias = map_bias.as<float>() - kernel.first_kept;
    }
    const int32_t rows = call.matrix.rows;
    call.exact_rows = static_cast<int32_t>(std::min<int64_t>(asked_rows, rows));
    call.first_row = mode == kFullLayer ? 0 : mode == kSkip ? rows : kernel.first_kept;
    if (OrtStatus* status = output(context, tokens, rows, &call.out)) return status;
    // What gate_up gives is read by down alone, which the same mode leaves out: megabytes of zeros
    // that nobody reads.
    if (mode != kFullLayer && call.norm && kernel.first_kept == m.rows) return nullptr;
    const int status = kernel.device ? run_linear_on(*kernel.device, call)
                                     : run_linear(call, {run_parallel, context});
    return status ? failed("Linear", "the product was refused") : nullptr;
}

OrtStatus* compute_embed(void* state, OrtKernelContext* context) {
    const kvq_matrix& m = static_cast<Kernel*>(state)->matrix;
    Input ids, weights, panels;
    size_t index = 0;
    for (Input* input : {&ids, &weights, &panels})
        if (OrtStatus* status = read(context, index++, *input)) return status;
    if (ids.count != weights.count || !holds(panels, PanelLayout(m)))
        return failed("Embed", "input shapes do not match the attributes");
    const int64_t mixed = ids.last, tokens = mixed ? ids.count / mixed : 0;
    float* out = nullptr;
    if (OrtStatus* status = output(context, tokens, m.columns, &out)) return status;
    const kvq_embed call{
        m,   panels.as<uint8_t>(),         ids.as<int64_t>(),          weights.as<float>(),
        out, static_cast<int32_t>(tokens), static_cast<int32_t>(mixed)};
    return run_embed(call) ? failed("Embed", "an id is no row of the matrix") : nullptr;
}

Op linear_op(Device* device) {
    Op o = op_of<Kernel>(device);
    o.GetName = [](const OrtCustomOp*) { return "Linear"; };
    o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{11}; };
    o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
        return i == 1 || i == 9 ? kUint8 : i >= 5 && i < 9 ? kInt64 : kFloat;
    };
    o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
        return i >= 2 ? kOptional : kRequired;
    };
    o.CreateKernelV2 = create<true>;
    o.KernelComputeV2 = compute_linear;
    return o;
}

// On the processor wherever the model runs: it reads a few rows of its largest matrix.
Op embed_op() {
    Op o = op_of<Kernel>(nullptr);
    o.GetName = [](const OrtCustomOp*) { return "Embed"; };
    o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{3}; };
    o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
        return i == 0 ? kInt64 : i == 1 ? kFloat : kUint8;
    };
    o.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
    o.CreateKernelV2 = create<false>;
    o.KernelComputeV2 = compute_embed;
    return o;
}

}  // namespace

std::vector<Op> linear_ops(Device* device) {
    return {linear_op(device), embed_op()};
}

}  // namespace kvq::ort
