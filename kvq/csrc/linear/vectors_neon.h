// Sixteen lanes as four vectors of NEON with dotprod. Meanings: vectors_generic.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kMaxRows = 4;
constexpr int whole_low_bits(int) { return 4; }
constexpr float kMergedLess = 128;  // merged() gives signed codes

struct Floats {
    float32x4_t v[4];
};
struct Ints {
    int32x4_t v[4];
};

// One operation on each of the four vectors.
template <class Op>
inline Floats floats(Op op) {
    return {op(0), op(1), op(2), op(3)};
}
template <class Op>
inline Ints ints(Op op) {
    return {op(0), op(1), op(2), op(3)};
}
inline Floats set1(float x) {
    return floats([&](int) { return vdupq_n_f32(x); });
}
inline Floats load(const float* p) {
    return floats([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Floats x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
inline Floats operator+(Floats x, Floats y) {
    return floats([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline Floats operator-(Floats x, Floats y) {
    return floats([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline Floats operator*(Floats x, Floats y) {
    return floats([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline Floats operator/(Floats x, Floats y) {
    return floats([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline Floats fma(Floats x, Floats y, Floats z) {
    return floats([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline Floats clamp(Floats x, float low, float high) {
    const float32x4_t l = vdupq_n_f32(low), h = vdupq_n_f32(high);
    return floats([&](int i) { return vminq_f32(vmaxq_f32(x.v[i], l), h); });
}
inline Floats round(Floats x) {
    return floats([&](int i) { return vrndnq_f32(x.v[i]); });
}
inline float reduce_add(Floats x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline Floats to_float(Ints x) {
    return floats([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline Ints to_nearest(Floats x) {
    return ints([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline Ints set1(int32_t x) {
    return ints([&](int) { return vdupq_n_s32(x); });
}
inline Ints operator+(Ints x, Ints y) {
    return ints([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline Ints operator*(Ints x, Ints y) {
    return ints([&](int i) { return vmulq_s32(x.v[i], y.v[i]); });
}
template <int Bits>
inline Ints shifted(Ints x) {
    return ints([&](int i) { return vshlq_n_s32(x.v[i], Bits); });
}
inline Ints magnitude_bits(Floats x) {
    return ints([&](int i) { return vreinterpretq_s32_f32(vabsq_f32(x.v[i])); });
}
inline Ints max(Ints x, Ints y) {
    return ints([&](int i) { return vmaxq_s32(x.v[i], y.v[i]); });
}
inline int32_t reduce_max(Ints x) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3])));
}
inline int32_t reduce_add(Ints x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}
inline Floats power_of_two(Floats n) {
    return floats([&](int i) {
        const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127));
        return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    });
}
inline void store_bytes(int8_t* p, Ints x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
inline Floats load_half(const uint8_t* p) {
    return floats([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}

inline Floats load_unsigned(const uint8_t* p) {
    return floats([&](int i) {
        uint32_t four;
        std::memcpy(&four, p + 4 * i, 4);
        const uint16x8_t words = vmovl_u8(vcreate_u8(four));
        return vcvtq_f32_u32(vmovl_u16(vget_low_u16(words)));
    });
}

struct CodePair {
    int8x16_t first[4], second[4];
};
template <int Shift, int Bits>
inline int8x16_t field(uint8x16_t bytes) {
    if constexpr (Shift > 0) bytes = vshrq_n_u8(bytes, Shift);
    if constexpr (Shift + Bits < 8) bytes = vandq_u8(bytes, vdupq_n_u8((1 << Bits) - 1));
    return vreinterpretq_s8_u8(bytes);
}
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    CodePair r;
    for (int i = 0; i < 4; i++) {
        const uint8x16_t bytes = vld1q_u8(p + 16 * i);
        r.first[i] = field<2 * Bits * I, Bits>(bytes);
        r.second[i] = field<2 * Bits * I + Bits, Bits>(bytes);
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
    return ints([&](int i) {
        const int32x4_t low = vmull_s16(vget_low_s16(w.v[i]), vget_low_s16(both));
        return vaddq_s32(total.v[i], vpaddq_s32(low, vmull_high_s16(w.v[i], both)));
    });
}
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        const int8x8_t eight = vld1_s8(x);
        for (int i = 0; i < 4; i++) {
            total.v[i] = vdotq_lane_s32(total.v[i], codes.first[i], eight, 0);
            total.v[i] = vdotq_lane_s32(total.v[i], codes.second[i], eight, 1);
        }
    }
    inline void flush() {}
};

}  // namespace
