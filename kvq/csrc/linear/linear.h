// Weights times activations: the bytes of a matrix and what a set of kernels offers. The definition
// of both is kvq/reference/linear.py. Includes no cache and no framework.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../kvq.h"
#include "../parallel.h"

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

// Most rows or columns: a count of twice as many, or of whole panels and blocks, is an int32 still.
constexpr int kMostSide = 1 << 28;

// Grids of super-blocks: so many columns under float16 numbers, sub-blocks under whole ones.
constexpr int kSuperColumns = 256;
constexpr bool is_super(int grid) {
    return grid == KVQ_SUPER_MINIMUM || grid == KVQ_SUPER_SYMMETRIC;
}

// Whether kernels know the format.
constexpr bool is_format(int bits, int block, int grid) {
    switch (grid) {
        case KVQ_SUPER_MINIMUM:
            return block == 32 ? bits >= 2 && bits <= 6
                               : block == 16 && (bits == 2 || bits == 4 || bits == 6);
        case KVQ_SUPER_SYMMETRIC:
            return block == 16 && (bits == 3 || bits == 4 || bits == 6 || bits == 8);
        default:
            return (block == 32 || block == 64 || block == 128) && grid >= KVQ_SYMMETRIC &&
                   grid <= KVQ_E2M1 &&
                   (bits == 4 || (grid != KVQ_E2M1 && (bits == 5 || bits == 6 || bits == 8)));
    }
}

// Whether there is such a matrix.
constexpr bool is_matrix(const kvq_matrix& m) {
    return m.rows > 0 && m.rows <= kMostSide && m.columns > 0 && m.columns <= kMostSide &&
           is_format(m.bits, m.block, m.grid);
}

// Whether `m` is of whole panels, so that another can lie behind it.
constexpr bool is_stackable(const kvq_matrix& m) {
    return is_matrix(m) && m.rows % kPanelRows == 0;
}

// Where things lie in a panel. Invariant: every part starts at a multiple of 64 bytes.
struct PanelLayout {
    // A block is what one activation scale is for; a super-block has sub-blocks of `sub` columns,
    // others 0.
    int panels, block, blocks, sub, bits, upper_bits, grid;
    // Of a block: its sixteen scales and offsets, and those of its sub-blocks.
    size_t block_constants, plane_bytes, constant_bytes, panel_bytes;

    explicit constexpr PanelLayout(const kvq_matrix& m)
        : panels((m.rows + kPanelRows - 1) / kPanelRows),
          block(is_super(m.grid) ? kSuperColumns : m.block),
          blocks((m.columns + block - 1) / block),
          sub(is_super(m.grid) ? m.block : 0),
          bits(m.bits),
          upper_bits(bits < 4 ? 2 : 4),
          grid(m.grid),
          block_constants(constants_of(m)),
          plane_bytes(blocks * bytes_of(block, upper_bits)),
          constant_bytes((size_t(blocks) * block_constants + 63) / 64 * 64),
          panel_bytes(blocks * bytes_of(block, bits) + constant_bytes) {}
    // Bytes of so many columns of a plane of `bits` bits.
    static constexpr size_t bytes_of(int columns, int bits) {
        return size_t(columns) * kPanelRows * bits / 8;
    }
    // Where a block's constants and upper plane begin, and where all lower bits do.
    constexpr size_t constants_at(size_t b) const {
        return sub ? b * super_bytes() : plane_bytes + b * block_constants;
    }
    constexpr size_t plane_at(size_t b) const {
        return sub ? b * super_bytes() + block_constants : b * bytes_of(block, upper_bits);
    }
    constexpr size_t low_at() const { return plane_bytes + constant_bytes; }
    // Of a super-block without lower bits: constants, then the plane, one behind the other, as memory
    // is read fastest.
    constexpr size_t super_bytes() const {
        return block_constants + bytes_of(kSuperColumns, upper_bits);
    }
    constexpr int low_bits() const { return bits - upper_bits; }
    // What a view reads: of codes of up to four bits all.
    constexpr int low_bits(int view) const { return view == KVQ_HI && bits > 4 ? 0 : low_bits(); }
    constexpr size_t view_bytes(int view) const {
        return view == KVQ_HI && bits > 4 ? low_at() : panel_bytes;
    }
    constexpr size_t padded_columns() const { return size_t(blocks) * block; }
    // Sub-blocks of a row.
    constexpr size_t subs() const { return sub ? padded_columns() / sub : 0; }

private:
    static constexpr size_t constants_of(const kvq_matrix& m) {
        if (!is_super(m.grid)) return size_t(kPanelRows) * (m.grid == KVQ_E2M1 ? 1 : 2 + m.grid);
        const size_t sides = m.grid == KVQ_SUPER_MINIMUM ? 2 : 1;
        const size_t numbers = kPanelRows * sides * kSuperColumns / m.block;
        const size_t used = 2 * kPanelRows * sides + (m.block == 32 ? numbers * 6 / 8 : numbers);
        return (used + 63) / 64 * 64;
    }
};

// What products do on a processor where nobody has measured; no result depends on it.
kvq_built_in built_in(const kvq_processor& processor);
const kvq_built_in& built_in();  // of this machine

// How weights are asked of memory before they are read. kvq_tune sets it.
struct Prefetching {
    std::atomic<bool> second_level;
    // How far ahead, in bytes; 0: as is built in.
    std::atomic<size_t> ahead{0};

    Prefetching();
};
Prefetching& prefetching();

// Activations rounded to int8, row after row; or as octets, of which the last may lack rows: levels
// [M / 8, padded columns / 4, 8, 4], sums of sub-blocks [M / 8, subs / 2, 8, 2], the others
// [M / 8, blocks, 8].
struct RoundedRows {
    int8_t* levels;  // [M, padded columns]
    float* scales;   // [M, blocks], kScaleUnit included
    float* sums;     // [M, blocks], of the levels: whole numbers
    bool octets;
    int16_t* sub_sums = nullptr;  // [M, subs]: of every four sub-blocks 0, 2, 1 and 3
};
constexpr int kOctetRows = 8;

struct LinearKernels {
    // Row `row` of x.
    void (*round_row)(const PanelLayout& layout, const float* values, int columns,
                      const RoundedRows& x, size_t row);
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

// kvq_linear_run, kvq_experts_run and kvq_embed_run over a pool of threads.
int run_linear(const kvq_linear& call, const Parallel& pool);
int run_experts(const kvq_experts& call, const Parallel& pool);
int run_embed(const kvq_embed& call);

}  // namespace kvq
