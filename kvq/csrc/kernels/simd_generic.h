// Eight lanes in plain C++: what every simd header means, and the fallback where none fits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kRegisterRows = 4;  // query rows whose accumulators stay in registers

struct F { float v[8]; };
struct I { int32_t v[8]; };
struct Bytes { uint8_t v[32]; };

template <class Op> inline F lanes(Op op) {
    F r;
    for (int i = 0; i < 8; i++) r.v[i] = op(i);
    return r;
}
inline F set1(float x) { return lanes([&](int) { return x; }); }
inline F load(const float* p) { return lanes([&](int i) { return p[i]; }); }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline F operator+(F a, F b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
inline F operator-(F a, F b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
inline F operator*(F a, F b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
inline F operator/(F a, F b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F max(F a, F b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F abs(F a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
inline F round(F a) { return lanes([&](int i) { return std::nearbyintf(a.v[i]); }); }
inline float reduce_max(F a) {
    float m = a.v[0];
    for (int i = 1; i < 8; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
inline float reduce_add(F a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline F to_float(I a) { return lanes([&](int i) { return static_cast<float>(a.v[i]); }); }
inline I operator+(I a, I b) {
    I r;
    for (int i = 0; i < 8; i++) r.v[i] = a.v[i] + b.v[i];
    return r;
}
inline I to_int(F a) {  // rounds half to even
    I r;
    for (int i = 0; i < 8; i++) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
    return r;
}
inline int reduce_add(I a) {
    int total = 0;
    for (int i = 0; i < 8; i++) total += a.v[i];
    return total;
}
// p * 2^n for integral n <= 127; 0 below -126.
inline F scale_by_power(F p, F n) {
    return lanes([&](int i) {
        if (n.v[i] < -126.0f) return 0.0f;
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float r;
        std::memcpy(&r, &bits, 4);
        return p.v[i] * r;
    });
}
// Lane i keeps a where bit i is set, else b.
inline F select_bits(unsigned bits, F a, F b) {
    return lanes([&](int i) { return (bits >> i & 1) ? a.v[i] : b.v[i]; });
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31;
    uint32_t mantissa = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        const float r = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -r : r;
    }
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
}
// Round to nearest, ties to even; beyond 65504 gives infinity.
inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00;
    if (bits >= 0x477ff000u) return sign | 0x7c00;
    if (bits < 0x38800000u) {  // subnormal in half: let the float adder round
        float magnitude, shifted;
        std::memcpy(&magnitude, &bits, 4);
        shifted = magnitude + 0.5f;
        uint32_t r;
        std::memcpy(&r, &shifted, 4);
        return sign | static_cast<uint16_t>(r - 0x3f000000u);
    }
    bits += 0xfffu + (bits >> 13 & 1);
    return sign | static_cast<uint16_t>((bits - 0x38000000u) >> 13);
}
inline F load_half(const uint16_t* p) { return lanes([&](int i) { return half_to_float(p[i]); }); }
inline F load_codes(const uint8_t* p) {
    return lanes([&](int i) { return static_cast<float>(p[i]); });
}
inline void store_half(uint16_t* p, F a) {
    for (int i = 0; i < 8; i++) p[i] = float_to_half(a.v[i]);
}
inline void store_bytes(uint8_t* p, I a) {  // 0..255
    for (int i = 0; i < 8; i++) p[i] = static_cast<uint8_t>(a.v[i]);
}
inline void store_codes(int8_t* p, const I* a) {  // four lanes of -127..127: 32 bytes
    for (int i = 0; i < 32; i++) p[i] = static_cast<int8_t>(a[i / 8].v[i % 8]);
}

inline Bytes load_bytes(const uint8_t* p) {
    Bytes r;
    std::memcpy(r.v, p, 32);
    return r;
}
template <int Shift, int Mask> inline Bytes field(Bytes a) {
    Bytes r;
    for (int i = 0; i < 32; i++) r.v[i] = a.v[i] >> Shift & Mask;
    return r;
}

// Sums of four-byte dot products: lane i gathers codes[4i..4i+3] . quad.
struct Dot {
    int32_t v[8] = {};
    inline void add(Bytes codes, const int8_t* quad) {
        for (int i = 0; i < 8; i++)
            for (int c = 0; c < 4; c++) v[i] += codes.v[4 * i + c] * quad[c];
    }
    inline I sum() const {
        I r;
        std::memcpy(r.v, v, sizeof v);
        return r;
    }
};

// 8x8 float transpose: out[8*c + t] = rows[t][c].
inline void transpose(const F* rows, float* out, int stride) {
    for (int c = 0; c < 8; c++)
        for (int t = 0; t < 8; t++) out[c * stride + t] = rows[t].v[c];
}
inline void prefetch(const void*) {}

}  // namespace
