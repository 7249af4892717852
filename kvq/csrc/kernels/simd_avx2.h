// Sixteen lanes as two vectors of AVX2, with FMA and F16C, byte products by AVX-VNNI where a file is
// compiled for it. Meanings: simd_generic.h.
#pragma once
#include "simd_x86.h"

namespace {

constexpr int kRegisterRows = 4;
constexpr bool kFewRegisters = true;

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct Bytes { __m256i a, b; };
struct Quad { __m256i v; };

inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline void store_rows(float* p, F x) { _mm256_storeu_ps(p, x.a); }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
inline float reduce_max(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float reduce_add(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int reduce_add(I x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline __m256 power_of_two(__m256 n) {
    const __m256 clamped = _mm256_max_ps(n, _mm256_set1_ps(-127.0f));  // 2^-127 becomes 0
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline F scale_by_power(F p, F n) { return p * F{power_of_two(n.a), power_of_two(n.b)}; }
inline __m256 where_below(__m256 x, __m256 limit, __m256 other) {
    return _mm256_blendv_ps(x, other, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
inline F where_below(F x, F limit, F other) {
    return {where_below(x.a, limit.a, other.a), where_below(x.b, limit.b, other.b)};
}
inline __m256 select_bits(unsigned bits, __m256 x, __m256 y) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i hit = _mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(hit));
}
inline F select_bits(unsigned bits, F x, F y) {
    return {select_bits(bits, x.a, y.a), select_bits(bits >> 8, x.b, y.b)};
}

// Halves, quarters and so on are joined two rows at a time, so that lanes come to be rows.
template <int N, class Join> KVQ_INLINE F join_rows(const F (&x)[N], Join join) {
    constexpr int kHalf = N > 4 ? 4 : 2;  // of the rows
    __m256 half[2 * kHalf], quarter[kHalf], pair[kHalf / 2];
    const auto both = [&](__m256 first, __m256 second) {
        return join(F{first, first}, F{second, second}).a;
    };
    for (int i = 0; i < 2 * kHalf; i++) half[i] = i < N ? both(x[i].a, x[i].b) : half[0];
    for (int i = 0; i < kHalf; i++)
        quarter[i] = both(_mm256_permute2f128_ps(half[i], half[i + kHalf], 0x20),
                          _mm256_permute2f128_ps(half[i], half[i + kHalf], 0x31));
    for (int i = 0; i < kHalf / 2; i++)
        pair[i] = both(_mm256_unpacklo_ps(quarter[2 * i], quarter[2 * i + 1]),
                       _mm256_unpackhi_ps(quarter[2 * i], quarter[2 * i + 1]));
    if constexpr (N > 4) {
        const __m256 rows = both(_mm256_shuffle_ps(pair[0], pair[1], 0x44),
                                 _mm256_shuffle_ps(pair[0], pair[1], 0xee));
        return {rows, rows};
    } else {
        const __m256 twice = both(pair[0], _mm256_permute_ps(pair[0], 0x4e));
        const __m128 rows =
            _mm_movelh_ps(_mm256_castps256_ps128(twice), _mm256_extractf128_ps(twice, 1));
        return {_mm256_set_m128(rows, rows), _mm256_set_m128(rows, rows)};
    }
}

inline F load_half(const uint16_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline F load_codes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_float(
        {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline void store_half(uint16_t* p, F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i* halves = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.a, kNearest));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.b, kNearest));
}
inline void store_bytes(void* p, I x) {
    // Of each word the low byte, as 0x00ff; packing works per half.
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i sorted = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm_packus_epi16(_mm256_castsi256_si128(sorted),
                                      _mm256_extracti128_si256(sorted, 1)));
}

inline void store_bytes(int8_t* p, I x, I y) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works per half
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(x.a, x.b), _mm256_packs_epi32(y.a, y.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}

inline Bytes load_bytes(const uint8_t* p, const uint8_t* q) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q))};
}
template <int Shift, int Mask> inline __m256i field(__m256i x) {
    return _mm256_and_si256(Shift ? _mm256_srli_epi16(x, Shift) : x, _mm256_set1_epi8(Mask));
}
template <int Shift, int Mask> inline Bytes field(Bytes x) {
    return {field<Shift, Mask>(x.a), field<Shift, Mask>(x.b)};
}
inline Quad broadcast(const int8_t* quad) { return {_mm256_set1_epi32(bits_of(quad))}; }
#ifdef __AVXVNNI__
struct Dot {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    inline void add(Bytes codes, Quad quad) {
        a = _mm256_dpbusd_avx_epi32(a, codes.a, quad.v);
        b = _mm256_dpbusd_avx_epi32(b, codes.b, quad.v);
    }
    inline I sum() const { return {a, b}; }
};
#else
// int16 holds eight nibble products (2 * 15 * 127 each).
struct Dot {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    inline void add(Bytes codes, Quad quad) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes.a, quad.v));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(codes.b, quad.v));
        // Or the compiler adds products before it adds them here, and has no registers left.
        asm("" : "+x"(a), "+x"(b));
    }
    inline I sum() const {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
    }
};
#endif

}  // namespace
