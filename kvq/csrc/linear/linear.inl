// The kernels, written once over sixteen lanes: a panel's rows. A .cpp file includes a vectors
// header, then this. kvq/reference_linear.py says what each computes.

namespace {

using kvq::kPanelGroup;
using kvq::kPanelRows;
using kvq::PanelLayout;
using kvq::RoundedRows;

// Rows' sums stay in registers only where no loop over them is left.
#define KVQ_UNROLL _Pragma("GCC unroll 16")

constexpr int kLanes = 16;
constexpr int kFlushGroups = 4;  // Dots takes four groups of columns between flushes

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

// 2^f by its Taylor series, |f| <= 1/2: below float32's rounding.
inline Floats exponential(Floats x) {
    const Floats t = clamp(x * set1(1.44269504088896341f), -126.0f, 127.0f);
    const Floats n = round(t), f = t - n;
    constexpr float kTerms[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                                2.4022651e-1f, 6.9314718e-1f, 1.0f};
    Floats p = set1(1.5252734e-5f);
    for (float term : kTerms) p = fma(p, f, set1(term));
    return p * power_of_two(n);
}

// Both activations are x times the logistic function of something.
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
        const Ints level = to_int(round(load_to(x, i, columns) * inverse));
        total = total + level;
        store_bytes(levels + i, level);
    }
    sum = static_cast<float>(reduce_add(total));
}

