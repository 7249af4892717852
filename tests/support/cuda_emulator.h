// A GPU on one processor, for proofs: every kernel of kvq/csrc/cuda compiles against this instead of
// CUDA and must give what the numpy reference gives. Below the grid of threads are the calls of
// kvq_cuda.h whose memory is the host's, and a few more for tests.
//
// A thread is a fiber. In whatever order the test asked for, it runs until it must wait for others:
// its block (sync_block) or its warp (shuffles, mma). Blocks run one after the other, so what they
// share is a static array, full of what the block before left. Threads that wait for each other at
// different places end the process.
#pragma once
#include <ucontext.h>
#include <csetjmp>
#include <memory>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cuda/kvq_cuda.h"
#include "kvq.h"

#define KVQ_KERNEL static void
#define KVQ_DEVICE static inline
#define KVQ_DEVICE_MEMBER inline
#define KVQ_SHARED static
#define KVQ_DYNAMIC_SHARED(name) uint8_t* const name = ::kvq::cuda::Emulator::now().shared()
#define KVQ_UNROLL

namespace kvq::cuda {

using std::ceil, std::max, std::min, std::rint, std::tanh;

struct Dim3 {
    int x = 1, y = 1, z = 1;
};

constexpr int kWarp = 32;

struct alignas(16) Quad {
    uint32_t words[4];
};

class Emulator {
public:
    static Emulator& now() {
        static Emulator emulator;
        return emulator;
    }

    void launch(Dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
        // What every GPU from sm_80 on takes.
        if (shared_bytes > 99 << 10 || threads > 1024 || std::min({grid.x, grid.y, grid.z}) < 1 ||
            std::max(grid.y, grid.z) > 65535)
            fail("not every GPU takes this launch");
        launches++;
        kernel_ = &kernel;
        count_ = static_cast<size_t>(threads);
        while (fibers_.size() < count_) fibers_.push_back(std::make_unique<Fiber>());
        Line unwritten;
        std::memset(&unwritten, 0xff, sizeof unwritten);
        shared_.assign((shared_bytes + sizeof unwritten - 1) / sizeof unwritten, unwritten);
        for (block.z = 0; block.z < grid.z; block.z++)
            for (block.y = 0; block.y < grid.y; block.y++)
                for (block.x = 0; block.x < grid.x; block.x++) run_block();
    }

    void wait(bool whole_block) { pause(whole_block ? Waits::kBlock : Waits::kWarp); }

    // A word every lane of the warp can read after both have called wait(false). Two sets of
    // words: a lane may be one exchange ahead of its neighbours, never two.
    uint32_t exchange(const uint32_t* words, int count, uint32_t (*out)[8]) {
        Fiber& own = *fibers_[current_];
        const size_t set = own.exchanges++ % 2;
        std::memcpy(own.words[set], words, sizeof(uint32_t) * static_cast<size_t>(count));
        wait(false);
        const size_t first = current_ / kWarp * kWarp;
        for (size_t lane = 0; lane < kWarp; lane++)
            std::memcpy(out[lane], fibers_[first + lane]->words[set], sizeof out[lane]);
        return static_cast<uint32_t>(current_ - first);
    }

    // A copy is made when it is waited for, not before.
    void copy(void* to, const void* from, size_t bytes) {
        if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
            fail("a copy to shared memory is not aligned");
        fibers_[current_]->copies.push_back({to, from, bytes});
    }
    void commit() { fibers_[current_]->groups.push_back(fibers_[current_]->copies.size()); }
    void wait_copies(size_t awaited) {
        Fiber& own = *fibers_[current_];
        if (own.groups.size() <= awaited) return;
        const size_t last = own.groups.size() - awaited - 1, done = own.groups[last];
        for (size_t i = 0; i < done; i++)
            std::memcpy(own.copies[i].to, own.copies[i].from, own.copies[i].bytes);
        own.copies.erase(own.copies.begin(), own.copies.begin() + static_cast<int64_t>(done));
        own.groups.erase(own.groups.begin(), own.groups.begin() + static_cast<int64_t>(last) + 1);
        for (size_t& group : own.groups) group -= done;
    }

    uint8_t* shared() { return reinterpret_cast<uint8_t*>(shared_.data()); }
    // How threads that can go on take turns: 0 in order, -1 in reverse, else shuffled by this seed.
    void take_turns(int order) { order_ = order, random_.seed(static_cast<unsigned>(order)); }

