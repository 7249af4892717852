// Eight lanes as two vectors of NEON with dotprod. Meanings: simd_generic.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kRegisterRows = 4;  // as many bytes of registers as AVX2

struct F { float32x4_t a, b; };
struct I { int32x4_t a, b; };
struct Bytes { uint8x16_t a, b; };

inline F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}
inline F operator+(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F operator-(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F operator*(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F operator/(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline F max(F x, F y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F min(F x, F y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
inline F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F round(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
inline float reduce_max(F x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
inline float reduce_add(F x) {
    const float32x4_t four = vaddq_f32(x.a, x.b);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
inline I operator+(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
inline I to_int(F x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
inline int reduce_add(I x) { return vaddvq_s32(vaddq_s32(x.a, x.b)); }
inline float32x4_t power_of_two(float32x4_t n) {
    const float32x4_t clamped = vmaxq_f32(n, vdupq_n_f32(-127.0f));  // 2^-127 becomes 0
    const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(clamped), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
}
inline F scale_by_power(F p, F n) { return p * F{power_of_two(n.a), power_of_two(n.b)}; }
inline F select_bits(unsigned bits, F x, F y) {
    const uint32_t lane[] = {1, 2, 4, 8};
    const uint32x4_t low = vld1q_u32(lane), all = vdupq_n_u32(bits);
    return {vbslq_f32(vtstq_u32(all, low), x.a, y.a),
            vbslq_f32(vtstq_u32(all, vshlq_n_u32(low, 4)), x.b, y.b)};
}

inline float half_to_float(uint16_t h) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
inline uint16_t float_to_half(float x) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}
inline F load_half(const uint16_t* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline F load_codes(const uint8_t* p) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))};
}
inline void store_half(uint16_t* p, F x) {
    const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b);
    vst1q_u16(p, vreinterpretq_u16_f16(halves));
}
inline int16x8_t words(I x) { return vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)); }
inline void store_bytes(uint8_t* p, I x) { vst1_u8(p, vqmovun_s16(words(x))); }
inline void store_codes(int8_t* p, const I* x) {
    for (int i = 0; i < 4; i++) vst1_s8(p + 8 * i, vqmovn_s16(words(x[i])));
}

inline Bytes load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
template <int Shift, int Mask> inline uint8x16_t field(uint8x16_t x) {
    if constexpr (Shift > 0) x = vshrq_n_u8(x, Shift);
    if constexpr (Mask << Shift < 128) x = vandq_u8(x, vdupq_n_u8(Mask));
    return x;  // a field of the top bit has nothing above it
}
template <int Shift, int Mask> inline Bytes field(Bytes x) {
    return {field<Shift, Mask>(x.a), field<Shift, Mask>(x.b)};
}

// Codes are below 128, so it does not matter that they are taken for signed ones.
struct Dot {
    int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
    inline void add(Bytes codes, const int8_t* quad) {
        int32_t bits;
        std::memcpy(&bits, quad, 4);
        const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(bits));
        a = vdotq_s32(a, vreinterpretq_s8_u8(codes.a), four);
        b = vdotq_s32(b, vreinterpretq_s8_u8(codes.b), four);
    }
    inline I sum() const { return {a, b}; }
};

// 4x4 block of a transpose: out[c * stride + t] = rows[t][c].
inline void transpose(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* out,
                      int stride) {
    const float64x2_t first = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    const float64x2_t second = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t third = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
    const float64x2_t fourth = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(first, third)));
    vst1q_f32(out + stride, vreinterpretq_f32_f64(vtrn1q_f64(second, fourth)));
    vst1q_f32(out + 2 * stride, vreinterpretq_f32_f64(vtrn2q_f64(first, third)));
    vst1q_f32(out + 3 * stride, vreinterpretq_f32_f64(vtrn2q_f64(second, fourth)));
}
inline void transpose(const F* rows, float* out, int stride) {
    for (int t = 0; t < 8; t += 4, rows += 4) {
        transpose(rows[0].a, rows[1].a, rows[2].a, rows[3].a, out + t, stride);
        transpose(rows[0].b, rows[1].b, rows[2].b, rows[3].b, out + t + 4 * stride, stride);
    }
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
