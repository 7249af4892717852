// Replays calls of the C ABI that parity.py wrote, with the numpy reference's answers, and
// compares:
//
//     parity LIBRARY'S CASES
//
// Runs wherever the library does, so that kernels can be proved on processors without Python.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "kvq.h"

namespace {

// Numbers of parity.py's records.
enum Call {
    kPack,
    kOpen,
    kBegin,
    kAttend,
    kCommit,
    kRewind,
    kDemote,
    kShift,
    kMask,
    kEvidence,
    kPage,
    kLinear,
    kEmbed,
    kFeedBack,
    kCalls
};
constexpr const char* kNames[kCalls] = {"pack",   "open",   "begin", "attend", "commit",
                                        "rewind", "demote", "shift", "mask",   "evidence",
                                        "page",   "linear", "embed", "feed_back"};

// One call: its name and number, then arguments and answers as they lie in memory.
struct Record {
    std::string name;
    int32_t call = 0;
    std::vector<std::vector<char>> parts;

    template <class T>
    const T* array(size_t part) const {
        return reinterpret_cast<const T*>(parts[part].data());
    }
    // Null where nothing was given.
    template <class T>
    const T* optional(size_t part) const {
        return parts[part].empty() ? nullptr : array<T>(part);
    }
    template <class T>
    T value(size_t part, size_t i = 0) const {
        T out;
        std::memcpy(&out, parts[part].data() + i * sizeof(T), sizeof(T));
        return out;
    }
    int32_t number(size_t part, size_t i = 0) const { return value<int32_t>(part, i); }
    template <class T>
    size_t count(size_t part) const {
        return parts[part].size() / sizeof(T);
    }
};

bool read_part(std::ifstream& file, std::vector<char>& part) {
    int64_t bytes = 0;
    if (!file.read(reinterpret_cast<char*>(&bytes), sizeof bytes)) return false;
    part.resize(static_cast<size_t>(bytes));
    return bytes == 0 || file.read(part.data(), bytes);
}

// Parts of a record: its name, its number and how many follow, then those.
bool read(std::ifstream& file, Record& record) {
    std::vector<char> name, head;
    if (!read_part(file, name) || !read_part(file, head)) return false;
    int32_t numbers[2];
    std::memcpy(numbers, head.data(), sizeof numbers);
    record.name.assign(name.begin(), name.end());
    record.call = numbers[0];
    record.parts.resize(static_cast<size_t>(numbers[1]));
    for (std::vector<char>& part : record.parts)
        if (!read_part(file, part)) return false;
    return true;
}

class Replay {
public:
    void run(const Record& record) {
        record_ = &record;
        const int status = call();
        if (status != KVQ_OK) fail("is refused", status);
    }
    ~Replay() { kvq_cache_close(cache_); }

    int compared = 0, failed = 0;

private:
    int call() {
        const Record& r = *record_;
        switch (r.call) {
            case kPack:
                return pack();
            case kOpen:
                return open();
            case kFeedBack:
                feedback_.assign(r.array<float>(0), r.array<float>(0) + r.count<float>(0));
                return kvq_cache_feed_back(cache_, feedback_.data());
            case kBegin:
                return kvq_cache_begin(cache_, r.number(0), nullptr, r.number(0, 1), -1, nullptr);
            case kAttend:
                return attend();
            case kCommit:
                return kvq_cache_commit(cache_, nullptr, r.number(0), nullptr);
            case kRewind:
                return kvq_cache_rewind(cache_, r.number(0), nullptr);
            case kDemote:
                return kvq_cache_demote(cache_, r.array<kvq_action>(0),
                                        static_cast<int32_t>(r.count<kvq_action>(0)), nullptr);
            case kShift:
                return kvq_cache_shift(cache_, r.number(0), r.number(0, 1));
            case kMask:
                return kvq_cache_mask(cache_, r.number(0), r.value<uint64_t>(1));
            case kEvidence:
                return evidence();
            case kPage:
                return page();
            case kLinear:
                return linear();
            case kEmbed:
                return embed();
            default:
                return KVQ_BAD_ARGUMENT;
        }
    }

    // (side, channels, head_dim, bits), x -> planes, grid
    int pack() {
        const Record& r = *record_;
        std::vector<uint8_t> planes(64 * static_cast<size_t>(r.number(0, 2)));
        std::vector<uint8_t> grid(r.count<uint8_t>(3));
        const int status = kvq_pack(r.number(0), r.number(0, 1), r.array<float>(1), r.number(0, 2),
                                    r.number(0, 3), r.optional<float>(4), planes.data(),
                                    grid.data());
        same(planes.data(), 2);
        same(grid.data(), 3);
        return status;
    }

    // config, (budget, columns), forms
    int open() {
        kvq_cache_close(cache_);
        const kvq_config config = record_->value<kvq_config>(0);
        return kvq_cache_open(&config, record_->array<int64_t>(1)[0],
                              static_cast<int32_t>(record_->array<int64_t>(1)[1]),
                              record_->optional<uint8_t>(2), 0, 0, -1, 0, &cache_);
    }

    // attention, qkv, positions, inv_freq, limits -> out; sink_logits or nothing
    int attend() {
        const Record& r = *record_;
        const kvq_attention attention = r.value<kvq_attention>(0);
        std::vector<float> out(r.count<float>(5));
        const int status =
            kvq_cache_attend(cache_, &attention, static_cast<int32_t>(r.count<int64_t>(2)),
                             r.array<float>(1), r.array<int64_t>(2), r.array<float>(3), nullptr,
                             nullptr, r.optional<float>(6), out.data());
        close(out, 4, 5);
        return status;
    }

