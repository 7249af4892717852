// Launches. Compiled by nvcc for devices, and by any C++ compiler (-x c++) against the emulator of
// the tests.
#include "kvq_cuda.h"

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "../kvq.h"
#include "attend.h"
#include "best.h"
#include "choose.h"
#include "linear_tiles.h"
#include "pack.h"
#include "tiles.h"
#ifdef __CUDACC__
#include "memory.h"
#endif

namespace kvq::cuda {
namespace {

// Channels of heads that attention has kernels for.
constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256};

kvq_cuda_add_ops g_add_ops = nullptr;
void* g_ops_user = nullptr;

void choose(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, void* stream) {
    const Dim3 bounds{(s.view_count + kBoundWarps - 1) / kBoundWarps, s.tokens, a.kv_heads};
    launch(bound_pages, bounds, kBoundWarps * kWarp, 0, stream, a, s);
    launch(choose_pages, Dim3{s.tokens, a.kv_heads}, kChooseThreads, 0, stream, a, s);
    if (s.away_end)
        launch(fetch_pages, Dim3{s.view_count, a.kv_heads}, kFetchThreads, 0, stream, s);
}

template <int Dim>
int attend_all(const kvq_cuda_attention& a, const kvq_cuda_sequence& s, void* stream) {
    const int rows = s.tokens * (a.heads / a.kv_heads);
    const int step = kvq_cuda_rows_of_block(rows);
    const bool tiled = step == kTileRows;
    const Dim3 grid{a.splits, (rows + step - 1) / step, a.kv_heads};
    if (tiled) launch(attend_tiles<Dim>, grid, kTileThreads, sizeof(TileRoom<Dim>), stream, a, s);
    else launch(attend<Dim>, grid, kThreads<Dim>, sizeof(AttendRoom<Dim>), stream, a, s);
    if (!tiled || a.splits > 1)
        launch(merge, Dim3{rows, a.kv_heads}, kMostChannels, 0, stream, a, s);
    return outcome();
}

// Calls with the channels of a head as a type.
template <int Dim>
struct Channels {
    static constexpr int kDim = Dim;
};
template <size_t I = 0, class Call>
int with_channels(int head_dim, const Call& call) {
    if constexpr (I == std::size(kHeadDims)) return KVQ_BAD_ARGUMENT;
    else if (head_dim == kHeadDims[I]) return call(Channels<kHeadDims[I]>{});
    else return with_channels<I + 1>(head_dim, call);
}

constexpr int kFewTokens = 16;  // of a product whose time is that of reading the weights

// Calls with the columns of a sub-block as a type, 0 where there are none.
template <class Call>
void with_sub(const kvq_cuda_linear& c, const Call& call) {
    switch (layout_of(c).sub) {
        case 16: return call(std::integral_constant<int, 16>{});
        case 32: return call(std::integral_constant<int, 32>{});
        default: return call(std::integral_constant<int, 0>{});
    }
}

template <bool Low, bool Marked, int Sub, int UpperBits = 4>
void multiply_few_of(const kvq_cuda_linear& c, void* stream) {
    const auto kernel = c.tokens <= 8 ? product<Low, 1, Marked, Sub, UpperBits>
                                      : product<Low, 2, Marked, Sub, UpperBits>;
    launch(kernel, Dim3{panels_of(c)}, kLinearWarps * kWarp, 0, stream, c);
}
template <bool Low, bool Marked>
void multiply_few(const kvq_cuda_linear& c, void* stream) {
    with_sub(c, [&](auto sub) { multiply_few_of<Low, Marked, sub()>(c, stream); });
}

template <int LowBits, int Sub, int UpperBits = 4>
void multiply_many_of(const kvq_cuda_linear& c, void* stream) {
    launch(round_inputs, Dim3{c.tokens}, 256, 0, stream, c);
    const Dim3 tiles{(c.tokens + kTileTokens - 1) / kTileTokens,
                     (c.rows + kTileOutputs - 1) / kTileOutputs};
    const LinearRoom room(Sub ? kSuperStage : c.block, UpperBits, LowBits);
    const size_t two_stages = 2 * static_cast<size_t>(room.stage_bytes);
    launch(product_tiles<LowBits, Sub, UpperBits>, tiles, kLinearThreads, two_stages, stream, c);
}
template <int LowBits>
void multiply_many(const kvq_cuda_linear& c, void* stream) {
    with_sub(c, [&](auto sub) { multiply_many_of<LowBits, sub()>(c, stream); });
}

// Of codes of 2 bits, and of 3 with one of them beside the upper plane.
template <int LowBits, int Sub>
void multiply_narrow_of(const kvq_cuda_linear& c, void* stream) {
    if (c.tokens > kFewTokens) return multiply_many_of<LowBits, Sub, 2>(c, stream);
    multiply_few_of<LowBits == 1, false, Sub, 2>(c, stream);
}
void multiply_narrow(const kvq_cuda_linear& c, void* stream) {
    if (c.block == 32)
        return c.bits == 3 ? multiply_narrow_of<1, 32>(c, stream)
                           : multiply_narrow_of<0, 32>(c, stream);
    return c.bits == 3 ? multiply_narrow_of<1, 16>(c, stream)
                       : multiply_narrow_of<0, 16>(c, stream);
}

// Of the codes their upper bits and so many of their low bits: all or none.
void multiply(const kvq_cuda_linear& c, int low_bits, void* stream) {
    const bool few = c.tokens <= kFewTokens;
    if (few) launch(inputs, Dim3{c.tokens}, 256, 0, stream, c);
    if (c.bits < 4) return multiply_narrow(c, stream);
    if (few)
        return low_bits ? multiply_few<true, false>(c, stream)
                        : multiply_few<false, false>(c, stream);
    switch (low_bits) {
        case 1: return multiply_many<1>(c, stream);
        case 2: return multiply_many<2>(c, stream);
        case 4: return multiply_many<4>(c, stream);
        default: return multiply_many<0>(c, stream);
    }
}

bool in_two_passes(const kvq_cuda_linear& c) {
    return c.exact_rows && c.bits > 4 && c.view == KVQ_FULL && c.tokens <= kFewTokens &&
           panels_of(c) > (c.exact_rows > kFirstPanels ? c.exact_rows : kFirstPanels);
}

// Upper nibbles first, then whole what may be among the best.
void multiply_head(const kvq_cuda_linear& c, void* stream) {
    multiply(c, 0, stream);
    launch(mark_best, Dim3{c.tokens}, kBestThreads, 0, stream, c);
    multiply_few<true, true>(c, stream);
    launch(mark_more, Dim3{c.tokens}, kBestThreads, 0, stream, c);
    multiply_few<true, true>(c, stream);
}

bool is_head(int channels) {
    return channels > 0 && channels % 16 == 0 && channels <= kMostChannels;
}

}  // namespace
}  // namespace kvq::cuda