void round_row(const float* x, int columns, int block, int8_t* levels, float* scales,
               float* sums) {
    for (int b = 0; b * block < columns; b++)
        round_block(x + b * block, columns - b * block, block, levels + b * block, scales[b],
                    sums[b]);
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
void gate_row(const float* gate, const float* up, int columns, float* out) {
    for (int i = 0; i < columns; i += kLanes)
        store_to(out, i, columns,
                 activated<Activation>(load_to(gate, i, columns)) * load_to(up, i, columns));
}

void gate_row(const float* gate, const float* up, int columns, int activation, float* out) {
    if (activation == KVQ_SILU) return gate_row<KVQ_SILU>(gate, up, columns, out);
    gate_row<KVQ_GELU_TANH>(gate, up, columns, out);
}

// What a product makes of the stored codes.
enum Reading { kFourBits, kUpperNibbles, kBothNibbles };

// How far ahead to fetch: far enough to hide a miss behind sixteen rows of work, and in small
// panels the same place of the next one, so that a view never fetches the plane it leaves out.
inline size_t prefetch_bytes(const PanelLayout& layout) {
    return layout.panel_bytes <= 32 << 10 ? layout.panel_bytes : 8 << 10;
}

// A block's codes, one group after the other: of one plane, or of two made whole.
// Fetched for one row, which reads it once, it goes past the larger caches: the products take 1 to
// 3 % less. Five rows would take 2 % more.
template <bool Once>
struct Plane {
    const uint8_t* bytes;
    size_t ahead;
    CodePair group(int g) const {
        __builtin_prefetch(bytes + 64 * g + ahead, 0, Once ? 0 : 3);
        return load_codes(bytes + 64 * g);
    }
};
template <bool Once>
struct WholeCodes {
    Plane<Once> upper, lower;
    CodePair group(int g) const { return merged(upper.group(g), lower.group(g)); }
};

// Adds one block to the sums of R rows.
template <int R, class Source>
inline void add_block(const Source& source, int block, const int8_t* x, size_t stride, Dots* dots) {
    for (int j = 0; j < block / kPanelGroup; j += kFlushGroups) {
        KVQ_UNROLL for (int g = j; g < j + kFlushGroups; g++) {
            const CodePair codes = source.group(g);
            KVQ_UNROLL for (int m = 0; m < R; m++) dots[m].add(codes,
                                                               x + m * stride + kPanelGroup * g);
        }
        KVQ_UNROLL for (int m = 0; m < R; m++) dots[m].flush();
    }
}

// A block's products from those of its codes. Every term is a whole or half number below 2^23, so
// floats hold them exactly. `sum` is that of the row's levels.
template <Reading Read>
inline Floats centred(const Dots& upper, const Dots& lower, float sum) {
    if constexpr (Read == kFourBits)
        return fma(set1(-8.0f), set1(sum), to_float(upper.total));
    else if constexpr (Read == kUpperNibbles)
        return fma(set1(-120.5f), set1(sum), to_float(shifted<4>(upper.total)));
    else if constexpr (kWholeCodes)
        return fma(set1(-kWholeMiddle), set1(sum), to_float(upper.total));
    else
        return fma(set1(-128.0f), set1(sum), to_float(shifted<4>(upper.total) + lower.total));
}

template <int R, Reading Read>
void multiply_rows(const PanelLayout& layout, const uint8_t* panel, const RoundedRows& x, int first,
                   float* out) {
    const size_t stride = layout.padded_columns();
    const int block = layout.block, block_bytes = block * kPanelRows / 2;
    const uint8_t* scales = panel + layout.plane_bytes;
    const uint8_t* low = scales + layout.scale_bytes;
    const size_t ahead = prefetch_bytes(layout);
    constexpr bool kOnce = R == 1;
    constexpr bool kTwice = Read == kBothNibbles && !kWholeCodes;
    Floats total[R];
    KVQ_UNROLL for (int m = 0; m < R; m++) total[m] = set1(0.0f);
    for (int b = 0; b < layout.blocks; b++) {
        Dots upper[R], lower[kTwice ? R : 1];
        const int8_t* levels = x.levels + first * stride + size_t(b) * block;
        const Plane<kOnce> first_plane{panel + size_t(b) * block_bytes, ahead};
        const Plane<kOnce> second_plane{low + size_t(b) * block_bytes, ahead};
        if constexpr (Read == kBothNibbles && kWholeCodes) {
            const WholeCodes<kOnce> both{first_plane, second_plane};
            add_block<R>(both, block, levels, stride, upper);
        } else {
            add_block<R>(first_plane, block, levels, stride, upper);
            if constexpr (kTwice) add_block<R>(second_plane, block, levels, stride, lower);
        }
        const Floats scale = load_half(scales + size_t(b) * 2 * kPanelRows);
        KVQ_UNROLL for (int m = 0; m < R; m++) {
            const size_t at = size_t(first + m) * layout.blocks + b;
            const Floats dot = centred<Read>(upper[m], lower[kTwice ? m : 0], x.sums[at]);
            total[m] = fma(dot, scale * set1(x.scales[at]), total[m]);
        }
    }
    KVQ_UNROLL for (int m = 0; m < R; m++) store(out + kPanelRows * m, total[m]);
}

using MultiplyRows = void (*)(const PanelLayout&, const uint8_t*, const RoundedRows&, int, float*);

template <Reading Read, int... R>
constexpr MultiplyRows row_count(std::integer_sequence<int, R...>, int rows) {
    constexpr MultiplyRows table[] = {multiply_rows<R + 1, Read>...};
    return table[rows - 1];
}
MultiplyRows multiply_for(Reading read, int rows) {
    using Counts = std::make_integer_sequence<int, kMaxRows>;
    if (read == kFourBits) return row_count<kFourBits>(Counts{}, rows);
    if (read == kUpperNibbles) return row_count<kUpperNibbles>(Counts{}, rows);
    return row_count<kBothNibbles>(Counts{}, rows);
}

void multiply(const PanelLayout& layout, int view, const uint8_t* panel, const RoundedRows& x,
              int first, int count, float* out) {
    const Reading read =
        layout.bits == 4 ? kFourBits : (view == KVQ_HI ? kUpperNibbles : kBothNibbles);
    int groups = (count + kMaxRows - 1) / kMaxRows;
    for (; groups > 0; groups--) {  // of as equal sizes as can be
        const int rows = (count + groups - 1) / groups;
        multiply_for(read, rows)(layout, panel, x, first, out);
        first += rows, count -= rows, out += kPanelRows * rows;
    }
}

void add_row(const PanelLayout& layout, const uint8_t* panel, int lane, float weight, int columns,
             float* out) {
    const uint8_t* scales = panel + layout.plane_bytes + 2 * lane;
    const uint8_t* low = panel + layout.plane_bytes + layout.scale_bytes;
    float scale[kLanes] = {};  // load_half turns sixteen: lane 0 is wanted
    for (int i = 0; i < columns; i++) {
        if (i % layout.block == 0) {
            uint8_t halves[2 * kLanes] = {};
            std::memcpy(halves, scales + size_t(i / layout.block) * 2 * kPanelRows, 2);
            store(scale, load_half(halves));
        }
        const size_t at = size_t(i / kPanelGroup) * 64 + 4 * lane + i % 4;
        const int shift = i & 4;
        int level = (panel[at] >> shift & 15) - 8;
        if (layout.bits == 8) level = 16 * level + (low[at] >> shift & 15);
        out[i] += weight * (scale[0] * kvq::kScaleUnit * float(level));
    }
}

}  // namespace
