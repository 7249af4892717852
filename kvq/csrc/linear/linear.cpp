// Products and embeddings over a pool of threads: rounds the input once, divides panels among
// threads.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "../kernels/kernels.h"
#include "../platform.h"
#include "../tiles.h"
#include "kept_room.h"

namespace kvq {
namespace {

// A unit of work reads about this much of the weights: enough to hide what handing it out costs.
constexpr size_t kUnitBytesLow = 32 << 10, kUnitBytesHigh = 512 << 10;
constexpr size_t kUnits = 64;
constexpr int kRowBlock = 48;
static_assert(kRowBlock % kMostTileRows == 0, "rows fill tiles");
static_assert(kRowBlock % kOctetRows == 0, "each call of multiply begins with an octet");
// Rows of one call of multiply at most, which unpacks a panel's codes for all of them.
constexpr int kCallRows = 4 * kRowBlock;
// Far enough ahead to hide a miss behind sixteen rows of work: a matter of memory's delay, not of the
// caches, and as good or better than 2, 4 and 16 KiB on an AMD and on an Intel processor.
constexpr int64_t kAheadBytes = 8 << 10;
// Input values from which on preparing rows is worth a dispatch of its own.
constexpr size_t kPrepareValues = 64 << 10;
constexpr int kPrepareRows = 16;
static_assert(kPrepareRows % kOctetRows == 0, "no two units prepare rows of one octet");
// As reference_linear.py names them.
constexpr int kFirstPanels = 128;
constexpr float kMargin = 1.5f;

std::atomic<int64_t> g_bytes_read{0};

template <class T>
T* grown(std::vector<T>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

// The same, of whole vectors: none of them lies in two lines of a cache.
template <class T>
T* aligned(std::vector<T>& buffer, size_t count) {
    constexpr size_t kLine = 64;
    const auto start = reinterpret_cast<uintptr_t>(grown(buffer, count + kLine / sizeof(T)));
    return reinterpret_cast<T*>((start + kLine - 1) / kLine * kLine);
}

// What products keep between them.
struct Scratch {
    std::vector<int8_t> levels, octet_levels;
    std::vector<int16_t> sub_sums, octet_sub_sums;
    std::vector<float> scales, sums, octet_scales, octet_sums, rows, tops, sorted, deviations;
    std::vector<uint8_t> exact, more;
};

// Units of work in lanes, one per core: a lane's units lie next to each other, so that what one
// fetches ahead is what the same core reads next. Who is done with a lane helps with the others.
class Lanes {
public:
    explicit Lanes(size_t units)
        : lanes_(std::min<size_t>({units, kMostLanes, cores()})) {
        for (size_t lane = 0; lane < lanes_; lane++) {
            next_[lane].place.store(units * lane / lanes_, std::memory_order_relaxed);
            next_[lane].end = units * (lane + 1) / lanes_;
        }
    }
    size_t count() const { return lanes_; }

    template <class Work>
    void run(size_t first, Work& work) {
        for (size_t i = 0; i < lanes_; i++) {
            Lane& lane = next_[(first + i) % lanes_];
            for (size_t unit; (unit = lane.place.fetch_add(1)) < lane.end;) work(unit);
        }
    }

private:
    static constexpr size_t kMostLanes = 32;
    struct alignas(64) Lane {
        std::atomic<size_t> place;
        size_t end;
    };
    static size_t cores() {
        static const size_t count = std::max(1u, std::thread::hardware_concurrency());
        return count;
    }

    const size_t lanes_;
    Lane next_[kMostLanes];
};

template <class Work>
void dispatch(const Parallel& pool, size_t count, Work work) {
    if (count == 0) return;
    if (count == 1) return work(0);
    Lanes lanes(count);
    each(pool, lanes.count(), [&](size_t lane) { lanes.run(lane, work); });
}

class Product {
public:
    Product(const kvq_linear& call, const Parallel& pool, Scratch& scratch)
        : call_(call),
          pool_(pool),
          layout_(call.matrix),
          table_(*kernels().linear),
          scratch_(scratch),
          first_panel_(call.first_row == call.matrix.rows ? layout_.panels
                                                          : call.first_row / kPanelRows) {
        const size_t tokens = call.tokens;
        rounded_ = {grown(scratch.levels, tokens * layout_.padded_columns()),
                    grown(scratch.scales, tokens * layout_.blocks),
                    grown(scratch.sums, tokens * layout_.blocks), false,
                    grown(scratch.sub_sums, tokens * layout_.subs())};
        const bool wide = layout_.sub && layout_.bits == 8;
        if (!table_.octets_from || call.tokens < table_.octets_from || wide) return;
        const size_t rows = (tokens + kOctetRows - 1) / kOctetRows * kOctetRows;
        octets_ = {aligned(scratch.octet_levels, rows * layout_.padded_columns()),
                   aligned(scratch.octet_scales, rows * layout_.blocks),
                   aligned(scratch.octet_sums, rows * layout_.blocks), true,
                   aligned(scratch.octet_sub_sums, rows * layout_.subs())};
    }

    void run() {
        skip_rows();
        if (first_panel_ == layout_.panels) return;
        prepare();
        const bool two_passes = call_.exact_rows && first_exact() < layout_.panels &&
                                layout_.bits > 4 && call_.view == KVQ_FULL;
        if (!two_passes) return multiply_all(call_.view, nullptr);
        float* tops = grown(scratch_.tops, size_t(call_.tokens) * layout_.panels);
        multiply_all(KVQ_HI, tops);
        multiply_best(tops);
    }

private:
    int first_exact() const { return std::max(call_.exact_rows, kFirstPanels); }

    // The results of rows whose weights are not read.
    void skip_rows() {
        const size_t bytes = sizeof(float) * call_.first_row;
        for (int t = 0; t < call_.tokens && bytes; t++) {
            const size_t at = size_t(t) * call_.matrix.rows;
            if (call_.residual)
                std::memcpy(call_.out + at, call_.residual + at, bytes);
            else
                std::memset(call_.out + at, 0, bytes);
        }
    }

    // Norm or activation, then rounding, of every row.
    void prepare() {
        const int columns = call_.matrix.columns;
        const bool alone = size_t(call_.tokens) * columns < kPrepareValues;
        const int step = alone ? call_.tokens : kPrepareRows;
        const size_t units = (call_.tokens + step - 1) / step;
        float* rows = grown(scratch_.rows, units * columns);
        dispatch(pool_, units, [=](size_t unit) {
            const int end = std::min(int(unit + 1) * step, call_.tokens);
            for (int t = int(unit) * step; t < end; t++) prepare_row(t, rows + unit * columns);
            for (int t = int(unit) * step; octets_.octets && t < end; t += kOctetRows) lay_octet(t);
        });
    }

    // Rows t to t + 8 as an octet; where there are fewer, nobody asks what comes of the others.
    void lay_octet(int t) {
        const int rows = std::min(kOctetRows, call_.tokens - t), blocks = layout_.blocks;
        const size_t columns = layout_.padded_columns();
        int8_t* levels = octets_.levels + t * columns;
        const size_t sums = size_t(t) * blocks;
        for (int r = 0; r < rows; r++) {
            const int8_t* row = rounded_.levels + (t + r) * columns;
            for (size_t c = 0; c < columns; c += 4)
                std::memcpy(levels + kOctetRows * c + 4 * r, row + c, 4);
            for (int b = 0; b < blocks; b++) {
                octets_.scales[sums + kOctetRows * b + r] = rounded_.scales[sums + r * blocks + b];
                octets_.sums[sums + kOctetRows * b + r] = rounded_.sums[sums + r * blocks + b];
            }
            for (size_t i = 0; i < layout_.subs(); i += 2)
                std::memcpy(octets_.sub_sums + t * layout_.subs() + kOctetRows * i + 2 * r,
                            rounded_.sub_sums + (t + r) * layout_.subs() + i, 4);
        }
    }

    void prepare_row(int t, float* room) {
        const int columns = call_.matrix.columns;
        const float* x = call_.x + size_t(t) * columns * (call_.activation ? 2 : 1);
        if (call_.activation) {
            table_.gate_row(x, x + columns, columns, call_.activation, room);
        } else if (call_.norm) {
            table_.norm_row(x, call_.norm, columns, call_.norm_eps, room);
        }
        table_.round_row(layout_, call_.activation || call_.norm ? room : x, columns, rounded_, t);
    }

    void multiply_all(int view, float* tops) {
        const int begin = first_panel_, left = layout_.panels - begin;
        const size_t bytes = layout_.view_bytes(view), all = bytes * left;
        const size_t unit_bytes = std::clamp(all / kUnits, kUnitBytesLow, kUnitBytesHigh);
        const int panels = std::max<int>(1, int(unit_bytes / bytes));
        const int fit = int(size_t(built_in().row_bytes) / layout_.padded_columns());
        const int rows = std::max(fit / kRowBlock * kRowBlock, kRowBlock);
        const size_t columns = (left + panels - 1) / panels;
        const size_t blocks = (call_.tokens + rows - 1) / rows;
        dispatch(pool_, blocks * columns, [=](size_t unit) {
            const int first = int(unit / columns) * rows,
                      from = begin + int(unit % columns) * panels;
            const int to = std::min(from + panels, layout_.panels);
            const int count = std::min(rows, call_.tokens - first);
            const RoundedRows& x = octets_.octets ? octets_ : rounded_;
            for (int p = from; p < to; p++) multiply(view, p, x, first, count, tops, nullptr);
            g_bytes_read.fetch_add(int64_t(bytes * (to - from)), std::memory_order_relaxed);
        });
    }

    void multiply(int view, int panel, const RoundedRows& x, int first, int count, float* tops,
                  float* deviations) {
        alignas(64) float out[kCallRows * kPanelRows];
        const uint8_t* bytes = call_.panels + panel * layout_.panel_bytes;
        for (int done = 0; done < count; done += kCallRows) {
            const int rows = std::min(kCallRows, count - done);
            table_.multiply(layout_, view, bytes, x, first + done, rows, out);
            for (int m = 0; m < rows; m++) {
                const int t = first + done + m;
                const size_t at = size_t(t) * layout_.panels + panel;
                const float top = finish(out + m * kPanelRows, t, panel, tops != nullptr,
                                         deviations ? deviations + at : nullptr);
                if (tops) tops[at] = top;
            }
        }
    }

    // Adds bias and residual to a panel's sixteen results; returns the largest, NaN aside, where
    // `ranked`. Given a `deviation`, sets it to the largest change of what the results were.
    float finish(float* y, int t, int panel, bool ranked, float* deviation) {
        const int row = panel * kPanelRows;
        const int begin = std::max(0, call_.first_row - row);
        const int end = std::min(kPanelRows, call_.matrix.rows - row);
        float* out = call_.out + size_t(t) * call_.matrix.rows + row;
        // Vectors, where the compiler knows how many there are.
        if (begin == 0 && end == kPanelRows)
            put(y, out, row, 0, kPanelRows, deviation);
        else
            put(y, out, row, begin, end, deviation);
        return ranked ? largest(y, end) : 0.0f;
    }

    inline __attribute__((always_inline)) void put(float* y, float* out, int row, int begin, int end,
                                                   float* deviation) const {
        if (call_.bias)
            for (int i = begin; i < end; i++) y[i] += call_.bias[row + i];
        if (call_.residual) {
            const float* residual = call_.residual + (out - call_.out);
            for (int i = begin; i < end; i++) y[i] += residual[i];
        }
        if (deviation) {
            *deviation = 0;
            for (int i = begin; i < end; i++)
                *deviation = std::max(*deviation, std::fabs(y[i] - out[i]));
        }
        std::memcpy(out + begin, y + begin, sizeof(float) * (end - begin));
    }

    // Of a panel's first `count`: four at a time, which the compiler turns into vectors.
    static float largest(const float* y, int count) {
        constexpr float kLeast = -std::numeric_limits<float>::infinity();
        float top[4] = {kLeast, kLeast, kLeast, kLeast};
        for (int i = 0; i + 4 <= count; i += 4)
            for (int j = 0; j < 4; j++) top[j] = y[i + j] > top[j] ? y[i + j] : top[j];
        for (int i = count & ~3; i < count; i++) top[0] = y[i] > top[0] ? y[i] : top[0];
        for (int j = 1; j < 4; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
        return top[0];
    }

    // Reads both planes of every token's best panels, then of those that could still hold one of its
    // exact_rows largest results if the upper plane errs there as it did in the ones read.
    void multiply_best(const float* tops) {
        const size_t panels = layout_.panels, all = call_.tokens * panels;
        uint8_t* exact = grown(scratch_.exact, all);
        uint8_t* more = grown(scratch_.more, all);
        float* deviations = grown(scratch_.deviations, all);
        std::memset(exact, 0, all);
        for (int t = 0; t < call_.tokens; t++) mark_best(tops + t * panels, exact + t * panels);
        multiply_marked(exact, deviations);
        for (int t = 0; t < call_.tokens; t++)
            mark_more(tops + t * panels, deviations + t * panels, exact + t * panels, t,
                      more + t * panels);
        multiply_marked(more, nullptr);
    }

    void multiply_marked(const uint8_t* marks, float* deviations) {
        const size_t panels = layout_.panels;
        std::vector<int32_t> wanted;
        for (size_t p = 0; p < panels; p++)
            for (int t = 0; t < call_.tokens; t++)
                if (marks[t * panels + p]) {
                    wanted.push_back(int32_t(p));
                    break;
                }
        const int32_t* list = wanted.data();
        const size_t step = std::max<size_t>(1, kUnitBytesLow / layout_.panel_bytes);
        const size_t units = (wanted.size() + step - 1) / step, count = wanted.size();
        dispatch(pool_, units, [=](size_t unit) {
            const size_t end = std::min(count, (unit + 1) * step);
            for (size_t i = unit * step; i < end; i++)
                for (int t = 0; t < call_.tokens; t++)
                    if (marks[t * panels + list[i]])
                        multiply(KVQ_FULL, list[i], rounded_, t, 1, nullptr, deviations);
            g_bytes_read.fetch_add(int64_t(layout_.panel_bytes * (end - unit * step)),
                                   std::memory_order_relaxed);
        });
    }

    void mark_more(const float* tops, const float* deviations, const uint8_t* exact, int t,
                   uint8_t* marks) {
        const int panels = layout_.panels, rows = call_.matrix.rows;
        float* sorted = grown(scratch_.sorted, size_t(panels) * kPanelRows);
        float deviation = 0;
        size_t count = 0;
        for (int p = 0; p < panels; p++) {
            if (!exact[p]) continue;
            deviation = std::max(deviation, deviations[p]);
            const int end = std::min(kPanelRows, rows - p * kPanelRows);
            const float* from = call_.out + size_t(t) * rows + p * kPanelRows;
            count = size_t(std::copy(from, from + end, sorted + count) - sorted);
        }
        const size_t place = std::min<size_t>(count, call_.exact_rows) - 1;
        std::nth_element(sorted, sorted + place, sorted + count, std::greater<float>());
        const float least = sorted[place], margin = kMargin * deviation;
        for (int p = 0; p < panels; p++) marks[p] = !exact[p] && tops[p] + margin >= least;
    }

    // Sets marks of the first_exact() largest tops; of equal ones the first.
    void mark_best(const float* tops, uint8_t* marks) {
        const int panels = layout_.panels, count = first_exact();
        float* sorted = grown(scratch_.sorted, panels);
        std::copy(tops, tops + panels, sorted);
        std::nth_element(sorted, sorted + count - 1, sorted + panels, std::greater<float>());
        const float least = sorted[count - 1];
        int room =
            count - int(std::count_if(tops, tops + panels, [=](float x) { return x > least; }));
        for (int p = 0; p < panels; p++)
            marks[p] = tops[p] > least || (tops[p] == least && room-- > 0);
    }

    const kvq_linear& call_;
    const Parallel& pool_;
    const PanelLayout layout_;
    const LinearKernels& table_;
    Scratch& scratch_;
    const int first_panel_;
    RoundedRows rounded_{}, octets_{};  // octets_ where they are faster
};

}  // namespace

kvq_built_in built_in(const kvq_processor& processor) {
    // Fetched into the second level alone, what one row reads comes up to 1.5 times as fast on AMD's
    // processors, whose design Hygon's is: more lines can be on their way to it than to the first
    // level. Nobody has measured others.
    const auto made_by = [&](const char* maker) {
        return !std::strncmp(processor.maker, maker, sizeof processor.maker);
    };
    kvq_built_in found{};
    found.second_level = made_by("AuthenticAMD") || made_by("HygonGenuine");
    found.ahead_bytes = kAheadBytes;
    constexpr int64_t kUsual = 512 << 10;
    const int64_t cache = processor.level2_bytes > 0 ? processor.level2_bytes : kUsual;
    // What is fetched ahead must not push out what else a core works on.
    found.panel_bytes = std::min<int64_t>(32 << 10, cache / 16);
    // A quarter; of small caches up to half, or rows would be too few. What would make more than
    // 512 KiB is a cache that cores share, or that a virtual machine makes up.
    found.row_bytes =
        std::clamp<int64_t>(cache / 4, std::min<int64_t>(256 << 10, cache / 2), 512 << 10);
    return found;
}

const kvq_built_in& built_in() {
    static const kvq_built_in here = [] {
        kvq_processor processor;
        kvq_processor_of(&processor);
        return built_in(processor);
    }();
    return here;
}

Prefetching::Prefetching() : second_level(built_in().second_level) {}

Prefetching& prefetching() {
    static Prefetching used;
    return used;
}

int run_linear(const kvq_linear& call, const Parallel& pool) {
    const bool added = call.bias || call.residual || call.first_row;
    if (!is_matrix(call.matrix) || call.tokens < 0 || call.activation < KVQ_PLAIN ||
        call.activation > KVQ_CLAMPED_SWIGLU || (call.view != KVQ_FULL && call.view != KVQ_HI) ||
        (call.activation && call.norm) || call.first_row < 0 || call.first_row > call.matrix.rows ||
        call.exact_rows < 0 || (call.exact_rows && added))
        return KVQ_BAD_ARGUMENT;
    if (call.tokens == 0) return KVQ_OK;
    try {
        KeptRoom<Scratch> scratch;
        Product(call, pool, scratch.room()).run();
    } catch (const std::bad_alloc&) {
        return KVQ_NO_MEMORY;
    }
    return KVQ_OK;
}

int run_embed(const kvq_embed& call) {
    if (!is_matrix(call.matrix) || call.tokens < 0 || call.mixed < 0) return KVQ_BAD_ARGUMENT;
    const PanelLayout layout(call.matrix);
    const int64_t columns = call.matrix.columns, entries = int64_t(call.tokens) * call.mixed;
    for (int64_t i = 0; i < entries; i++)
        if (call.ids[i] < 0 || call.ids[i] >= call.matrix.rows) return KVQ_BAD_ARGUMENT;
    std::memset(call.out, 0, sizeof(float) * call.tokens * columns);
    for (int64_t i = 0; i < entries; i++) {
        const int64_t id = call.ids[i];
        kernels().linear->add_row(layout, call.panels + id / kPanelRows * layout.panel_bytes,
                         int(id % kPanelRows), call.weights[i], call.matrix.columns,
                         call.out + i / call.mixed * columns);
    }
    return KVQ_OK;
}

}  // namespace kvq

extern "C" {

int kvq_linear_run(const kvq_linear* call) {
    return kvq::run_linear(*call, kvq::kSerial);
}

int kvq_embed_run(const kvq_embed* call) {
    return kvq::run_embed(*call);
}

int kvq_tune(int32_t second_level, int64_t ahead_bytes) {
    if (second_level < -1 || second_level > 1 || ahead_bytes < 0 || ahead_bytes > KVQ_MOST_AHEAD)
        return KVQ_BAD_ARGUMENT;
    kvq::prefetching().second_level =
        second_level < 0 ? kvq::built_in().second_level : second_level == 1;
    kvq::prefetching().ahead = static_cast<size_t>(ahead_bytes);
    return KVQ_OK;
}

int kvq_processor_of(kvq_processor* here) {
    const kvq::platform::Processor found = kvq::platform::processor();
    *here = {};
    std::memcpy(here->maker, found.maker, sizeof found.maker);
    here->level2_bytes = found.level2_bytes;
    return KVQ_OK;
}

int kvq_built_in_of(const kvq_processor* processor, kvq_built_in* out) {
    *out = kvq::built_in(*processor);
    return KVQ_OK;
}

int64_t kvq_weight_bytes_read() {
    return kvq::g_bytes_read.load();
}

}  // extern "C"
