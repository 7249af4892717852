// The ops of the library, and what each asks of ONNX Runtime: attributes, inputs, the output,
// threads, errors.
#pragma once
#include <climits>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "../device_library.h"
#include "abi.h"

namespace kvq::ort {

inline const Api* g_api;  // set once, when ONNX Runtime loads the library

inline OrtStatus* failed(const char* op, const std::string& reason) {
    return g_api->CreateStatus(kFail, ("kvq::" + (op + (": " + reason))).c_str());
}

// Attributes of op `op`, by name; none may be negative.
inline OrtStatus* integers(const char* op, const OrtKernelInfo* info,
                           std::initializer_list<std::pair<const char*, int32_t*>> attributes) {
    for (const auto& [name, value] : attributes) {
        int64_t found = 0;
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_int64(info, name, &found))
            return status;
        if (found < 0 || found > INT32_MAX)
            return failed(op, std::string(name) + " " + std::to_string(found) + " is out of range");
        *value = static_cast<int32_t>(found);
    }
    return nullptr;
}

inline OrtStatus* floats(const OrtKernelInfo* info,
                         std::initializer_list<std::pair<const char*, float*>> attributes) {
    for (const auto& [name, value] : attributes)
        if (OrtStatus* status = g_api->KernelInfoGetAttribute_float(info, name, value))
            return status;
    return nullptr;
}

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

inline OrtStatus* read(const OrtKernelContext* context, size_t index, Input& input) {
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

inline OrtStatus* output(OrtKernelContext* context, int64_t rows, int64_t columns, float** out) {
    const int64_t dims[2] = {rows, columns};
    OrtValue* value = nullptr;
    if (OrtStatus* status = g_api->KernelContext_GetOutput(context, 0, dims, 2, &value))
        return status;
    return g_api->GetTensorMutableData(value, reinterpret_cast<void**>(out));
}

// Runs work(user, 0) to work(user, units - 1) on ONNX Runtime's own threads.
inline void run_parallel(void* context, void (*work)(void*, size_t), size_t units, void* user) {
    // A failed dispatch has run nothing; the serial loop gives the same result.
    OrtStatus* status = g_api->KernelContext_ParallelFor(static_cast<OrtKernelContext*>(context),
                                                         work, units, 0, user);
    if (!status) return;
    g_api->ReleaseStatus(status);
    for (size_t i = 0; i < units; i++) work(user, i);
}

// An op, and where its kernels compute.
struct Op : OrtCustomOp {
    const char* name;
    const ElementType* types;  // of its inputs
    Device* device;     // null: on the processor
    int64_t residency;  // of the experts, see kvq.h; 0: none
};
inline Device* device_of(const OrtCustomOp* op) {
    return static_cast<const Op*>(op)->device;
}
// The kernels of an emulated device are ONNX Runtime's of the processor.
inline const char* provider_of(const OrtCustomOp* op) {
    const Device* device = device_of(op);
    return device && !device->on_host() ? "CUDAExecutionProvider" : nullptr;
}

// An op of one float output whose kernels are `Kernel`s. Of its inputs, whose `types` lie there for
// good, the first kNeeded must be given. What it reads of a pass to decide by, integers all, stays
// on the host.
template <class Kernel, size_t kNeeded = SIZE_MAX, size_t kInputs>
Op op_of(const char* name, const ElementType (&types)[kInputs], Device* device,
         decltype(Op::CreateKernelV2) create, decltype(Op::KernelComputeV2) compute) {
    Op o{};
    o.name = name;
    o.types = types;
    o.device = device;
    o.CreateKernelV2 = create;
    o.KernelComputeV2 = compute;
    o.GetName = [](const OrtCustomOp* op) { return static_cast<const Op*>(op)->name; };
    o.GetInputType = [](const OrtCustomOp* op, size_t i) -> int {
        return static_cast<const Op*>(op)->types[i];
    };
    o.GetInputTypeCount = [](const OrtCustomOp*) { return kInputs; };
    o.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
        return i < kNeeded ? kRequired : kOptional;
    };
    o.version = kApiVersion;
    o.GetExecutionProviderType = provider_of;
    o.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
    o.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
    o.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
    o.GetInputMemoryType = [](const OrtCustomOp* op, size_t i) -> int {
        return provider_of(op) && op->GetInputType(op, i) == kInt64 ? kHostMemory : 0;
    };
    o.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    o.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    o.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    o.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    o.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    o.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    o.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    return o;
}

// The ops over stored weights: kvq::Linear, kvq::Experts and kvq::Embed.
std::vector<Op> linear_ops(Device* device);
// These compute on the processor wherever the model runs: which experts are read depends on each
// token, and no device has convolutions or delta nets.
Op experts_op();
Op short_conv_op();
Op delta_net_op();

// Adds domain "kvq" to OrtSessionOptions `options`, `base` being its OrtApiBase and `device` the
// kvq::Device that computes, null for the processor. An OrtStatus, null: done.
void* register_ops(void* options, const void* base, void* device);

}  // namespace kvq::ort
