// Sixteen lanes in plain C++: what every simd header means, and the fallback where none fits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define KVQ_UNROLL  // loops over rows and vectors, where lanes are registers

namespace {

// Rows whose products with a vector of codes are summed in registers: those that pass through all
// stages together, eight at most.
constexpr int kRegisterRows = 4;
// Sums keep their registers only in a function of their own.
constexpr bool kFewRegisters = false;

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };
struct Quad { int8_t v[4]; };

template <class Op> inline F lanes(Op op) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = op(i);
    return r;
}
inline F set1(float x) { return lanes([&](int) { return x; }); }
inline F load(const float* p) { return lanes([&](int i) { return p[i]; }); }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
// The first eight lanes.
inline void store_rows(float* p, F a) { std::memcpy(p, a.v, 8 * sizeof(float)); }
inline F operator+(F a, F b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
inline F operator-(F a, F b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
inline F operator*(F a, F b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
inline F operator/(F a, F b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F max(F a, F b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F abs(F a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
inline F round(F a) { return lanes([&](int i) { return std::nearbyintf(a.v[i]); }); }
// Lanes far apart are joined first.
template <class Join> inline float reduce(F a, Join join) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = join(a.v[i], a.v[i + half]);
    return a.v[0];
}
inline float reduce_max(F a) {
    return reduce(a, [](float x, float y) { return x > y ? x : y; });
}
inline float reduce_add(F a) {
    return reduce(a, [](float x, float y) { return x + y; });
}
inline F to_float(I a) { return lanes([&](int i) { return static_cast<float>(a.v[i]); }); }
inline I operator+(I a, I b) {
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = a.v[i] + b.v[i];
    return r;
}
inline I to_int(F a) {  // rounds half to even
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
    return r;
}
inline int reduce_add(I a) {
    int total = 0;
    for (int i = 0; i < 16; i++) total += a.v[i];
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
// Lanes of x that are below those of `limit` become those of `other`.
inline F where_below(F x, F limit, F other) {
    return lanes([&](int i) { return x.v[i] < limit.v[i] ? other.v[i] : x.v[i]; });
}
// Lane i keeps a where bit i is set, else b.
inline F select_bits(unsigned bits, F a, F b) {
    return lanes([&](int i) { return (bits >> i & 1) ? a.v[i] : b.v[i]; });
}
// Joins the lanes of each of N rows, eight at most, in an order that is the same for all, to lane r.
template <int N, class Join> inline F join_rows(const F (&x)[N], Join join) {
    F rows[8] = {};
    for (int r = 0; r < N; r++) {
        rows[r] = x[r];
        for (int half = 8; half; half /= 2) {
            F far = rows[r];
            for (int i = 0; i < half; i++) far.v[i] = rows[r].v[i + half];
            rows[r] = join(rows[r], far);
        }
    }
    return lanes([&](int i) { return rows[i % 8].v[0]; });
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
    for (int i = 0; i < 16; i++) p[i] = float_to_half(a.v[i]);
}
inline void store_bytes(void* p, I a) {  // the low byte of each lane
    for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(a.v[i]);
}
// Of numbers that fit int8, side by side.
inline void store_bytes(int8_t* p, I a, I b) { store_bytes(p, a), store_bytes(p + 16, b); }

// 32 bytes at p, then 32 at q.
inline Bytes load_bytes(const uint8_t* p, const uint8_t* q) {
    Bytes r;
    std::memcpy(r.v, p, 32);
    std::memcpy(r.v + 32, q, 32);
    return r;
}
template <int Shift, int Mask> inline Bytes field(Bytes a) {
    Bytes r;
    for (int i = 0; i < 64; i++) r.v[i] = a.v[i] >> Shift & Mask;
    return r;
}
inline Quad broadcast(const int8_t* quad) { return {{quad[0], quad[1], quad[2], quad[3]}}; }

// Sums of four-byte dot products: lane i gathers codes[4i..4i+3] . quad. Codes are nibbles; no more
// than eight adds before sum().
struct Dot {
    int32_t v[16] = {};
    inline void add(Bytes codes, Quad quad) {
        for (int i = 0; i < 16; i++)
            for (int c = 0; c < 4; c++) v[i] += codes.v[4 * i + c] * quad.v[c];
    }
    inline I sum() const {
        I r;
        std::memcpy(r.v, v, sizeof v);
        return r;
    }
};

// Eight numbers of each of eight rows, transposed: out[c * stride + t] = rows[t][c].
inline void transpose(const uint16_t* const* rows, float* out, int stride) {
    for (int c = 0; c < 8; c++)
        for (int t = 0; t < 8; t++) out[c * stride + t] = half_to_float(rows[t][c]);
}

}  // namespace
