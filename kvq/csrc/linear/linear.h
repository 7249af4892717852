// Weights times activations: the bytes of a matrix and what a set of kernels offers. The definition
// of both is kvq/reference_linear.py. Includes no cache and no framework.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../kvq.h"

namespace kvq {

constexpr int kPanelRows = 16;
constexpr int kPanelGroup = 8;  // columns whose codes lie together: 64 bytes of a plane
constexpr float kScaleUnit = 1.0f / 256.0f;
constexpr float kZeroParts = 256;  // of the range of codes, in offsets that are zero points
constexpr float kSmallestActivation = 1e-30f;

// What the four bits of an e2m1 stand for, doubled and around a middle; what a block's exponent is
// greater by than that of its scale in kScaleUnit.
constexpr int kE2m1Middle = 12, kE2m1Bias = 120;
constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Whether there is such a matrix.
constexpr bool is_matrix(const kvq_matrix& m) {
    return m.rows > 0 && m.columns > 0 && (m.block == 32 || m.block == 64 || m.block == 128) &&
           (m.bits == 4 || m.bits == 5 || m.bits == 6 || m.bits == 8) && m.grid >= KVQ_SYMMETRIC &&
           m.grid <= KVQ_E2M1 && (m.grid != KVQ_E2M1 || m.bits == 4);
}

// Whether `m` is of whole panels, so that another can lie behind it.
constexpr bool is_stackable(const kvq_matrix& m) {
    return is_matrix(m) && m.rows % kPanelRows == 0;
}

// Where things lie in a panel. Invariant: every part starts at a multiple of 64 bytes.
struct PanelLayout {
    int panels, blocks, block, bits, grid;
    // Of a block: its sixteen scales and offsets.
    size_t block_constants, plane_bytes, constant_bytes, panel_bytes;

    explicit constexpr PanelLayout(const kvq_matrix& m)
        : panels((m.rows + kPanelRows - 1) / kPanelRows),
          blocks((m.columns + m.block - 1) / m.block),
          block(m.block),
          bits(m.bits),
          grid(m.grid),
          block_constants(size_t(kPanelRows) * (m.grid == KVQ_E2M1 ? 1 : 2 + m.grid)),
          plane_bytes(size_t(blocks) * block * kPanelRows / 2),
          constant_bytes((size_t(blocks) * block_constants + 63) / 64 * 64),
          panel_bytes(plane_bytes * bits / 4 + constant_bytes) {}
    constexpr int low_bits() const { return bits - 4; }
    constexpr size_t padded_columns() const { return size_t(blocks) * block; }
};

// What products do on a processor where nobody has measured; no result depends on it.
kvq_built_in built_in(const kvq_processor& processor);
const kvq_built_in& built_in();  // of this machine

// How weights are asked of memory before they are read. kvq_tune sets it.
struct Prefetching {
    std::atomic<bool> past_caches;
    // How far ahead, in bytes; 0: as is built in.
    std::atomic<size_t> ahead{0};

    Prefetching();
};
Prefetching& prefetching();

// Activations rounded to int8, row after row; or as octets, of which the last may lack rows: levels
// [M / 8, padded columns / 4, 8, 4], the others [M / 8, blocks, 8].
struct RoundedRows {
    int8_t* levels;  // [M, padded columns]
    float* scales;   // [M, blocks], kScaleUnit included
    float* sums;     // [M, blocks], of the levels: whole numbers
    bool octets;
};
constexpr int kOctetRows = 8;

struct LinearKernels {
    const char* name;
    void (*round_row)(const float* x, int columns, int block, int8_t* levels, float* scales,
                      float* sums);
    // RMS norm (1910.07467) of a row, weight included.
    void (*norm_row)(const float* x, const float* weight, int columns, float epsilon, float* out);
    // activation(gate) * up, for one of kvq_activation.
    void (*gate_row)(const float* gate, const float* up, int columns, int activation, float* out);
    // Rows [first, first + count) times one panel: out float32 [count, 16]. Of octets `first` begins
    // one.
    void (*multiply)(const PanelLayout& layout, int view, const uint8_t* panel,
                     const RoundedRows& x, int first, int count, float* out);
    // out [columns] += weight * row `lane` of a panel.
    void (*add_row)(const PanelLayout& layout, const uint8_t* panel, int lane, float weight,
                    int columns, float* out);
    int octets_from = 0;  // rows from which on octets are multiplied faster; 0: never
};

const LinearKernels* generic_linear();
const LinearKernels* avx2_linear();        // null where not compiled or not supported
const LinearKernels* avxvnni_linear();     // likewise
const LinearKernels* avx512vnni_linear();  // likewise
const LinearKernels* amxint8_linear();     // likewise
const LinearKernels* neon_linear();        // likewise

// Runs work(user, i) for i in [0, count), on as many threads as it has.
struct Dispatch {
    void (*run)(void* context, void (*work)(void* user, size_t i), size_t count, void* user);
    void* context;
};

// kvq_linear_run, kvq_experts_run and kvq_embed_run over a pool of threads.
int run_linear(const kvq_linear& call, const Dispatch& dispatch);
int run_experts(const kvq_experts& call, const Dispatch& dispatch);
int run_embed(const kvq_embed& call);

}  // namespace kvq
