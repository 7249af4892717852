// The best of many: tokens of a vocabulary, and the panels of a head that are worth reading whole.
#pragma once
#include "linear.h"

namespace kvq::cuda {

constexpr int kMostBest = 256, kBestThreads = 512;

// What falls as x does and, of equal ones, as their places rise. Not a number: above all others, so
// that who is given the best sees it.
KVQ_DEVICE uint64_t order_key(float x, int place) {
    // Adding zero makes one zero of two, which compare alike.
    const uint32_t bits = x == x ? static_cast<uint32_t>(bits_of(add(x, 0.0f))) : 0x7fffffffu;
    const uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return static_cast<uint64_t>(rising) << 32 | (0xffffffffu - static_cast<uint32_t>(place));
}

struct SelectRoom {
    int counts[256];
    int digit, wanted;
};

// A number that exactly the `count` largest of key(0) to key(n - 1) reach, no two of which are
// alike: eight bits at a time, until all that share the bits so far are among them.
template <class Key>
KVQ_DEVICE uint64_t least_of_best(const Key& key, int n, int count, SelectRoom& room) {
    uint64_t prefix = 0;
    int wanted = count;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = thread_index(); i < 256; i += thread_count()) room.counts[i] = 0;
        sync_block();
        for (int i = thread_index(); i < n; i += thread_count()) {
            const uint64_t k = key(i);
            if (shift == 56 || k >> (shift + 8) == prefix)
                atomic_add(&room.counts[k >> shift & 255], 1);
        }
        sync_block();
        if (thread_index() == 0) {
            int digit = 255, left = wanted;
            for (; digit > 0 && room.counts[digit] < left; digit--) left -= room.counts[digit];
            room.digit = digit, room.wanted = left;
        }
        sync_block();
        prefix = prefix << 8 | static_cast<uint64_t>(room.digit);
        wanted = room.wanted;
        const bool all = room.counts[room.digit] == wanted;
        sync_block();
        if (all) return prefix << shift;
    }
    return prefix;
}

// A block per row of logits [rows, columns]: its `count` best, best first.
KVQ_KERNEL best(const float* logits, int columns, int count, int32_t* places, float* values) {
    KVQ_SHARED SelectRoom room;
    KVQ_SHARED uint64_t found[kMostBest];
    KVQ_SHARED int found_count;
    const int row = block_index().x;
    const float* x = logits + int64_t{row} * columns;
    const auto key = [&](int i) { return order_key(x[i], i); };
    const uint64_t least = least_of_best(key, columns, count, room);
    if (thread_index() == 0) found_count = 0;
    sync_block();
    for (int i = thread_index(); i < columns; i += thread_count())
        if (const uint64_t k = key(i); k >= least) found[atomic_add(&found_count, 1)] = k;
    sync_block();
    for (int i = thread_index(); i < count; i += thread_count()) {
        int rank = 0;
        for (int j = 0; j < count; j++) rank += found[j] > found[i];
        const int64_t at = int64_t{row} * count + rank;
        const int place = static_cast<int>(0xffffffffu - uint32_t(found[i]));
        places[at] = place, values[at] = x[place];
    }
}

// ---- a head in two passes ----------------------------------------------------------------------

// As kvq/reference/linear.py names them.
constexpr int kFirstPanels = 128;
constexpr float kMargin = 1.5f;

KVQ_DEVICE float panel_top(const kvq_cuda_linear& c, int token, int panel) {
    const int64_t row = int64_t{token} * c.rows;
    float top = -INFINITY;
    for (int i = panel * kPanelRows; i < min(c.rows, (panel + 1) * kPanelRows); i++)
        top = fmaxf(top, c.out[row + i]);
    return top;
}

// A block per token, whose results so far are of upper nibbles alone: marks the best panels.
KVQ_KERNEL mark_best(kvq_cuda_linear c) {
    KVQ_SHARED SelectRoom room;
    const int token = block_index().x, panels = panels_of(c);
    float* tops = c.panel_tops + int64_t{token} * panels;
    uint8_t* marks = c.marks + int64_t{token} * panels;
    for (int p = thread_index(); p < panels; p += thread_count()) tops[p] = panel_top(c, token, p);
    if (thread_index() == 0) c.deviations[token] = 0;
    sync_block();
    const auto key = [&](int p) { return order_key(tops[p], p); };
    const uint64_t least = least_of_best(key, panels, max(c.exact_rows, kFirstPanels), room);
    for (int p = thread_index(); p < panels; p += thread_count()) marks[p] = key(p) >= least;
}

// Likewise, once those are whole: marks the others that may yet reach the best rows.
KVQ_KERNEL mark_more(kvq_cuda_linear c) {
    KVQ_SHARED SelectRoom room;
    const int token = block_index().x, panels = panels_of(c);
    const float* tops = c.panel_tops + int64_t{token} * panels;
    uint8_t* marks = c.marks + int64_t{token} * panels;
    const float* out = c.out + int64_t{token} * c.rows;
    const auto key = [&](int row) {
        return marks[row / kPanelRows] ? order_key(out[row], row) : uint64_t{0};
    };
    const uint64_t key_of_least = least_of_best(key, c.rows, min(c.exact_rows, c.rows), room);
    KVQ_SHARED float some[kBestThreads];
    float least = INFINITY;
    for (int row = thread_index(); row < c.rows; row += thread_count())
        if (const uint64_t own = key(row); own && own >= key_of_least)
            least = fminf(least, out[row]);
    least = over_block(least, some, [](float a, float b) { return fminf(a, b); });
    for (int p = thread_index(); p < panels; p += thread_count())
        marks[p] = !marks[p] && add(tops[p], mul(kMargin, c.deviations[token])) >= least;
}

}  // namespace kvq::cuda