    bool in_reverse() const { return order_ < 0; }

    int thread() const { return static_cast<int>(current_); }
    int threads() const { return static_cast<int>(count_); }
    Dim3 block;
    int64_t launches = 0, copies = 0;  // copies and clearings of memory, that is

private:
    enum class Waits { kNothing, kWarp, kBlock, kEnded };
    // Lives on after its thread has ended, and is the next block's.
    struct Fiber {
        Waits waits;
        bool begun = false;
        size_t exchanges;
        uint32_t words[2][8];
        std::jmp_buf at;
        struct Copy {
            void* to;
            const void* from;
            size_t bytes;
        };
        std::vector<Copy> copies;
        std::vector<size_t> groups;  // where each group of copies ends
        std::vector<char> stack = std::vector<char>(128 << 10);
    };

    [[noreturn]] static void fail(const char* reason) {
        std::fprintf(stderr, "%s\n", reason);
        std::abort();
    }

    static void enter() {
        for (Emulator& e = now();;) {
            (*e.kernel_)();
            e.pause(Waits::kEnded);
        }
    }

    // A jump costs no call of the system, as a change of contexts does: they only begin a fiber.
    void pause(Waits what) {
        Fiber& own = *fibers_[current_];
        own.waits = what;
        if (!_setjmp(own.at)) _longjmp(scheduler_, 1);
    }

    void resume(Fiber& fiber) {
        if (_setjmp(scheduler_)) return;
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.stack.data();
        context.uc_stack.ss_size = fiber.stack.size();
        context.uc_link = nullptr;
        makecontext(&context, enter, 0);
        setcontext(&context);
    }

    void run_block() {
        for (size_t i = 0; i < count_; i++) {
            Fiber& fiber = *fibers_[i];
            fiber.waits = Waits::kNothing;
            fiber.exchanges = 0;
            fiber.copies.clear();
            fiber.groups.clear();
        }
        while (step()) {}
    }

    // Runs whoever can go on; false once all have ended.
    bool step() {
        bool moved = false;
        turns_.resize(count_);
        std::iota(turns_.begin(), turns_.end(), size_t{0});
        if (order_ < 0) std::reverse(turns_.begin(), turns_.end());
        if (order_ > 0) std::shuffle(turns_.begin(), turns_.end(), random_);
        for (const size_t thread : turns_)
            if (fibers_[thread]->waits == Waits::kNothing) {
                current_ = thread;
                resume(*fibers_[thread]);
                moved = true;
            }
        bool ended = true;
        for (size_t i = 0; i < count_; i++) ended &= fibers_[i]->waits == Waits::kEnded;
        for (size_t warp = 0; warp < count_; warp += kWarp)
            moved |= release(warp, warp + kWarp, Waits::kWarp);
        moved |= release(0, count_, Waits::kBlock);
        if (!moved && !ended) fail("threads wait for each other at different places");
        return !ended;
    }

    // All of these wait for the same: they go on.
    bool release(size_t first, size_t last, Waits what) {
        for (size_t i = first; i < last; i++)
            if (fibers_[i]->waits != what) return false;
        for (size_t i = first; i < last; i++) fibers_[i]->waits = Waits::kNothing;
        return true;
    }

