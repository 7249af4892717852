// Sixteen lanes as one vector of AVX-512, byte products by VNNI. Meanings: simd_generic.h.
#pragma once
#include "simd_x86.h"

namespace {

constexpr int kRegisterRows = 8;
constexpr bool kFewRegisters = false;

struct F { __m512 v; };
struct I { __m512i v; };
struct Bytes { __m512i v; };
struct Quad { __m512i v; };

inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store_rows(float* p, F a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a.v)); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }
inline float reduce_add(F a) { return _mm512_reduce_add_ps(a.v); }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline int reduce_add(I a) { return _mm512_reduce_add_epi32(a.v); }
inline F scale_by_power(F p, F n) { return {_mm512_scalef_ps(p.v, n.v)}; }
inline F where_below(F x, F limit, F other) {
    return {_mm512_mask_mov_ps(x.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), other.v)};
}
inline F select_bits(unsigned bits, F a, F b) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v)};
}

// Halves, quarters and so on are joined two rows at a time, so that lanes come to be rows.
template <int N, class Join> KVQ_INLINE F join_rows(const F (&x)[N], Join join) {
    constexpr int kHalf = N > 4 ? 4 : 2;  // of the rows
    const auto row = [&](int i) { return x[i < N ? i : 0].v; };
    F halves[kHalf];
    for (int i = 0; i < kHalf; i++)
        halves[i] = join(F{_mm512_shuffle_f32x4(row(i), row(i + kHalf), 0x44)},
                         F{_mm512_shuffle_f32x4(row(i), row(i + kHalf), 0xee)});
    if constexpr (N <= 4) {
        const F quarters = join(F{_mm512_shuffle_f32x4(halves[0].v, halves[1].v, 0x88)},
                                F{_mm512_shuffle_f32x4(halves[0].v, halves[1].v, 0xdd)});
        const F pairs = join(quarters, F{_mm512_permute_ps(quarters.v, 0x4e)});
        const F rows = join(pairs, F{_mm512_permute_ps(pairs.v, 0xb1)});
        const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12);
        return {_mm512_permutexvar_ps(order, rows.v)};
    } else {
        F quarters[2];
        for (int i = 0; i < 2; i++)
            quarters[i] = join(F{_mm512_shuffle_f32x4(halves[i].v, halves[i + 2].v, 0x88)},
                               F{_mm512_shuffle_f32x4(halves[i].v, halves[i + 2].v, 0xdd)});
        const F pairs = join(F{_mm512_unpacklo_ps(quarters[0].v, quarters[1].v)},
                             F{_mm512_unpackhi_ps(quarters[0].v, quarters[1].v)});
        const F rows = join(pairs, F{_mm512_permute_ps(pairs.v, 0x4e)});
        const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 1, 8, 9, 4, 5, 12, 13);
        return {_mm512_permutexvar_ps(order, rows.v)};
    }
}

inline F load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_codes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
inline void store_half(uint16_t* p, F a) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p),
        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bytes(void* p, I a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline void store_bytes(int8_t* p, I a, I b) { store_bytes(p, a), store_bytes(p + 16, b); }

inline Bytes load_bytes(const uint8_t* p, const uint8_t* q) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
template <int Shift, int Mask> inline Bytes field(Bytes a) {
    return {_mm512_and_si512(Shift ? _mm512_srli_epi16(a.v, Shift) : a.v,
                             _mm512_set1_epi8(Mask))};
}
inline Quad broadcast(const int8_t* quad) { return {_mm512_set1_epi32(bits_of(quad))}; }
struct Dot {
    __m512i v = _mm512_setzero_si512();
    inline void add(Bytes codes, Quad quad) { v = _mm512_dpbusd_epi32(v, codes.v, quad.v); }
    inline I sum() const { return {v}; }
};

}  // namespace
