// Sixteen lanes as four vectors of NEON with dotprod. Meanings: vectors_generic.h.
#pragma once
#include "../kernels/kernels.h"
#include "../kernels/simd_neon.h"

namespace {

constexpr int kMaxRows = 4;
constexpr int whole_low_bits(int) { return 4; }
constexpr float kMergedLess = 128;  // merged() gives signed codes

using Floats = F;
using Ints = I;

template <class Op>
inline Ints ints(Op op) {
    return {op(0), op(1), op(2), op(3)};
}
inline Ints set1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
inline Ints operator*(Ints x, Ints y) {
    return each<Ints>([](int32x4_t p, int32x4_t q) { return vmulq_s32(p, q); }, x, y);
}
template <int Bits>
inline Ints shifted(Ints x) {
    return each<Ints>([](int32x4_t p) { return vshlq_n_s32(p, Bits); }, x);
}
inline Ints magnitude_bits(Floats x) {
    return each<Ints>([](V p) { return vreinterpretq_s32_f32(vabsq_f32(p)); }, x);
}
inline Ints max(Ints x, Ints y) {
    return each<Ints>([](int32x4_t p, int32x4_t q) { return vmaxq_s32(p, q); }, x, y);
}
inline int32_t reduce_max(Ints x) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d)));
}
inline Floats load_half(const uint8_t* p) {
    return load_half(reinterpret_cast<const uint16_t*>(p));
}

// Arrays, since compilers count a loop once where they decide what to inline: else codes would go
// through memory to where they are multiplied.
struct CodePair {
    int8x16_t first[4], second[4];
};
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    constexpr int kShift = 2 * Bits * I, kMask = (1 << Bits) - 1;
    CodePair r;
    for (int i = 0; i < 4; i++) {
        const uint8x16_t bytes = vld1q_u8(p + 16 * i);
        r.first[i] = vreinterpretq_s8_u8(field<kShift, kMask>(bytes));
        r.second[i] = vreinterpretq_s8_u8(field<kShift + Bits, kMask>(bytes));
    }
    return r;
}
// 2^LowBits * upper + lower; of 8 bits less 128: signed, as vdotq_s32 takes them.
template <int LowBits>
inline int8x16_t merged(int8x16_t upper, int8x16_t lower) {
    const int8x16_t codes = vsliq_n_s8(lower, upper, LowBits);
    return LowBits == 4 ? veorq_s8(codes, vdupq_n_s8(-128)) : codes;
}
template <int LowBits>
inline CodePair merged(const CodePair& upper, const CodePair& lower) {
    CodePair r;
    for (int i = 0; i < 4; i++) {
        r.first[i] = merged<LowBits>(upper.first[i], lower.first[i]);
        r.second[i] = merged<LowBits>(upper.second[i], lower.second[i]);
    }
    return r;
}
template <int I>
inline CodePair load_three_bits(const uint8_t* upper, const uint8_t* lower) {
    return merged<1>(load_codes<2, I % 2>(upper), load_codes<1, I>(lower));
}
inline CodePair looked_up(const CodePair& nibbles, const uint8_t* table) {
    const int8x16_t sixteen = vreinterpretq_s8_u8(vld1q_u8(table));
    CodePair r;
    for (int i = 0; i < 4; i++) {
        r.first[i] = vqtbl1q_s8(sixteen, vreinterpretq_u8_s8(nibbles.first[i]));
        r.second[i] = vqtbl1q_s8(sixteen, vreinterpretq_u8_s8(nibbles.second[i]));
    }
    return r;
}
inline CodePair load_byte_pair(const uint8_t* p) {
    CodePair r;
    for (int i = 0; i < 4; i++) {
        r.first[i] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * i));
        r.second[i] = vreinterpretq_s8_u8(vld1q_u8(p + 64 + 16 * i));
    }
    return r;
}
struct Words {
    int16x8_t v[4];
};
template <bool Signed>
inline Words even_words(const int8x16_t (&bytes)[4]) {
    Words r;
    for (int i = 0; i < 4; i++) {
        const int16x8_t high = vshlq_n_s16(vreinterpretq_s16_s8(bytes[i]), 8);
        r.v[i] = Signed ? vshrq_n_s16(high, 8)
                        : vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(high), 8));
    }
    return r;
}
template <bool Signed>
inline Words odd_words(const int8x16_t (&bytes)[4]) {
    Words r;
    for (int i = 0; i < 4; i++)
        r.v[i] = Signed ? vshrq_n_s16(vreinterpretq_s16_s8(bytes[i]), 8)
                        : vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s8(bytes[i]), 8));
    return r;
}
inline Ints first_words(const Words& w) {
    return ints([&](int i) {
        return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(w.v[i]), 16), 16);
    });
}
inline Ints second_words(const Words& w) {
    return ints([&](int i) { return vshrq_n_s32(vreinterpretq_s32_s16(w.v[i]), 16); });
}
inline Ints add_products(const Ints& total, const Words& w, const int16_t* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, 4);
    const int16x8_t both = vreinterpretq_s16_s32(vdupq_n_s32(bits));
    return total + ints([&](int i) {
        const int32x4_t low = vmull_s16(vget_low_s16(w.v[i]), vget_low_s16(both));
        return vpaddq_s32(low, vmull_high_s16(w.v[i], both));
    });
}
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        const int8x8_t eight = vld1_s8(x);
        const auto sum = [&](int32x4_t before, int i) {
            return vdotq_lane_s32(vdotq_lane_s32(before, codes.first[i], eight, 0),
                                  codes.second[i], eight, 1);
        };
        total = {sum(total.a, 0), sum(total.b, 1), sum(total.c, 2), sum(total.d, 3)};
    }
    inline void flush() {}
};

}  // namespace
