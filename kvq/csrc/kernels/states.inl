// What layers compute that keep a state in place of keys. Part of kernels.inl.

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
