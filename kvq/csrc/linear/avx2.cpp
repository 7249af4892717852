// Products for AVX2 + FMA + F16C.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <algorithm>

#include "vectors_avx2.h"

#include "linear.inl"

namespace {

using kvq::kOctetRows;

// Many rows are multiplied by octets: what a vector has eight lanes for are rows, and a row of the
// panel meets them four columns at a time, broadcast. Levels are read from memory where they are
// multiplied, so that a product takes two instructions where multiply_rows takes five.
constexpr int kMostOctets = 6;
constexpr int kOctetsFrom = 3 * kOctetRows;  // of fewer rows multiply_rows is faster

inline __m256i load_levels(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256 broadcast(const float* lanes, int lane) {
    return _mm256_broadcast_ss(lanes + lane);
}

// Adds to the sums of V octets, `stride` levels apart, their products with one row of a block's
// codes, times a whole `scale` in words of 16 bits. Such words can add up the products of `Groups`
// groups of columns.
template <int V, int Groups>
KVQ_INLINE void add_octets(const uint8_t* codes, int block, const int8_t* x, size_t stride,
                           __m256i* sums, __m256i scale = _mm256_set1_epi16(1)) {
    for (int quad = 0; quad < block / 4; quad += 2 * Groups) {
        __m256i words[V];
        KVQ_UNROLL for (int i = 0; i < 2 * Groups; i++) {
            const auto* at = reinterpret_cast<const int8_t*>(codes + 4 * kPanelRows * (quad + i));
            const __m256i code = broadcast(at).v;
            KVQ_UNROLL for (int v = 0; v < V; v++) {
                const int8_t* eight = x + v * stride + 4 * kOctetRows * (quad + i);
                const __m256i products = _mm256_maddubs_epi16(code, load_levels(eight));
                words[v] = i ? _mm256_add_epi16(words[v], products) : products;
                asm("" : "+x"(words[v]));  // as in Dots
            }
        }
        KVQ_UNROLL for (int v = 0; v < V; v++) sums[v] =
            _mm256_add_epi32(sums[v], _mm256_madd_epi16(words[v], scale));
    }
}

// As `unpack`, of the lower nibbles of 8-bit codes alone.
inline void unpack_lower(const PanelLayout& layout, const uint8_t* panel, int b, size_t ahead,
                         uint8_t* codes) {
    const uint8_t* low = panel + layout.plane_bytes + layout.constant_bytes;
    const size_t at = size_t(b) * layout.block * kPanelRows / 2;
    unpack_groups(Plane<4, false>{low + at, ahead}, layout.block, codes);
}

// A block's constants, a number for each row of the panel.
struct BlockNumbers {
    alignas(64) float scale[kPanelRows], beyond[kPanelRows], minimum[kPanelRows];
    template <bool E2m1>
    explicit BlockNumbers(const BlockTerms<E2m1>& terms) {
        store(scale, terms.scale);
        store(beyond, terms.beyond);
        if (terms.has_minimum) store(minimum, terms.minimum());
    }
};

// totals [16][V][8]: results of V octets, to which a block is added as BlockTerms adds it to a row.
template <int V>
KVQ_INLINE void add_block_to(float* totals, const BlockNumbers& block, bool has_minimum, int lane,
                             const __m256i* raw, const float* sums, const float* units,
                             size_t stride) {
    const __m256 scale = broadcast(block.scale, lane), beyond = broadcast(block.beyond, lane);
    KVQ_UNROLL for (int v = 0; v < V; v++) {
        const __m256 sum = _mm256_loadu_ps(sums + v * stride);
        const __m256 unit = _mm256_loadu_ps(units + v * stride);
        float* to = totals + kOctetRows * (V * lane + v);
        const __m256 dot = _mm256_fmadd_ps(beyond, sum, _mm256_cvtepi32_ps(raw[v]));
        __m256 total = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, unit), _mm256_load_ps(to));
        if (has_minimum)
            total =
                _mm256_fmadd_ps(broadcast(block.minimum, lane), _mm256_mul_ps(sum, unit), total);
        _mm256_store_ps(to, total);
    }
}

