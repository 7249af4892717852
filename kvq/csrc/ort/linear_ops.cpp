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
#include <algorithm>
#include <memory>

#include "../linear/linear.h"
#include "kernel.h"

namespace kvq::ort {
namespace {

// Of maps beside weights in super-blocks; bundle.py has it too.
constexpr int kMapBlock = 64;

enum LayerMode { kFullLayer, kSkip, kKeysAndValues };

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
            {{"rows", &m.rows},
             {"columns", &m.columns},
             {"bits", &m.bits},
             {"block", &m.block},
             {"grid", &m.grid}}))
        return status;
    if (!is_matrix(m)) return failed(op, "no matrix has these attributes");
    if (Linear) {
        if (OrtStatus* status = integers(op, info,
                                         {{"activation", &made->activation},
                                          {"layer", &made->layer},
                                          {"first_kept", &made->first_kept}}))
            return status;
        if (OrtStatus* status = floats(info, {{"norm_eps", &made->norm_eps}})) return status;
    }
    *kernel = made.release();
    return nullptr;
}

bool holds(const Input& panels, const PanelLayout& layout) {
    return panels.count == int64_t(layout.panels) * int64_t(layout.panel_bytes);
}

// Room for what a device makes of the inputs of a product, and for products and residuals of a part
// of the rows, which come to lie apart from the others.
struct DeviceScratch {
    int64_t inputs, tops, levels, steps, products, residuals, panel_tops, deviations, marks, bytes;

    DeviceScratch(const kvq_linear& call, const PanelLayout& layout) {
        const int64_t tokens = call.tokens, columns = int64_t(layout.padded_columns());
        const int64_t apart = call.first_row ? 4 * tokens * (call.matrix.rows - call.first_row) : 0;
        bytes = 0;
        const auto take = [&](int64_t count) {
            const int64_t start = bytes;
            bytes += (count + 63) / 64 * 64;
            return start;
        };
        inputs = take(2 * tokens * columns), tops = take(4 * tokens), levels = take(tokens * columns);
        // Of a super-block for few tokens a sum of each sub-block; for many less.
        const int64_t numbers = layout.sub ? 16 : 2;
        steps = take(4 * numbers * tokens * int64_t(layout.blocks));
        products = take(apart), residuals = take(call.residual ? apart : 0);
        const int64_t ranked = call.exact_rows ? tokens * layout.panels : 0;
        panel_tops = take(4 * ranked), deviations = take(4 * tokens), marks = take(ranked);
    }
};

// The rows from call.first_row on; `products` and `residuals` are theirs alone.
int run_part(Device& device, const kvq_linear& call, const PanelLayout& layout,
             const DeviceScratch& at, uint8_t* scratch, float* products, const float* residuals) {
    kvq_cuda_linear part{};
    part.rows = call.matrix.rows - call.first_row, part.columns = call.matrix.columns;
    part.bits = call.matrix.bits, part.block = call.matrix.block, part.grid = call.matrix.grid;
    part.panels = call.panels + call.first_row / kPanelRows * int64_t(layout.panel_bytes);
    part.x = call.x, part.norm = call.norm, part.norm_eps = call.norm_eps;
    part.bias = call.bias ? call.bias + call.first_row : nullptr;
    part.out = products, part.residual = residuals;
    part.tokens = call.tokens, part.activation = call.activation;
    part.view = call.view, part.exact_rows = call.exact_rows;
    part.inputs = reinterpret_cast<uint16_t*>(scratch + at.inputs);
    part.tops = reinterpret_cast<float*>(scratch + at.tops);
    part.levels = reinterpret_cast<int8_t*>(scratch + at.levels);
    part.steps = reinterpret_cast<float*>(scratch + at.steps);
    part.panel_tops = reinterpret_cast<float*>(scratch + at.panel_tops);
    part.deviations = reinterpret_cast<float*>(scratch + at.deviations);
    part.marks = scratch + at.marks;
    return device.calls().linear_run(&part, device.facts().stream);
}

// As run_linear, of numbers on the device.
int run_linear_on(Device& device, const kvq_linear& call) {
    if (call.exact_rows && call.first_row) return KVQ_BAD_ARGUMENT;
    if (!call.tokens) return KVQ_OK;
    std::lock_guard<std::mutex> turn(device.turn);
    const PanelLayout layout(call.matrix);
    const DeviceScratch at(call, layout);
    uint8_t* scratch = device.scratch.at_least(at.bytes);
    if (!scratch) return KVQ_NO_MEMORY;
    if (!call.first_row)
        return run_part(device, call, layout, at, scratch, call.out, call.residual);
    void* stream = device.facts().stream;
    const int kept = call.matrix.rows - call.first_row;
    const int64_t step = int64_t{4} * call.matrix.rows, row = int64_t{4} * kept;
    int status = call.residual ? device.copy(call.out, call.residual, step * call.tokens)
                               : device.calls().clear(call.out, step * call.tokens, stream);
    if (status || !kept) return status;
    auto* products = reinterpret_cast<float*>(scratch + at.products);
    float* residuals = nullptr;
    if (call.residual) {
        residuals = reinterpret_cast<float*>(scratch + at.residuals);
        status = device.calls().copy(residuals, row, call.residual + call.first_row, step, row,
                                     call.tokens, stream);
    }
    if (!status) status = run_part(device, call, layout, at, scratch, products, residuals);
    if (status) return status;
    return device.calls().copy(call.out + call.first_row, step, products, row, row, call.tokens,
                               stream);
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
        kept.rows -= kernel.first_kept, kept.bits = 8, kept.grid = KVQ_SYMMETRIC;
        if (is_super(m.grid)) kept.block = kMapBlock;
        const PanelLayout layout(kept);
        if (kernel.first_kept % kPanelRows || !holds(map, layout) || map_bias.count != kept.rows)
            return failed("Linear", "a map is none of this product's");
        // Rows before first_kept are never read: the panels begin where theirs would.
        call.matrix.bits = 8, call.matrix.grid = KVQ_SYMMETRIC, call.view = KVQ_FULL;
        call.matrix.block = kept.block;
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
    if (status == KVQ_BAD_ARGUMENT) return failed("Linear", "the product was refused");
    return status ? failed("Linear", kvq_status_text(status)) : nullptr;
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

constexpr ElementType kLinearTypes[] = {kFloat, kUint8, kFloat, kFloat, kFloat, kInt64,
                                        kInt64, kInt64, kInt64, kUint8, kFloat};
constexpr ElementType kEmbedTypes[] = {kInt64, kFloat, kUint8};

}  // namespace

std::vector<Op> linear_ops(Device* device) {
    return {op_of<Kernel, 2>("Linear", kLinearTypes, device, create<true>, compute_linear),
            experts_op(),
            // On the processor wherever the model runs: it reads a few rows of its largest matrix.
            op_of<Kernel>("Embed", kEmbedTypes, nullptr, create<false>, compute_embed)};
}

}  // namespace kvq::ort
