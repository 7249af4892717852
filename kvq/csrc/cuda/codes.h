// Packed codes as operands of a matrix product. Pages and weights share one idea: a 32-bit word
// holds codes of one row (a token of keys, a channel of values, an output of weights), and four
// words that follow one another belong to the four lanes of a row in an mma. The order of columns
// inside a product is free, so words go into it as they lie in memory.
#pragma once
#include "../format.h"
#include "device.h"

namespace kvq::cuda {

constexpr uint32_t kOneThousand24 = 0x64006400u;  // halves (1024, 1024): their last bit is 1
constexpr uint32_t kMinus1024 = 0xe400e400u;
constexpr uint32_t kOnes = 0x3c003c00u, kSixteens = 0x4c004c00u, kFours = 0x44004400u;
constexpr uint32_t kMinus7_5 = 0xc780c780u, kMinus1_5 = 0xbe00be00u, kMinus127_5 = 0xd7f8d7f8u,
                   kMinus31_5 = 0xcfe0cfe0u;

// Codes 4i + 0, 4i + 2 (`odd` 0) or 4i + 1, 4i + 3 of a word of `Bits`-bit fields, as halves.
template <int Bits>
KVQ_DEVICE uint32_t whole_pair(uint32_t word, int i, int odd) {
    constexpr uint32_t kMask = Bits == 4 ? 0x000f000fu : 0x00030003u;
    const uint32_t codes = word >> (Bits * i + 8 * odd) & kMask;
    return fma_halves(codes | kOneThousand24, kOnes, kMinus1024);
}

// Less the middle of their range; of 8 and 6 bits `word` holds the upper nibbles and `low` the
// rest.
template <int Bits>
KVQ_DEVICE uint32_t centred_pair(uint32_t word, uint32_t low, int i, int odd) {
    if constexpr (Bits == 8 || Bits == 6) {
        const uint32_t rest = whole_pair<Bits - 4>(low, i, odd);
        const uint32_t upper = whole_pair<4>(word, i, odd);
        const uint32_t whole = fma_halves(upper, Bits == 8 ? kSixteens : kFours, rest);
        return fma_halves(whole, kOnes, Bits == 8 ? kMinus127_5 : kMinus31_5);
    } else {
        return fma_halves(whole_pair<Bits>(word, i, odd), kOnes, Bits == 4 ? kMinus7_5 : kMinus1_5);
    }
}

// Of a word: products it takes part in, each with four of its codes.
template <int Bits>
constexpr int kProducts = Bits == 2 ? 4 : 2;
// Codes of one word.
template <int Bits>
constexpr int kCodes = 4 * kProducts<Bits>;

// What every code of `code_operand` has beyond its distance from the middle of its range.
template <int Bits>
constexpr float kBeyond = 1024.0f + ((1 << Bits) - 1) * 0.5f;

// Product i of the words of rows g and g + 8: the operand A. To a half 1024 + code costs no
// arithmetic; what that adds to a product, `kBeyond` times the sum of the numbers, is taken off
// afterwards.
template <int Bits>
KVQ_DEVICE void code_operand(const uint32_t* word, const uint32_t* low, int i, uint32_t* a) {
    constexpr uint32_t kUpper = Bits == 2 ? 0x00030003u : 0x000f000fu;
    constexpr uint32_t kLower = Bits == 6 ? 0x00030003u : 0x000f000fu;
    KVQ_UNROLL for (int lower = 0; lower < 2; lower++)
        KVQ_UNROLL for (int odd = 0; odd < 2; odd++) {
        uint32_t codes = word[lower] >> ((Bits == 2 ? 2 : 4) * i + 8 * odd) & kUpper;
        if constexpr (Bits > 4)
            codes = codes << (Bits - 4) | (low[lower] >> ((Bits - 4) * i + 8 * odd) & kLower);
        a[lower + 2 * odd] = codes | kOneThousand24;
    }
}

// The operand A whose every product is the sum of the numbers it meets.
KVQ_DEVICE void ones_operand(uint32_t* a) {
    for (int i = 0; i < 4; i++) a[i] = kOnes;
}

// The numbers that meet codes 4i to 4i + 3: the operand B.
KVQ_DEVICE void number_operand(const float* x, uint32_t* b) {
    b[0] = halves(x[0], x[2]);
    b[1] = halves(x[1], x[3]);
}

// A grid's line: low + unit * code.
struct Line {
    float low, unit;
    const uint8_t* codes;
    KVQ_DEVICE_MEMBER float at(int i) const { return low + unit * static_cast<float>(codes[i]); }
    // No number of the line is larger (codes grow).
    KVQ_DEVICE_MEMBER float top() const { return low + unit * 255.0f; }
};

KVQ_DEVICE Line line_at(const uint8_t* ends, const uint8_t* codes) {
    const auto* half = reinterpret_cast<const uint16_t*>(ends);
    return {half_value(half[0]), half_value(half[1]), codes};
}
KVQ_DEVICE Line scales_of(const uint8_t* grid) {
    return line_at(grid, grid + 8);
}
KVQ_DEVICE Line mids_of(const uint8_t* grid, int groups) {
    return line_at(grid + 4, grid + 8 + groups);
}

}  // namespace kvq::cuda