// Results of eight rows of the panel, V octets apart, as up to eight rows of `out`.
inline void store_octet(const float* totals, int octets, int count, float* out) {
    __m256 x[8], pair[8], four[8];
    for (int i = 0; i < 8; i++) x[i] = _mm256_load_ps(totals + size_t(kOctetRows) * octets * i);
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0x44);
            four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4 && i < count; i++)
        _mm256_storeu_ps(out + kPanelRows * i, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
    for (int i = 4; i < 8 && i < count; i++)
        _mm256_storeu_ps(out + kPanelRows * i, _mm256_permute2f128_ps(four[i - 4], four[i], 0x31));
}

template <int V>
inline void store_octets(const float* totals, int count, float* out) {
    for (int first_lane = 0; first_lane < kPanelRows; first_lane += kOctetRows)
        for (int v = 0; v < V; v++)
            store_octet(totals + kOctetRows * (V * first_lane + v), V, count - kOctetRows * v,
                        out + kOctetRows * kPanelRows * v + first_lane);
}

template <int V, int LowBits, bool E2m1>
void multiply_octets(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x,
                     int first, int count, float* out) {
    constexpr int kTop = E2m1 ? 2 * kvq::kE2m1Middle : LowBits == 4 ? 15 : (16 << LowBits) - 1;
    constexpr int kGroups = groups_between_flushes(kTop);
    const size_t columns = layout.padded_columns();
    const size_t ahead = prefetch_bytes(layout, LowBits == layout.low_bits());
    const size_t stride = kOctetRows * columns, sum_stride = size_t(kOctetRows) * layout.blocks;
    const Reading reading(layout, LowBits, 0.0f);
    alignas(64) uint8_t codes[kPanelRows * kWidestBlock], low[LowBits == 4 ? sizeof codes : 1];
    alignas(64) float totals[kPanelRows * V * kOctetRows] = {};
    for (int b = 0; b < layout.blocks; b++) {
        unpack<LowBits == 4 ? 0 : LowBits, E2m1>(layout, panel, b, ahead, codes);
        if constexpr (LowBits == 4) unpack_lower(layout, panel, b, ahead, low);
        const BlockTerms<E2m1> terms(layout, reading, panel, b);
        const BlockNumbers numbers(terms);
        const int8_t* levels = x.levels + first * columns + size_t(kOctetRows) * b * layout.block;
        const size_t sums = size_t(first) * layout.blocks + kOctetRows * b;
        for (int lane = 0; lane < kPanelRows; lane++) {
            __m256i raw[V];
            KVQ_UNROLL for (int v = 0; v < V; v++) raw[v] = _mm256_setzero_si256();
            add_octets<V, kGroups>(codes + 4 * lane, layout.block, levels, stride, raw);
            if constexpr (LowBits == 4) {
                KVQ_UNROLL for (int v = 0; v < V; v++) raw[v] = _mm256_slli_epi32(raw[v], LowBits);
                add_octets<V, kGroups>(low + 4 * lane, layout.block, levels, stride, raw);
            }
            add_block_to<V>(totals, numbers, terms.has_minimum, lane, raw, x.sums + sums,
                            x.scales + sums, sum_stride);
        }
    }
    store_octets<V>(totals, count, out);
}

// A super-block's numbers, by rows of the panel. Whole ones stand two a word, as `load_subs` reads
// them.
template <int Sub, bool kMinimum>
struct SuperNumbers {
    static constexpr int kWords = kSubWords<Sub>;
    alignas(64) int32_t scales[kWords][kPanelRows], minima[kMinimum ? kWords : 1][kPanelRows];
    alignas(64) float scale[kPanelRows], offset[kPanelRows];

