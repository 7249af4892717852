// What a set of kernels offers. Includes the C++ standard library and the page layout, nothing
// else: no cache, no framework. Each instruction set compiles kernels.inl once over its own simd
// header.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "../format.h"

// Either may decide whether sums stay in registers.
#define KVQ_INLINE inline __attribute__((always_inline))
#define KVQ_NOINLINE __attribute__((noinline))

// A set that is not compiled for this processor; KVQ_KERNEL_SET of kernels.inl is one that is.
#define KVQ_NO_KERNEL_SET(name)                 \
    const kvq::Kernels* kvq::name##_kernels() { \
        return nullptr;                         \
    }

namespace kvq {

constexpr int kBlockRows = 16;  // query rows that share one pass over the pages
constexpr int kRowLanes = 8;    // of which at most so many at a time have a lane each
constexpr int kMaxGroups = kMaxHeadDim / 32;
constexpr int kRunPages = 4;    // pages that are read together
// What stands so many binary orders below a row's maximum adds less to its sum than float32 can
// tell: 2^-32 of a weight, times all keys of a long context, stays below 1e-5.
constexpr float kNegligible = 32.0f;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNothingSeen = -1e30f;  // running maximum before the first visible key

// One page as a kernel sees it.
struct PageView {
    const uint8_t* k[kGranulesPerSide];
    const uint8_t* v[kGranulesPerSide];
    const uint8_t* k_grid;
    const uint8_t* v_grid;
    int k_bits, v_bits;
    bool channel_values;
};

// Up to kBlockRows query rows of one KV head and their running softmax (base 2).
// Invariant: acc / sum is the attention output over all keys seen so far, relative to maximum.
struct Block {
    int rows, head_dim;
    float softcap_log2;  // softcap * log2(e), or 0
    float maximum[kBlockRows + 16];  // read sixteen at a time, from any row
    float least[kBlockRows];  // of a page whose largest logit is below it a row sees nothing
    float sum[kBlockRows];
    alignas(64) float q[kBlockRows * kMaxHeadDim];  // rotated and scaled
    alignas(64) float acc[kBlockRows * kMaxHeadDim];

    // Nothing seen yet; the rows of q are the caller's to fill.
    void start(int row_count, int dim, float softcap);
};

inline void Block::start(int row_count, int dim, float softcap) {
    rows = row_count;
    head_dim = dim;
    softcap_log2 = softcap * kLog2E;
    std::fill(std::begin(maximum), std::end(maximum), kNothingSeen);
    std::fill(std::begin(least), std::end(least), -3e38f);
    std::fill(std::begin(sum), std::end(sum), 0.0f);
    std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows * dim));
}

// What a block's rows see of one page; sums over the rows that can see any of it.
struct PageEvidence {
    bool errors = true;  // asked for; without them a page's values are not read
    int rows = 0;
    float mass = 0;         // of attention weights
    float peak = 0;         // the largest weight a row gave one token: no sum
    float key_error = 0;    // squared change of the output, were keys rounded to 8 bits
    float value_error = 0;  // likewise values
    float evict_error = 0;  // and were the page gone
};

// A row that gives a page less than this much of its attention counts in its mass only.
constexpr float kObservedMass = 1.0f / 4096.0f;

// `visible` is one mask per row of the block, bit i for key i; null: every row sees every key.
struct LinearKernels;  // of ../linear/linear.h

struct Kernels {
    const char* name;
    const LinearKernels* linear;  // products with weights
    // Keys or values float32 [64, D], on a grid of channels or of tokens -> planes (hi4 then lo4,
    // 32*D bytes each) and grid. False: not finite in float16. `feedback` [D, D], or null, is for
    // groups of channels that will be read at `bits`, and moves x (kvq.reference.stored.carried).
    bool (*pack)(float* x, int head_dim, bool values, bool channels, int bits,
                 const float* feedback, uint8_t* planes, uint8_t* grid);
    // The grid's scales, then its mids, float32 [2, groups].
    void (*read_grid)(const uint8_t* grid, int groups, float* out);
    // Planes of keys of `from` bits, rounded anew for a read of `to` bits, moved as by `pack`: hi4
    // then lo4.
    void (*narrow_keys)(uint8_t* planes, int head_dim, int from, int to, const uint8_t* grid,
                        const float* feedback);
    // A plane of nibbles becomes the 2-bit plane of their top bits, at its start.
    void (*narrow)(uint8_t* plane, int head_dim);
    // Attends the block to up to kRunPages pages that have moved alike; visible[i] are the masks of
    // page i. q is block.q counter-rotated by their shift. What is read of `next`, the pages that
    // come after, is asked of memory meanwhile.
    void (*pages)(Block& block, const float* q, const PageView* pages,
                  const uint64_t* const* visible, int count, const PageView* next, int next_count);
    // Attends the block to n <= 64 floating-point keys, float16 [n, D]; q as in `pages`. Without
    // values, null, only the rows' maxima and sums tell of it.
    void (*tile)(Block& block, const float* q, const uint16_t* k, const uint16_t* v, int n,
                 const uint64_t* visible);
    // logits [rows, 64]: products of the block's rows with the page's keys; q as in `pages`.
    void (*logits)(const PageView& page, const Block& block, const float* q, float* logits);
    // bounds [rows]: by a page's constants alone, its middle key's product with each row plus what
    // any key could add to that; no logit is larger (before a softcap).
    void (*bounds)(const Block& block, const float* q, const PageView& page, float* bounds);
    // Reads a page for rows whose softmax is complete: acc is their attention output. q as in
    // `pages`; unit turns its products with keys into natural logits.
    void (*evidence)(const Block& block, const float* q, const PageView& page,
                     const uint64_t* visible, float unit, PageEvidence& seen);
    // False if any value is not finite in float16.
    bool (*to_half)(const float* x, uint16_t* out, int n);
    void (*from_half)(const uint16_t* x, float* out, int n);
    // Of delta nets; every n and channel count is a multiple of 16, and what a row comes to does not
    // depend on how many there are. out [count, value_dim]: products of rows [count, key_dim] with a
    // state [key_dim, value_dim].
    void (*delta_read)(const float* state, int key_dim, int value_dim, const float* rows, int count,
                       float* out);
    // out = fade * state + the sum of keys [count, key_dim] times u[i] [value_dim]; may be `state`.
    void (*delta_fold)(const float* state, float* out, int key_dim, int value_dim, float fade,
                       const float* keys, const float* const* u, int count);
    // x * sigmoid(x); sums += factor * x; the sum of products.
    void (*silu)(const float* x, float* out, int n);
    void (*add)(float* sums, float factor, const float* x, int n);
    float (*dot)(const float* x, const float* y, int n);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();        // null where not compiled or not supported
const Kernels* avxvnni_kernels();     // likewise
const Kernels* avx512vnni_kernels();  // likewise
const Kernels* amxint8_kernels();     // likewise
// Why a processor that announces AMX is not offered its kernels; empty where it is, or announces none.
const char* amxint8_refusal();
const Kernels* neon_kernels();        // likewise
// Of a set that is offered, its products.
const LinearKernels* generic_linear();
const LinearKernels* avx2_linear();
const LinearKernels* avxvnni_linear();
const LinearKernels* avx512vnni_linear();
const LinearKernels* amxint8_linear();
const LinearKernels* neon_linear();
const Kernels& kernels();
bool select_kernels(const char* name);
const char* available_kernels();
const char* refused_kernels();  // kvq_isa_refused

}  // namespace kvq
