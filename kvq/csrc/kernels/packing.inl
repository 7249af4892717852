// How rows become a page's codes and grid, and how these are narrowed and read. Part of kernels.inl.

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

// x [64, D] moved as kvq.reference.stored.carried does, in blocks of sixteen channels: of those that are
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