    // (tokens, columns), limits -> facts; limits -> queries
    int evidence() {
        const Record& r = *record_;
        std::vector<float> facts(r.count<float>(2)), queries(r.count<float>(4));
        const int status =
            kvq_cache_evidence(cache_, r.number(0), r.number(0, 1), facts.data(), queries.data());
        close(facts, 1, 2);
        close(queries, 3, 4);
        return status;
    }

    // (layer, head, column) -> bytes
    int page() {
        const Record& r = *record_;
        std::vector<uint8_t> bytes(64 << 10);
        const int64_t count =
            kvq_cache_page(cache_, r.number(0), r.number(0, 1), r.number(0, 2), bytes.data());
        same(bytes.data(), 1);
        return count == static_cast<int64_t>(r.parts[1].size()) ? KVQ_OK : KVQ_BAD_ARGUMENT;
    }

    // matrix, (tokens, activation, view, exact_rows, first_row), norm_eps, panels, x, norm, bias,
    // residual, limits -> out. Rows together must equal, bit for bit, each row alone.
    int linear() {
        const Record& r = *record_;
        const int32_t tokens = r.number(1);
        std::vector<float> out(r.count<float>(9)), alone(out.size());
        const size_t rows = out.size() / static_cast<size_t>(tokens);
        const size_t columns = r.count<float>(4) / static_cast<size_t>(tokens);
        const float* residual = r.optional<float>(7);
        kvq_linear call{};
        call.matrix = r.value<kvq_matrix>(0);
        call.panels = r.array<uint8_t>(3);
        call.norm = r.optional<float>(5);
        call.bias = r.optional<float>(6);
        call.activation = r.number(1, 1), call.view = r.number(1, 2);
        call.exact_rows = r.number(1, 3), call.first_row = r.number(1, 4);
        call.norm_eps = r.value<float>(2);
        const auto product = [&](size_t first, int32_t count, std::vector<float>& to) {
            call.x = r.array<float>(4) + first * columns;
            call.residual = residual ? residual + first * rows : nullptr;
            call.out = to.data() + first * rows;
            call.tokens = count;
            return kvq_linear_run(&call);
        };
        int status = product(0, tokens, out);
        for (size_t row = 0; row < static_cast<size_t>(tokens); row++)
            status = std::max(status, product(row, 1, alone));
        if (std::memcmp(out.data(), alone.data(), sizeof(float) * out.size()))
            fail("rows together differ from rows alone", 0);
        close(out, 8, 9);
        return status;
    }

    // matrix, panels, ids, weights, (tokens, mixed), limits -> out
    int embed() {
        const Record& r = *record_;
        std::vector<float> out(r.count<float>(6));
        kvq_embed call{};
        call.matrix = r.value<kvq_matrix>(0);
        call.panels = r.array<uint8_t>(1);
        call.ids = r.array<int64_t>(2);
        call.weights = r.array<float>(3);
        call.out = out.data();
        call.tokens = r.number(4), call.mixed = r.number(4, 1);
        const int status = kvq_embed_run(&call);
        close(out, 5, 6);
        return status;
    }

    void same(const void* found, size_t wanted) {
        compared++;
        const std::vector<char>& bytes = record_->parts[wanted];
        if (std::memcmp(found, bytes.data(), bytes.size())) fail("differs in its bytes", 0);
    }

    // Limits [n][2] hold for n equal parts of the answer: root mean square and largest error, over
    // those of what is wanted.
    void close(const std::vector<float>& found, size_t limits, size_t wanted) {
        const Record& r = *record_;
        const size_t groups = r.count<float>(limits) / 2, size = found.size() / groups;
        for (size_t g = 0; g < groups; g++) {
            compared++;
            double errors = 0, squares = 0, top_error = 0, top = 1e-30;
            for (size_t i = g * size; i < (g + 1) * size; i++) {
                const double want = r.array<float>(wanted)[i], error = found[i] - want;
                errors += error * error, squares += want * want;
                top_error = error == error ? std::max(top_error, std::fabs(error)) : INFINITY;
                top = std::max(top, std::fabs(want));
            }
            const double rms = std::sqrt(errors / std::max(squares, 1e-30)), most = top_error / top;
            if (!(rms <= r.value<float>(limits, 2 * g))) fail("root mean square error", rms);
            if (!(most <= r.value<float>(limits, 2 * g + 1))) fail("largest error", most);
        }
    }

    void fail(const char* what, double value) {
        failed++;
        std::printf("%s: %s of \"%s\": %s %.3g\n", kvq_isa(), kNames[record_->call],
                    record_->name.c_str(), what, value);
    }

    const Record* record_ = nullptr;
    int64_t cache_ = 0;
    std::vector<float> feedback_;  // what it keeps a pointer to
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return std::printf("usage: parity CASES\n"), 2;
    std::string names = kvq_isa_available();
    bool passed = true;
    for (size_t end = 0; !names.empty(); names.erase(0, end == names.npos ? end : end + 1)) {
        end = names.find(',');
        const std::string name = names.substr(0, end);
        if (kvq_isa_select(name.c_str())) return std::printf("%s: refused\n", name.c_str()), 2;
        std::ifstream file(arguments[1], std::ios::binary);
        Replay replay;
        for (Record record; read(file, record);) replay.run(record);
        std::printf("%s: %d compared, %d failed\n", name.c_str(), replay.compared, replay.failed);
        passed = passed && replay.compared && !replay.failed;
    }
    return passed ? 0 : 1;
}