    int order_ = 0;
    std::minstd_rand random_;
    std::vector<size_t> turns_;
    struct alignas(16) Line {
        uint8_t bytes[16];
    };
    std::vector<Line> shared_;
    const std::function<void()>* kernel_ = nullptr;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    size_t current_ = 0, count_ = 0;
    std::jmp_buf scheduler_;
};

inline int thread_index() {
    return Emulator::now().thread();
}
inline int thread_count() {
    return Emulator::now().threads();
}
inline Dim3 block_index() {
    return Emulator::now().block;
}
inline void sync_block() {
    Emulator::now().wait(true);
}
inline void sync_warp() {
    Emulator::now().wait(false);
}

inline float shuffle_from(float x, int lane) {
    uint32_t word, words[kWarp][8];
    std::memcpy(&word, &x, 4);
    Emulator::now().exchange(&word, 1, words);
    std::memcpy(&x, &words[lane][0], 4);
    return x;
}

inline float shuffle_xor(float x, int mask) {
    return shuffle_from(x, thread_index() % kWarp ^ mask);
}

inline bool any_lane(bool x) {
    uint32_t word = x, words[kWarp][8];
    Emulator::now().exchange(&word, 1, words);
    for (const auto& lane : words)
        if (lane[0]) return true;
    return false;
}

inline int atomic_add(int* at, int x) {
    return std::exchange(*at, *at + x);
}
inline void atomic_add(int64_t* at, int64_t x) {
    *at += x;
}
inline void atomic_max(float* at, float x) {
    *at = std::max(*at, x);
}

template <int Bytes>
inline void copy_ahead(void* shared, const void* global) {
    Emulator::now().copy(shared, global, Bytes);
}
inline void commit_copies() {
    Emulator::now().commit();
}
template <int Awaited>
inline void wait_copies() {
    Emulator::now().wait_copies(Awaited);
}

// By a table: the products of one small test ask for a hundred million of them.
inline float half_value(uint16_t h) {
    static const std::vector<float> values = [] {
        std::vector<float> all(1 << 16);
        for (uint32_t i = 0; i < all.size(); i++) {
            const auto bits = static_cast<uint16_t>(i);
            _Float16 value;
            std::memcpy(&value, &bits, 2);
            all[i] = static_cast<float>(value);
        }
        return all;
    }();
    return values[h];
}
inline uint16_t half_bits(float x) {
    const _Float16 value = static_cast<_Float16>(x);
    uint16_t h;
    std::memcpy(&h, &value, 2);
    return h;
}
inline uint32_t halves(float low, float high) {
    return half_bits(low) | static_cast<uint32_t>(half_bits(high)) << 16;
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [&](int shift) {
        const auto part = [shift](uint32_t x) { return half_value(uint16_t(x >> shift)); };
        return std::fma(part(a), part(b), part(c));
    };
    return halves(one(0), one(16));
}
inline float exp2_fast(float x) {
    return std::exp2(x);
}
// Rounded once each, never contracted: the bytes of a page depend on them.
inline float add(float a, float b) {
    return a + b;
}
inline float sub(float a, float b) {
    return a - b;
}
inline float mul(float a, float b) {
    return a * b;
}
inline float divide(float a, float b) {
    return a / b;
}
inline float fma_once(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float root(float x) {
    return std::sqrt(x);
}

// The definition of mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 (PTX ISA, "Matrix Fragments
// for mma.m16n8k16"): lane 4g + t holds of A rows g and g + 8 at columns 2t, 2t + 1, 2t + 8, 2t +
// 9, of B those rows of column g, of C columns 2t and 2t + 1 of rows g and g + 8.
inline void mma(float* c, const uint32_t* a, const uint32_t* b) {
    uint32_t mine[6], all[kWarp][8];
    std::memcpy(mine, a, 16);
    std::memcpy(mine + 4, b, 8);
    const int lane = static_cast<int>(Emulator::now().exchange(mine, 6, all));
    const auto half_of = [](uint32_t pair, int i) { return half_value(uint16_t(pair >> 16 * i)); };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int pair = k % 8 / 2, upper = k / 8;
            const uint32_t x = all[row % 8 * 4 + pair][(row >= 8) + 2 * upper];
            const uint32_t y = all[column * 4 + pair][4 + upper];
            sum += static_cast<double>(half_of(x, k % 2)) * half_of(y, k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
}

// That of mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: lane 4g + t holds of A rows g and g + 8
// at columns 4t to 4t + 3 and sixteen further, of B those rows of column g, of C as above.
inline void mma(int32_t* c, const uint32_t* a, const uint32_t* b) {
    uint32_t mine[6], all[kWarp][8];
    std::memcpy(mine, a, 16);
    std::memcpy(mine + 4, b, 8);
    const int lane = static_cast<int>(Emulator::now().exchange(mine, 6, all));
    const auto byte_of = [](uint32_t word, int i) { return int8_t(word >> 8 * i); };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; k++)
            c[i] += byte_of(all[row % 8 * 4 + k % 16 / 4][(row >= 8) + k / 16 * 2], k % 4) *
                    byte_of(all[column * 4 + k % 16 / 4][4 + k / 16], k % 4);
    }
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Dim3 grid, int threads, size_t shared_bytes, void*,
            const Arguments&... arguments) {
    Emulator::now().launch(grid, threads, shared_bytes, [&] { kernel(arguments...); });
}

static thread_local char g_reason[256] = "";
constexpr int64_t kEmulatedBytes = int64_t{1} << 30;

// The stream beside the first one does what it is asked as late as it may: once somebody waits for
// it. So whoever does not reads what was there before. Where turns are taken in reverse it does it
// as early as it may: at once. It refuses a copy that does not wait for all kernels launched
// before.
static struct Copies {
    struct Copy {
        char* to;
        const char* from;
        int64_t to_step, from_step, row_bytes, rows;
        void run() const {
            for (int64_t i = 0; i < rows; i++)
                std::memcpy(to + i * to_step, from + i * from_step, static_cast<size_t>(row_bytes));
        }
    };
    std::vector<Copy> queued;
    bool waits_for_all = true;  // that the first stream was asked
    void run() {
        for (const Copy& copy : queued) copy.run();
        queued.clear();
    }
} g_copies;

static int outcome() {
    g_copies.waits_for_all = false;
    return *g_reason ? KVQ_DEVICE_FAILED : KVQ_OK;
}

static int open_device(kvq_cuda_device& out) {
    std::snprintf(out.name, sizeof out.name, "an emulated device");
    out.memory_bytes = out.free_bytes = kEmulatedBytes;
    out.capability = 80, out.units = 2, out.on_host = 1;
    out.copies = &g_copies;
    return KVQ_OK;
}

}  // namespace kvq::cuda

