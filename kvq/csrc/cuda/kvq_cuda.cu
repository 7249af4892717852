// Launches. Compiled by nvcc for devices, and by any C++ compiler (-x c++) against the emulator.
#include "kvq_cuda.h"

#include "../kvq.h"
#include "attend.h"
#include "linear_tiles.h"
#include "memory.h"
#include "pack.h"
#include "tiles.h"

namespace kvq::cuda {
namespace {

constexpr int kFewRows = 16;  // of a KV head, for which no block of 64 rows is worth its while

template <int Dim>
int attend_all(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, void* stream) {
    const int rows = s.tokens * (a.heads / a.kv_heads);
    const bool tiled = rows > kFewRows;
    const int step = tiled ? kTileRows : kRows;
    const Dim3 grid{a.splits, (rows + step - 1) / step, a.kv_heads};
    if (tiled) launch(attend_tiles<Dim>, grid, kTileThreads, sizeof(TileRoom<Dim>), stream, a, s);
    else launch(attend<Dim>, grid, kThreads, sizeof(AttendRoom<Dim>), stream, a, s);
    if (!tiled || a.splits > 1)
        launch(merge, Dim3{rows, a.kv_heads}, kvq::kMaxHeadDim, 0, stream, a, s);
    return outcome();
}

constexpr int kFewTokens = 16;  // of a product whose time is that of reading the weights

template <int Bits, bool Hi>
void multiply(const kvq_cuda_linear& c, void* stream) {
    if (c.tokens > kFewTokens) {
        launch(round_inputs, Dim3{c.tokens}, 256, 0, stream, c);
        const Dim3 tiles{(c.tokens + kTileTokens - 1) / kTileTokens,
                         (c.rows + kTileOutputs - 1) / kTileOutputs};
        const size_t room = linear_room_bytes(c.block, Bits == 8 && !Hi ? 2 : 1);
        return launch(product_tiles<Bits, Hi>, tiles, kLinearThreads, room, stream, c);
    }
    launch(inputs, Dim3{c.tokens}, 256, 0, stream, c);
    const Dim3 grid{(c.rows + kPanelRows - 1) / kPanelRows};
    const auto kernel = c.tokens <= 8 ? product<Bits, Hi, 1> : product<Bits, Hi, 2>;
    launch(kernel, grid, kLinearWarps * kWarp, 0, stream, c);
}

}  // namespace
}  // namespace kvq::cuda

using namespace kvq::cuda;

extern "C" {

#ifndef __CUDACC__
// For proofs that no result depends on the order in which threads run: Emulator::take_turns.
KVQ_EXPORT int kvq_cuda_take_turns(int32_t order, void*) {
    Emulator::now().take_turns(order);
    return KVQ_OK;
}
#endif

KVQ_EXPORT int kvq_cuda_store(const kvq_cuda_attention* attention,
                              const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    launch(prepare, Dim3{s.tokens, a.heads + 2 * a.kv_heads}, kvq::kMaxHeadDim, 0, stream, a, s);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_attend(const kvq_cuda_attention* attention,
                               const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    if (const int status = kvq_cuda_store(attention, sequence, stream)) return status;
    switch (a.head_dim) {
        case 64:
            return attend_all<64>(a, s, stream);
        case 80:
            return attend_all<80>(a, s, stream);
        case 96:
            return attend_all<96>(a, s, stream);
        case 128:
            return attend_all<128>(a, s, stream);
        case 256:
            return attend_all<256>(a, s, stream);
        default:
            return KVQ_BAD_ARGUMENT;
    }
}

KVQ_EXPORT int kvq_cuda_pack(const kvq_cuda_page* page, void* stream) {
    if (page->head_dim % 16 || page->head_dim > kvq::kMaxHeadDim) return KVQ_BAD_ARGUMENT;
    launch(pack, Dim3{}, kvq::kMaxHeadDim, 0, stream, *page);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_narrow(uint8_t* plane, int32_t head_dim, void* stream) {
    if (head_dim % 16 || head_dim > kvq::kMaxHeadDim) return KVQ_BAD_ARGUMENT;
    launch(narrow, Dim3{}, kvq::kMaxHeadDim, 0, stream, plane, head_dim);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_linear_run(const kvq_cuda_linear* call, void* stream) {
    const kvq_cuda_linear& c = *call;
    if (c.tokens < 1 || (c.block != 32 && c.block != 64 && c.block != 128) ||
        (c.bits != 4 && c.bits != 8) || (c.tokens > kFewTokens && (!c.levels || !c.steps)))
        return KVQ_BAD_ARGUMENT;
    if (c.bits == 4) multiply<4, false>(c, stream);
    else if (c.view == KVQ_HI) multiply<8, true>(c, stream);
    else multiply<8, false>(c, stream);
    return outcome();
}

}  // extern "C"