using namespace kvq::cuda;

extern "C" {

KVQ_EXPORT const char* kvq_cuda_error(void) {
    return g_reason;
}
KVQ_EXPORT int kvq_cuda_abi(void) {
    return KVQ_ABI;
}
KVQ_EXPORT int kvq_cuda_open(kvq_cuda_device* device) {
    *device = {};
    std::copy(std::begin(kHeadDims), std::end(kHeadDims), device->head_dims);
    return open_device(*device);
}
KVQ_EXPORT void kvq_cuda_set_ops(kvq_cuda_add_ops add, void* user) {
    g_add_ops = add, g_ops_user = user;
}
KVQ_EXPORT void* RegisterCustomOps(void* options, const void* base) {
    return g_add_ops ? g_add_ops(options, base, g_ops_user) : nullptr;
}

KVQ_EXPORT int kvq_cuda_store(const kvq_cuda_attention* attention,
                              const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    launch(prepare, Dim3{s.tokens, a.heads + 2 * a.kv_heads}, kMostChannels, 0, stream, a, s);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_attend(const kvq_cuda_attention* attention,
                               const kvq_cuda_sequence* sequence, void* stream) {
    const kvq_cuda_attention& a = *attention;
    const kvq_cuda_sequence& s = *sequence;
    if (const int status = kvq_cuda_store(attention, sequence, stream)) return status;
    if (s.chosen && s.view_count) choose(a, s, stream);
    return with_channels(a.head_dim, [&](auto channels) {
        return attend_all<decltype(channels)::kDim>(a, s, stream);
    });
}

KVQ_EXPORT int kvq_cuda_close(const kvq_cuda_closing* closing, void* stream) {
    const kvq_cuda_closing& c = *closing;
    if (!is_head(c.head_dim) || c.count < 1 || c.kv_heads < 1) return KVQ_BAD_ARGUMENT;
    launch(close_pages, Dim3{c.count, c.kv_heads, 2}, kMostChannels, packing_bytes(c.head_dim),
           stream, c);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_narrow(const kvq_cuda_plane* planes, int32_t count, int32_t head_dim,
                               void* stream) {
    if (!is_head(head_dim) || count < 1) return KVQ_BAD_ARGUMENT;
    launch(narrow, Dim3{count}, kMostChannels, 0, stream, planes, head_dim);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_narrow_keys(const kvq_cuda_keys* keys, int32_t count, int32_t head_dim,
                                    void* stream) {
    if (!is_head(head_dim) || count < 1) return KVQ_BAD_ARGUMENT;
    launch(narrow_keys, Dim3{count}, kMostChannels, packing_bytes(head_dim), stream, keys, head_dim);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_linear_run(const kvq_cuda_linear* call, void* stream) {
    const kvq_cuda_linear& c = *call;
    if (!kvq::is_matrix(matrix_of(c)) || c.tokens < 1 || c.exact_rows < 0 ||
        (c.exact_rows && (c.bias || c.residual)) ||
        (c.tokens > kFewTokens && !c.levels) ||
        ((c.tokens > kFewTokens || has_offsets(c.grid)) && !c.steps))
        return KVQ_BAD_ARGUMENT;
    if (in_two_passes(c)) multiply_head(c, stream);
    else multiply(c, layout_of(c).low_bits(c.view), stream);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_best(const float* logits, int32_t rows, int32_t columns, int32_t count,
                             int32_t* places, float* values, void* stream) {
    if (rows < 1 || count < 1 || count > kMostBest || count > columns) return KVQ_BAD_ARGUMENT;
    launch(best, Dim3{rows}, kBestThreads, 0, stream, logits, columns, count, places, values);
    return outcome();
}

KVQ_EXPORT int kvq_cuda_gather(const kvq_cuda_rows* rows, void* stream) {
    if (rows->streams < 1 || rows->count < 1 || !is_head(rows->head_dim)) return KVQ_BAD_ARGUMENT;
    launch(gather_rows, Dim3{rows->streams}, kGatherThreads, 0, stream, *rows);
    return outcome();
}

}  // extern "C"
