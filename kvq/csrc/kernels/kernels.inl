// The kernels, written once over sixteen lanes. A .cpp file includes a simd header, then this.
// Names of helpers are the ones of simd_generic.h, which says what each means.

// A call would put sums into memory.
#define KVQ_INLINE inline __attribute__((always_inline))

namespace {

using kvq::Block;
using kvq::kBlockRows;
using kvq::kLog2E;
using kvq::kMaxGroups;
using kvq::kMaxHeadDim;
using kvq::kNegligible;
using kvq::kPageTokens;
using kvq::kReach;
using kvq::kRowLanes;
using kvq::kRunPages;
using kvq::PageView;

// 2^x for x <= 0, relative error below 2e-7: the polynomial is the minimax fit of 2^f on [-1/2,
// 1/2]. What is negligible is 0, so that it matters to no sum whether it was read.
inline F exp2_lanes(F x) {
    x = where_below(x, set1(-kNegligible), set1(-200.0f));
    const F n = round(x);
    const F f = x - n;
    F p = set1(1.33952875e-3f);
    p = fma(p, f, set1(9.66974590e-3f));
    p = fma(p, f, set1(5.55030331e-2f));
    p = fma(p, f, set1(2.40220666e-1f));
    p = fma(p, f, set1(6.93147182e-1f));
    p = fma(p, f, set1(1.0f));
    return scale_by_power(p, n);
}

// tanh through 2^-2|x|, sign restored.
inline F tanh_lanes(F x) {
    const F magnitude = min(abs(x), set1(20.0f));
    const F e = exp2_lanes(magnitude * set1(-2.0f * kLog2E));
    const F sign = max(min(x * set1(3e38f), set1(1.0f)), set1(-1.0f));
    return (set1(1.0f) - e) / (set1(1.0f) + e) * sign;
}

// Of each of N rows the largest lane or the sum of lanes: row r in lane r.
template <int N, class Join>
inline F join_lanes(const F (&rows)[N], Join&& join) {
    F all[kRowLanes];
    for (int r = 0; r < kRowLanes; r++) all[r] = rows[r < N ? r : 0];
    return join_rows(all, join);
}
template <int N>
inline F largest_lanes(const F (&rows)[N]) {
    return join_lanes(rows, [](F x, F y) { return max(x, y); });
}
template <int N>
inline F sum_lanes(const F (&rows)[N]) {
    return join_lanes(rows, [](F x, F y) { return x + y; });
}

// Calls with the width as a constant.
template <class Call>
inline void with_bits(int bits, Call&& call) {
    if (bits == 8) call(std::integral_constant<int, 8>{});
    else if (bits == 6) call(std::integral_constant<int, 6>{});
    else if (bits == 4) call(std::integral_constant<int, 4>{});
    else call(std::integral_constant<int, 2>{});
}

// Serves `rows` rows N at a time and the rest in one go: call(count as a constant, first row).
template <int N, class Call>
inline void rows_of(int rows, Call&& call) {
    int r = 0;
    for (; r + N <= rows; r += N) call(std::integral_constant<int, N>{}, r);
    if constexpr (N > 1) {
        if (rows - r == N - 1) call(std::integral_constant<int, N - 1>{}, r);
        else if (rows > r) rows_of<N - 1>(rows - r, [&](auto n, int inner) { call(n, r + inner); });
    }
}

// Serves N rows, at most `Most` at a time.
template <int N, int Most, class Call>
inline void split_rows(Call&& call, int first = 0) {
    constexpr int kCount = std::min(N, Most);
    call(std::integral_constant<int, kCount>{}, first);
    if constexpr (N > kCount) split_rows<N - kCount, Most>(call, first + kCount);
}

// ---- products with codes -------------------------------------------------------------------

// A page's grid, widened once per page and shared by all rows.
struct Grid {
    alignas(64) float step[kMaxHeadDim];  // scale * 2^(8 - bits)
    alignas(64) float mid[kMaxHeadDim];
};

// Leaves what is folded into it as it is.
constexpr Grid kPlain = [] {
    Grid plain{};
    for (float& step : plain.step) step = 1.0f;
    return plain;
}();

inline void widen(const uint8_t* stored, int groups, int bits, Grid& out) {
    uint16_t ends[4];
    std::memcpy(ends, stored, sizeof ends);
    const F factor = set1(static_cast<float>(1 << (8 - bits)));
    const F low = set1(half_to_float(ends[0])), unit = set1(half_to_float(ends[1]));
    const F first = set1(half_to_float(ends[2])), stride = set1(half_to_float(ends[3]));
    for (int i = 0; i < groups; i += 16) {
        store(out.step + i, fma(load_codes(stored + 8 + i), unit, low) * factor);
        store(out.mid + i, fma(load_codes(stored + 8 + groups + i), stride, first));
    }
}

// Reads of more than a nibble join hi4 and a lower plane: code = hi * 2^(Bits - 4) + low.
template <int Bits>
constexpr bool kJoined = Bits > 4;
template <int Bits>
constexpr float kHighUnit = kJoined<Bits> ? 1 << (Bits - 4) * kJoined<Bits> : 1;

// Up to eight rows folded into a page's grid, to be multiplied with the page's codes: queries into
// the scales of channels, or attention weights into those of tokens. They are rounded to int8 in
// groups of 32 numbers, so that one loud channel or token costs its own group only; a number is
// about scale * (code + fine / 254). Pages read at 6 and 8 bits use the fine part against their hi4
// plane, or rounding a row would cost as much as the page's own rounding; narrower reads do without.
struct Folded {
    static constexpr int kStride = kMaxHeadDim + 16;  // rows side by side share no memory bank
    alignas(64) int8_t code[kRowLanes * kStride];
    alignas(64) int8_t fine[kRowLanes * kStride];
    alignas(64) float scale[kMaxGroups][kRowLanes];
    alignas(64) float constant[kRowLanes];  // what the codes' midpoint and the page's mids add
};

// Folds the group of 16 * Vectors numbers from `base` on of N rows x [N][n]; adds to the rows'
// constants, lane by lane.
template <int Bits, int N, int Vectors>
inline void fold_group(const float* x, int n, int base, const Grid& grid, F* constants,
                       Folded& out) {
    constexpr float kHalfRange = ((1 << Bits) - 1) * 0.5f;
    F product[N][Vectors], largest[N];
    for (int r = 0; r < N; r++) {
        largest[r] = set1(0.0f);
        for (int i = 0; i < Vectors; i++) {
            const F number = load(x + r * n + base + 16 * i);
            product[r][i] = number * load(grid.step + base + 16 * i);
            constants[r] = fma(number, load(grid.mid + base + 16 * i), constants[r]);
            largest[r] = max(largest[r], abs(product[r][i]));
        }
    }
    const F top = largest_lanes(largest);
    alignas(64) float inverse[kRowLanes];
    float* scale = out.scale[base / 32];
    store_rows(inverse, set1(127.0f) / max(top, set1(1e-30f)));
    store_rows(scale, top * set1(1.0f / 127.0f));
    // What the middle of the code range adds to sums over the codes. The fine part meets hi4 alone,
    // whose nibbles stand 7.5 from their middle.
    for (int r = 0; r < N; r++) {
        I total = {}, fines = {};
        for (int i = 0; i < Vectors; i++) {
            const int at = r * Folded::kStride + base + 16 * i;
            const F number = product[r][i] * set1(inverse[r]);
            const I code = to_int(number);
            store_bytes(out.code + at, code);
            total = i ? total + code : code;
            if constexpr (kJoined<Bits>) {
                const I fine = to_int((number - to_float(code)) * set1(254.0f));
                store_bytes(out.fine + at, fine);
                fines = i ? fines + fine : fine;
            }
        }
        F middle = to_float(total) * set1(kHalfRange);
        if constexpr (kJoined<Bits>)
            middle = fma(to_float(fines), set1(7.5f * kHighUnit<Bits> / 254.0f), middle);
        constants[r] = constants[r] - middle * set1(scale[r]);
    }
}

template <int Bits, int N>
inline void fold(const float* x, int n, const Grid& grid, Folded& out) {
    F constants[N];
    for (F& constant : constants) constant = set1(0.0f);
    for (int base = 0; base + 32 <= n; base += 32)
        fold_group<Bits, N, 2>(x, n, base, grid, constants, out);
    if (n % 32) fold_group<Bits, N, 1>(x, n, n / 32 * 32, grid, constants, out);
    store_rows(out.constant, sum_lanes(constants));
}

// Where the codes of eight lanes begin, in a plane of nibbles that fills two granules or in one of
// pairs of bits that fills one.
template <bool Pairs>
inline const uint8_t* octet_at(const uint8_t* const* granules, int outputs, int n, int octet) {
    if (Pairs) return granules[0] + octet * 2 * n;
    const int half = outputs / 16, second = octet >= half;
    return granules[second] + (octet - second * half) * 4 * n;
}

// Memory is slow to answer and takes few questions at once: one line for every line computed with.
// Inlined, or GCC finds that it changes nothing and drops it.
KVQ_INLINE void ask(const uint8_t* const* plane, int vector) {
    __builtin_prefetch(plane[vector % 2] + 32 * (vector - vector % 2));
}

// The bytes of sixteen lanes in a side's upper plane, and in the lower one of joined reads.
template <int Bits>
struct Planes {
    const uint8_t *high[2], *low[2];

