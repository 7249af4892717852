// The C ABI of kvq.h: handles to caches, arguments to calls.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "handles.h"
#include "kernels/kernels.h"
#include "platform.h"

using kvq::Cache;

// Runs `call` on the cache a handle names, which lives at least as long as the call.
template <class Call>
static auto with_cache(int64_t handle, Call&& call, int closed = KVQ_CLOSED) {
    const std::shared_ptr<Cache> cache = kvq::Handles<Cache>::all().find(handle);
    using Result = decltype(call(*cache));
    if (!cache) return static_cast<Result>(closed);
    std::lock_guard<std::mutex> turn(cache->turn);
    return call(*cache);
}

// Likewise, and tells what the cache holds afterwards, also where the call was refused.
template <class Call>
static int with_stats(int64_t handle, kvq_stats* stats, Call&& call) {
    return with_cache(handle, [&](Cache& cache) {
        const int status = call(cache);
        if (stats) cache.stats(*stats);
        return status ? status : cache.device_status();
    });
}

static const char* device_failed() {
    static thread_local std::string text;
    const std::string why = kvq::Device::failure();
    text = "the device failed" + (why.empty() ? why : " (" + why + ")") +
           ", and what it held is lost; open the model again";
    return text.c_str();
}

static bool attends(const kvq::Device& device, int head_dim) {
    const auto& own = device.facts().head_dims;
    return head_dim && std::find(std::begin(own), std::end(own), head_dim) != std::end(own);
}

