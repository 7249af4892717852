// kvq::Linear, kvq::Between and kvq::Embed in ONNX Runtime: shapes checked here, arithmetic in
// ../linear.
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
// Between: what stands between the attentions of two layers, for a model whose branches have no
// norm of their own: o, gate_up and down of layer `layer` with their residuals, then qkv of the
// next, in one wake-up of the threads where rows are few. Each is what a Linear computes, bit for
// bit. Inputs: attended float [T, o_columns], hidden float [T, hidden], then panels and optional
// bias of o; norm, panels and bias of gate_up; panels and bias of down; norm, panels and bias of
// qkv; weights_view, layer_modes, map and map_bias. Outputs: hidden [T, hidden], qkv [T, qkv_rows],
// and room for what gate_up gives [T, 2 * inner], which nobody reads.
//
// Embed: out [T, columns] = sum over k of weights[t, k] * row ids[t, k]. Inputs: ids int64 [T, K],
// weights float [T, K], panels.
#include "linear_ops.h"

#include <algorithm>
#include <cstring>
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

// The matrices of a layer's end and of the next one's beginning.
struct BetweenKernel {
    kvq_matrix o{}, gate_up{}, down{}, qkv{};
    int32_t activation = 0, layer = 0, first_kept = 0;
    float norm_eps = 0;
    Device* device = nullptr;
};

bool possible(const kvq_matrix& m) {
    return m.rows >= 1 && m.columns >= 1 && (m.bits == 4 || m.bits == 8) &&
           (m.block == 32 || m.block == 64 || m.block == 128);
}

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
    if (!possible(m)) return failed(op, "no matrix has these attributes");
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

OrtStatus* create_between(const OrtCustomOp* op, const void*, const OrtKernelInfo* info,
                          void** kernel) {
    auto made = std::make_unique<BetweenKernel>();
    made->device = device_of(op);
    int32_t hidden = 0, inner = 0, block = 0;
    if (OrtStatus* status = integers("Between", info,
                                     {{"hidden", &hidden},
                                      {"inner", &inner},
                                      {"block", &block},
                                      {"o_columns", &made->o.columns},
                                      {"o_bits", &made->o.bits},
                                      {"gate_up_bits", &made->gate_up.bits},
                                      {"down_bits", &made->down.bits},
                                      {"qkv_rows", &made->qkv.rows},
                                      {"qkv_bits", &made->qkv.bits},
                                      {"activation", &made->activation},
                                      {"layer", &made->layer},
                                      {"first_kept", &made->first_kept}}))
        return status;
    if (OrtStatus* status = g_api->KernelInfoGetAttribute_float(info, "norm_eps", &made->norm_eps))
        return status;
    made->o.rows = made->gate_up.columns = made->down.rows = made->qkv.columns = hidden;
    made->down.columns = inner;
    made->gate_up.rows = inner > INT32_MAX / 2 ? 0 : 2 * inner;
    for (kvq_matrix* m : {&made->o, &made->gate_up, &made->down, &made->qkv}) {
        m->block = block;
        if (!possible(*m)) return failed("Between", "no matrix has these attributes");
    }
    if (made->first_kept > made->qkv.rows || made->activation < KVQ_SILU)
        return failed("Between", "first_kept or activation is out of range");
    *kernel = made.release();
    return nullptr;
}

bool holds(const Input& panels, const PanelLayout& layout) {
    return panels.count == int64_t(layout.panels) * int64_t(layout.panel_bytes);
}

// What a pass says of the weights it reads.
struct Reading {
    Input view, modes, map, map_bias;

