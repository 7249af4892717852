// Sixteen lanes as two vectors of AVX2, FMA and F16C; where AVX-VNNI is compiled for, dot products
// are vpdpbusd. Meanings: vectors_generic.h.
#pragma once
#include "../kernels/kernels.h"
#include "../kernels/simd_avx2.h"

namespace {

constexpr int kMaxRows = 5;
#ifdef __AVXVNNI__
constexpr int whole_low_bits(int) { return 4; }
#else
// Of six bits one row is as fast by planes.
constexpr int whole_low_bits(int rows) { return rows > 1 ? 2 : 1; }
#endif
constexpr float kMergedLess = 0;

using Floats = F;
using Ints = I;

inline Ints set1(int32_t x) {
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
inline Ints operator*(Ints x, Ints y) {
    return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
template <int Bits>
inline Ints shifted(Ints x) {
    return {_mm256_slli_epi32(x.a, Bits), _mm256_slli_epi32(x.b, Bits)};
}
inline Ints magnitude_bits(Floats x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask),
            _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
inline Ints max(Ints x, Ints y) {
    return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
inline int32_t reduce_max(Ints x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
inline Floats load_half(const uint8_t* p) {
    return load_half(reinterpret_cast<const uint16_t*>(p));
}

struct CodePair {
    Ints first, second;
};
template <int Shift>
inline Ints fields(__m256i a, __m256i b, __m256i mask) {
    return {_mm256_and_si256(_mm256_srli_epi16(a, Shift), mask),
            _mm256_and_si256(_mm256_srli_epi16(b, Shift), mask)};
}
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    const __m256i* bytes = reinterpret_cast<const __m256i*>(p);
    const __m256i a = _mm256_loadu_si256(bytes), b = _mm256_loadu_si256(bytes + 1);
    const __m256i mask = _mm256_set1_epi8((1 << Bits) - 1);
    return {fields<2 * Bits * I>(a, b, mask), fields<2 * Bits * I + Bits>(a, b, mask)};
}
template <int LowBits>
inline Ints merged(const Ints& upper, const Ints& lower) {
    return {_mm256_or_si256(_mm256_slli_epi16(upper.a, LowBits), lower.a),
            _mm256_or_si256(_mm256_slli_epi16(upper.b, LowBits), lower.b)};
}
template <int LowBits>
inline CodePair merged(const CodePair& upper, const CodePair& lower) {
    return {merged<LowBits>(upper.first, lower.first), merged<LowBits>(upper.second, lower.second)};
}
// Of four fields of two bits those at even places, then those at odd ones, get their last bits from
// a table of nibbles of the plane below, and each is a nibble then: fewer shifts than code by code.
template <int I>
inline CodePair load_three_bits(const uint8_t* upper, const uint8_t* lower) {
    const __m256i nibble = _mm256_set1_epi8(15), moved = _mm256_set1_epi8(0x66);
    const __m256i even_of = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(0x01000100, 0x11101110, 0x01000100, 0x11101110));
    const __m256i odd_of = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(0x01010000, 0x01010000, 0x11111010, 0x11111010));
    CodePair r;
    const auto half = [&](int i, __m256i& first, __m256i& second) {
        const __m256i twos = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper) + i);
        const __m256i rest = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower) + i);
        const __m256i ones = _mm256_and_si256(I < 2 ? rest : _mm256_srli_epi16(rest, 4), nibble);
        const __m256i even = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(twos, 1), moved),
                                             _mm256_shuffle_epi8(even_of, ones));
        const __m256i odd = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(twos, 1), moved),
                                            _mm256_shuffle_epi8(odd_of, ones));
        constexpr int kShift = I % 2 * 4;
        first = _mm256_and_si256(_mm256_srli_epi16(even, kShift), nibble);
        second = _mm256_and_si256(_mm256_srli_epi16(odd, kShift), nibble);
    };
    half(0, r.first.a, r.second.a);
    half(1, r.first.b, r.second.b);
    return r;
}
inline Ints looked_up(const Ints& nibbles, __m256i table) {
    return {_mm256_shuffle_epi8(table, nibbles.a), _mm256_shuffle_epi8(table, nibbles.b)};
}
inline CodePair looked_up(const CodePair& nibbles, const uint8_t* table) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m256i twice = _mm256_broadcastsi128_si256(sixteen);
    return {looked_up(nibbles.first, twice), looked_up(nibbles.second, twice)};
}
inline void store_codes(uint8_t* p, const CodePair& codes) {
    __m256i* to = reinterpret_cast<__m256i*>(p);
    _mm256_store_si256(to, codes.first.a), _mm256_store_si256(to + 1, codes.first.b);
    _mm256_store_si256(to + 2, codes.second.a), _mm256_store_si256(to + 3, codes.second.b);
}
inline CodePair load_byte_pair(const uint8_t* p) {
    const __m256i* bytes = reinterpret_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(bytes), _mm256_loadu_si256(bytes + 1)},
            {_mm256_loadu_si256(bytes + 2), _mm256_loadu_si256(bytes + 3)}};
}
struct Words {
    __m256i a, b;
};
template <bool Signed>
inline Words even_words(const Ints& x) {
    if (Signed)
        return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8),
                _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
    const __m256i mask = _mm256_set1_epi16(255);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
template <bool Signed>
inline Words odd_words(const Ints& x) {
    if (Signed) return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)};
    return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)};
}
inline Ints first_words(const Words& w) {
    return {_mm256_srai_epi32(_mm256_slli_epi32(w.a, 16), 16),
            _mm256_srai_epi32(_mm256_slli_epi32(w.b, 16), 16)};
}
inline Ints second_words(const Words& w) {
    return {_mm256_srai_epi32(w.a, 16), _mm256_srai_epi32(w.b, 16)};
}
inline Ints add_products(const Ints& total, const Words& w, const int16_t* pair) {
    const __m256i both = _mm256_set1_epi32(bits_of(pair));
    return {_mm256_add_epi32(total.a, _mm256_madd_epi16(w.a, both)),
            _mm256_add_epi32(total.b, _mm256_madd_epi16(w.b, both))};
}
#ifdef __AVXVNNI__
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        add(codes.first, broadcast(x).v);
        add(codes.second, broadcast(x + 4).v);
    }
    inline void add(const Ints& codes, __m256i quad) {
        total.a = _mm256_dpbusd_avx_epi32(total.a, codes.a, quad);
        total.b = _mm256_dpbusd_avx_epi32(total.b, codes.b, quad);
    }
    inline void flush() {}
};
#else
// Words of 16 bits hold the products of one to four groups: flush() then adds them to the total.
struct Dots {
    Ints total = set1(0);
    Ints words = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        add(codes.first, broadcast(x).v);
        add(codes.second, broadcast(x + 4).v);
    }
    inline void add(const Ints& codes, __m256i quad) {
        words.a = _mm256_add_epi16(words.a, _mm256_maddubs_epi16(codes.a, quad));
        words.b = _mm256_add_epi16(words.b, _mm256_maddubs_epi16(codes.b, quad));
        // Compilers would rather add products in a tree, for which there are no registers.
        asm("" : "+x"(words.a), "+x"(words.b));
    }
    inline void flush() {
        const __m256i ones = _mm256_set1_epi16(1);
        total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(words.a, ones));
        total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(words.b, ones));
        words = set1(0);
    }
};
#endif

}  // namespace
