// kvq::Linear and kvq::Embed in ONNX Runtime: shapes checked here, arithmetic in ../linear.
//
// Linear: out [T, rows] = residual + bias + weights . input. Inputs: x float [T, columns], panels
// uint8 [panels, panel_bytes], then optionally norm float [columns] (the input is x's RMS norm),
// bias float [rows], residual float [T, rows], and data of the pass: weights_view int64 [1] (0
// full, 1 hi), exact_rows int64 [1] (0: all; else the view hi, but exact in what can be each row's
// best so many) and layer_modes int64 [layers] (0 full, 1 skip, 2 kv). With an activation x is [T,
// 2 * columns] and the input activation(first half) * second half. A layer that is skipped gives
// residual or zeros and reads no weight; with kv, rows before the attribute first_kept do so.
//
// Embed: out [T, columns] = sum over k of weights[t, k] * row ids[t, k]. Inputs: ids int64 [T, K],
// weights float [T, K], panels.
#include "linear_ops.h"

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "../linear/linear.h"

namespace kvq::ort {
namespace {

const Api* g_api;

enum LayerMode { kFullLayer, kSkip, kKeysAndValues };

struct Input {
    const void* data = nullptr;  // null where an optional input is absent
    int64_t count = 0;
    int64_t last = 0;  // length of the last axis

    template <class T>
    const T* as() const {
        return static_cast<const T*>(data);
    }
    // The one integer of an optional input.
    int64_t integer(int64_t absent) const { return count == 1 ? *as<int64_t>() : absent; }
};

OrtStatus* read(const OrtKernelContext* context, size_t index, Input& input) {
    const OrtValue* value = nullptr;
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
    input.count = rank <= 8;
    for (size_t i = 0; i < rank && i < 8; i++) input.count *= dims[i];
    input.last = rank && rank <= 8 ? dims[rank - 1] : 1;
    void* pointer = nullptr;
    status = g_api->GetTensorMutableData(const_cast<OrtValue*>(value), &pointer);
    input.data = pointer;
    return status;
}

OrtStatus* output(OrtKernelContext* context, int64_t rows, int64_t columns, float** out) {
    const int64_t dims[2] = {rows, columns};
    OrtValue* value = nullptr;
    if (OrtStatus* status = g_api->KernelContext_GetOutput(context, 0, dims, 2, &value))
        return status;
    return g_api->GetTensorMutableData(value, reinterpret_cast<void**>(out));
}

Dispatch pool_of(OrtKernelContext* context) {
    return {[](void* ort, void (*work)(void*, size_t), size_t count, void* user) {
                // A failed dispatch has run nothing; the serial loop gives the same result.
                OrtStatus* status = g_api->KernelContext_ParallelFor(
                    static_cast<OrtKernelContext*>(ort), work, count, 0, user);
                if (!status) return;
                g_api->ReleaseStatus(status);
                for (size_t i = 0; i < count; i++) work(user, i);
            },
            context};
}

struct Kernel {
    kvq_matrix matrix{};
    int32_t activation = 0, layer = 0, first_kept = 0;
    float norm_eps = 0;
};

OrtStatus* failed(const char* op, const std::string& reason) {
    return g_api->CreateStatus(kFail, ("kvq::" + (op + (": " + reason))).c_str());
}

OrtStatus* integers(const OrtKernelInfo* info,
                    std::initializer_list<std::pair<const char*, int32_t*>> attributes) {
    for (const auto& [name, value] : attributes) {
        int64_t found = 0;
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_int64(info, name, &found))
            return status;
        *value = static_cast<int32_t>(found);
    }
    return nullptr;
}

template <bool Linear>
OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto made = std::make_unique<Kernel>();
    kvq_matrix& m = made->matrix;
    if (OrtStatus* status = integers(
            info,
            {{"rows", &m.rows}, {"columns", &m.columns}, {"bits", &m.bits}, {"block", &m.block}}))
        return status;
    if (m.rows < 1 || m.columns < 1 || (m.bits != 4 && m.bits != 8) ||
        (m.block != 32 && m.block != 64 && m.block != 128))
        return failed(Linear ? "Linear" : "Embed", "no matrix has these attributes");
    if (Linear) {
        if (OrtStatus* status = integers(info, {{"activation", &made->activation},
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

OrtStatus* compute_linear(void* state, OrtKernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Input x, panels, norm, bias, residual, view, exact, modes;
    size_t index = 0;
    for (Input* input : {&x, &panels, &norm, &bias, &residual, &view, &exact, &modes})
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
    call.exact_rows = static_cast<int32_t>(std::min<int64_t>(asked_rows, m.rows));
    call.first_row = mode == kFullLayer ? 0 : mode == kSkip ? m.rows : kernel.first_kept;
    if (OrtStatus* status = output(context, tokens, m.rows, &call.out)) return status;
    const int status = run_linear(call, pool_of(context));
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

// What both ops have in common.
OrtCustomOp base_op() {
    OrtCustomOp o{};
    o.version = kApiVersion;
    o.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    o.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
    o.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
    o.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
    o.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    o.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    o.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    o.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    o.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    o.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    o.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    o.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    return o;
}

const OrtCustomOp* linear_op() {
    static const OrtCustomOp op = [] {
        OrtCustomOp o = base_op();
        o.GetName = [](const OrtCustomOp*) { return "Linear"; };
        o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{8}; };
        o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
            return i == 1 ? kUint8 : i >= 5 ? kInt64 : kFloat;
        };
        o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
            return i >= 2 ? kOptional : kRequired;
        };
        o.CreateKernelV2 = create<true>;
        o.KernelComputeV2 = compute_linear;
        return o;
    }();
    return &op;
}

const OrtCustomOp* embed_op() {
    static const OrtCustomOp op = [] {
        OrtCustomOp o = base_op();
        o.GetName = [](const OrtCustomOp*) { return "Embed"; };
        o.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{3}; };
        o.GetInputType = [](const OrtCustomOp*, size_t i) -> int {
            return i == 0 ? kInt64 : i == 1 ? kFloat : kUint8;
        };
        o.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
        o.CreateKernelV2 = create<false>;
        o.KernelComputeV2 = compute_embed;
        return o;
    }();
    return &op;
}

}  // namespace

OrtStatus* add_linear_ops(const Api& api, OrtCustomOpDomain* domain) {
    g_api = &api;
    for (const OrtCustomOp* op : {linear_op(), embed_op()})
        if (OrtStatus* status = g_api->CustomOpDomain_Add(domain, op)) return status;
    return nullptr;
}

}  // namespace kvq::ort