    SuperNumbers(const uint8_t* constants, float part) {
        const uint8_t* numbers = constants + 2 * kPanelRows * (kMinimum ? 2 : 1);
        load(numbers, false, scales);
        store(scale, load_half(constants) * set1(part));
        if constexpr (kMinimum) {
            load(numbers, true, minima);
            store(offset, load_half(constants + 2 * kPanelRows));
        }
    }
    int16_t scale_of(int lane, int sub) const {
        const int32_t both = scales[sub / 4 * 2 + sub % 2][lane];
        return static_cast<int16_t>(sub & 2 ? both >> 16 : both);
    }

private:
    static void load(const uint8_t* numbers, bool wants_minima, int32_t (*to)[kPanelRows]) {
        Words words[kWords];
        load_subs<Sub>(numbers, wants_minima, words);
        for (int i = 0; i < kWords; i++) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(to[i]), words[i].a);
            _mm256_store_si256(reinterpret_cast<__m256i*>(to[i] + 8), words[i].b);
        }
    }
};

// As `dot_subs`, of eight rows: `sums` are theirs, [words, 8, 2].
template <int Words>
KVQ_INLINE __m256i dot_octet(const int32_t (*numbers)[kPanelRows], int lane, const int16_t* sums) {
    __m256i total = _mm256_setzero_si256();
    KVQ_UNROLL for (int i = 0; i < Words; i++) {
        const auto* pairs = reinterpret_cast<const __m256i*>(sums + 2 * kOctetRows * i);
        const __m256i number = _mm256_set1_epi32(numbers[i][lane]);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(number, _mm256_load_si256(pairs)));
    }
    return total;
}

// As `multiply_super`, of V octets.
template <int V, int Sub, bool kMinimum, int UpperBits, int LowBits>
void multiply_super_octets(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x,
                           int first, int count, float* out) {
    using Numbers = SuperNumbers<Sub, kMinimum>;
    constexpr int kTop = UpperBits == 4 ? (16 << LowBits) - 1 : 15, kSubGroups = Sub / kPanelGroup;
    constexpr int kFit = groups_between_flushes(kTop);
    constexpr int kGroups = kFit < kSubGroups ? kFit : kSubGroups;
    constexpr int kSubs = kvq::kSuperColumns / Sub;
    const size_t columns = layout.padded_columns(), stride = kOctetRows * columns;
    const size_t number_stride = size_t(kOctetRows) * layout.blocks;
    const size_t sum_stride = kOctetRows * layout.subs();
    const size_t ahead = layout.low_bits() ? prefetch_bytes(layout, LowBits == layout.low_bits())
                                           : size_t(kSequentialAhead);
    const SuperReading reading(layout, LowBits, 0);
    alignas(64) uint8_t codes[kPanelRows * kvq::kSuperColumns];
    alignas(64) float totals[kPanelRows * V * kOctetRows] = {};
    for (int b = 0; b < layout.blocks; b++) {
        const uint8_t* constants = panel + layout.constants_at(b);
        const Plane<UpperBits, false> upper{panel + layout.plane_at(b), ahead};
        const uint8_t* low = panel + layout.low_at() +
                             b * PanelLayout::bytes_of(kvq::kSuperColumns, LowBits);
        const Plane<LowBits ? LowBits : 4, false> lower{low, ahead};
        if constexpr (LowBits == 0)
            unpack_groups(upper, kvq::kSuperColumns, codes);
        else if constexpr (UpperBits == 2)
            unpack_groups(ThreeBits<false>{upper, lower}, kvq::kSuperColumns, codes);
        else
            unpack_groups(WholeCodes<LowBits, false>{upper, lower}, kvq::kSuperColumns, codes);
        const Numbers numbers(constants, reading.part);
        const int8_t* levels = x.levels + first * columns + size_t(kOctetRows) * b * layout.block;
        const size_t at = size_t(first) * layout.blocks + kOctetRows * b;
        const int16_t* sub_sums = x.sub_sums + first * layout.subs() + kOctetRows * b * kSubs;
        for (int lane = 0; lane < kPanelRows; lane++) {
            __m256i sums[V];
            KVQ_UNROLL for (int v = 0; v < V; v++) sums[v] = _mm256_setzero_si256();
            for (int sub = 0; sub < kSubs; sub++)
                add_octets<V, kGroups>(codes + 4 * lane + kPanelRows * Sub * sub, Sub,
                                       levels + kOctetRows * Sub * sub, stride, sums,
                                       _mm256_set1_epi16(numbers.scale_of(lane, sub)));
            const __m256 scale = broadcast(numbers.scale, lane);
            KVQ_UNROLL for (int v = 0; v < V; v++) {
                const int16_t* row_sums = sub_sums + v * sum_stride;
                if (reading.beyond) {
                    const __m256i dot = dot_octet<Numbers::kWords>(numbers.scales, lane, row_sums);
                    sums[v] = _mm256_add_epi32(
                        _mm256_mullo_epi32(sums[v], _mm256_set1_epi32(reading.times)),
                        _mm256_mullo_epi32(dot, _mm256_set1_epi32(reading.beyond)));
                }
                const __m256 unit = _mm256_loadu_ps(x.scales + at + v * number_stride);
                float* to = totals + kOctetRows * (V * lane + v);
                __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[v]),
                                               _mm256_mul_ps(scale, unit), _mm256_load_ps(to));
                if constexpr (kMinimum) {
                    const __m256i dot = dot_octet<Numbers::kWords>(numbers.minima, lane, row_sums);
                    const __m256 offset = broadcast(numbers.offset, lane);
                    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(offset, unit),
                                            total);
                }
                _mm256_store_ps(to, total);
            }
        }
    }
    store_octets<V>(totals, count, out);
}