    int64_t mode(int64_t layer) const {
        return modes.data ? modes.as<int64_t>()[layer] : int64_t{kFullLayer};
    }
    bool sensible(int64_t layer) const {
        const int64_t asked = view.integer(KVQ_FULL);
        return mode(layer) >= kFullLayer && mode(layer) <= kKeysAndValues && asked >= KVQ_FULL &&
               asked <= KVQ_HI;
    }
    // Sets the weights and the first row that a product of `layer` reads; false where a map is
    // none of its own.
    bool apply(kvq_linear& call, int64_t layer, int32_t first_kept) const {
        kvq_matrix& m = call.matrix;
        call.view = static_cast<int32_t>(view.integer(KVQ_FULL));
        call.first_row = mode(layer) == kFullLayer ? 0 : mode(layer) == kSkip ? m.rows : first_kept;
        if (mode(layer) != kKeysAndValues || map.count == 0) return true;
        kvq_matrix kept = m;
        kept.rows -= first_kept, kept.bits = 8;
        const PanelLayout layout(kept);
        if (first_kept % kPanelRows || !holds(map, layout) || map_bias.count != kept.rows)
            return false;
        // Rows before first_kept are never read: the panels begin where theirs would.
        m.bits = 8, call.view = KVQ_FULL;
        call.panels = map.as<uint8_t>() - first_kept / kPanelRows * layout.panel_bytes;
        call.bias = map_bias.as<float>() - first_kept;
        return true;
    }
};

// A product of numbers on the device. `exact_rows` asks for less than all being exact, which
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

// Products one after the other, where the kernel computes.
int run(Device* device, const kvq_linear* calls, int count, OrtKernelContext* context) {
    if (!device) return run_series(calls, count, {run_parallel, context});
    int status = KVQ_OK;
    for (int i = 0; !status && i < count; i++) status = run_linear_on(*device, calls[i]);
    return status;
}

OrtStatus* compute_linear(void* state, OrtKernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Input x, panels, norm, bias, residual, exact, head_rows;
    Reading reading;
    size_t index = 0;
    for (Input* input : {&x, &panels, &norm, &bias, &residual, &reading.view, &exact,
                         &reading.modes, &head_rows, &reading.map, &reading.map_bias})
        if (OrtStatus* status = read(context, index++, *input)) return status;
    const kvq_matrix& m = kernel.matrix;
    const int64_t width = int64_t(m.columns) * (kernel.activation ? 2 : 1);
    const int64_t tokens = x.count / width;
    if (x.count % width || (x.count && x.last != width) || !holds(panels, PanelLayout(m)) ||
        (norm.data && norm.count != m.columns) || (bias.data && bias.count != m.rows) ||
        (residual.data && residual.count != tokens * m.rows) ||
        (reading.modes.data && reading.modes.count <= kernel.layer))
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
    const int64_t asked_rows = exact.integer(0);
    if (!reading.sensible(kernel.layer) || asked_rows < 0)
        return failed("Linear", "weights_view, exact_rows or layer_modes is out of range");
    if (!reading.apply(call, kernel.layer, kernel.first_kept))
        return failed("Linear", "a map is none of this product's");
    const int32_t rows = call.matrix.rows;
    call.exact_rows = static_cast<int32_t>(std::min<int64_t>(asked_rows, rows));
    if (OrtStatus* status = output(context, 0, tokens, rows, &call.out)) return status;
    // What gate_up gives is read by down alone, which the same mode leaves out: megabytes of zeros
    // that nobody reads.
    if (call.first_row == rows && call.norm && kernel.first_kept == rows) return nullptr;
    const int status = run(kernel.device, &call, 1, context);
    return status ? failed("Linear", "the product was refused") : nullptr;
}

// The inputs of a call of Between.
struct BetweenInputs {
    struct Stored {
        Input panels, bias;
        bool fit(const kvq_matrix& m) const {
            return holds(panels, PanelLayout(m)) && (!bias.data || bias.count == m.rows);
        }
    };
    Input attended, hidden, mlp_norm, attn_norm;
    Stored o, gate_up, down, qkv;
    Reading reading;

    OrtStatus* read_all(const OrtKernelContext* context) {
        size_t index = 0;
        for (Input* input :
             {&attended, &hidden, &o.panels, &o.bias, &mlp_norm, &gate_up.panels, &gate_up.bias,
              &down.panels, &down.bias, &attn_norm, &qkv.panels, &qkv.bias, &reading.view,
              &reading.modes, &reading.map, &reading.map_bias})
            if (OrtStatus* status = read(context, index++, *input)) return status;
        return nullptr;
    }
    int64_t tokens(const BetweenKernel& kernel) const { return attended.count / kernel.o.columns; }
    bool fit(const BetweenKernel& kernel) const {
        const int32_t width = kernel.o.rows, heads_width = kernel.o.columns;
        const bool rows = attended.count % heads_width == 0 &&
                          hidden.count == tokens(kernel) * width &&
                          (!hidden.count || (attended.last == heads_width && hidden.last == width));
        return rows && mlp_norm.count == width && attn_norm.count == width && o.fit(kernel.o) &&
               gate_up.fit(kernel.gate_up) && down.fit(kernel.down) && qkv.fit(kernel.qkv) &&
               !(reading.modes.data && reading.modes.count <= int64_t{kernel.layer} + 1);
    }
};

