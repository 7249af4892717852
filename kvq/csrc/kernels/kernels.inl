// The kernels, written once over eight lanes. A .cpp file includes a simd header, then this.
// Names of helpers are the ones of simd_generic.h, which says what each means.

namespace {

using kvq::Block;
using kvq::kBlockRows;
using kvq::kLog2E;
using kvq::kMaxGroups;
using kvq::kMaxHeadDim;
using kvq::kNothingSeen;
using kvq::kPageTokens;
using kvq::kReach;
using kvq::PageView;

// 2^x for x <= 0, relative error below 2e-7: the polynomial is the minimax fit of 2^f on [-1/2,
// 1/2].
inline F exp2_lanes(F x) {
    x = max(x, set1(-200.0f));
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

inline float exp2_one(float x) {
    alignas(32) float r[8];
    store(r, exp2_lanes(set1(x)));
    return r[0];
}

// tanh through 2^-2|x|, sign restored.
inline F tanh_lanes(F x) {
    const F magnitude = min(abs(x), set1(20.0f));
    const F e = exp2_lanes(magnitude * set1(-2.0f * kLog2E));
    const F t = (set1(1.0f) - e) / (set1(1.0f) + e);
    const F negative = set1(0.0f) - t;
    alignas(32) float sign[8];
    store(sign, x);
    unsigned bits = 0;
    for (int i = 0; i < 8; i++) bits |= static_cast<unsigned>(sign[i] >= 0.0f) << i;
    return select_bits(bits, t, negative);
}

// A page's grid, widened once per page and shared by all rows.
struct Grid {
    alignas(64) float step[kMaxHeadDim];  // scale * 2^(8 - bits)
    alignas(64) float mid[kMaxHeadDim];
};

inline void widen(const uint8_t* stored, int groups, int bits, Grid& out) {
    uint16_t ends[4];
    std::memcpy(ends, stored, sizeof ends);
    const F factor = set1(static_cast<float>(1 << (8 - bits)));
    const F low = set1(half_to_float(ends[0])), unit = set1(half_to_float(ends[1]));
    const F first = set1(half_to_float(ends[2])), stride = set1(half_to_float(ends[3]));
    for (int i = 0; i < groups; i += 8) {
        store(out.step + i, fma(load_codes(stored + 8 + i), unit, low) * factor);
        store(out.mid + i, fma(load_codes(stored + 8 + groups + i), stride, first));
    }
}

// Reads of more than a nibble join hi4 and a lower plane: code = hi * 2^(Bits - 4) + low.
template <int Bits>
constexpr bool kJoined = Bits > 4;
template <int Bits>
constexpr float kHighUnit = kJoined<Bits> ? 1 << (Bits - 4) * kJoined<Bits> : 1;

// Numbers rounded to int8 codes: x is about scale * (code + fine / 254). Pages read at 6 and 8 bits
// use the fine part against their hi4 plane, or rounding x would cost as much as the page's own
// rounding; narrower reads do without. Returns, lane by lane, what the middle of the code range
// adds to sums over these codes: the fine part meets hi4 alone, whose nibbles stand 7.5 from
// their middle.
template <int Lanes, int Bits>
inline F round_codes(const F* x, float top, int8_t* code, int8_t* fine, float* scale) {
    constexpr bool Fine = kJoined<Bits>;
    constexpr float kHalfRange = ((1 << Bits) - 1) * 0.5f;
    const F inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
    I codes[4] = {}, rests[4] = {};
    I total = {}, rest_total = {};
    for (int i = 0; i < Lanes; i++) {
        const F scaled = x[i] * inverse;
        codes[i] = to_int(scaled);
        total = total + codes[i];
        if constexpr (Fine) {
            rests[i] = to_int((scaled - to_float(codes[i])) * set1(254.0f));
            rest_total = rest_total + rests[i];
        }
    }
    store_codes(code, codes);
    *scale = top * (1.0f / 127.0f);
    F centre = to_float(total) * set1(kHalfRange);
    if constexpr (Fine) {
        store_codes(fine, rests);
        centre = fma(to_float(rest_total), set1(7.5f * kHighUnit<Bits> / 254.0f), centre);
    }
    return centre * set1(*scale);
}

// A query row folded into a page's key scales and rounded in groups of 32 channels, so that one
// loud channel costs its own group only.
struct FoldedQuery {
    alignas(64) int8_t code[kMaxHeadDim + 16];  // the last group's store may run past the end
    alignas(64) int8_t fine[kMaxHeadDim + 16];
    float scale[kMaxGroups];
    float constant;  // what the codes' midpoint and the page's mids add to every logit
};

template <int Lanes, int Bits>
inline F fold_group(const float* q, const Grid& k, int g, FoldedQuery& out) {
    const int base = 32 * g;
    F scaled[Lanes];
    F constant = set1(0.0f), largest = set1(0.0f);
    for (int i = 0; i < Lanes; i++) {
        const F x = load(q + base + 8 * i);
        scaled[i] = x * load(k.step + base + 8 * i);
        constant = fma(x, load(k.mid + base + 8 * i), constant);
        largest = max(largest, abs(scaled[i]));
    }
    return constant - round_codes<Lanes, Bits>(scaled, reduce_max(largest), out.code + base,
                                               out.fine + base, out.scale + g);
}

template <int Bits>
inline void fold_query(const float* q, const Grid& k, int head_dim, FoldedQuery& out) {
    F constant = set1(0.0f);
    const int whole = head_dim / 32;
    for (int g = 0; g < whole; g++)
        constant = constant + fold_group<4, Bits>(q, k, g, out);
    if (head_dim % 32) constant = constant + fold_group<2, Bits>(q, k, whole, out);
    out.constant = reduce_add(constant);
}

// What lies below hi4's vector j, whose two nibbles join a and b: half of one of lo4's top bits at
// 6 bits, a vector of lo4 at 8.
template <int Bits>
inline void low_fields(const uint8_t* lo, int j, Bytes& a, Bytes& b) {
    if constexpr (Bits == 6) {
        const Bytes w = load_bytes(lo + 32 * (j / 2));
        a = j % 2 ? field<4, 3>(w) : field<0, 3>(w);
        b = j % 2 ? field<6, 3>(w) : field<2, 3>(w);
    } else {
        const Bytes w = load_bytes(lo + 32 * j);
        a = field<0, 15>(w), b = field<4, 15>(w);
    }
}

// Sum of code products of one row, the fine part included.
template <int Bits>
inline F combine(const Dot& high, const Dot* low, const Dot* fine, int r) {
    if constexpr (kJoined<Bits>) {
        const F coarse = fma(to_float(high.sum()), set1(kHighUnit<Bits>), to_float(low[r].sum()));
        return fma(to_float(fine[r].sum()), set1(kHighUnit<Bits> / 254.0f), coarse);
    } else {
        return to_float(high.sum());
    }
}

// Adds one group of Vectors * kChannels channels to the logits of eight tokens.
template <int Bits, int N, int Vectors>
inline void group_logits(const uint8_t* hi, const uint8_t* lo, const FoldedQuery* q, int g,
                         F* logit) {
    Dot high[N], low[kJoined<Bits> ? N : 1], fine[kJoined<Bits> ? N : 1];
    for (int j = 0; j < Vectors; j++) {
        const Bytes v = load_bytes(hi + 32 * j);
        if constexpr (Bits == 2) {
            const Bytes a = field<0, 3>(v), b = field<2, 3>(v);
            const Bytes c = field<4, 3>(v), d = field<6, 3>(v);
            for (int r = 0; r < N; r++) {
                const int8_t* quad = q[r].code + 32 * g + 16 * j;
                high[r].add(a, quad);
                high[r].add(b, quad + 4);
                high[r].add(c, quad + 8);
                high[r].add(d, quad + 12);
            }
        } else {
            const Bytes a = field<0, 15>(v), b = field<4, 15>(v);
            for (int r = 0; r < N; r++) {
                const int8_t* quad = q[r].code + 32 * g + 8 * j;
                high[r].add(a, quad);
                high[r].add(b, quad + 4);
            }
            if constexpr (kJoined<Bits>) {
                Bytes c, d;
                low_fields<Bits>(lo, j, c, d);
                for (int r = 0; r < N; r++) {
                    low[r].add(c, q[r].code + 32 * g + 8 * j);
                    low[r].add(d, q[r].code + 32 * g + 8 * j + 4);
                    fine[r].add(a, q[r].fine + 32 * g + 8 * j);
                    fine[r].add(b, q[r].fine + 32 * g + 8 * j + 4);
                }
            }
        }
    }
    for (int r = 0; r < N; r++)
        logit[r] = fma(combine<Bits>(high[r], low, fine, r), set1(q[r].scale[g]), logit[r]);
}

// scores [N][64]: the page's logits for N folded rows.
template <int Bits, int N>
void page_logits(const PageView& page, int head_dim, const FoldedQuery* q, float* scores) {
    constexpr int kVectors = Bits == 2 ? 2 : 4;  // that hold 32 channels of eight tokens
    constexpr int kLow = Bits == 6 ? 64 : 128;   // bytes below these
    const int whole = head_dim / 32;
    for (int group = 0; group < 8; group++) {
        const uint8_t* hi;
        const uint8_t* lo = nullptr;
        if constexpr (Bits == 2) {
            hi = page.k[0] + group * 2 * head_dim;
        } else {
            const int offset = (group & 3) * 4 * head_dim;
            hi = page.k[group >> 2] + offset;
            if constexpr (Bits == 8) lo = page.k[2 + (group >> 2)] + offset;
            if constexpr (Bits == 6) lo = page.k[2] + group * 2 * head_dim;
        }
        F logit[N];
        for (int r = 0; r < N; r++) logit[r] = set1(q[r].constant);
        for (int g = 0; g < whole; g++)
            group_logits<Bits, N, kVectors>(hi + g * kVectors * 32, lo + g * kLow, q, g, logit);
        if (head_dim % 32)
            group_logits<Bits, N, kVectors / 2>(hi + whole * kVectors * 32,
                                                lo + whole * kLow, q, whole, logit);
        for (int r = 0; r < N; r++) store(scores + r * kPageTokens + 8 * group, logit[r]);
    }
}

// Attention weights of one row folded into a page's value scales and rounded to 7 bits.
struct FoldedWeights {
    alignas(64) int8_t code[kPageTokens];
    alignas(64) int8_t fine[kPageTokens];
    float scale;
    float constant;  // same for every channel, in steps of a grid of channels
    float mass;      // sum of the weights
};

// A grid of channels stays out of the weights: `v` is null and they are rounded as they are.
template <int Bits>
inline void fold_weights(const F* p, const Grid* v, FoldedWeights& out) {
    constexpr int kLanes = kPageTokens / 8;
    F scaled[kLanes];
    F mid_sum = set1(0.0f), largest = set1(0.0f);
    for (int i = 0; i < kLanes; i++) {
        scaled[i] = v ? p[i] * load(v->step + 8 * i) : p[i];
        mid_sum = v ? fma(p[i], load(v->mid + 8 * i), mid_sum) : mid_sum;
        largest = max(largest, scaled[i]);
    }
    const F total = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    out.mass = reduce_add(total);
    const float top = reduce_max(largest);
    for (int half = 0; half < 2; half++)
        mid_sum = mid_sum - round_codes<4, Bits>(scaled + 4 * half, top, out.code + 32 * half,
                                                 out.fine + 32 * half, &out.scale);
    out.constant = reduce_add(mid_sum);
}

// acc [N][head_dim] += weights . V; `v` is the grid if it is one of channels.
template <int Bits, int N>
void page_values(const PageView& page, int head_dim, const Grid* v, const FoldedWeights* p,
                 float* acc) {
    constexpr int kTokens = Bits == 2 ? 16 : 8;  // per 32-byte vector
    constexpr int kVectors = kPageTokens / kTokens;
    const int half = head_dim / 16;  // channel groups per granule of a nibble plane
    for (int group = 0; group < head_dim / 8; group++) {
        const uint8_t* hi;
        const uint8_t* lo = nullptr;
        if constexpr (Bits == 2) {
            hi = page.v[0] + group * 128;
        } else {
            const int which = group >= half, offset = (group - which * half) * 256;
            hi = page.v[which] + offset;
            if constexpr (Bits == 8) lo = page.v[2 + which] + offset;
            if constexpr (Bits == 6) lo = page.v[2] + group * 128;
        }
        F total[N];
        for (int r = 0; r < N; r++) total[r] = set1(0.0f);
        // Two halves of eight adds each: the most an int16 sum of nibble products can hold.
        for (int part = 0; part < 2; part++) {
            Dot high[N], low[kJoined<Bits> ? N : 1], fine[kJoined<Bits> ? N : 1];
            for (int j = part * kVectors / 2; j < (part + 1) * kVectors / 2; j++) {
                const Bytes x = load_bytes(hi + 32 * j);
                if constexpr (Bits == 2) {
                    const Bytes a = field<0, 3>(x), b = field<2, 3>(x);
                    const Bytes c = field<4, 3>(x), d = field<6, 3>(x);
                    for (int r = 0; r < N; r++) {
                        const int8_t* quad = p[r].code + 16 * j;
                        high[r].add(a, quad);
                        high[r].add(b, quad + 4);
                        high[r].add(c, quad + 8);
                        high[r].add(d, quad + 12);
                    }
                } else {
                    const Bytes a = field<0, 15>(x), b = field<4, 15>(x);
                    for (int r = 0; r < N; r++) {
                        high[r].add(a, p[r].code + 8 * j);
                        high[r].add(b, p[r].code + 8 * j + 4);
                    }
                    if constexpr (kJoined<Bits>) {
                        Bytes c, d;
                        low_fields<Bits>(lo, j, c, d);
                        for (int r = 0; r < N; r++) {
                            low[r].add(c, p[r].code + 8 * j);
                            low[r].add(d, p[r].code + 8 * j + 4);
                            fine[r].add(a, p[r].fine + 8 * j);
                            fine[r].add(b, p[r].fine + 8 * j + 4);
                        }
                    }
                }
            }
            for (int r = 0; r < N; r++) total[r] = total[r] + combine<Bits>(high[r], low, fine, r);
        }
        for (int r = 0; r < N; r++) {
            float* out = acc + r * head_dim + 8 * group;
            F value = fma(total[r], set1(p[r].scale), set1(p[r].constant));
            if (v)
                value = fma(value, load(v->step + 8 * group),
                            load(v->mid + 8 * group) * set1(p[r].mass));
            store(out, load(out) + value);
        }
    }
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

// Bits of row r's mask of `n` keys.
inline uint64_t mask_of(const uint64_t* visible, int r, int n = kPageTokens) {
    if (visible) return visible[r];
    return n == kPageTokens ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// A page whose best logit stands this far (base 2) below the best so far adds nothing that float32
// sums could keep: 2^-32 of a weight, times all keys of a long context, stays below 1e-5.
constexpr float kNegligible = 32.0f;

// The sum of weights of 1 at most, as whole steps of 2^-24: it does not depend on their order.
inline float sum_of_steps(const F* p) {
    const F steps = set1(16777216.0f);
    I total = to_int(p[0] * steps);
    for (int i = 1; i < kPageTokens / 8; i++) total = total + to_int(p[i] * steps);
    return static_cast<float>(reduce_add(total)) * (1.0f / 16777216.0f);
}

// Weights p[8 lanes x 8] of row r's 64 logits, relative to the row's new maximum; what was summed
// before is rescaled to it. False: all weights are negligible, p holds logits still. `any_order`:
// the result is the same wherever in the tile the visible rows stand.
inline bool softmax_update(Block& block, int r, const float* logits, uint64_t bits, F* p,
                           bool any_order = false) {
    constexpr int kLanes = kPageTokens / 8;
    for (int i = 0; i < kLanes; i++) p[i] = load(logits + 8 * i);
    if (block.softcap_log2 > 0.0f)
        for (int i = 0; i < kLanes; i++) p[i] = tanh_lanes(p[i]) * set1(block.softcap_log2);
    if (bits != ~uint64_t{0})
        for (int i = 0; i < kLanes; i++)
            p[i] = select_bits(static_cast<unsigned>(bits >> 8 * i & 0xff), p[i], set1(-3e38f));
    F largest = max(max(max(p[0], p[1]), max(p[2], p[3])), max(max(p[4], p[5]), max(p[6], p[7])));
    const float top = reduce_max(largest);
    if (top < block.maximum[r] - kNegligible) return false;
    if (top > block.maximum[r]) {
        const F shrink = set1(exp2_one(block.maximum[r] - top));
        float* acc = block.acc + r * block.head_dim;
        for (int i = 0; i < block.head_dim; i += 8) store(acc + i, load(acc + i) * shrink);
        block.sum[r] *= exp2_one(block.maximum[r] - top);
        block.maximum[r] = top;
    }
    const F maximum = set1(block.maximum[r]);
    for (int i = 0; i < kLanes; i++) p[i] = exp2_lanes(p[i] - maximum);
    const F total = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    block.sum[r] += any_order ? sum_of_steps(p) : reduce_add(total);
    return true;
}

template <int Bits>
void all_logits(const PageView& page, const Block& block, const float* q, float* scores) {
    Grid grid;
    FoldedQuery folded[kBlockRows];
    widen(page.k_grid, block.head_dim, Bits, grid);
    for (int r = 0; r < block.rows; r++)
        fold_query<Bits>(q + r * block.head_dim, grid, block.head_dim, folded[r]);
    rows_of<kRegisterRows>(block.rows, [&](auto n, int r) {
        page_logits<Bits, n()>(page, block.head_dim, folded + r, scores + r * kPageTokens);
    });
}

template <int Bits>
void all_values(const PageView& page, Block& block, const float* scores, const uint64_t* visible) {
    Grid grid;
    FoldedWeights folded[kBlockRows];
    const bool channels = page.channel_values;
    widen(page.v_grid, channels ? block.head_dim : kPageTokens, Bits, grid);
    bool any = false;
    for (int r = 0; r < block.rows; r++) {
        F p[kPageTokens / 8];
        if (softmax_update(block, r, scores + r * kPageTokens, mask_of(visible, r), p)) {
            fold_weights<Bits>(p, channels ? nullptr : &grid, folded[r]);
            any = true;
        } else {
            std::memset(&folded[r], 0, sizeof folded[r]);
        }
    }
    if (!any) return;
    rows_of<kRegisterRows>(block.rows, [&](auto n, int r) {
        page_values<Bits, n()>(page, block.head_dim, channels ? &grid : nullptr, folded + r,
                               block.acc + r * block.head_dim);
    });
}

void page_scores(const PageView& page, const Block& block, const float* q, float* scores) {
    if (page.k_bits == 8) all_logits<8>(page, block, q, scores);
    else if (page.k_bits == 6) all_logits<6>(page, block, q, scores);
    else if (page.k_bits == 4) all_logits<4>(page, block, q, scores);
    else all_logits<2>(page, block, q, scores);
}

// A key is read at most half a step of 8 bits beyond where its channel's values reach.
void page_bounds(const Block& block, const float* q, const PageView& page, float spread,
                 float* bounds) {
    Grid k;
    widen(page.k_grid, block.head_dim, 8, k);
    for (int r = 0; r < block.rows; r++) {
        F middle = set1(0.0f), half = set1(0.0f);
        for (int c = 0; c < block.head_dim; c += 8) {
            const F x = load(q + r * block.head_dim + c);
            middle = fma(x, load(k.mid + c), middle);
            half = fma(abs(x), load(k.step + c), half);
        }
        bounds[r] = reduce_add(fma(half, set1((kReach + 0.5f) * spread), middle));
    }
}

void attend_page(Block& block, const float* q, const PageView& page, const uint64_t* visible) {
    alignas(64) float scores[kBlockRows * kPageTokens];
    page_scores(page, block, q, scores);
    if (page.v_bits == 8) all_values<8>(page, block, scores, visible);
    else if (page.v_bits == 6) all_values<6>(page, block, scores, visible);
    else if (page.v_bits == 4) all_values<4>(page, block, scores, visible);
    else all_values<2>(page, block, scores, visible);
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
    for (int i = 0; i < kPageTokens / 8; i++) {
        F x = load(logits + 8 * i);
        if (block.softcap_log2 > 0.0f) x = tanh_lanes(x) * set1(block.softcap_log2);
        const F weight = exp2_lanes(min(x - set1(block.maximum[r]), set1(0.0f))) * inverse;
        const F seen = select_bits(static_cast<unsigned>(bits >> 8 * i & 0xff), weight, set1(0.0f));
        store(p + 8 * i, seen);
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
                for (int c = 0; c < dim; c += 8)
                    sum = fma(load(v + t * dim + c), load(v + t * dim + c), sum);
                length[t] = reduce_add(sum);
            }
            read = true;
        }
        // Logit noise of keys rounded to steps of s: sum over channels of (q s)^2 / 12.
        F noise = set1(0.0f);
        for (int c = 0; c < dim; c += 8) {
            const F x = load(q + r * dim + c) * set1(unit) * load(keys.step + c);
            noise = fma(x, x, noise);
        }
        // With X the row's output: sum p (V - X) = sum p V - m X, and sum p^2 |V - X|^2 =
        // sum p^2 |V|^2 - 2 X . sum p^2 V + |X|^2 sum p^2.
        const float* output = block.acc + r * dim;
        alignas(64) float square[kPageTokens];
        F squares = set1(0.0f), lengths = set1(0.0f), steps = set1(0.0f);
        for (int t = 0; t < kPageTokens; t += 8) {
            const F weight = load(p + t), both = weight * weight, step = load(values.step + t);
            store(square + t, both);
            squares = squares + both;
            lengths = fma(both, load(length + t), lengths);
            steps = fma(both, step * step, steps);
        }
        float noises = reduce_add(steps) * static_cast<float>(dim);
        if (page.channel_values) {
            steps = set1(0.0f);
            for (int c = 0; c < dim; c += 8)
                steps = fma(load(values.step + c), load(values.step + c), steps);
            noises = reduce_add(steps) * reduce_add(squares);
        }
        F gone = set1(0.0f), inner = set1(0.0f), size = set1(0.0f);
        for (int c = 0; c < dim; c += 16) {  // two sums of each kind at a time hide their latency
            F first[2] = {set1(0.0f), set1(0.0f)}, second[2] = {set1(0.0f), set1(0.0f)};
            for (int t = 0; t < kPageTokens; t++) {
                const F weight = set1(p[t]), both = set1(square[t]);
                for (int i = 0; i < 2; i++) {
                    const F x = load(v + t * dim + c + 8 * i);
                    first[i] = fma(weight, x, first[i]);
                    second[i] = fma(both, x, second[i]);
                }
            }
            for (int i = 0; i < 2; i++) {
                const F x = load(output + c + 8 * i), moved = first[i] - set1(mass) * x;
                gone = fma(moved, moved, gone);
                inner = fma(second[i], x, inner);
                size = fma(x, x, size);
            }
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
void tile_logits(const float* q, int head_dim, const float* keys, float* scores) {
    for (int t = 0; t < kPageTokens; t += 16) {
        F a[N], b[N];
        for (int r = 0; r < N; r++) a[r] = b[r] = set1(0.0f);
        for (int c = 0; c < head_dim; c++) {
            const F x = load(keys + c * kPageTokens + t), y = load(keys + c * kPageTokens + t + 8);
            for (int r = 0; r < N; r++) {
                const F w = set1(q[r * head_dim + c]);
                a[r] = fma(w, x, a[r]);
                b[r] = fma(w, y, b[r]);
            }
        }
        for (int r = 0; r < N; r++) {
            store(scores + r * kPageTokens + t, a[r]);
            store(scores + r * kPageTokens + t + 8, b[r]);
        }
    }
}

template <int N>
void tile_values(const float* p, int n, const uint16_t* values, int head_dim, float* acc) {
    for (int c = 0; c < head_dim; c += 16) {
        F a[N], b[N];
        for (int r = 0; r < N; r++) {
            a[r] = load(acc + r * head_dim + c);
            b[r] = load(acc + r * head_dim + c + 8);
        }
        for (int t = 0; t < n; t++) {
            const F x = load_half(values + t * head_dim + c);
            const F y = load_half(values + t * head_dim + c + 8);
            for (int r = 0; r < N; r++) {
                const F w = set1(p[r * kPageTokens + t]);
                a[r] = fma(w, x, a[r]);
                b[r] = fma(w, y, b[r]);
            }
        }
        for (int r = 0; r < N; r++) {
            store(acc + r * head_dim + c, a[r]);
            store(acc + r * head_dim + c + 8, b[r]);
        }
    }
}

void attend_tile(Block& block, const float* q, const uint16_t* k, const uint16_t* v, int n,
                 const uint64_t* visible) {
    const int head_dim = block.head_dim;
    alignas(64) float keys[kMaxHeadDim * kPageTokens];  // [head_dim][64]
    alignas(64) float scores[kBlockRows * kPageTokens];
    F rows[8];
    for (int t = 0; t < kPageTokens; t += 8)
        for (int c = 0; c < head_dim; c += 8) {
            for (int i = 0; i < 8; i++)
                rows[i] = t + i < n ? load_half(k + (t + i) * head_dim + c) : set1(0.0f);
            transpose(rows, keys + c * kPageTokens + t, kPageTokens);
        }
    rows_of<4>(block.rows, [&](auto count, int r) {
        tile_logits<count()>(q + r * head_dim, head_dim, keys, scores + r * kPageTokens);
    });
    for (int r = 0; r < block.rows; r++) {
        F p[kPageTokens / 8];
        // A row of a tree must get what it would get in the place where it is kept.
        if (!softmax_update(block, r, scores + r * kPageTokens, mask_of(visible, r, n), p, true))
            for (F& weights : p) weights = set1(0.0f);
        for (int i = 0; i < kPageTokens / 8; i++) store(scores + r * kPageTokens + 8 * i, p[i]);
    }
    rows_of<4>(block.rows, [&](auto count, int r) {
        tile_values<count()>(scores + r * kPageTokens, n, v, head_dim, block.acc + r * head_dim);
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

inline void put_nibble(uint8_t* planes, size_t plane_bytes, size_t at, bool high, uint8_t code) {
    const int shift = high ? 4 : 0;
    planes[at] |= static_cast<uint8_t>((code >> 4) << shift);
    planes[plane_bytes + at] |= static_cast<uint8_t>((code & 15) << shift);
}

// codes [n] = round((x - mid) / scale + 127.5) clipped to 0..255, scale and mid elementwise.
inline void encode_codes(const float* x, const float* scale, const float* mid, int n,
                         uint8_t* codes) {
    for (int i = 0; i < n; i += 8) {
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
            for (int c = 0; c < head_dim; c += 8) {
                store(low + c, t ? min(load(low + c), load(row + c)) : load(row + c));
                store(high + c, t ? max(load(high + c), load(row + c)) : load(row + c));
            }
        } else {
            F a = load(row), b = a;
            for (int c = 8; c < head_dim; c += 8) {
                a = min(a, load(row + c));
                b = max(b, load(row + c));
            }
            low[t] = -reduce_max(set1(0.0f) - a);
            high[t] = reduce_max(b);
        }
    }
}

// Where the code of token t, channel c lies in a nibble plane: its byte, and whether above.
inline size_t key_place(int head_dim, int t, int c, bool& high) {
    high = c % 8 >= 4;
    return static_cast<size_t>(t / 8 * 4 * head_dim + 4 * (t % 8) + c / 8 * 32 + c % 4);
}
inline size_t value_place(int t, int c, bool& high) {
    high = t % 8 >= 4;
    return static_cast<size_t>(t / 8 * 32 + t % 4 + c / 8 * 256 + 4 * (c % 8));
}

bool pack(const float* x, int head_dim, bool values, bool channels, uint8_t* planes,
          uint8_t* grid) {
    const size_t plane_bytes = 2 * kvq::granule_bytes(head_dim);
    std::memset(planes, 0, 2 * plane_bytes);
    alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim], scale[kMaxHeadDim] = {};
    alignas(64) float mid[kMaxHeadDim] = {};
    extremes(x, head_dim, channels, low, high);
    if (!encode_grid(low, high, channels ? head_dim : kPageTokens, grid, scale, mid)) return false;
    alignas(64) uint8_t codes[kMaxHeadDim];
    for (int t = 0; t < kPageTokens; t++) {
        if (!channels) {  // one group is the whole row
            std::fill(low, low + head_dim, scale[t]);
            std::fill(high, high + head_dim, mid[t]);
        }
        encode_codes(x + t * head_dim, channels ? scale : low, channels ? mid : high, head_dim,
                     codes);
        for (int c = 0; c < head_dim; c++) {
            bool above;
            const size_t at = values ? value_place(t, c, above) : key_place(head_dim, t, c, above);
            put_nibble(planes, plane_bytes, at, above, codes[c]);
        }
    }
    return true;
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
    for (int i = 0; i < n; i += 8) {
        store_half(out + i, load(x + i));
        for (int j = 0; j < 8; j++) finite &= finite_half(out[i + j]);
    }
    return finite;
}

void from_half(const uint16_t* x, float* out, int n) {
    for (int i = 0; i < n; i += 8) store(out + i, load_half(x + i));
}

}  // namespace