using MultiplyOctets = void (*)(const PanelLayout&, const uint8_t*, const RoundedRows&, int, int,
                                float*);
template <int LowBits, bool E2m1, int... V>
MultiplyOctets octet_count(std::integer_sequence<int, V...>, int octets) {
    constexpr MultiplyOctets table[] = {multiply_octets<V + 1, LowBits, E2m1>...};
    return table[octets - 1];
}

template <int Sub, bool kMinimum, int UpperBits, int LowBits, int... V>
MultiplyOctets super_octets(std::integer_sequence<int, V...>, int octets) {
    constexpr MultiplyOctets table[] = {
        multiply_super_octets<V + 1, Sub, kMinimum, UpperBits, LowBits>...};
    return table[octets - 1];
}

void multiply_many(const PanelLayout& layout, int view, const uint8_t* panel, const RoundedRows& x,
                   int first, int count, float* out) {
    if (!x.octets) return multiply(layout, view, panel, x, first, count, out);
    using Counts = std::make_integer_sequence<int, kMostOctets>;
    constexpr int kMost = kMostOctets * kOctetRows;
    const int low_bits = layout.low_bits(view);
    for (int done = 0; done < count; done += kMost) {
        const int rows = std::min(count - done, kMost);
        const int octets = (rows + kOctetRows - 1) / kOctetRows;
        const auto plain = [=](auto low, auto e2m1) {
            return octet_count<low(), e2m1()>(Counts{}, octets);
        };
        const auto super = [=](auto sub, auto minimum, auto upper, auto low) -> MultiplyOctets {
            // Words of 16 bits hold no products of 8-bit codes, which come as rows alone.
            if constexpr (low() == 4) return nullptr;
            else return super_octets<sub(), minimum(), upper(), low()>(Counts{}, octets);
        };
        const MultiplyOctets chosen = layout.sub ? for_supers(layout, low_bits, super)
                                                 : for_codes(low_bits, layout.grid, plain);
        chosen(layout, panel, x, first + done, rows, out + kPanelRows * done);
    }
}

}  // namespace

KVQ_LINEAR_SET(avx2, multiply_many, kOctetsFrom)
#endif