    Planes(const uint8_t* const* side, int outputs, int n, int octet) {
        for (int i = 0; i < 2; i++) {
            high[i] = octet_at<Bits == 2>(side, outputs, n, octet + i);
            low[i] = kJoined<Bits> ? octet_at<Bits == 6>(side + 2, outputs, n, octet + i) : nullptr;
        }
    }
    static Bytes at(const uint8_t* const* plane, int vector) {
        return load_bytes(plane[0] + 32 * vector, plane[1] + 32 * vector);
    }
    // What lies below vector j of hi4, whose two nibbles join a and b: half of one of lo4's top
    // bits at 6 bits, a vector of lo4 at 8.
    void below(int j, Bytes& a, Bytes& b) const {
        const Bytes x = at(low, Bits == 6 ? j / 2 : j);
        if constexpr (Bits == 6) {
            a = j % 2 ? field<4, 3>(x) : field<0, 3>(x);
            b = j % 2 ? field<6, 3>(x) : field<2, 3>(x);
        } else {
            a = field<0, 15>(x), b = field<4, 15>(x);
        }
    }
};

// Sums of code products of N rows over one group, fine parts included.
template <int Bits, int N>
struct Sums {
    Dot high[N], low[kJoined<Bits> ? N : 1], fine[kJoined<Bits> ? N : 1];

