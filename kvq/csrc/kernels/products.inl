// Rows folded into a page's grid, and their products with its codes. Part of kernels.inl.

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

// Stores the numbers side by side; returns their sums lane by lane.
inline I store_and_add(int8_t* to, const I (&numbers)[1]) {
    store_bytes(to, numbers[0]);
    return numbers[0];
}
inline I store_and_add(int8_t* to, const I (&numbers)[2]) {
    store_bytes(to, numbers[0], numbers[1]);
    return numbers[0] + numbers[1];
}

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
        const int at = r * Folded::kStride + base;
        I code[Vectors], fine[Vectors];
        for (int i = 0; i < Vectors; i++) {
            const F number = product[r][i] * set1(inverse[r]);
            code[i] = to_int(number);
            if constexpr (kJoined<Bits>)
                fine[i] = to_int((number - to_float(code[i])) * set1(254.0f));
        }
        const I total = store_and_add(out.code + at, code);
        I fines{};
        if constexpr (kJoined<Bits>) fines = store_and_add(out.fine + at, fine);
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
        KVQ_UNROLL for (int r = 0; r < N; r++) {
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
    KVQ_UNROLL for (int j = 0; j < Numbers / kPerVector; j++) {
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
    KVQ_UNROLL for (int r = 0; r < N; r++) {
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

// Where sums go that lie in memory row by row: to [N][outputs].
struct StoreSums {
    float* to;
    int outputs;
    void operator()(int r, int i, F sums) const { store(to + r * outputs + 16 * i, sums); }
};
// `multiply_rows` as the function of its own that kFewRegisters asks for.
template <int Bits, int N>
KVQ_NOINLINE void multiply_apart(const uint8_t* const* side, const uint8_t* const* next, int outputs,
                                 int n, const Folded& x, int first, float* to) {
    multiply_rows<Bits, N>(side, next, outputs, n, x, first, StoreSums{to, outputs});
}
// All N rows, as many at a time as there are registers for.
template <int Bits, int N, class Put>
inline void multiply(const uint8_t* const* side, const uint8_t* const* next, int outputs, int n,
                     const Folded& x, Put&& put) {
    constexpr int kRows = kJoined<Bits> ? kRegisterRows / 2 : kRegisterRows;
    split_rows<N, kRows>([&](auto count, int first) {
        constexpr int kCount = count();
        if constexpr (!kFewRegisters) {
            multiply_rows<Bits, kCount>(side, next, outputs, n, x, first, put);
        } else if constexpr (std::is_same_v<Put, StoreSums>) {
            multiply_apart<Bits, kCount>(side, next, outputs, n, x, first, put.to);
        } else {
            alignas(64) float sums[N * kMaxHeadDim];
            multiply_apart<Bits, kCount>(side, next, outputs, n, x, first, sums);
            for (int r = first; r < first + kCount; r++)
                for (int i = 0; i < outputs / 16; i++) put(r, i, load(sums + r * outputs + 16 * i));
        }
    });
}