extern "C" {

int kvq_regions_of(const kvq_config* config, int32_t columns, int64_t pool_bytes, int64_t* regions) {
    if (columns < 0 || pool_bytes < 0) return KVQ_BAD_ARGUMENT;
    return kvq::size_regions(*config, columns, pool_bytes, regions);
}

int kvq_layout_of(const kvq_config* config, int64_t budget_bytes, int32_t columns,
                  kvq_layout* layout) {
    kvq::Layout full{};
    const int status = kvq::lay_out(*config, budget_bytes, columns, full);
    *layout = full.sizes;
    return status;
}

int kvq_device_open(const char* path, int32_t* device, kvq_device* facts) {
    std::string why;
    *facts = {};
    *device = kvq::Device::open(path, why);
    std::snprintf(facts->reason, sizeof facts->reason, "%s", why.c_str());
    if (!*device) return KVQ_DEVICE_FAILED;
    const kvq_cuda_device& found = kvq::Device::find(*device)->facts();
    std::copy(found.name, found.name + sizeof found.name, facts->name);
    facts->memory_bytes = found.memory_bytes, facts->free_bytes = found.free_bytes;
    facts->stream = reinterpret_cast<int64_t>(found.stream);
    facts->capability = found.capability;
    std::copy(std::begin(found.head_dims), std::end(found.head_dims), facts->head_dims);
    return KVQ_OK;
}
int kvq_device_best(int32_t device, const float* logits, int32_t rows, int32_t columns,
                    int32_t count, int32_t* places, float* values) {
    kvq::Device* there = kvq::Device::find(device);
    if (!there || rows < 1 || count < 1) return KVQ_BAD_ARGUMENT;
    return there->best(logits, rows, columns, count, places, values);
}
int kvq_cache_open(const kvq_config* config, int64_t budget_bytes, int32_t columns,
                   const uint8_t* forms, int32_t device, int32_t resident_columns, int32_t file,
                   int64_t file_bytes, int64_t* handle) {
    kvq::Layout layout{};
    if (const int status = kvq::lay_out(*config, budget_bytes, columns, layout)) return status;
    if (!kvq::forms_fit(*config, forms)) return KVQ_BAD_ARGUMENT;
    kvq::Device* there = kvq::Device::find(device);
    if (device && (!there || !attends(*there, config->head_dim) || config->conv_layers))
        return KVQ_BAD_ARGUMENT;
    if (resident_columns < 0 || (resident_columns && !there) ||
        (resident_columns && resident_columns >= layout.sizes.max_columns))
        return KVQ_BAD_ARGUMENT;
    if (file_bytes < 0 || file_bytes > layout.sizes.pool_bytes || (file_bytes && there))
        return KVQ_BAD_ARGUMENT;
    if (file_bytes && !kvq::platform::forgets()) return KVQ_NOT_MAPPED;
    // Kernels of a device copy 16 bytes at a time, and granules end where the pool does. No page has
    // another multiple, so none is lost.
    if (there) layout.sizes.pool_bytes -= layout.sizes.pool_bytes % kvq::kDeviceAlign;
    std::shared_ptr<Cache> cache =
        Cache::open(*config, layout, budget_bytes, forms, there, resident_columns, file, file_bytes);
    if (!cache) return KVQ_NO_MEMORY;
    *handle = kvq::Handles<Cache>::all().add(std::move(cache));
    return KVQ_OK;
}

int kvq_cache_close(int64_t handle) {
    return kvq::Handles<Cache>::all().erase(handle) ? KVQ_OK : KVQ_CLOSED;
}

int kvq_cache_stats(int64_t handle, kvq_stats* stats) {
    return with_cache(handle, [&](Cache& cache) -> int { return cache.stats(*stats), KVQ_OK; });
}
int kvq_cache_read(int64_t handle, const kvq_read* rule) {
    return with_cache(handle, [&](Cache& cache) { return cache.read_by(*rule); });
}
int kvq_cache_feed_back(int64_t handle, const float* feedback) {
    return with_cache(handle, [&](Cache& cache) { return cache.feed_back(feedback); });
}
int kvq_cache_missing(int64_t handle, int32_t tokens, int64_t* bytes, int32_t* columns) {
    return with_cache(handle,
                      [&](Cache& cache) { return cache.missing(tokens, *bytes, *columns); });
}
int kvq_cache_begin(int64_t handle, int32_t tokens, const int32_t* parents, int32_t view,
                    int32_t at, const uint8_t* silent) {
    return with_cache(handle, [&](Cache& cache) {
        return cache.begin(tokens, parents, view, at, silent);
    });
}
int kvq_cache_attend(int64_t handle, const kvq_attention* attention, int32_t tokens,
                     const float* qkv, const int64_t* positions, const float* inv_freq,
                     const float* q_norm, const float* k_norm, const float* sink_logits,
                     float* out) {
    const kvq::Inputs inputs{tokens, qkv, positions, inv_freq, q_norm, k_norm, sink_logits, out};
    return with_cache(handle, [&](Cache& cache) { return cache.attend(*attention, inputs); });
}
int kvq_cache_convolve(int64_t handle, int32_t layer, int32_t tokens, const float* bcx,
                       const float* weight, float* out) {
    return with_cache(handle, [&](Cache& cache) {
        return cache.convolve(layer, tokens, bcx, weight, out, kvq::kSerial);
    });
}
int kvq_cache_recur(int64_t handle, int32_t layer, int32_t tokens, const float* rows,
                    const float* gates, const float* conv, const float* decay,
                    const float* dt_bias, const float* scale, float norm_eps, float* out) {
    const kvq::DeltaInputs in{layer, tokens,  rows,  gates,    conv,
                              decay, dt_bias, scale, norm_eps, out};
    return with_cache(handle, [&](Cache& cache) { return cache.recur(in, kvq::kSerial); });
}
int kvq_cache_look(int64_t handle, const kvq_attention* attention, int32_t queries,
                   const int64_t* rows, const float* q, const float* inv_freq, const float* q_norm,
                   float* out) {
    const kvq::Inputs inputs{queries, q, nullptr, inv_freq, q_norm, nullptr, nullptr, out, rows};
    return with_cache(handle, [&](Cache& cache) { return cache.look(*attention, inputs); });
}
int kvq_cache_commit(int64_t handle, const int32_t* rows, int32_t count, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.commit(rows, count); });
}
int kvq_cache_rewind(int64_t handle, int32_t rows, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.rewind(rows); });
}
int kvq_cache_trim(int64_t handle, int32_t tokens, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.trim(tokens); });
}
int kvq_cache_mark(int64_t handle, int32_t tokens) {
    return with_cache(handle, [&](Cache& cache) { return cache.mark(tokens); });
}
int kvq_cache_edit(int64_t handle, int32_t start, int32_t stop, int32_t count, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.edit(start, stop, count); });
}
int kvq_cache_demote(int64_t handle, const kvq_action* actions, int32_t count, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.demote(actions, count); });
}
int kvq_cache_demote_entering(int64_t handle, const uint8_t* widths) {
    return with_cache(handle, [&](Cache& cache) { return cache.demote_entering(widths); });
}
int kvq_cache_shift_sinks(int64_t handle, int32_t delta) {
    return with_cache(handle, [&](Cache& cache) { return cache.shift_sinks(delta); });
}
int kvq_cache_shift(int64_t handle, int32_t column, int32_t delta) {
    return with_cache(handle, [&](Cache& cache) { return cache.shift(column, delta); });
}
int kvq_cache_mask(int64_t handle, int32_t column, uint64_t mask) {
    return with_cache(handle, [&](Cache& cache) { return cache.mask(column, mask); });
}
int kvq_cache_entering(int64_t handle, uint8_t* widths) {
    return with_cache(handle, [&](Cache& cache) -> int { return cache.entering(widths), KVQ_OK; });
}