extern "C" {

// Full of what nobody wrote.
KVQ_EXPORT int kvq_cuda_allocate(int64_t bytes, void** memory) {
    *memory = bytes > kvq::cuda::kEmulatedBytes ? nullptr : std::malloc(static_cast<size_t>(bytes));
    if (!*memory) return KVQ_NO_MEMORY;
    std::memset(*memory, 0xff, static_cast<size_t>(bytes));
    return KVQ_OK;
}
KVQ_EXPORT void kvq_cuda_free(void* memory) {
    std::free(memory);
}
KVQ_EXPORT int kvq_cuda_allocate_host(int64_t bytes, void** memory) {
    return kvq_cuda_allocate(bytes, memory);
}
KVQ_EXPORT void kvq_cuda_free_host(void* memory) {
    std::free(memory);
}
KVQ_EXPORT int kvq_cuda_copy(void* to, int64_t to_step, const void* from, int64_t from_step,
                             int64_t row_bytes, int64_t rows, void* stream) {
    using namespace kvq::cuda;
    if (!row_bytes || !rows) return KVQ_OK;
    Emulator::now().copies++;
    const Copies::Copy copy{static_cast<char*>(to),
                            static_cast<const char*>(from),
                            to_step,
                            from_step,
                            row_bytes,
                            rows};
    if (stream != &g_copies) {
        copy.run();
        return KVQ_OK;
    }
    if (!g_copies.waits_for_all) {
        std::snprintf(g_reason, sizeof g_reason, "a copy may come before what it must wait for");
        return KVQ_DEVICE_FAILED;
    }
    if (Emulator::now().in_reverse()) copy.run();
    else g_copies.queued.push_back(copy);
    return KVQ_OK;
}
KVQ_EXPORT int kvq_cuda_clear(void* at, int64_t bytes, void*) {
    kvq::cuda::Emulator::now().copies++;
    std::memset(at, 0, static_cast<size_t>(bytes));
    return KVQ_OK;
}
KVQ_EXPORT int kvq_cuda_wait(void* stream) {
    if (stream == &kvq::cuda::g_copies) kvq::cuda::g_copies.run();
    return KVQ_OK;
}
KVQ_EXPORT int kvq_cuda_after(void* later, void* earlier) {
    if (later == &kvq::cuda::g_copies) kvq::cuda::g_copies.waits_for_all = true;
    return kvq_cuda_wait(earlier);
}
// For proofs that no result depends on the order in which threads run: Emulator::take_turns.
KVQ_EXPORT int kvq_cuda_take_turns(int32_t order, void*) {
    kvq::cuda::Emulator::now().take_turns(order);
    return KVQ_OK;
}
// From now on every launch fails for this reason, until there is none.
KVQ_EXPORT int kvq_cuda_fail(const char* reason, void*) {
    std::snprintf(kvq::cuda::g_reason, sizeof kvq::cuda::g_reason, "%s", reason);
    return KVQ_OK;
}
// How many launches there were, and how many copies and clearings of memory.
KVQ_EXPORT int kvq_cuda_queued(int64_t* launches, int64_t* copies, void*) {
    *launches = kvq::cuda::Emulator::now().launches, *copies = kvq::cuda::Emulator::now().copies;
    return KVQ_OK;
}

}  // extern "C"
