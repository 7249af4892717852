// Launches. Compiled by nvcc for devices, and by any C++ compiler (-x c++) against the emulator.
#include "kvq_cuda.h"

#include "../kvq.h"
#include "attend.h"
#include "linear.h"
#include "memory.h"
#include "pack.h"

namespace kvq::cuda {
namespace {

template <int Dim>
void attend_all(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, void* stream) {
    const int rows = s.tokens * (a.heads / a.kv_heads);
    const Dim3 grid{a.splits, (rows + kRows - 1) / kRows, a.kv_heads};
    KVQ_LAUNCH(attend<Dim>, grid, kThreads, stream, a, s);
}

template <int Bits, bool Hi>
void multiply(const kvq_cuda_linear& c, void* stream) {
    const Dim3 grid{(c.rows + kPanelRows - 1) / kPanelRows};
    if (c.tokens <= 8) {
        KVQ_LAUNCH((product<Bits, Hi, 1>), grid, kLinearWarps * kWarp, stream, c);
    } else {
        KVQ_LAUNCH((product<Bits, Hi, 2>), grid, kLinearWarps * kWarp, stream, c);
    }
}

}  // namespace
}  // namespace kvq::cuda

using namespace kvq::cuda;

extern "C" {

KVQ_EXPORT int kvq_cuda_store(const kvq_cuda_attention* attention,
                              const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    KVQ_LAUNCH(prepare, (Dim3{s.tokens, a.heads + 2 * a.kv_heads}), kvq::kMaxHeadDim, stream, a, s);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_attend(const kvq_cuda_attention* attention,
                               const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    if (const int status = kvq_cuda_store(attention, sequence, stream)) return status;
    switch (a.head_dim) {
        case 64:
            attend_all<64>(a, s, stream);
            break;
        case 80:
            attend_all<80>(a, s, stream);
            break;
        case 96:
            attend_all<96>(a, s, stream);
            break;
        case 128:
            attend_all<128>(a, s, stream);
            break;
        case 256:
            attend_all<256>(a, s, stream);
            break;
        default:
            return KVQ_BAD_ARGUMENT;
    }
    const int rows = s.tokens * (a.heads / a.kv_heads);
    KVQ_LAUNCH(merge, (Dim3{rows, a.kv_heads}), kvq::kMaxHeadDim, stream, a, s);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_pack(const kvq_cuda_page* page, void* stream) {
    if (page->head_dim % 16 || page->head_dim > kvq::kMaxHeadDim) return KVQ_BAD_ARGUMENT;
    KVQ_LAUNCH(pack, Dim3{}, kvq::kMaxHeadDim, stream, *page);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_narrow(uint8_t* plane, int32_t head_dim, void* stream) {
    if (head_dim % 16 || head_dim > kvq::kMaxHeadDim) return KVQ_BAD_ARGUMENT;
    KVQ_LAUNCH(narrow, Dim3{}, kvq::kMaxHeadDim, stream, plane, head_dim);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_linear_run(const kvq_cuda_linear* call, void* stream) {
    const kvq_cuda_linear& c = *call;
    if (c.tokens < 1 || c.tokens > 16 || c.block % 32 || (c.bits != 4 && c.bits != 8))
        return KVQ_BAD_ARGUMENT;
    KVQ_LAUNCH(inputs, Dim3{c.tokens}, 256, stream, c);
    if (c.bits == 4) multiply<4, false>(c, stream);
    else if (c.view == KVQ_HI) multiply<8, true>(c, stream);
    else multiply<8, false>(c, stream);
    return outcome();
}

}  // extern "C"
