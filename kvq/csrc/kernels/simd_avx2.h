// Eight lanes on AVX2, FMA and F16C. With KVQ_VNNI the byte products use vpdpbusd instead.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#ifdef KVQ_VNNI
constexpr int kRegisterRows = 8;  // 32 vector registers
#else
constexpr int kRegisterRows = 4;
#endif

struct F { __m256 v; };
struct I { __m256i v; };
struct Bytes { __m256i v; };

inline F set1(float x) { return {_mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a.v); }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F round(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline float reduce_max(F a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
inline int reduce_add(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline F scale_by_power(F p, F n) {
#ifdef KVQ_VNNI
    return {_mm256_scalef_ps(p.v, n.v)};
#else
    const __m256 clamped = _mm256_max_ps(n.v, _mm256_set1_ps(-127.0f));  // 2^-127 becomes 0
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(p.v, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)))};
#endif
}
inline F select_bits(unsigned bits, F a, F b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hit = _mm256_cmpeq_epi32(
        _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(hit))};
}

inline F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_codes(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))};
}
inline void store_half(uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline void store_bytes(uint8_t* p, I a) {
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void store_codes(int8_t* p, const I* a) {
    const __m256i low = _mm256_packs_epi32(a[0].v, a[1].v);
    const __m256i high = _mm256_packs_epi32(a[2].v, a[3].v);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs works per half
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
}

inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
template <int Shift, int Mask> inline Bytes field(Bytes a) {
    return {_mm256_and_si256(Shift ? _mm256_srli_epi16(a.v, Shift) : a.v,
                             _mm256_set1_epi8(Mask))};
}

inline __m256i broadcast_quad(const int8_t* quad) {
    int32_t bits;
    std::memcpy(&bits, quad, 4);
    return _mm256_set1_epi32(bits);
}
#ifdef KVQ_VNNI
struct Dot {
    __m256i v = _mm256_setzero_si256();
    inline void add(Bytes codes, const int8_t* quad) {
        v = _mm256_dpbusd_epi32(v, codes.v, broadcast_quad(quad));
    }
    inline I sum() const { return {v}; }
};
#else
// int16 holds eight nibble products (2 * 15 * 127 each): no more than eight adds before sum().
struct Dot {
    __m256i v = _mm256_setzero_si256();
    inline void add(Bytes codes, const int8_t* quad) {
        v = _mm256_add_epi16(v, _mm256_maddubs_epi16(codes.v, broadcast_quad(quad)));
    }
    inline I sum() const { return {_mm256_madd_epi16(v, _mm256_set1_epi16(1))}; }
};
#endif

inline void transpose(const F* rows, float* out, int stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
        a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
