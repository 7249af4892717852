// Sixteen lanes in plain C++: what every vectors header means beside its simd header, and the
// fallback where none fits.
#pragma once
#define KVQ_PLAIN_CPP
#include "../kernels/kernels.h"
#include "../kernels/simd_generic.h"

namespace {

constexpr int kMaxRows = 4;  // activation rows multiplied in one go
// Codes of so many bits below a nibble are multiplied whole; of more, planes are summed apart.
constexpr int whole_low_bits(int) { return 0; }
constexpr float kMergedLess = 0;  // what merged() takes off codes of 8 bits

using Floats = F;
using Ints = I;
using Codes = Bytes;  // four codes of each lane, one per byte

template <class Op>
inline Ints int_lanes(Op op) {
    Ints r;
    for (int i = 0; i < 16; i++) r.v[i] = op(i);
    return r;
}
inline Ints set1(int32_t x) {
    return int_lanes([&](int) { return x; });
}
inline Ints load_ints(const int32_t* p) {
    return int_lanes([&](int i) { return p[i]; });
}
inline Ints operator*(Ints a, Ints b) {
    return int_lanes([&](int i) { return a.v[i] * b.v[i]; });
}
template <int Bits>
inline Ints shifted(Ints a) {
    return int_lanes([&](int i) { return a.v[i] * (1 << Bits); });
}
// Bits of |a|; as integers they order like |a|, infinities and then NaN last.
inline Ints magnitude_bits(Floats a) {
    Ints r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return int_lanes([&](int i) { return r.v[i] & 0x7fffffff; });
}
inline Ints max(Ints a, Ints b) {
    return int_lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline int32_t reduce_max(Ints a) {
    int32_t m = a.v[0];
    for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
inline Floats load_half(const uint8_t* p) {
    return lanes([&](int i) {
        uint16_t h;
        std::memcpy(&h, p + 2 * i, 2);
        return half_to_float(h);
    });
}

struct CodePair {
    Codes first, second;
};  // columns 0-3 and 4-7 of a group
// Of group I of those that share 64 bytes of a plane of `Bits` bits.
template <int Bits, int I>
inline CodePair load_codes(const uint8_t* p) {
    constexpr int kShift = 2 * Bits * I, kMask = (1 << Bits) - 1;
    CodePair r;
    for (int i = 0; i < 64; i++) {
        r.first.v[i] = p[i] >> kShift & kMask;
        r.second.v[i] = p[i] >> (kShift + Bits) & kMask;
    }
    return r;
}
// 2^LowBits * upper + lower.
template <int LowBits>
inline Codes merged(const Codes& upper, const Codes& lower) {
    Codes r;
    for (int i = 0; i < 64; i++) r.v[i] = static_cast<uint8_t>(upper.v[i] << LowBits | lower.v[i]);
    return r;
}
template <int LowBits>
inline CodePair merged(const CodePair& upper, const CodePair& lower) {
    return {merged<LowBits>(upper.first, lower.first), merged<LowBits>(upper.second, lower.second)};
}
// Of group I of four: the planes of two bits and of one.
template <int I>
inline CodePair load_three_bits(const uint8_t* upper, const uint8_t* lower) {
    return merged<1>(load_codes<2, I % 2>(upper), load_codes<1, I>(lower));
}
inline void store_codes(uint8_t* p, const CodePair& codes) {  // what a tile is loaded from
    std::memcpy(p, codes.first.v, 64);
    std::memcpy(p + 64, codes.second.v, 64);
}
// Of nibbles what a table has in their places.
inline CodePair looked_up(const CodePair& nibbles, const uint8_t* table) {
    CodePair r;
    for (int i = 0; i < 64; i++) {
        r.first.v[i] = table[nibbles.first.v[i]];
        r.second.v[i] = table[nibbles.second.v[i]];
    }
    return r;
}
// Codes that lie one a byte.
inline CodePair load_byte_pair(const uint8_t* p) {
    CodePair r;
    std::memcpy(r.first.v, p, 64);
    std::memcpy(r.second.v, p + 64, 64);
    return r;
}
// Two words of 16 bits in each lane: of its four bytes 0 and 2, or 1 and 3.
struct Words {
    int16_t v[32];
};
template <bool Signed>
inline Words every_second(const Codes& bytes, int first) {
    Words r;
    for (int i = 0; i < 32; i++) {
        const uint8_t byte = bytes.v[2 * i + first];
        r.v[i] = Signed ? static_cast<int8_t>(byte) : byte;
    }
    return r;
}
template <bool Signed>
inline Words even_words(const Codes& bytes) {
    return every_second<Signed>(bytes, 0);
}
template <bool Signed>
inline Words odd_words(const Codes& bytes) {
    return every_second<Signed>(bytes, 1);
}
inline Ints first_words(const Words& w) {
    return int_lanes([&](int i) { return w.v[2 * i]; });
}
inline Ints second_words(const Words& w) {
    return int_lanes([&](int i) { return w.v[2 * i + 1]; });
}
// What the codes of a lane's four columns are multiplied by, of 8 bits, and what is added to each.
struct LaneFactors {
    Ints scale, more;
    LaneFactors(const Ints& scale, int beyond) : scale(scale), more(scale * set1(beyond)) {}
};
// Codes times factors, sixteen bits each: their lower bytes and their upper ones.
template <bool kMore>
inline void store_scaled(uint8_t* low, uint8_t* high, const Codes& codes,
                         const LaneFactors& factors) {
    for (int i = 0; i < 64; i++) {
        const int more = kMore ? factors.more.v[i / 4] : 0;
        const int value = codes.v[i] * factors.scale.v[i / 4] + more;
        low[i] = static_cast<uint8_t>(value), high[i] = static_cast<uint8_t>(value >> 8);
    }
}
// total + first word * pair[0] + second word * pair[1].
inline Ints add_products(const Ints& total, const Words& w, const int16_t* pair) {
    return int_lanes([&](int i) {
        return total.v[i] + w.v[2 * i] * pair[0] + w.v[2 * i + 1] * pair[1];
    });
}
// Sums of products of codes with four activations: lane i gathers codes[4i..4i+3] . quad.
struct Dots {
    Ints total = set1(0);
    inline void add(const CodePair& codes, const int8_t* x) {
        for (int i = 0; i < 16; i++)
            for (int c = 0; c < 4; c++)
                total.v[i] +=
                    codes.first.v[4 * i + c] * x[c] + codes.second.v[4 * i + c] * x[4 + c];
    }
    inline void flush() {}
};

}  // namespace
