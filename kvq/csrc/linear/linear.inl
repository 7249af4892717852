// The kernels, written once over sixteen lanes: a panel's rows. A .cpp file includes a vectors
// header, then this. kvq/reference/linear.py says what each computes.
#include <cmath>
#include <cstring>
#include <utility>

#include "../kernels/kernels.h"
#include "linear.h"

namespace {

using kvq::kPanelGroup;
using kvq::kPanelRows;
using kvq::PanelLayout;
using kvq::RoundedRows;

// Rows' sums stay in registers only where no loop over them is left, and there are more rows than
// the simd header's loops have.
#undef KVQ_UNROLL
#define KVQ_UNROLL _Pragma("GCC unroll 16")
// A call would put sums into memory. Compilers take minutes to inline all of plain C++ that way.
#ifdef KVQ_PLAIN_CPP
#define KVQ_SUPER_INLINE inline
constexpr int kMaxSuperRows = 1;
#else
#define KVQ_SUPER_INLINE KVQ_INLINE
constexpr int kMaxSuperRows = kMaxRows < 6 ? kMaxRows : 6;  // of more, sums leave registers
#endif

constexpr int kLanes = 16;
constexpr int kFlushGroups = 4;  // of columns, after which Dots is flushed at the latest
// As many of codes up to `top` as words of 16 bits hold sums of, two times two products a group.
constexpr int groups_between_flushes(int top) {
    const int fit = 32767 / (4 * 127 * top);
    return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// The first n < 16 values, then zeros.
inline Floats load_some(const float* p, int n) {
    float some[kLanes] = {};
    std::memcpy(some, p, sizeof(float) * n);
    return load(some);
}
inline Floats load_to(const float* p, int i, int end) {
    return i + kLanes <= end ? load(p + i) : load_some(p + i, end > i ? end - i : 0);
}
inline void store_to(float* p, int i, int end, Floats a) {
    if (i + kLanes <= end) return store(p + i, a);
    float some[kLanes];
    store(some, a);
    std::memcpy(p + i, some, sizeof(float) * (end - i));
}

inline Floats clamp(Floats x, float low, float high) {
    return min(max(x, set1(low)), set1(high));
}

// 2^f by its Taylor series, |f| <= 1/2: below float32's rounding.
inline Floats exponential(Floats x) {
    const Floats t = clamp(x * set1(1.44269504088896341f), -126.0f, 127.0f);
    const Floats n = round(t), f = t - n;
    constexpr float kTerms[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                                2.4022651e-1f, 6.9314718e-1f, 1.0f};
    Floats p = set1(1.5252734e-5f);
    for (float term : kTerms) p = fma(p, f, set1(term));
    return scale_by_power(p, n);
}

// Activations of the gate alone are x times the logistic function of something.
template <int Activation>
inline Floats activated(Floats x) {
    if constexpr (Activation == KVQ_SILU) {
        return x / (set1(1.0f) + exponential(set1(0.0f) - x));
    } else {
        const Floats inner = fma(set1(0.044715f) * x * x, x, x);
        return x / (set1(1.0f) + exponential(set1(-1.59576912160573071f) * inner));
    }
}

void round_block(const float* x, int columns, int block, int8_t* levels, float& scale,
                 float& sum) {
    Ints top_bits = set1(0);
    for (int i = 0; i < block; i += kLanes)
        top_bits = max(top_bits, magnitude_bits(load_to(x, i, columns)));
    const int32_t bits = reduce_max(top_bits);
    float top;
    std::memcpy(&top, &bits, 4);
    const bool finite = bits < 0x7f800000, alive = finite && top >= kvq::kSmallestActivation;
    scale = finite ? (alive ? top / 127.0f * kvq::kScaleUnit : 0.0f) : std::nanf("");
    sum = 0;
    if (!alive) return static_cast<void>(std::memset(levels, 0, block));
    const Floats inverse = set1(127.0f / top);
    Ints total = set1(0);
    for (int i = 0; i < block; i += kLanes) {
        const Ints level = to_int(load_to(x, i, columns) * inverse);
        total = total + level;
        store_bytes(levels + i, level);
    }
    sum = static_cast<float>(reduce_add(total));
}

// The sums of sub-blocks' levels: those of each four in the order that Words has their constants.
template <int Sub>
void sum_subs(const int8_t* levels, size_t count, int16_t* sums) {
    constexpr int kOrder[] = {0, 2, 1, 3};
    for (size_t i = 0; i < count; i++) {
        const int8_t* from = levels + Sub * (i / 4 * 4 + kOrder[i % 4]);
        int16_t sum = 0;
        for (int c = 0; c < Sub; c++) sum = static_cast<int16_t>(sum + from[c]);
        sums[i] = sum;
    }
}

void round_row(const PanelLayout& layout, const float* values, int columns, const RoundedRows& x,
               size_t row) {
    const int block = layout.block, sub = layout.sub;
    int8_t* levels = x.levels + row * layout.padded_columns();
    const size_t first = row * layout.blocks, subs = row * layout.subs();
    for (int b = 0; b < layout.blocks; b++)
        round_block(values + b * block, columns - b * block, block, levels + b * block,
                    x.scales[first + b], x.sums[first + b]);
    if (sub == 32) sum_subs<32>(levels, layout.subs(), x.sub_sums + subs);
    if (sub == 16) sum_subs<16>(levels, layout.subs(), x.sub_sums + subs);
}

void norm_row(const float* x, const float* weight, int columns, float epsilon, float* out) {
    Floats squares = set1(0.0f);
    for (int i = 0; i < columns; i += kLanes) {
        const Floats a = load_to(x, i, columns);
        squares = fma(a, a, squares);
    }
    const Floats unit = set1(1.0f / std::sqrt(reduce_add(squares) / float(columns) + epsilon));
    for (int i = 0; i < columns; i += kLanes)
        store_to(out, i, columns, load_to(x, i, columns) * unit * load_to(weight, i, columns));
}

template <int Activation>
inline Floats gated(Floats gate, Floats up) {
    if constexpr (Activation == KVQ_CLAMPED_SWIGLU) {
        constexpr float kLimit = 7.0f, kLeast = -3.402823466e38f;
        // Limits would hide what is not a number.
        const Floats nothing = set1(0.0f) * gate * up;
        const Floats g = clamp(gate, kLeast, kLimit) + nothing, u = clamp(up, -kLimit, kLimit);
        return g / (set1(1.0f) + exponential(set1(-1.702f) * g)) * (u + set1(1.0f));
    } else {
        return activated<Activation>(gate) * up;
    }
}

template <int Activation>
void gate_row(const float* gate, const float* up, int columns, float* out) {
    for (int i = 0; i < columns; i += kLanes)
        store_to(out, i, columns,
                 gated<Activation>(load_to(gate, i, columns), load_to(up, i, columns)));
}

void gate_row(const float* gate, const float* up, int columns, int activation, float* out) {
    switch (activation) {
        case KVQ_SILU:
            return gate_row<KVQ_SILU>(gate, up, columns, out);
        case KVQ_GELU_TANH:
            return gate_row<KVQ_GELU_TANH>(gate, up, columns, out);
        default:
            return gate_row<KVQ_CLAMPED_SWIGLU>(gate, up, columns, out);
    }
}

// How far ahead to fetch: as was asked for, or far enough to hide a miss behind sixteen rows of
// work, and in small panels the same place of the next one. A view always keeps to that, so that it
// never fetches the plane it leaves out.
inline size_t prefetch_bytes(const PanelLayout& layout, bool whole) {
    const size_t asked = kvq::prefetching().ahead.load(std::memory_order_relaxed);
    if (asked && whole) return asked;
    const kvq_built_in& here = kvq::built_in();
    return layout.panel_bytes <= size_t(here.panel_bytes) ? layout.panel_bytes
                                                          : size_t(here.ahead_bytes);
}

// Which caches are asked to fetch: all, or those from the second level on.
constexpr int kIntoFirst = 3, kIntoSecond = 2;
constexpr int kSequentialAhead = 4 << 10;

// A plane of `Bits` bits of a block's codes, a group of eight columns after the other. `Second`: what
// comes next is fetched into the second level, as `Prefetching` asks for one row.
template <int Bits, bool Second>
struct Plane {
    static constexpr int kTop = 15;  // no code is larger
    const uint8_t* bytes;
    size_t ahead;
    // Group first + I, where `first` is a multiple of four.
    template <int I>
    CodePair group(int first) const {
        return load_codes<Bits, I % kGroups>(at<I>(first));
    }
    template <int I>
    const uint8_t* at(int first) const {
        const uint8_t* place = bytes + 64 * (first / kGroups + I / kGroups);
        if constexpr (I % kGroups == 0)
            __builtin_prefetch(place + ahead, 0, Second ? kIntoSecond : kIntoFirst);
        return place;
    }

private:
    static constexpr int kGroups = 4 / Bits;  // that lie in the same bytes
};
template <int LowBits, bool Second>
struct WholeCodes {
    static constexpr int kTop = (16 << LowBits) - 1;
    Plane<4, Second> upper;
    Plane<LowBits, Second> lower;
    template <int I>
    CodePair group(int first) const {
        return merged<LowBits>(upper.template group<I>(first), lower.template group<I>(first));
    }
};
template <bool Second>
struct ThreeBits {
    static constexpr int kTop = 7;
    Plane<2, Second> upper;
    Plane<1, Second> lower;
    template <int I>
    CodePair group(int first) const {
        return load_three_bits<I>(upper.template at<I>(first), lower.template at<I>(first));
    }
};

// Nibbles that are looked up before they are multiplied.
template <class Source>
struct LookedUp {
    static constexpr int kTop = 2 * kvq::kE2m1Middle;
    Source source;
    template <int I>
    CodePair group(int first) const {
        return looked_up(source.template group<I>(first), kvq::kE2m1Codes);
    }
};

template <int R, int I, class Source>
KVQ_INLINE void add_group(const Source& source, int first, const int8_t* x, size_t stride,
                          Dots* dots) {
    const CodePair codes = source.template group<I>(first);
    constexpr int kGroups = groups_between_flushes(Source::kTop);
    KVQ_UNROLL for (int m = 0; m < R; m++) dots[m].add(codes,
                                                       x + m * stride + kPanelGroup * (first + I));
    if constexpr (I % kGroups == kGroups - 1)
        KVQ_UNROLL for (int m = 0; m < R; m++) dots[m].flush();
}

// Adds one block to the sums of R rows.
template <int R, class Source>
KVQ_INLINE void add_block(const Source& source, int block, const int8_t* x, size_t stride,
                          Dots* dots) {
    for (int j = 0; j < block / kPanelGroup; j += kFlushGroups) {
        add_group<R, 0>(source, j, x, stride, dots);
        add_group<R, 1>(source, j, x, stride, dots);
        add_group<R, 2>(source, j, x, stride, dots);
        add_group<R, 3>(source, j, x, stride, dots);
    }
}

constexpr int kWidestBlock = 128;

template <class Source>
void unpack_groups(const Source& source, int block, uint8_t* codes) {
    for (int j = 0; j < block / kPanelGroup; j += kFlushGroups) {
        uint8_t* to = codes + kPanelRows * kPanelGroup * j;
        store_codes(to, source.template group<0>(j));
        store_codes(to + 128, source.template group<1>(j));
        store_codes(to + 256, source.template group<2>(j));
        store_codes(to + 384, source.template group<3>(j));
    }
}

// A block's codes, one a byte: [block / 4][16 rows][4], for many rows.
template <int LowBits, bool E2m1>
void unpack(const PanelLayout& layout, const uint8_t* panel, int b, size_t ahead, uint8_t* codes) {
    const size_t at = size_t(b) * layout.block * kPanelRows / 2;
    const Plane<4, false> upper{panel + at, ahead};
    if constexpr (LowBits) {
        const uint8_t* low = panel + layout.plane_bytes + layout.constant_bytes;
        const Plane<LowBits, false> lower{low + at * LowBits / 4, ahead};
        unpack_groups(WholeCodes<LowBits, false>{upper, lower}, layout.block, codes);
    } else if constexpr (E2m1) {
        unpack_groups(LookedUp<Plane<4, false>>{upper}, layout.block, codes);
    } else {
        unpack_groups(upper, layout.block, codes);
    }
}

// What a view's codes lack of the matrix's: of upper nibbles alone the middle of what they may be.
// All in steps of the codes read, `step` of the matrix's, so that it is exact.
struct Reading {
    float step, beyond;
    Reading(const PanelLayout& layout, int low_bits_read, float merged_less)
        : step(float(1 << (layout.low_bits() - low_bits_read))),
          beyond((step - 1) / 2 / step + merged_less) {}
};

// What a block's codes have beyond zero, negative: the factor of the sum of a row's levels.
inline Floats beyond_zero(const PanelLayout& layout, const Reading& reading,
                          const uint8_t* constants) {
    if (layout.grid == KVQ_ZERO_POINT)
        return fma(load_codes(constants + 2 * kPanelRows),
                   set1(-float(1 << layout.bits) / kvq::kZeroParts / reading.step),
                   set1(reading.beyond));
    const float middle = layout.grid == KVQ_SYMMETRIC ? float(1 << (layout.bits - 1))
                         : layout.grid == KVQ_E2M1    ? float(kvq::kE2m1Middle)
                                                      : 0.0f;
    return set1(reading.beyond - middle / reading.step);
}

template <bool E2m1>
inline Floats block_scale(const uint8_t* constants) {
    if constexpr (!E2m1) return load_half(constants);
    return scale_by_power(set1(1.0f), load_codes(constants) - set1(float(kvq::kE2m1Bias)));
}

// A block's constants, which turn sums of products of its codes into a part of results.
template <bool E2m1>
struct BlockTerms {
    const uint8_t* constants;
    const bool has_minimum;
    Floats scale, beyond;

    KVQ_INLINE BlockTerms(const PanelLayout& of, const Reading& read, const uint8_t* panel, size_t b)
        : constants(panel + of.plane_bytes + b * of.block_constants),
          has_minimum(of.grid == KVQ_MINIMUM),
          scale(block_scale<E2m1>(constants) * set1(read.step)),
          beyond(beyond_zero(of, read, constants)) {}
    // A row's results so far and what the block's codes add to them; `sum` and `unit` are the sum of
    // the row's levels there and their scale.
    KVQ_INLINE Floats added(Floats total, Ints raw, float sum, float unit) const {
        const Floats dot = fma(beyond, set1(sum), to_float(raw));
        return fma(dot, scale * set1(unit), total);
    }
    // And, where there is one, what its minimum adds.
    KVQ_INLINE Floats with_minimum(Floats total, float sum, float unit) const {
        return fma(minimum(), set1(sum * unit), total);
    }
    KVQ_INLINE Floats minimum() const { return load_half(constants + 2 * kPanelRows); }
};

// LowBits: of codes, read beside their upper nibbles. E2m1: of such a grid. Sums of products of
// codes are whole and below 2^23, so floats hold them exactly.
template <int R, int LowBits, bool E2m1 = false, bool kSecond = (R > 1)>
void multiply_rows(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x, int first,
                   float* out) {
    const size_t stride = layout.padded_columns();
    const int block = layout.block, block_bytes = block * kPanelRows / 2;
    const uint8_t* low = panel + layout.plane_bytes + layout.constant_bytes;
    const size_t ahead = prefetch_bytes(layout, LowBits == layout.low_bits());
    constexpr bool kWhole = LowBits <= whole_low_bits(R), kTwice = !kWhole;
    const Reading reading(layout, LowBits, LowBits == 4 && kWhole ? kMergedLess : 0.0f);
    const size_t blocks = layout.blocks, first_sum = first * blocks;
    Floats total[R];
    KVQ_UNROLL for (int m = 0; m < R; m++) total[m] = set1(0.0f);
    for (size_t b = 0; b < blocks; b++) {
        Dots upper[R], lower[kTwice ? R : 1];
        const int8_t* levels = x.levels + first * stride + b * block;
        const Plane<4, kSecond> first_plane{panel + b * block_bytes, ahead};
        if constexpr (LowBits) {
            const uint8_t* rest = low + b * block_bytes * LowBits / 4;
            const Plane<LowBits, kSecond> second_plane{rest, ahead};
            if constexpr (kWhole) {
                const WholeCodes<LowBits, kSecond> both{first_plane, second_plane};
                add_block<R>(both, block, levels, stride, upper);
            } else {
                add_block<R>(first_plane, block, levels, stride, upper);
                add_block<R>(second_plane, block, levels, stride, lower);
            }
        } else if constexpr (E2m1) {
            const LookedUp<Plane<4, kSecond>> found{first_plane};
            add_block<R>(found, block, levels, stride, upper);
        } else {
            add_block<R>(first_plane, block, levels, stride, upper);
        }
        const BlockTerms<E2m1> terms(layout, reading, panel, b);
        const float *sums = x.sums + first_sum + b, *units = x.scales + first_sum + b;
        KVQ_UNROLL for (int m = 0; m < R; m++) {
            Ints raw = upper[m].total;
            if constexpr (kTwice) raw = shifted<LowBits>(raw) + lower[m].total;
            total[m] = terms.added(total[m], raw, sums[m * blocks], units[m * blocks]);
        }
        if (terms.has_minimum) KVQ_UNROLL for (int m = 0; m < R; m++) total[m] =
            terms.with_minimum(total[m], sums[m * blocks], units[m * blocks]);
    }
    KVQ_UNROLL for (int m = 0; m < R; m++) store(out + kPanelRows * m, total[m]);
}

// The whole numbers of a super-block's sub-blocks, two a word: of every four Words of 0 and 2, then
// of 1 and 3. Of sub-blocks of 32 columns they have six bits, which lie as codes of six bits do:
// those of a row are sixteen columns, first scales, then minima. Of 16 columns they are int8.
template <int Sub>
constexpr int kSubWords = kvq::kSuperColumns / Sub / 2;

template <int Sub>
KVQ_SUPER_INLINE void load_subs(const uint8_t* subs, bool minima, Words* words) {
    constexpr bool kSigned = Sub == 16;
    const auto put = [&](const CodePair& eight) {
        *words++ = even_words<kSigned>(eight.first);
        *words++ = odd_words<kSigned>(eight.first);
        *words++ = even_words<kSigned>(eight.second);
        *words++ = odd_words<kSigned>(eight.second);
    };
    if constexpr (kSigned) {
        const uint8_t* bytes = subs + (minima ? kvq::kSuperColumns : 0);
        put(load_byte_pair(bytes));
        put(load_byte_pair(bytes + 128));
    } else {
        const CodePair low = minima ? load_codes<2, 1>(subs + 128) : load_codes<2, 0>(subs + 128);
        put(merged<2>(load_codes<4, 0>(subs + (minima ? 64 : 0)), low));
    }
}

// Sum of a row's levels times the numbers of their sub-blocks.
template <int Sub>
KVQ_SUPER_INLINE Ints dot_subs(const Words* words, const int16_t* sums) {
    Ints total = set1(0);
    KVQ_UNROLL for (int i = 0; i < kSubWords<Sub>; i++) total =
        add_products(total, words[i], sums + 2 * i);
    return total;
}

// Groups [I, I + Count) of four, flushed at the end.
template <int R, int I, int Count, class Source>
KVQ_SUPER_INLINE void add_groups(const Source& source, int first, const int8_t* x, size_t stride,
                           Dots* dots) {
    if constexpr (Count > 0) {
        constexpr bool kFlushed = I % groups_between_flushes(Source::kTop) ==
                                  groups_between_flushes(Source::kTop) - 1;
        add_group<R, I>(source, first, x, stride, dots);
        if constexpr (Count == 1 && !kFlushed) KVQ_UNROLL for (int m = 0; m < R; m++)
            dots[m].flush();
        add_groups<R, I + 1, Count - 1>(source, first, x, stride, dots);
    }
}

// Adds to the sums of R rows one sub-block's products times its whole scale; its groups begin with
// first + I.
template <int R, int Sub, int LowBits, int I, bool kSecond, int UpperBits>
KVQ_SUPER_INLINE void add_sub(const Plane<UpperBits, kSecond>& plane,
                              const Plane<LowBits ? LowBits : 4, kSecond>& low, int first,
                              const int8_t* x, size_t stride, Ints scale, Ints* sums) {
    constexpr bool kWhole = UpperBits == 2 || LowBits <= whole_low_bits(R);
    constexpr int kCount = Sub / kPanelGroup;
    Dots upper[R], lower[kWhole ? 1 : R];
    if constexpr (LowBits == 0) {
        add_groups<R, I, kCount>(plane, first, x, stride, upper);
    } else if constexpr (UpperBits == 2) {
        add_groups<R, I, kCount>(ThreeBits<kSecond>{plane, low}, first, x, stride, upper);
    } else if constexpr (kWhole) {
        add_groups<R, I, kCount>(WholeCodes<LowBits, kSecond>{plane, low}, first, x, stride, upper);
    } else {
        add_groups<R, I, kCount>(plane, first, x, stride, upper);
        add_groups<R, I, kCount>(low, first, x, stride, lower);
    }
    KVQ_UNROLL for (int m = 0; m < R; m++) {
        Ints raw = upper[m].total;
        if constexpr (!kWhole) raw = shifted<LowBits>(raw) + lower[m].total;
        sums[m] = sums[m] + raw * scale;
    }
}

// What whole sums of products of codes lack, all times the sums of levels: the middle that the grid
// takes off, and of upper nibbles alone the middle of what they may be. Doubled, these are whole.
struct SuperReading {
    int times, beyond;
    float part;
    SuperReading(const PanelLayout& layout, int low_bits_read, int merged_less) {
        const int middle = layout.grid == KVQ_SUPER_SYMMETRIC ? 1 << (layout.bits - 1) : 0;
        const int step = 1 << (layout.low_bits() - low_bits_read);
        if (step == 1) {
            times = 1, beyond = merged_less - middle, part = 1.0f;
        } else {
            times = 2 * step, beyond = step - 1 - 2 * middle, part = 0.5f;
        }
    }
};

// Codes have `UpperBits` in the upper plane, and `LowBits` beside it are read.
template <int R, int Sub, bool kMinimum, int UpperBits, int LowBits, bool kSecond = (R > 1)>
void multiply_super(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x, int first,
                    float* out) {
    constexpr int kQuadGroups = 4 * Sub / kPanelGroup, kSubs = kvq::kSuperColumns / Sub;
    constexpr size_t kLowBytes = PanelLayout::bytes_of(kvq::kSuperColumns, LowBits);
    constexpr size_t kUpperBytes = PanelLayout::bytes_of(kvq::kSuperColumns, UpperBits);
    const size_t stride = layout.padded_columns(), blocks = layout.blocks, subs = layout.subs();
    const size_t super_bytes = layout.block_constants + kUpperBytes;
    const uint8_t* low = panel + layout.low_at();
    // What has no lower bits is read from end to end.
    const size_t ahead = layout.low_bits() ? prefetch_bytes(layout, LowBits == layout.low_bits())
                                           : size_t(kSequentialAhead);
    const bool merges = LowBits == 4 && LowBits <= whole_low_bits(R);
    const SuperReading reading(layout, LowBits, merges ? int(kMergedLess) : 0);
    // What lies so far behind the upper planes was read beside them: the next panel's comes then.
    // With sub-blocks of 16 columns that would cost more registers than there are.
    constexpr bool kBeside = LowBits && Sub == 32;
    const bool ends = kBeside && ahead < layout.panel_bytes;
    const size_t beside = ends ? layout.low_at() - ahead : layout.panel_bytes;
    Floats total[R];
    KVQ_UNROLL for (int m = 0; m < R; m++) total[m] = set1(0.0f);
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t* constants = panel + b * super_bytes;
        const bool near = !kBeside || b * super_bytes < beside;
        const size_t next = near ? ahead : ahead + layout.panel_bytes;
        for (size_t i = 0; i < layout.block_constants; i += 64)
            __builtin_prefetch(constants + next + i, 0, kSecond ? kIntoSecond : kIntoFirst);
        const uint8_t* numbers = constants + 2 * kPanelRows * (kMinimum ? 2 : 1);
        Words scales[kSubWords<Sub>];
        load_subs<Sub>(numbers, false, scales);
        const Plane<UpperBits, kSecond> plane{constants + layout.block_constants, next};
        constexpr int kLowBits = LowBits ? LowBits : 4;
        const Plane<kLowBits, kSecond> rest{low + b * kLowBytes, ahead};
        const int8_t* levels = x.levels + first * stride + b * kvq::kSuperColumns;
        Ints sums[R];
        KVQ_UNROLL for (int m = 0; m < R; m++) sums[m] = set1(0);
        for (int q = 0; q < kSubs / 4; q++) {
            const int group = q * kQuadGroups;
            const Words even = scales[2 * q], odd = scales[2 * q + 1];
            // Places of groups are known to the compiler modulo four alone.
            constexpr int kStep = Sub / kPanelGroup, kNext = kStep % kFlushGroups;
            const int second = group + (kNext ? 0 : kStep), third = group + 2 * kStep;
            const int fourth = third + (kNext ? 0 : kStep);
            add_sub<R, Sub, LowBits, 0, kSecond>(plane, rest, group, levels, stride,
                                               first_words(even), sums);
            add_sub<R, Sub, LowBits, kNext, kSecond>(plane, rest, second, levels, stride,
                                                   first_words(odd), sums);
            add_sub<R, Sub, LowBits, 0, kSecond>(plane, rest, third, levels, stride,
                                               second_words(even), sums);
            add_sub<R, Sub, LowBits, kNext, kSecond>(plane, rest, fourth, levels, stride,
                                                   second_words(odd), sums);
        }
        const Floats scale = load_half(constants) * set1(reading.part);
        const float* units = x.scales + first * blocks + b;
        const int16_t* row_sums = x.sub_sums + first * subs + b * kSubs;
        if (reading.beyond) KVQ_UNROLL for (int m = 0; m < R; m++) sums[m] =
            sums[m] * set1(reading.times) +
            dot_subs<Sub>(scales, row_sums + m * subs) * set1(reading.beyond);
        KVQ_UNROLL for (int m = 0; m < R; m++) total[m] =
            fma(to_float(sums[m]), scale * set1(units[m * blocks]), total[m]);
        if constexpr (kMinimum) {
            Words minima[kSubWords<Sub>];
            load_subs<Sub>(numbers, true, minima);
            const Floats offset = load_half(constants + 2 * kPanelRows);
            KVQ_UNROLL for (int m = 0; m < R; m++) total[m] =
                fma(to_float(dot_subs<Sub>(minima, row_sums + m * subs)),
                    offset * set1(units[m * blocks]), total[m]);
        }
    }
    KVQ_UNROLL for (int m = 0; m < R; m++) store(out + kPanelRows * m, total[m]);
}

using MultiplyRows = void (*)(const PanelLayout&, const uint8_t*, const RoundedRows&, int, float*);

template <int Sub, bool kMinimum, int UpperBits, int LowBits, int... R>
MultiplyRows super_rows(std::integer_sequence<int, R...>, int rows) {
    constexpr MultiplyRows table[] = {multiply_super<R + 1, Sub, kMinimum, UpperBits, LowBits>...};
    if (rows == 1 && kvq::prefetching().second_level.load(std::memory_order_relaxed))
        return multiply_super<1, Sub, kMinimum, UpperBits, LowBits, true>;
    return table[rows - 1];
}
// pick(columns of a sub-block, whether it has a minimum, bits of the upper plane, bits read beside it),
// all as constants.
template <class Pick>
auto for_supers(const PanelLayout& layout, int low_bits, Pick&& pick) {
    constexpr std::integral_constant<int, 0> none{};
    constexpr std::integral_constant<int, 1> single{};
    constexpr std::integral_constant<int, 2> two{};
    constexpr std::integral_constant<int, 4> four{};
    constexpr std::integral_constant<int, 16> sixteen{};
    constexpr std::integral_constant<int, 32> wide{};
    const bool narrow = layout.upper_bits == 2;
    if (layout.grid == KVQ_SUPER_SYMMETRIC) {
        constexpr std::false_type minimum{};
        if (narrow) return pick(sixteen, minimum, two, single);
        if (low_bits == 0) return pick(sixteen, minimum, four, none);
        if (low_bits == 2) return pick(sixteen, minimum, four, two);
        return pick(sixteen, minimum, four, four);
    }
    constexpr std::true_type minimum{};
    if (layout.sub == 16) {
        if (narrow) return pick(sixteen, minimum, two, none);
        if (low_bits == 0) return pick(sixteen, minimum, four, none);
        return pick(sixteen, minimum, four, two);
    }
    if (narrow) return low_bits ? pick(wide, minimum, two, single) : pick(wide, minimum, two, none);
    if (low_bits == 0) return pick(wide, minimum, four, none);
    if (low_bits == 1) return pick(wide, minimum, four, single);
    return pick(wide, minimum, four, two);
}

template <int LowBits, bool E2m1, int... R>
MultiplyRows row_count(std::integer_sequence<int, R...>, int rows) {
    constexpr MultiplyRows table[] = {multiply_rows<R + 1, LowBits, E2m1>...};
    if (rows == 1 && kvq::prefetching().second_level.load(std::memory_order_relaxed))
        return multiply_rows<1, LowBits, E2m1, true>;
    return table[rows - 1];
}
// pick(bits read below a nibble, whether the grid is e2m1), both as constants.
template <class Pick>
auto for_codes(int low_bits, int grid, Pick&& pick) {
    constexpr std::integral_constant<int, 0> none{};
    if (grid == KVQ_E2M1) return pick(none, std::true_type{});
    switch (low_bits) {
        case 1: return pick(std::integral_constant<int, 1>{}, std::false_type{});
        case 2: return pick(std::integral_constant<int, 2>{}, std::false_type{});
        case 4: return pick(std::integral_constant<int, 4>{}, std::false_type{});
        default: return pick(none, std::false_type{});
    }
}

void multiply(const PanelLayout& layout, int view, const uint8_t* panel, const RoundedRows& x,
              int first, int count, float* out) {
    using Counts = std::make_integer_sequence<int, kMaxRows>;
    using SuperCounts = std::make_integer_sequence<int, kMaxSuperRows>;
    const int low_bits = layout.low_bits(view);
    const int most = layout.sub ? kMaxSuperRows : kMaxRows;
    int groups = (count + most - 1) / most;
    for (; groups > 0; groups--) {  // of as equal sizes as can be
        const int rows = (count + groups - 1) / groups;
        const auto plain = [=](auto low, auto e2m1) {
            return row_count<low(), e2m1()>(Counts{}, rows);
        };
        const auto super = [=](auto sub, auto minimum, auto upper, auto low) {
            return super_rows<sub(), minimum(), upper(), low()>(SuperCounts{}, rows);
        };
        const MultiplyRows chosen = layout.sub ? for_supers(layout, low_bits, super)
                                               : for_codes(low_bits, layout.grid, plain);
        chosen(layout, panel, x, first, out);
        first += rows, count -= rows, out += kPanelRows * rows;
    }
}

// A block's scale of row `lane`, and what it adds to a weight beside that times the code; of a
// super-block those of sub-block `sub`.
struct Line {
    float scale, offset;
    Line(const PanelLayout& layout, const uint8_t* constants, int lane, int sub) {
        if (layout.sub) {
            const bool minimum = layout.grid == KVQ_SUPER_MINIMUM;
            const uint8_t* numbers = constants + 2 * kPanelRows * (minimum ? 2 : 1);
            scale = half_at(constants + 2 * lane) * kvq::kScaleUnit *
                    float(number_at(layout, numbers, lane, sub, false));
            offset = minimum ? half_at(constants + 2 * (kPanelRows + lane)) * kvq::kScaleUnit *
                                   float(number_at(layout, numbers, lane, sub, true))
                             : float(1 << (layout.bits - 1));
            return;
        }
        if (layout.grid == KVQ_E2M1) {
            scale = std::ldexp(kvq::kScaleUnit, constants[lane] - kvq::kE2m1Bias);
            offset = float(kvq::kE2m1Middle);
            return;
        }
        scale = half_at(constants + 2 * lane) * kvq::kScaleUnit;
        const uint8_t* offsets = constants + 2 * kPanelRows;
        switch (layout.grid) {
            case KVQ_ZERO_POINT:
                offset = float(offsets[lane] << layout.bits) / kvq::kZeroParts;
                break;
            case KVQ_MINIMUM: offset = half_at(offsets + 2 * lane) * kvq::kScaleUnit; break;
            default: offset = float(1 << (layout.bits - 1));
        }
    }
    // As `load_subs` reads it.
    static int number_at(const PanelLayout& layout, const uint8_t* numbers, int lane, int sub,
                         bool minimum) {
        const int place = 4 * lane + sub % 4;
        if (layout.sub == 16)
            return static_cast<int8_t>(numbers[(minimum ? kvq::kSuperColumns : 0) + sub / 4 * 64 +
                                               place]);
        const int upper = numbers[(minimum ? 64 : 0) + place] >> (sub & 4) & 15;
        const int shift = (minimum ? 4 : 0) + (sub & 4) / 2;
        return upper << 2 | (numbers[128 + place] >> shift & 3);
    }
    // load_half turns sixteen: one is wanted.
    static float half_at(const uint8_t* half) {
        uint8_t halves[2 * kLanes] = {};
        float values[kLanes];
        std::memcpy(halves, half, 2);
        store(values, load_half(halves));
        return values[0];
    }
};

// Of a plane of 1, 2 or 4 bits the fields of row `lane`.
struct Fields {
    int bits, lane;
    int at(const uint8_t* plane, int column) const {
        const int exponent = 5 - bits / 2;  // of the columns of a group
        const int shift = (column & ((1 << exponent) - 1)) / 4 * bits;
        const size_t place = size_t(column >> exponent) * 64 + 4 * lane + column % 4;
        return plane[place] >> shift & ((1 << bits) - 1);
    }
};

void add_row(const PanelLayout& layout, const uint8_t* panel, int lane, float weight, int columns,
             float* out) {
    const uint8_t* low = panel + layout.low_at();
    const Fields upper_fields{layout.upper_bits, lane}, low_fields{layout.low_bits(), lane};
    const bool adds = layout.grid == KVQ_MINIMUM || layout.grid == KVQ_SUPER_MINIMUM;
    const int width = layout.sub ? layout.sub : layout.block, parts = layout.block / width;
    for (int b = 0; b * width < columns; b++) {
        const uint8_t* constants = panel + layout.constants_at(b / parts);
        const uint8_t* plane = panel + layout.plane_at(b / parts);
        const Line line(layout, constants, lane, b % parts);
        const int end = columns < (b + 1) * width ? columns : (b + 1) * width;
        for (int i = b * width; i < end; i++) {
            int code = upper_fields.at(plane, i % layout.block);
            if (low_fields.bits) code = code << low_fields.bits | low_fields.at(low, i);
            if (layout.grid == KVQ_E2M1) code = kvq::kE2m1Codes[code];
            const float value = adds ? line.scale * float(code) + line.offset
                                     : line.scale * (float(code) - line.offset);
            out[i] += weight * value;
        }
    }
}

}  // namespace

// Offers these products with the kernels of set `name`: `multiply` takes octets from so many rows
// on, 0: never.
#define KVQ_LINEAR_SET(name, multiply, octets_from)                                   \
    const kvq::LinearKernels* kvq::name##_linear() {                                  \
        static const LinearKernels table{round_row, norm_row, gate_row,               \
                                         multiply,  add_row,  octets_from};           \
        return &table;                                                                \
    }