kvq_linear product(const kvq_matrix& matrix, const BetweenInputs::Stored& stored, const float* x,
                   int64_t tokens, float* out) {
    kvq_linear call{};
    call.matrix = matrix;
    call.panels = stored.panels.as<uint8_t>();
    call.bias = stored.bias.as<float>();
    call.x = x;
    call.out = out;
    call.tokens = static_cast<int32_t>(tokens);
    return call;
}

// What a layer that is left out does.
int hand_on(Device* device, const Input& hidden, float* out) {
    const int64_t bytes = hidden.count * int64_t{sizeof(float)};
    if (device) return device->copy(out, hidden.data, bytes);
    std::memcpy(out, hidden.data, bytes);
    return KVQ_OK;
}

OrtStatus* compute_between(void* state, OrtKernelContext* context) {
    const BetweenKernel& kernel = *static_cast<BetweenKernel*>(state);
    BetweenInputs in;
    if (OrtStatus* status = in.read_all(context)) return status;
    if (!in.fit(kernel)) return failed("Between", "input shapes do not match the attributes");
    const int64_t layer = kernel.layer;
    if (!in.reading.sensible(layer) || !in.reading.sensible(layer + 1))
        return failed("Between", "weights_view or layer_modes is out of range");
    const int64_t tokens = in.tokens(kernel);
    float *hidden = nullptr, *qkv = nullptr, *inner = nullptr;
    if (OrtStatus* status = output(context, 0, tokens, kernel.o.rows, &hidden)) return status;
    if (OrtStatus* status = output(context, 1, tokens, kernel.qkv.rows, &qkv)) return status;
    if (OrtStatus* status = output(context, 2, tokens, kernel.gate_up.rows, &inner)) return status;
    kvq_linear calls[] = {product(kernel.o, in.o, in.attended.as<float>(), tokens, hidden),
                          product(kernel.gate_up, in.gate_up, hidden, tokens, inner),
                          product(kernel.down, in.down, inner, tokens, hidden),
                          product(kernel.qkv, in.qkv, hidden, tokens, qkv)};
    calls[0].residual = in.hidden.as<float>();
    calls[1].norm = in.mlp_norm.as<float>();
    calls[2].activation = kernel.activation;
    calls[2].residual = hidden;
    calls[3].norm = in.attn_norm.as<float>();
    for (kvq_linear& call : calls) {
        call.norm_eps = kernel.norm_eps;
        call.view = static_cast<int32_t>(in.reading.view.integer(KVQ_FULL));
    }
    if (!in.reading.apply(calls[3], layer + 1, kernel.first_kept))
        return failed("Between", "a map is none of this product's");
    const int first = in.reading.mode(layer) == kFullLayer ? 0 : 3;
    int status = first ? hand_on(kernel.device, in.hidden, hidden) : int{KVQ_OK};
    if (!status) status = run(kernel.device, calls + first, 4 - first, context);
    return status ? failed("Between", "the products were refused") : nullptr;
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
    if (OrtStatus* status = output(context, 0, tokens, m.columns, &out)) return status;
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

Op between_op(Device* device) {
    Op o = op_of<BetweenKernel>(device);
    o.GetName = [](const OrtCustomOp*) { return "Between"; };
    o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{16}; };
    o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
        const bool panels = i == 2 || i == 5 || i == 7 || i == 10 || i == 14;
        return panels ? kUint8 : i == 12 || i == 13 ? kInt64 : kFloat;
    };
    o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
        return i == 3 || i == 6 || i == 8 || i >= 11 ? kOptional : kRequired;
    };
    o.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{3}; };
    o.CreateKernelV2 = create_between;
    o.KernelComputeV2 = compute_between;
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
    return {linear_op(device), between_op(device), embed_op()};
}

}  // namespace kvq::ort