int kvq_cache_columns(int64_t handle, int32_t columns, int64_t* facts, uint8_t* widths) {
    return with_cache(handle, [&](Cache& cache) { return cache.columns(columns, facts, widths); });
}
int kvq_cache_views(int64_t handle, int32_t views, int64_t* facts) {
    return with_cache(handle, [&](Cache& cache) { return cache.views(views, facts); });
}
int kvq_cache_places(int64_t handle, int32_t rows, int64_t* places) {
    return with_cache(handle, [&](Cache& cache) { return cache.places(rows, places); });
}
int kvq_cache_evidence(int64_t handle, int32_t tokens, int32_t columns, float* facts,
                       float* queries) {
    return with_cache(
        handle, [&](Cache& cache) { return cache.evidence(tokens, columns, facts, queries); });
}
int kvq_cache_constants(int64_t handle, int32_t layer, int32_t columns, float* keys,
                        float* values) {
    return with_cache(
        handle, [&](Cache& cache) { return cache.constants(layer, columns, keys, values); });
}
int kvq_cache_key_squares(int64_t handle, int32_t layer, int32_t columns, float* squares) {
    return with_cache(handle,
                      [&](Cache& cache) { return cache.key_squares(layer, columns, squares); });
}
int64_t kvq_cache_page(int64_t handle, int32_t layer, int32_t head, int32_t column,
                       uint8_t* bytes) {
    return with_cache(
        handle, [&](Cache& cache) { return cache.page(layer, head, column, bytes); }, -1);
}
int kvq_cache_tail(int64_t handle, int32_t layer, int32_t head, int32_t rows, uint16_t* k,
                   uint16_t* v, int32_t* positions) {
    return with_cache(handle,
                      [&](Cache& cache) { return cache.tail(layer, head, rows, k, v, positions); });
}
int64_t kvq_cache_state_bytes(int64_t handle) {
    return with_cache(handle, [&](Cache& cache) { return cache.state_bytes(); }, -1);
}
int kvq_cache_save(int64_t handle, uint8_t* bytes, int64_t count) {
    return with_cache(handle, [&](Cache& cache) { return cache.save(bytes, count); });
}
int kvq_cache_load(int64_t handle, const uint8_t* bytes, int64_t count, kvq_stats* stats) {
    return with_stats(handle, stats, [&](Cache& cache) { return cache.load(bytes, count); });
}

int kvq_pack(int32_t values, int32_t channels, const float* x, int32_t head_dim, int32_t bits,
             const float* feedback, uint8_t* planes, uint8_t* grid) {
    if (head_dim < 16 || head_dim > kvq::kMaxHeadDim || head_dim % 16 || !kvq::valid_width(bits) ||
        (feedback && !channels))
        return KVQ_BAD_ARGUMENT;
    for (int i = 0; i < kvq::kPageTokens * head_dim; i++)
        if (!std::isfinite(x[i])) return KVQ_NOT_FINITE;
    const kvq::Kernels& kernel = kvq::kernels();
    std::vector<float> own(x, x + kvq::kPageTokens * head_dim);
    const bool packed =
        kernel.pack(own.data(), head_dim, values, channels, bits, feedback, planes, grid);
    if (packed && kvq::halves_plane(bits))
        kernel.narrow(planes + kvq::halved(bits) * kvq::granule_bytes(head_dim), head_dim);
    return packed ? KVQ_OK : KVQ_NOT_FINITE;
}

const char* kvq_status_text(int status) {
    switch (status) {
        case KVQ_OK:
            return "done";
        case KVQ_SHORT:
            return "the budget has no room for these tokens";
        case KVQ_BAD_ARGUMENT:
            return "an argument does not fit the cache: a shape, layer, row or position";
        case KVQ_NOT_FINITE:
            return "a key or value is not finite in float16, so it cannot be cached";
        case KVQ_BAD_STATE:
            return "begin, attend and commit were called out of order, begin() was not called for "
                   "this "
                   "many tokens, or an earlier chunk failed";
        case KVQ_NO_MEMORY:
            return "there is no memory for the arena, or on a device for a pass";
        case KVQ_TOO_SMALL:
            return "the budget is too small";
        case KVQ_DEVICE_FAILED:
            return device_failed();
        case KVQ_CLOSED:
            return "no open cache has this handle: it was closed";
        case KVQ_NOT_MAPPED:
            return "what is to leave memory is no view of a file here, or this system has no such views";
        default:
            return "a status this version does not know";
    }
}
int kvq_abi(void) {
    return KVQ_ABI;
}
const char* kvq_isa(void) {
    return kvq::kernels().name;
}
const char* kvq_isa_available(void) {
    return kvq::available_kernels();
}
const char* kvq_isa_refused(void) {
    return kvq::refused_kernels();
}
int kvq_isa_select(const char* name) {
    return kvq::select_kernels(name) ? KVQ_OK : KVQ_BAD_ARGUMENT;
}

}  // extern "C"