    // Adds products with four of each row's codes, of which the first is at `at`.
    KVQ_INLINE void add(Bytes codes, Bytes rest, const Folded& x, int first, int at) {
        for (int r = 0; r < N; r++) {
            const int place = (first + r) * Folded::kStride + at;
            const Quad quad = broadcast(x.code + place);
            high[r].add(codes, quad);
            if constexpr (kJoined<Bits>) {
                low[r].add(rest, quad);
                fine[r].add(codes, broadcast(x.fine + place));
            }
        }
    }
};

template <int Bits>
inline F combine(const Dot& high, const Dot& low, const Dot& fine) {
    if constexpr (!kJoined<Bits>) return to_float(high.sum());
    const F coarse = fma(to_float(high.sum()), set1(kHighUnit<Bits>), to_float(low.sum()));
    return fma(to_float(fine.sum()), set1(kHighUnit<Bits> / 254.0f), coarse);
}

// Adds to N rows' totals their products with the bytes of a group of 32 numbers, or of 16.
template <int Bits, int N, int Numbers>
KVQ_INLINE void multiply_group(const Planes<Bits>& planes, const Planes<Bits>& next,
                               const Folded& x, int first, int group, F* total) {
    constexpr int kPerVector = Bits == 2 ? 16 : 8;  // numbers that meet 32 bytes
    Sums<Bits, N> sums;
    for (int j = 0; j < Numbers / kPerVector; j++) {
        const int vector = 32 / kPerVector * group + j, at = kPerVector * vector;
        const Bytes high = planes.at(planes.high, vector);
        ask(next.high, vector);
        if constexpr (kJoined<Bits>) ask(next.low, Bits == 6 ? vector / 2 : vector);
        if constexpr (Bits == 2) {
            sums.add(field<0, 3>(high), high, x, first, at);
            sums.add(field<2, 3>(high), high, x, first, at + 4);
            sums.add(field<4, 3>(high), high, x, first, at + 8);
            sums.add(field<6, 3>(high), high, x, first, at + 12);
        } else {
            Bytes a = high, b = high;
            if constexpr (kJoined<Bits>) planes.below(vector, a, b);
            sums.add(field<0, 15>(high), a, x, first, at);
            sums.add(field<4, 15>(high), b, x, first, at + 4);
        }
    }
    for (int r = 0; r < N; r++) {
        const int below = kJoined<Bits> ? r : 0;
        const F sum = combine<Bits>(sums.high[r], sums.low[below], sums.fine[below]);
        total[r] = fma(sum, set1(x.scale[group][first + r]), total[r]);
    }
}

// Products of N folded rows, from `first` on, of n numbers with the codes of `outputs` tokens or
// channels of one side of a page, sixteen at a time: put(row, which sixteen, sums). The same codes
// of the side `next` are asked for.
template <int Bits, int N, class Put>
inline void multiply_rows(const uint8_t* const* side, const uint8_t* const* next, int outputs,
                          int n, const Folded& x, int first, Put&& put) {
    for (int i = 0; i < outputs / 16; i++) {
        const Planes<Bits> planes(side, outputs, n, 2 * i), coming(next, outputs, n, 2 * i);
        F total[N];
        for (int r = 0; r < N; r++) total[r] = set1(x.constant[first + r]);
        for (int group = 0; group < n / 32; group++)
            multiply_group<Bits, N, 32>(planes, coming, x, first, group, total);
        if (n % 32) multiply_group<Bits, N, 16>(planes, coming, x, first, n / 32, total);
        for (int r = 0; r < N; r++) put(first + r, i, total[r]);
    }
}
template <int Bits, int N, class Put>
inline void multiply(const uint8_t* const* side, const uint8_t* const* next, int outputs, int n,
                     const Folded& x, Put&& put) {
    constexpr int kRows = kJoined<Bits> ? kRegisterRows / 2 : kRegisterRows;
    split_rows<N, kRows>([&](auto count, int first) {
        multiply_rows<Bits, count()>(side, next, outputs, n, x, first, put);
    });
}

// ---- attention -----------------------------------------------------------------------------

// Bits of row r's mask of `n` keys.
inline uint64_t mask_of(const uint64_t* visible, int r, int n = kPageTokens) {
    if (visible) return visible[r];
    return n == kPageTokens ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// The sum of n weights of 1 at most, and of what stands up to the next sixteen, as whole steps of
// 2^-24: it does not depend on their order.
inline float sum_of_steps(const float* p, int n) {
    const F steps = set1(16777216.0f);
    I total = to_int(load(p) * steps);
    for (int i = 16; i < n; i += 16) total = total + to_int(load(p + i) * steps);
    return static_cast<float>(reduce_add(total)) * (1.0f / 16777216.0f);
}

// Logits, then weights, of up to eight rows over keys of up to kRunPages pages, [page][row][64].
struct Weights {
    alignas(64) float p[kRunPages][kRowLanes * kPageTokens];
    alignas(64) float most[kRunPages][kRowLanes];  // a page's largest logits
    alignas(64) float mass[kRunPages][kRowLanes];  // the sums of its weights
};

// Caps and masks the logits of N rows from `first` on; returns each row's largest, and sets those of
// every page. A `Tile` has n keys, and what stands beyond the next sixteen is never read; a page has
// all.
template <int N, bool Tile>
inline F cap_and_mask(const Block& block, int first, const uint64_t* const* visible, int pages,
                      int n, Weights& to) {
    F best = set1(-3e38f);
    for (int page = 0; page < pages; page++) {
        F largest[N];
        for (int r = 0; r < N; r++) {
            largest[r] = set1(-3e38f);
            const uint64_t bits = mask_of(visible[page], first + r, n);
            for (int i = 0; i < (Tile ? n : kPageTokens); i += 16) {
                float* at = to.p[page] + r * kPageTokens + i;
                F x = load(at);
                if (block.softcap_log2 > 0.0f) x = tanh_lanes(x) * set1(block.softcap_log2);
                if (bits != ~uint64_t{0})
                    x = select_bits(static_cast<unsigned>(bits >> i & 0xffff), x, set1(-3e38f));
                store(at, x);
                largest[r] = max(largest[r], x);
            }
        }
        const F most = largest_lanes(largest);
        store_rows(to.most[page], most);
        best = max(best, most);
    }
    return best;
}

// Turns the logits of N rows from `first` on into weights relative to each row's new maximum; what
// was summed before is rescaled to it. False: all weights are negligible, and none are set. Of a page
// that a row sees nothing of, the row has no weights, and their sum is 0.
// Of a `Tile` the result is the same wherever in it the visible rows stand.
template <int N, bool Tile>
inline bool softmax(Block& block, int first, const uint64_t* const* visible, int pages, int n,
                    Weights& to) {
    alignas(64) float largest[kRowLanes], shrink[kRowLanes], newest[kRowLanes];
    const F best = cap_and_mask<N, Tile>(block, first, visible, pages, n, to);
    const F before = load(block.maximum + first), after = max(before, best);
    store_rows(largest, best);
    store_rows(shrink, exp2_lanes(before - after));
    store_rows(newest, after);
    std::copy(newest, newest + N, block.maximum + first);
    bool any = false;
    for (int r = 0; r < N; r++) any |= largest[r] >= newest[r] - kNegligible;
    if (!any) return false;
    for (int r = 0; r < N; r++) {
        block.sum[first + r] *= shrink[r];
        float* acc = block.acc + (first + r) * block.head_dim;
        for (int i = 0; shrink[r] < 1.0f && i < block.head_dim; i += 16)
            store(acc + i, load(acc + i) * set1(shrink[r]));
    }
    for (int page = 0; page < pages; page++) {
        F sums[N] = {};
        for (int r = 0; r < N; r++) {
            if (!Tile && to.most[page][r] < block.least[first + r]) continue;
            for (int i = 0; i < (Tile ? n : kPageTokens); i += 16) {
                float* at = to.p[page] + r * kPageTokens + i;
                const F weights = exp2_lanes(load(at) - set1(newest[r]));
                store(at, weights);
                sums[r] = i ? sums[r] + weights : weights;
            }
        }
        store_rows(to.mass[page], sum_lanes(sums));
        for (int r = 0; r < N; r++) {
            // Weights above 1 come of numbers that are not finite: no integer holds their steps.
            if (Tile && to.mass[page][r] <= kPageTokens)
                to.mass[page][r] = sum_of_steps(to.p[page] + r * kPageTokens, n);
            block.sum[first + r] += to.mass[page][r];
        }
    }
    return true;
}

// scores [N][64]: the page's logits. Keys of the page `next` are asked for, if they have its width.
template <int N>
inline void row_logits(const PageView& page, const PageView& next, int head_dim, const float* q,
                       float* scores) {
    const auto* coming = next.k_bits == page.k_bits ? next.k : page.k;
    for (int i = 0; i < 2 * head_dim; i += 64) __builtin_prefetch(next.k_grid + i);
    Grid keys;
    Folded folded;
    widen(page.k_grid, head_dim, page.k_bits, keys);
    with_bits(page.k_bits, [&](auto bits) {
        fold<bits(), N>(q, head_dim, keys, folded);
        const auto put = [&](int r, int i, F logits) {
            store(scores + r * kPageTokens + 16 * i, logits);
        };
        multiply<bits(), N>(page.k, coming, kPageTokens, head_dim, folded, put);
    });
}

// Rows `which` [N] of acc [head_dim] += weights p [N][64] . V. A grid of channels stays out of the
// weights, whose sums are `mass`. Values of the page `next` are asked for, if they have its width.
template <int N>
inline void add_values(const PageView& page, const PageView& next, int head_dim, const float* p,
                       const float* mass, const int* which, float* acc) {
    const auto* coming = next.v_bits == page.v_bits ? next.v : page.v;
    for (int i = 0; i < 2 * head_dim; i += 64) __builtin_prefetch(next.v_grid + i);
    const bool channels = page.channel_values;
    Grid values;
    Folded folded;
    widen(page.v_grid, channels ? head_dim : kPageTokens, page.v_bits, values);
    with_bits(page.v_bits, [&](auto bits) {
        fold<bits(), N>(p, kPageTokens, channels ? kPlain : values, folded);
        multiply<bits(), N>(page.v, coming, head_dim, kPageTokens, folded, [&](int r, int i, F sums) {
            float* out = acc + which[r] * head_dim + 16 * i;
            if (channels)
                sums = fma(sums, load(values.step + 16 * i),
                           load(values.mid + 16 * i) * set1(mass[r]));
            store(out, load(out) + sums);
        });
    });
}

// Moves the rows of a page that weigh anything to the front; how many and which they are.
inline int gather_rows(float* p, float* mass, int rows, int* which) {
    int count = 0;
    for (int r = 0; r < rows; r++) {
        if (!(mass[r] > 0)) continue;
        if (count < r) std::copy_n(p + r * kPageTokens, kPageTokens, p + count * kPageTokens);
        mass[count] = mass[r];
        which[count++] = r;
    }
    return count;
}

void page_scores(const PageView& page, const Block& block, const float* q, float* scores) {
    rows_of<kRegisterRows>(block.rows, [&](auto rows, int r) {
        row_logits<rows()>(page, page, block.head_dim, q + r * block.head_dim,
                           scores + r * kPageTokens);
    });
}

// A key is read at most half a step of 8 bits beyond where its channel's values reach.
void page_bounds(const Block& block, const float* q, const PageView& page, float spread,
                 float* bounds) {
    Grid k;
    widen(page.k_grid, block.head_dim, 8, k);
    for (int r = 0; r < block.rows; r++) {
        F middle = set1(0.0f), half = set1(0.0f);
        for (int c = 0; c < block.head_dim; c += 16) {
            const F x = load(q + r * block.head_dim + c);
            middle = fma(x, load(k.mid + c), middle);
            half = fma(abs(x), load(k.step + c), half);
        }
        bounds[r] = reduce_add(fma(half, set1((kReach + 0.5f) * spread), middle));
    }
}

// One stage at a time over all pages: what a page waits for is hidden behind the next one's work.
void attend_pages(Block& block, const float* q, const PageView* pages,
                  const uint64_t* const* visible, int count, const PageView* next,
                  int next_count) {
    const int dim = block.head_dim;
    rows_of<kRegisterRows>(block.rows, [&](auto rows, int r) {
        // Asked for once; a page that is here already costs nothing to ask for.
        const auto after = [&](int i) -> const PageView& {
            return r == 0 && i < next_count ? next[i] : pages[i];
        };
        Weights to;
        for (int i = 0; i < count; i++)
            row_logits<rows()>(pages[i], after(i), dim, q + r * dim, to.p[i]);
        if (!softmax<rows(), false>(block, r, visible, count, kPageTokens, to)) return;
        for (int i = 0; i < count; i++) {
            int which[rows()];
            const int weighing = gather_rows(to.p[i], to.mass[i], rows(), which);
            rows_of<rows()>(weighing, [&](auto some, int from) {
                add_values<some()>(pages[i], after(i), dim, to.p[i] + from * kPageTokens,
                                   to.mass[i] + from, which + from, block.acc + r * dim);
            });
        }
    });
}

// ---- evidence ------------------------------------------------------------------------------

// The page's values as a read at its width sees them, float32 [64][head_dim].
void read_values(const PageView& page, int head_dim, const Grid& v, float* out) {
    const int bits = page.v_bits, half = head_dim / 16;
    const float middle = ((1 << bits) - 1) * 0.5f;
    for (int octet = 0; octet < head_dim / 8; octet++) {
        const int which = bits == 2 ? 0 : octet >= half;
        const int offset = bits == 2 ? octet * 128 : (octet - which * half) * 256;
        for (int j = 0; j < (bits == 2 ? 4 : 8); j++) {
            const uint8_t* hi = page.v[which] + offset + 32 * j;
            const uint8_t* lo = bits == 8   ? page.v[2 + which] + offset + 32 * j
                                : bits == 6 ? page.v[2] + octet * 128 + 32 * (j / 2)
                                            : hi;
            for (int i = 0; i < 32; i++) {
                const int channel = 8 * octet + i / 4;
                for (int part = 0; part < (bits == 2 ? 4 : 2); part++) {
                    const int token = (bits == 2 ? 16 : 8) * j + 4 * part + i % 4;
                    int code = bits == 2 ? hi[i] >> 2 * part & 3 : hi[i] >> 4 * part & 15;
                    if (bits == 8) code = 16 * code + (lo[i] >> 4 * part & 15);
                    if (bits == 6) code = 4 * code + (lo[i] >> (4 * (j % 2) + 2 * part) & 3);
                    const int group = page.channel_values ? channel : token;
                    out[token * head_dim + channel] =
                        v.mid[group] + v.step[group] * (static_cast<float>(code) - middle);
                }
            }
        }
    }
}

// Attention weights [64] of row r over the page, 0 where it cannot look; returns their sum and
// raises `peak` to the largest.
inline float page_weights(const Block& block, int r, const float* logits, uint64_t bits, float* p,
                          float& peak) {
    F total = set1(0.0f), largest = set1(peak);
    const F inverse = set1(block.sum[r] > 0.0f ? 1.0f / block.sum[r] : 0.0f);
    for (int i = 0; i < kPageTokens; i += 16) {
        F x = load(logits + i);
        if (block.softcap_log2 > 0.0f) x = tanh_lanes(x) * set1(block.softcap_log2);
        const F weight = exp2_lanes(min(x - set1(block.maximum[r]), set1(0.0f))) * inverse;
        const F seen = select_bits(static_cast<unsigned>(bits >> i & 0xffff), weight, set1(0.0f));
        store(p + i, seen);
        total = total + seen;
        largest = max(largest, seen);
    }
    peak = reduce_max(largest);
    return reduce_add(total);
}

void page_evidence(const Block& block, const float* q, const PageView& page,
                   const uint64_t* visible, float unit, kvq::PageEvidence& seen) {
    const int dim = block.head_dim;
    alignas(64) float scores[kBlockRows * kPageTokens];
    page_scores(page, block, q, scores);
    Grid keys, values;
    alignas(64) float v[kPageTokens * kMaxHeadDim], length[kPageTokens];  // values, |value|^2
    bool read = false;
    for (int r = 0; r < block.rows; r++) {
        const uint64_t bits = mask_of(visible, r);
        if (!bits) continue;
        alignas(64) float p[kPageTokens];
        const float mass = page_weights(block, r, scores + r * kPageTokens, bits, p, seen.peak);
        seen.rows++;
        seen.mass += mass;
        if (!seen.errors || mass < kvq::kObservedMass) continue;
        if (!read) {
            widen(page.k_grid, dim, 8, keys);
            widen(page.v_grid, page.channel_values ? dim : kPageTokens, page.v_bits, values);
            read_values(page, dim, values, v);
            for (int t = 0; t < kPageTokens; t++) {
                F sum = set1(0.0f);
                for (int c = 0; c < dim; c += 16)
                    sum = fma(load(v + t * dim + c), load(v + t * dim + c), sum);
                length[t] = reduce_add(sum);
            }
            read = true;
        }
        // Logit noise of keys rounded to steps of s: sum over channels of (q s)^2 / 12.
        F noise = set1(0.0f);
        for (int c = 0; c < dim; c += 16) {
            const F x = load(q + r * dim + c) * set1(unit) * load(keys.step + c);
            noise = fma(x, x, noise);
        }
        // With X the row's output: sum p (V - X) = sum p V - m X, and sum p^2 |V - X|^2 =
        // sum p^2 |V|^2 - 2 X . sum p^2 V + |X|^2 sum p^2.
        const float* output = block.acc + r * dim;
        alignas(64) float square[kPageTokens];
        F squares = set1(0.0f), lengths = set1(0.0f), steps = set1(0.0f);
        for (int t = 0; t < kPageTokens; t += 16) {
            const F weight = load(p + t), both = weight * weight, step = load(values.step + t);
            store(square + t, both);
            squares = squares + both;
            lengths = fma(both, load(length + t), lengths);
            steps = fma(both, step * step, steps);
        }
        float noises = reduce_add(steps) * static_cast<float>(dim);
        if (page.channel_values) {
            steps = set1(0.0f);
            for (int c = 0; c < dim; c += 16)
                steps = fma(load(values.step + c), load(values.step + c), steps);
            noises = reduce_add(steps) * reduce_add(squares);
        }
        F gone = set1(0.0f), inner = set1(0.0f), size = set1(0.0f);
        for (int c = 0; c < dim; c += 16) {
            F first = set1(0.0f), second = set1(0.0f);
            for (int t = 0; t < kPageTokens; t++) {
                const F y = load(v + t * dim + c);
                first = fma(set1(p[t]), y, first);
                second = fma(set1(square[t]), y, second);
            }
            const F x = load(output + c), moved = first - set1(mass) * x;
            gone = fma(moved, moved, gone);
            inner = fma(second, x, inner);
            size = fma(x, x, size);
        }
        const float spread =
            reduce_add(lengths) - 2.0f * reduce_add(inner) + reduce_add(size) * reduce_add(squares);
        const float narrow = 1.0f / static_cast<float>(1 << (8 - page.v_bits));
        const float left = mass < 0.9375f ? 1.0f - mass : 0.0625f;
        seen.key_error += reduce_add(noise) * (1.0f / 12.0f) * (spread > 0.0f ? spread : 0.0f);
        seen.value_error += noises * narrow * narrow * (1.0f / 12.0f);
        seen.evict_error += reduce_add(gone) / (left * left);
    }
}

// ---- floating-point keys -------------------------------------------------------------------

template <int N>
void tile_logits(const float* q, int head_dim, const float* keys, int n, float* scores) {
    for (int t = 0; t < n; t += 16) {
        F sums[N];
        for (F& sum : sums) sum = set1(0.0f);
        for (int c = 0; c < head_dim; c++) {
            const F x = load(keys + c * kPageTokens + t);
            for (int r = 0; r < N; r++) sums[r] = fma(set1(q[r * head_dim + c]), x, sums[r]);
        }
        for (int r = 0; r < N; r++) store(scores + r * kPageTokens + t, sums[r]);
    }
}

template <int N>
void tile_values(const float* p, int n, const uint16_t* values, int head_dim, float* acc) {
    for (int c = 0; c < head_dim; c += 16) {
        F sums[N];
        for (int r = 0; r < N; r++) sums[r] = load(acc + r * head_dim + c);
        for (int t = 0; t < n; t++) {
            const F x = load_half(values + t * head_dim + c);
            for (int r = 0; r < N; r++) sums[r] = fma(set1(p[r * kPageTokens + t]), x, sums[r]);
        }
        for (int r = 0; r < N; r++) store(acc + r * head_dim + c, sums[r]);
    }
}

// keys [head_dim][64]: n float16 rows [n, head_dim] transposed, 0 beyond them up to the next
// sixteen.
void transpose_keys(const uint16_t* k, int n, int head_dim, float* keys) {
    constexpr uint16_t kNoKey[8] = {};
    for (int t = 0; t < (n + 15) / 16 * 16; t += 8)
        for (int c = 0; c < head_dim; c += 8) {
            const uint16_t* rows[8];
            for (int i = 0; i < 8; i++)
                rows[i] = t + i < n ? k + (t + i) * head_dim + c : kNoKey;
            transpose(rows, keys + c * kPageTokens + t, kPageTokens);
        }
}

void attend_tile(Block& block, const float* q, const uint16_t* k, const uint16_t* v, int n,
                 const uint64_t* visible) {
    const int dim = block.head_dim;
    alignas(64) float keys[kMaxHeadDim * kPageTokens];
    transpose_keys(k, n, dim, keys);
    rows_of<kRegisterRows>(block.rows, [&](auto rows, int first) {
        Weights to;
        tile_logits<rows()>(q + first * dim, dim, keys, n, to.p[0]);
        // A row of a tree must get what it would get in the place where it is kept.
        if (!softmax<rows(), true>(block, first, &visible, 1, n, to) || !v) return;
        tile_values<rows()>(to.p[0], n, v, dim, block.acc + first * dim);
    });
}

// ---- encoding ------------------------------------------------------------------------------

inline uint16_t half_down(float x) {
    uint16_t h = float_to_half(x);
    if (half_to_float(h) > x) h = h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1;
    return h;
}
inline uint16_t half_up(float x) {  // x >= 0
    uint16_t h = float_to_half(x);
    return half_to_float(h) < x ? h + 1 : h;
}
inline bool finite_half(uint16_t h) {
    return (h & 0x7c00) != 0x7c00;
}

// What `n` numbers are stored as: low + unit * code, the code rounded to nearest or up. Replaces
// them by what is read back. False: not finite in float16.
template <bool Up>
inline bool encode_line(float* x, int n, uint8_t* ends, uint8_t* codes) {
    float least = x[0], most = x[0];
    bool ordered = true;
    for (int i = 0; i < n; i++) {
        ordered &= x[i] == x[i];
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    least += 0.0f;  // -0 becomes 0, or equal pages would have different bytes
    most += 0.0f;
    uint16_t half[2] = {half_down(least)};
    const float low = half_to_float(half[0]);
    half[1] = half_up((most - low) / 255.0f);
    const float unit = half_to_float(half[1]);
    std::memcpy(ends, half, sizeof half);
    if (!ordered || !finite_half(half[0]) || !finite_half(half[1])) return false;
    for (int i = 0; i < n; i++) {
        const float code = (x[i] - low) / (unit > 1e-30f ? unit : 1e-30f);
        const float whole = Up ? std::ceil(code) : std::nearbyint(code);
        codes[i] = static_cast<uint8_t>(whole < 255.0f ? whole : 255.0f);
        x[i] = low + unit * static_cast<float>(codes[i]);
    }
    return true;
}

// The grid of groups that span low to high, and the scales and mids that it stores.
inline bool encode_grid(const float* low, const float* high, int groups, uint8_t* grid,
                        float* scale, float* mid) {
    for (int i = 0; i < groups; i++) mid[i] = (low[i] + high[i]) * 0.5f;
    if (!encode_line<false>(mid, groups, grid + 4, grid + 8 + groups)) return false;
    for (int i = 0; i < groups; i++) {
        const float above = high[i] - mid[i], below = mid[i] - low[i];
        scale[i] = (above > below ? above : below) / kReach;
    }
    return encode_line<true>(scale, groups, grid, grid + 8);
}

inline void put_nibble(uint8_t* planes, size_t plane_bytes, int place, int shift, uint8_t code) {
    const auto at = static_cast<size_t>(place);
    planes[at] |= static_cast<uint8_t>((code >> 4) << shift);
    planes[plane_bytes + at] |= static_cast<uint8_t>((code & 15) << shift);
}

// codes [n] = round((x - mid) / scale + 127.5) clipped to 0..255, scale and mid elementwise.
inline void encode_codes(const float* x, const float* scale, const float* mid, int n,
                         uint8_t* codes) {
    for (int i = 0; i < n; i += 16) {
        const F s = load(scale + i);
        F code = (load(x + i) - load(mid + i)) / max(s, set1(1e-30f)) + set1(127.5f);
        code = min(max(code, set1(0.0f)), set1(255.0f));
        store_bytes(codes + i, to_int(code));
    }
}

// The least and the largest number of every channel, or of every token.
void extremes(const float* x, int head_dim, bool channels, float* low, float* high) {
    for (int t = 0; t < kPageTokens; t++) {
        const float* row = x + t * head_dim;
        if (channels) {
            for (int c = 0; c < head_dim; c += 16) {
                store(low + c, t ? min(load(low + c), load(row + c)) : load(row + c));
                store(high + c, t ? max(load(high + c), load(row + c)) : load(row + c));
            }
        } else {
            F a = load(row), b = a;
            for (int c = 16; c < head_dim; c += 16) {
                a = min(a, load(row + c));
                b = max(b, load(row + c));
            }
            low[t] = -reduce_max(set1(0.0f) - a);
            high[t] = reduce_max(b);
        }
    }
}

// Where a plane of nibbles has the code of a value: its byte, and how far up in it.
inline int value_place(int t, int c, int& shift) {
    shift = t % 8 / 4 * 4;
    return t / 8 * 32 + t % 4 + c / 8 * 256 + 4 * (c % 8);
}

// x [64, D] moved as kvq.reference.carried does, in blocks of sixteen channels: of those that are
// done feedback is 0.
void carry(float* x, int head_dim, const float* scale, const float* mid, int bits,
           const float* feedback) {
    const int step = 1 << (8 - bits);
    const float middle = kvq::from_middle(bits);
    alignas(64) float own[kPageTokens], scales[kPageTokens], mids[kPageTokens], error[kPageTokens];
    alignas(64) uint8_t codes[kPageTokens];
    for (int c = 0; c + 1 < head_dim; c++, feedback += head_dim) {
        std::fill(scales, scales + kPageTokens, scale[c]);
        std::fill(mids, mids + kPageTokens, mid[c]);
        for (int t = 0; t < kPageTokens; t++) own[t] = x[t * head_dim + c];
        encode_codes(own, scales, mids, kPageTokens, codes);
        for (int t = 0; t < kPageTokens; t++) {
            const float seen = static_cast<float>(codes[t] & -step) + middle;
            error[t] = own[t] - (mid[c] + scale[c] * seen);
        }
        for (int t = 0; t < kPageTokens; t++) {
            float* row = x + t * head_dim;
            for (int i = (c + 1) / 16 * 16; i < head_dim; i += 16)
                store(row + i, load(row + i) - set1(error[t]) * load(feedback + i));
        }
    }
}

// The planes of x [64, D], of which every channel or every token has a scale and a mid.
void put_codes(const float* x, int head_dim, bool values, bool channels, const float* scale,
               const float* mid, uint8_t* planes) {
    const size_t plane_bytes = 2 * kvq::granule_bytes(head_dim);
    std::memset(planes, 0, 2 * plane_bytes);
    alignas(64) float scales[kMaxHeadDim], mids[kMaxHeadDim];
    alignas(64) uint8_t codes[kMaxHeadDim];
    for (int t = 0; t < kPageTokens; t++) {
        if (!channels) {  // one group is the whole row
            std::fill(scales, scales + head_dim, scale[t]);
            std::fill(mids, mids + head_dim, mid[t]);
        }
        encode_codes(x + t * head_dim, channels ? scale : scales, channels ? mid : mids, head_dim,
                     codes);
        for (int c = 0; c < head_dim; c++) {
            const kvq::KeyPlace key = kvq::key_place(head_dim, t, c);
            int shift = key.nibble_shift;
            const int at = values ? value_place(t, c, shift) : key.nibble;
            put_nibble(planes, plane_bytes, at, shift, codes[c]);
        }
    }
}

bool pack(float* x, int head_dim, bool values, bool channels, int bits, const float* feedback,
          uint8_t* planes, uint8_t* grid) {
    alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim], scale[kMaxHeadDim] = {};
    alignas(64) float mid[kMaxHeadDim] = {};
    extremes(x, head_dim, channels, low, high);
    if (!encode_grid(low, high, channels ? head_dim : kPageTokens, grid, scale, mid)) return false;
    if (feedback) carry(x, head_dim, scale, mid, bits, feedback);
    put_codes(x, head_dim, values, channels, scale, mid, planes);
    return true;
}

// The code of token t, channel c in the planes of keys of `bits` bits; of bits that are gone 0.
inline int read_key(const uint8_t* planes, int head_dim, int bits, int t, int c) {
    const kvq::KeyPlace at = kvq::key_place(head_dim, t, c);
    if (bits == 2) return (planes[at.pair] >> at.pair_shift & 3) << 6;
    const int upper = (planes[at.nibble] >> at.nibble_shift & 15) << 4;
    const uint8_t* lower = planes + 2 * kvq::granule_bytes(head_dim);
    if (bits == 8) return upper | (lower[at.nibble] >> at.nibble_shift & 15);
    return bits == 6 ? upper | (lower[at.pair] >> at.pair_shift & 3) << 2 : upper;
}

void narrow_keys(uint8_t* planes, int head_dim, int from, int to, const uint8_t* grid,
                 const float* feedback) {
    Grid own;
    widen(grid, head_dim, 8, own);
    const float middle = kvq::from_middle(from);
    alignas(64) float x[kPageTokens * kMaxHeadDim];
    for (int t = 0; t < kPageTokens; t++)
        for (int c = 0; c < head_dim; c++) {
            const auto code = static_cast<float>(read_key(planes, head_dim, from, t, c));
            x[t * head_dim + c] = own.mid[c] + own.step[c] * (code + middle);
        }
    carry(x, head_dim, own.step, own.mid, to, feedback);
    put_codes(x, head_dim, false, true, own.step, own.mid, planes);
}

void read_grid(const uint8_t* grid, int groups, float* out) {
    Grid wide;
    widen(grid, groups, 8, wide);
    std::copy(wide.step, wide.step + groups, out);
    std::copy(wide.mid, wide.mid + groups, out + groups);
}

// Vector m of the result joins the top bits of vectors 2m and 2m + 1: for keys two channel octets
// of one token group, for values two token octets of one channel group.
void narrow(uint8_t* plane, int head_dim) {
    for (int m = 0; m < head_dim / 2; m++) {
        uint8_t merged[32];
        for (int i = 0; i < 32; i++) {
            const uint8_t a = plane[64 * m + i], b = plane[64 * m + 32 + i];
            merged[i] = static_cast<uint8_t>((a >> 2 & 3) | (a >> 6 & 3) << 2 | (b >> 2 & 3) << 4 |
                                             (b >> 6 & 3) << 6);
        }
        std::memcpy(plane + 32 * m, merged, 32);
    }
}

bool to_half(const float* x, uint16_t* out, int n) {
    bool finite = true;
    for (int i = 0; i < n; i += 16) {
        store_half(out + i, load(x + i));
        for (int j = 0; j < 16; j++) finite &= finite_half(out[i + j]);
    }
    return finite;
}

void from_half(const uint16_t* x, float* out, int n) {
    for (int i = 0; i < n; i += 16) store(out + i, load_half(x + i));
}

// Products of N rows with E times sixteen columns of a state, in the order of its rows.
template <int N, int E>
KVQ_INLINE void read_columns(const float* state, int key_dim, int value_dim, const float* rows,
                             float* out) {
    F sums[N][E];
    for (int r = 0; r < N; r++)
        for (int e = 0; e < E; e++) sums[r][e] = set1(0.0f);
    for (int d = 0; d < key_dim; d++) {
        F s[E];
        for (int e = 0; e < E; e++) s[e] = load(state + d * value_dim + 16 * e);
        for (int r = 0; r < N; r++) {
            const F x = set1(rows[r * key_dim + d]);
            for (int e = 0; e < E; e++) sums[r][e] = fma(x, s[e], sums[r][e]);
        }
    }
    for (int r = 0; r < N; r++)
        for (int e = 0; e < E; e++) store(out + r * value_dim + 16 * e, sums[r][e]);
}

void delta_read(const float* state, int key_dim, int value_dim, const float* rows, int count,
                float* out) {
    rows_of<4>(count, [&](auto n, int first) {
        constexpr int kColumns = kRegisterRows / (n > 2 ? 4 : 2);
        const float* x = rows + first * key_dim;
        float* to = out + first * value_dim;
        int e = 0;
        for (; e + 16 * kColumns <= value_dim; e += 16 * kColumns)
            read_columns<n, kColumns>(state + e, key_dim, value_dim, x, to + e);
        for (; e < value_dim; e += 16)
            read_columns<n, 1>(state + e, key_dim, value_dim, x, to + e);
    });
}

void delta_fold(const float* state, float* out, int key_dim, int value_dim, float fade,
                const float* keys, const float* const* u, int count) {
    for (int d = 0; d < key_dim; d++)
        for (int e = 0; e < value_dim; e += 16) {
            F sum = set1(fade) * load(state + d * value_dim + e);
            for (int i = 0; i < count; i++)
                sum = fma(set1(keys[i * key_dim + d]), load(u[i] + e), sum);
            store(out + d * value_dim + e, sum);
        }
}

// By 2^-|x|, which never overflows.
void silu(const float* x, float* out, int n) {
    for (int i = 0; i < n; i += 16) {
        const F here = load(x + i);
        const F power = exp2_lanes(abs(here) * set1(-kLog2E));
        const F above = max(here, set1(0.0f)), below = min(here, set1(0.0f));
        store(out + i, fma(below, power, above) / (set1(1.0f) + power));
    }
}

void add(float* sums, float factor, const float* x, int n) {
    const F times = set1(factor);
    for (int i = 0; i < n; i += 16) store(sums + i, fma(times, load(x + i), load(sums + i)));
}

float dot(const float* x, const float* y, int n) {
    F sum = set1(0.0f);
    for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(y + i), sum);
    return reduce_add(sum);
}

}  // namespace
