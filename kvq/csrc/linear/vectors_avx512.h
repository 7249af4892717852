// Sixteen lanes on AVX-512 with VNNI. Meanings: vectors_generic.h.
#pragma once
#include "../kernels/kernels.h"
#include "../kernels/simd_avx512.h"

namespace {

constexpr int kMaxRows = 12;
constexpr int whole_low_bits(int) { return 4; }
constexpr float kMergedLess = 0;

using Floats = F;
using Ints = I;

inline Ints set1(int32_t x) {
    return {_mm512_set1_epi32(x)};
}
inline Ints load_ints(const int32_t* p) {
    return {_mm512_loadu_si512(p)};
}
inline Ints operator*(Ints a, Ints b) {
    return {_mm512_mullo_epi32(a.v, b.v)};
}
template <int Bits>
inline Ints shifted(Ints a) {
    return {_mm512_slli_epi32(a.v, Bits)};
}
inline Ints magnitude_bits(Floats a) {
    return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline Ints max(Ints a, Ints b) {
    return {_mm512_max_epi32(a.v, b.v)};
}
inline int32_t reduce_max(Ints a) {
    return _mm512_reduce_max_epi32(a.v);
}
inline Floats load_half(const uint8_t* p) {
    return load_half(reinterpret_cast<const uint16_t*>(p));
}

struct CodePair {
    __m512i first, second;
};
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    constexpr int kShift = 2 * Bits * I;
    const __m512i bytes = _mm512_loadu_si512(p), mask = _mm512_set1_epi8((1 << Bits) - 1);
    return {_mm512_and_si512(_mm512_srli_epi16(bytes, kShift), mask),
            _mm512_and_si512(_mm512_srli_epi16(bytes, kShift + Bits), mask)};
}
template <int LowBits>
inline CodePair merged(const CodePair& upper, const CodePair& lower) {
    return {_mm512_or_si512(_mm512_slli_epi16(upper.first, LowBits), lower.first),
            _mm512_or_si512(_mm512_slli_epi16(upper.second, LowBits), lower.second)};
}
// The upper bits are moved at once to where they go.
template <int I>
inline CodePair load_three_bits(const uint8_t* upper, const uint8_t* lower) {
    const __m512i twos = _mm512_loadu_si512(upper), six = _mm512_set1_epi8(6);
    const __m512i first = I % 2 ? _mm512_srli_epi16(twos, 3) : _mm512_slli_epi16(twos, 1);
    const __m512i second = _mm512_srli_epi16(twos, I % 2 ? 5 : 1);
    const CodePair rest = load_codes<1, I>(lower);
    return {_mm512_or_si512(_mm512_and_si512(first, six), rest.first),
            _mm512_or_si512(_mm512_and_si512(second, six), rest.second)};
}
inline CodePair looked_up(const CodePair& nibbles, const uint8_t* table) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m512i all = _mm512_broadcast_i32x4(sixteen);
    return {_mm512_shuffle_epi8(all, nibbles.first), _mm512_shuffle_epi8(all, nibbles.second)};
}
inline void store_codes(uint8_t* p, const CodePair& codes) {
    _mm512_storeu_si512(p, codes.first);
    _mm512_storeu_si512(p + 64, codes.second);
}
inline CodePair load_byte_pair(const uint8_t* p) {
    return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)};
}
struct Words {
    __m512i v;
};
template <bool Signed>
inline Words even_words(__m512i bytes) {
    if (Signed) return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8)};
    return {_mm512_and_si512(bytes, _mm512_set1_epi16(255))};
}
template <bool Signed>
inline Words odd_words(__m512i bytes) {
    return {Signed ? _mm512_srai_epi16(bytes, 8) : _mm512_srli_epi16(bytes, 8)};
}
inline Ints first_words(Words w) {
    return {_mm512_srai_epi32(_mm512_slli_epi32(w.v, 16), 16)};
}
inline Ints second_words(Words w) {
    return {_mm512_srai_epi32(w.v, 16)};
}
// What the codes of a lane's four columns are multiplied by, of 8 bits, and what is added to each.
struct LaneFactors {
    __m512i even, odd, more;
    LaneFactors(Ints scale, int beyond) {
        const __m512i bytes = _mm512_and_si512(scale.v, _mm512_set1_epi32(255));
        even = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 16));
        odd = _mm512_slli_epi16(even, 8);
        const __m512i add = _mm512_mullo_epi16(scale.v, _mm512_set1_epi32(beyond));
        more = _mm512_mask_blend_epi16(0xaaaaaaaa, add, _mm512_slli_epi32(add, 16));
    }
};
// Codes times factors, sixteen bits each: their lower bytes and their upper ones.
template <bool kMore>
inline void store_scaled(uint8_t* low, uint8_t* high, __m512i codes, const LaneFactors& factors) {
    __m512i even = _mm512_maddubs_epi16(codes, factors.even);
    __m512i odd = _mm512_maddubs_epi16(codes, factors.odd);
    if (kMore) even = _mm512_add_epi16(even, factors.more), odd = _mm512_add_epi16(odd, factors.more);
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
    _mm512_storeu_si512(low, _mm512_mask_blend_epi8(kOdd, even, _mm512_slli_epi16(odd, 8)));
    _mm512_storeu_si512(high, _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(even, 8), odd));
}
inline Ints add_products(Ints total, Words w, const int16_t* pair) {
    return {_mm512_dpwssd_epi32(total.v, w.v, _mm512_set1_epi32(bits_of(pair)))};
}
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        total.v = _mm512_dpbusd_epi32(total.v, codes.first, broadcast(x).v);
        total.v = _mm512_dpbusd_epi32(total.v, codes.second, broadcast(x + 4).v);
    }
    inline void flush() {}
};

}  // namespace
