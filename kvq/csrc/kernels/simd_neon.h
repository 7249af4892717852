// Sixteen lanes as four vectors of NEON with dotprod. Meanings: simd_generic.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define KVQ_UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int kRegisterRows = 4;
constexpr bool kFewRegisters = false;

struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };
struct Bytes { uint8x16_t a, b, c, d; };
struct Quad { int8x16_t v; };

// A result of vectors by vectors.
template <class To = F, class Op, class... X> inline To each(Op op, X... x) {
    return {op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
}

inline F set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
inline F load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store_rows(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}
inline void store(float* p, F x) {
    store_rows(p, x);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
using V = float32x4_t;
inline F operator+(F x, F y) { return each([](V p, V q) { return vaddq_f32(p, q); }, x, y); }
inline F operator-(F x, F y) { return each([](V p, V q) { return vsubq_f32(p, q); }, x, y); }
inline F operator*(F x, F y) { return each([](V p, V q) { return vmulq_f32(p, q); }, x, y); }
inline F operator/(F x, F y) { return each([](V p, V q) { return vdivq_f32(p, q); }, x, y); }
inline F fma(F x, F y, F z) {
    return each([](V p, V q, V r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
inline F max(F x, F y) { return each([](V p, V q) { return vmaxq_f32(p, q); }, x, y); }
inline F min(F x, F y) { return each([](V p, V q) { return vminq_f32(p, q); }, x, y); }
inline F abs(F x) { return each([](V p) { return vabsq_f32(p); }, x); }
inline F round(F x) { return each([](V p) { return vrndnq_f32(p); }, x); }
inline float reduce_max(F x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d)));
}
inline float reduce_add(F x) {
    const V four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline F to_float(I x) { return each([](int32x4_t p) { return vcvtq_f32_s32(p); }, x); }
inline I operator+(I x, I y) {
    return each<I>([](int32x4_t p, int32x4_t q) { return vaddq_s32(p, q); }, x, y);
}
inline I to_int(F x) { return each<I>([](V p) { return vcvtnq_s32_f32(p); }, x); }
inline int reduce_add(I x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)));
}
inline F scale_by_power(F p, F n) {
    return p * each([](V x) {
               const V clamped = vmaxq_f32(x, vdupq_n_f32(-127.0f));  // 2^-127 becomes 0
               const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(clamped), vdupq_n_s32(127));
               return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
           }, n);
}
inline F where_below(F x, F limit, F other) {
    return each([](V p, V q, V r) { return vbslq_f32(vcltq_f32(p, q), r, p); }, x, limit, other);
}
inline F select_bits(unsigned bits, F x, F y) {
    const uint32_t first[] = {1, 2, 4, 8};
    uint32x4_t lane = vld1q_u32(first);
    const uint32x4_t all = vdupq_n_u32(bits);
    F r;
    r.a = vbslq_f32(vtstq_u32(all, lane), x.a, y.a);
    r.b = vbslq_f32(vtstq_u32(all, vshlq_n_u32(lane, 4)), x.b, y.b);
    r.c = vbslq_f32(vtstq_u32(all, vshlq_n_u32(lane, 8)), x.c, y.c);
    r.d = vbslq_f32(vtstq_u32(all, vshlq_n_u32(lane, 12)), x.d, y.d);
    return r;
}

// Neighbours are joined last, two rows at a time, so that lanes come to be rows.
template <int N, class Join> KVQ_INLINE F join_rows(const F (&x)[N], Join join) {
    constexpr int kFours = N > 4 ? 2 : 1;  // of rows
    V four[4 * kFours], two[2 * kFours], rows[kFours];
    const auto both = [&](V p, V q) { return join(F{p, p, p, p}, F{q, q, q, q}).a; };
    for (int i = 0; i < 4 * kFours; i++) {
        const F& row = x[i < N ? i : 0];
        four[i] = both(both(row.a, row.c), both(row.b, row.d));
    }
    for (int i = 0; i < 2 * kFours; i++)
        two[i] = both(vuzp1q_f32(four[2 * i], four[2 * i + 1]),
                      vuzp2q_f32(four[2 * i], four[2 * i + 1]));
    for (int i = 0; i < kFours; i++)
        rows[i] = both(vuzp1q_f32(two[2 * i], two[2 * i + 1]),
                       vuzp2q_f32(two[2 * i], two[2 * i + 1]));
    return {rows[0], rows[kFours - 1], rows[0], rows[kFours - 1]};
}

inline float half_to_float(uint16_t h) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
inline uint16_t float_to_half(float x) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}
inline F load_half(const uint16_t* p) {
    const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(p));
    const float16x8_t y = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)),
            vcvt_high_f32_f16(y)};
}
inline F load_codes(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
}
inline void store_half(uint16_t* p, F x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
    vst1q_u16(p + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.c), x.d)));
}
inline void store_bytes(void* p, I x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(static_cast<int8_t*>(p), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline void store_bytes(int8_t* p, I x, I y) { store_bytes(p, x), store_bytes(p + 16, y); }

inline Bytes load_bytes(const uint8_t* p, const uint8_t* q) {
    return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(q), vld1q_u8(q + 16)};
}
template <int Shift, int Mask> inline uint8x16_t field(uint8x16_t x) {
    if constexpr (Shift > 0) x = vshrq_n_u8(x, Shift);
    if constexpr (Mask << Shift < 128) x = vandq_u8(x, vdupq_n_u8(Mask));
    return x;  // a field of the top bit has nothing above it
}
template <int Shift, int Mask> inline Bytes field(Bytes x) {
    return each<Bytes>([](uint8x16_t p) { return field<Shift, Mask>(p); }, x);
}
inline Quad broadcast(const int8_t* quad) {
    int32_t bits;
    std::memcpy(&bits, quad, 4);
    return {vreinterpretq_s8_s32(vdupq_n_s32(bits))};
}

// Codes are below 128, so it does not matter that they are taken for signed ones.
struct Dot {
    I v = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    inline void add(Bytes codes, Quad quad) {
        v = each<I>(
            [&](int32x4_t sum, uint8x16_t four) {
                return vdotq_s32(sum, vreinterpretq_s8_u8(four), quad.v);
            },
            v, codes);
    }
    inline I sum() const { return v; }
};

// Each round moves one bit of a number's row to its place in the row.
inline void transpose(const uint16_t* const* rows, float* out, int stride) {
    uint16x8_t x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = vld1q_u16(rows[i]);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            y[2 * i] = vzip1q_u16(x[i], x[i + 4]);
            y[2 * i + 1] = vzip2q_u16(x[i], x[i + 4]);
        }
        std::memcpy(x, y, sizeof x);
    }
    for (int i = 0; i < 8; i++) {
        const float16x8_t halves = vreinterpretq_f16_u16(x[i]);
        vst1q_f32(out + i * stride, vcvt_f32_f16(vget_low_f16(halves)));
        vst1q_f32(out + i * stride + 4, vcvt_high_f32_f16(halves));
    }
}

}  // namespace
