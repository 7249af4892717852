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
struct Codes {
    int8x16_t a, b, c, d;
};

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

struct CodePair {
    Codes first, second;
};
template <int Shift, int Mask>
inline Codes codes_of(const Bytes& bytes) {
    return each<Codes>(
        [](uint8x16_t p) { return vreinterpretq_s8_u8(field<Shift, Mask>(p)); }, bytes);
}
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    constexpr int kShift = 2 * Bits * I, kMask = (1 << Bits) - 1;
    const Bytes bytes = load_bytes(p, p + 32);
    return {codes_of<kShift, kMask>(bytes), codes_of<kShift + Bits, kMask>(bytes)};
}
// 2^LowBits * upper + lower; of 8 bits less 128: signed, as vdotq_s32 takes them.
template <int LowBits>
inline Codes merged(const Codes& upper, const Codes& lower) {
    return each<Codes>(
        [](int8x16_t high, int8x16_t low) {
            const int8x16_t codes = vsliq_n_s8(low, high, LowBits);
            return LowBits == 4 ? veorq_s8(codes, vdupq_n_s8(-128)) : codes;
        },
        upper, lower);
}
template <int LowBits>
inline CodePair merged(const CodePair& upper, const CodePair& lower) {
    return {merged<LowBits>(upper.first, lower.first), merged<LowBits>(upper.second, lower.second)};
}
template <int I>
inline CodePair load_three_bits(const uint8_t* upper, const uint8_t* lower) {
    return merged<1>(load_codes<2, I % 2>(upper), load_codes<1, I>(lower));
}
inline CodePair looked_up(const CodePair& nibbles, const uint8_t* table) {
    const int8x16_t sixteen = vreinterpretq_s8_u8(vld1q_u8(table));
    const auto look = [&](int8x16_t p) { return vqtbl1q_s8(sixteen, vreinterpretq_u8_s8(p)); };
    return {each<Codes>(look, nibbles.first), each<Codes>(look, nibbles.second)};
}
inline CodePair load_byte_pair(const uint8_t* p) {
    return {codes_of<0, 255>(load_bytes(p, p + 32)), codes_of<0, 255>(load_bytes(p + 64, p + 96))};
}
struct Words {
    int16x8_t a, b, c, d;
};
template <bool Signed>
inline Words even_words(const Codes& bytes) {
    return each<Words>(
        [](int8x16_t p) {
            const int16x8_t high = vshlq_n_s16(vreinterpretq_s16_s8(p), 8);
            return Signed ? vshrq_n_s16(high, 8)
                          : vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(high), 8));
        },
        bytes);
}
template <bool Signed>
inline Words odd_words(const Codes& bytes) {
    return each<Words>(
        [](int8x16_t p) {
            return Signed ? vshrq_n_s16(vreinterpretq_s16_s8(p), 8)
                          : vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s8(p), 8));
        },
        bytes);
}
inline Ints first_words(const Words& w) {
    return each<Ints>(
        [](int16x8_t p) {
            return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(p), 16), 16);
        },
        w);
}
inline Ints second_words(const Words& w) {
    return each<Ints>([](int16x8_t p) { return vshrq_n_s32(vreinterpretq_s32_s16(p), 16); }, w);
}
inline Ints add_products(const Ints& total, const Words& w, const int16_t* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, 4);
    const int16x8_t both = vreinterpretq_s16_s32(vdupq_n_s32(bits));
    return each<Ints>(
        [&](int32x4_t sum, int16x8_t p) {
            const int32x4_t low = vmull_s16(vget_low_s16(p), vget_low_s16(both));
            return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(p, both)));
        },
        total, w);
}
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        const int8x8_t eight = vld1_s8(x);
        total = each<Ints>(
            [&](int32x4_t sum, int8x16_t p, int8x16_t q) {
                return vdotq_lane_s32(vdotq_lane_s32(sum, p, eight, 0), q, eight, 1);
            },
            total, codes.first, codes.second);
    }
    inline void flush() {}
};

}  // namespace
