// What policies are told of a page: what queries see of it, what it holds. Part of kernels.inl.

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
