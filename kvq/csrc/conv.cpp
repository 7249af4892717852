#include "conv.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

namespace kvq {
namespace {

// Channels that are computed together, over all rows.
constexpr int kChannels = 256;

}  // namespace

const float* Convolutions::seen(const Tail& tail, int layer, int row, int back,
                                const float* own) const {
    const BranchState& b = tail.branch();
    while (back && row >= 0) row = b.chain ? row - 1 : arena_.branch[row].parent, back--;
    if (row >= tail.first_row()) return own + int64_t{row - tail.first_row()} * config().conv_width;
    if (row >= 0) return branch(layer, row);
    const int token = arena_.state->tokens - 1 - back;
    return token >= 0 ? newest(layer, token) : nullptr;
}

// Of `count` channels of the pass's products.
void Convolutions::remember(const Tail& tail, int layer, int tokens, const float* own, int channel,
                            int count) const {
    const auto keep = [&](int t, float* to) {
        std::memcpy(to + channel, own + int64_t{t} * config().conv_width + channel,
                    sizeof(float) * static_cast<size_t>(count));
    };
    const int kept = std::min(tokens, config().draft_tokens - tail.first_row());
    for (int t = 0; t < kept; t++) keep(t, branch(layer, tail.first_row() + t));
    if (!tail.is_chunk()) return;
    for (int t = first_ending(tokens); t < tokens; t++)
        keep(t, ending(layer, t - first_ending(tokens)));
    const int held = arena_.state->tokens;
    const int wanted = wanted_within(state(), held, held + tokens) - held;
    if (wanted <= 0) return;
    for (int i = 0; i < before(); i++)
        if (wanted - before() + i >= 0) keep(wanted - before() + i, noted(layer, i));
}

int Convolutions::run(const Tail& tail, int layer, int tokens, const float* bcx,
                      const float* weight, float* out, const Parallel& parallel) {
    BranchState& b = arena_.state->branch;
    if (tokens < 1 || tokens != b.pass_rows) return KVQ_BAD_STATE;
    if (layer < 0 || layer >= config().conv_layers) return KVQ_BAD_ARGUMENT;
    const int64_t width = config().conv_width;
    const int taps = config().conv_taps;
    std::atomic<bool> all_finite{true};
    const auto unit = [&](size_t unit) {
        const int first = static_cast<int>(unit) * kChannels;
        const int count = static_cast<int>(std::min<int64_t>(kChannels, width - first));
        bool finite = true;
        for (int64_t t = 0; t < tokens; t++) {
            const float *b = bcx + 3 * t * width + first, *x = b + 2 * width;
            float* own = out + t * width + first;
            for (int c = 0; c < count; c++) {
                own[c] = b[c] * x[c];
                finite &= std::isfinite(own[c]);
            }
        }
        if (!finite) all_finite = false;
        remember(tail, layer, tokens, out, first, count);
        float weights[kMostTaps][kChannels], total[kChannels];
        for (int c = 0; c < count; c++)
            for (int k = 0; k < taps; k++) weights[k][c] = weight[(first + c) * taps + k];
        // A row sees earlier ones, which are still products when the last is summed first.
        for (int64_t t = tokens - 1; t >= 0; t--) {
            float* own = out + t * width + first;
            for (int c = 0; c < count; c++) total[c] = own[c] * weights[taps - 1][c];
            for (int back = 1; back < taps; back++) {
                const int row = tail.first_row() + static_cast<int>(t);
                const float* from = seen(tail, layer, row, back, out);
                const float* tap = weights[taps - 1 - back];
                for (int c = 0; from && c < count; c++) total[c] += from[first + c] * tap[c];
                for (int c = 0; !from && c < count; c++) total[c] += 0.0f * tap[c];
            }
            const float* gate = bcx + (3 * t + 1) * width + first;
            for (int c = 0; c < count; c++) own[c] = gate[c] * total[c];
        }
    };
    // A few rows take less time than waking a thread.
    each(tokens < 16 ? kSerial : parallel,
         static_cast<size_t>((width + kChannels - 1) / kChannels), unit);
    if (!all_finite) return KVQ_NOT_FINITE;
    b.mixed += layer == b.mixed;
    return KVQ_OK;
}

template <class Source>
void Convolutions::take(int place, Source&& source) const {
    ConvState& s = state();
    if (s.checkpoints && places()[s.checkpoints - 1] >= place) return;
    if (s.checkpoints == config().conv_checkpoints) forget_one(place);
    for (int layer = 0; layer < config().conv_layers; layer++)
        for (int i = 0; i < before(); i++) {
            float* to = checkpoint(layer, s.checkpoints) + int64_t{i} * config().conv_width;
            const float* from = source(layer, i);
            if (from) std::memcpy(to, from, static_cast<size_t>(bytes_of(1)));
            else std::memset(to, 0, static_cast<size_t>(bytes_of(1)));
        }
    places()[s.checkpoints++] = place;
}

void Convolutions::forget_one(int coming) const {
    ConvState& s = state();
    const std::vector<int32_t> known(places(), places() + s.checkpoints);
    const int found =
        static_cast<int>(least_missed(s, known, coming, [](int place) { return place; }));
    const int behind = --s.checkpoints - found;
    std::copy_n(places() + found + 1, behind, places() + found);
    places()[s.checkpoints] = 0;
    for (int layer = 0; layer < config().conv_layers; layer++)
        std::memmove(checkpoint(layer, found), checkpoint(layer, found + 1),
                     static_cast<size_t>(bytes_of(int64_t{before()} * behind)));
}

void Convolutions::keep(const Tail& tail, const int32_t* rows, int count) {
    if (!any()) return;
    ConvState& s = state();
    const int tokens = arena_.state->tokens, stop = tokens + count;
    const bool chunk = tail.is_chunk() && count == tail.branch().rows;
    const auto committed = [&](int layer, int token) {
        return token >= 0 ? newest(layer, token) : nullptr;
    };
    const auto kept = [&](int layer, int i) {
        return chunk ? ending(layer, i - first_ending(count)) : branch(layer, rows ? rows[i] : i);
    };
    if (const int wanted = wanted_within(s, tokens, stop))
        take(wanted, [&](int layer, int i) -> const float* {
            const int token = wanted - before() + i;
            if (token < tokens) return committed(layer, token);
            return chunk ? noted(layer, i) : kept(layer, token - tokens);
        });
    for (int layer = 0; layer < config().conv_layers; layer++)
        for (int i = first_ending(count); i < count; i++)
            std::memcpy(newest(layer, tokens + i), kept(layer, i),
                        static_cast<size_t>(bytes_of(1)));
    s.held = std::min(held_rows(), s.held + count);
    if (count > config().draft_tokens || stop / kConvStepTokens > tokens / kConvStepTokens)
        take(stop - 1, [&](int layer, int i) { return committed(layer, stop - 1 - before() + i); });
}

// Places that are no part of the first `tokens` tokens.
void Convolutions::forget_behind(int tokens) const {
    ConvState& s = state();
    while (s.checkpoints && places()[s.checkpoints - 1] > tokens) places()[--s.checkpoints] = 0;
}

int Convolutions::trim(int tokens) {
    if (!any()) return tokens;
    ConvState& s = state();
    if (std::max(0, tokens - before()) >= first_held()) {
        s.held = tokens - first_held();
        forget_behind(tokens);
        return tokens;
    }
    want(s, tokens, conv_places(config()));
    forget_behind(tokens);
    const int last = s.checkpoints - 1, place = last < 0 ? 0 : places()[last];
    s.held = std::min(place, before());
    for (int layer = 0; layer < config().conv_layers; layer++)
        for (int i = before() - s.held; i < before(); i++)
            std::memcpy(newest(layer, place - before() + i),
                        checkpoint(layer, last) + int64_t{i} * config().conv_width,
                        static_cast<size_t>(bytes_of(1)));
    return place;
}

bool Convolutions::fits(const uint8_t* saved, int tokens) const {
    ConvState s;
    std::memcpy(&s, saved, sizeof s);
    if (s.held < std::min(tokens, before()) || s.held > std::min(tokens, held_rows()) ||
        !valid_wanted(s, config().context_tokens) || s.checkpoints < 0 ||
        s.checkpoints > config().conv_checkpoints)
        return false;
    int32_t last = 0;
    for (int i = 0; i < config().conv_checkpoints; i++) {
        int32_t place;
        std::memcpy(&place, saved + sizeof s + sizeof place * static_cast<size_t>(i), sizeof place);
        if (i < s.checkpoints ? place <= last || place > tokens : place != 0) return false;
        last = place;
    }
    return true;
}

}  // namespace kvq
