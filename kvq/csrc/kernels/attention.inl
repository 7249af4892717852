// Logits, softmax and values: of pages, and of floating-point rows. Part of kernels.inl.

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
        multiply<bits(), N>(page.k, coming, kPageTokens, head_dim, folded,
                            StoreSums{scores, kPageTokens});
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
void page_bounds(const Block& block, const float* q, const PageView& page, float* bounds) {
    Grid k;
    widen(page.k_grid, block.head_dim, 8, k);
    for (int r = 0; r < block.rows; r++) {
        F middle = set1(0.0f), half = set1(0.0f);
        for (int c = 0; c < block.head_dim; c += 16) {
            const F x = load(q + r * block.head_dim + c);
            middle = fma(x, load(k.mid + c), middle);
            half = fma(abs(x), load(k.step + c), half);
        }
        bounds[r] = reduce_add(fma(half, set1(kReach + 0.5f), middle));
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
