// The kernels, written once over sixteen lanes. A .cpp file includes a simd header, then this.
// Names of helpers are the ones of simd_generic.h, which says what each means.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../platform.h"
#include "kernels.h"

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
template <int N>
KVQ_INLINE F largest_lanes(const F (&rows)[N]) {
    return join_rows(rows, [](F x, F y) { return max(x, y); });
}
template <int N>
KVQ_INLINE F sum_lanes(const F (&rows)[N]) {
    return join_rows(rows, [](F x, F y) { return x + y; });
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

#include "products.inl"

#include "attention.inl"

#include "evidence.inl"

#include "packing.inl"

#include "states.inl"

kvq::Kernels kernels_named(const char* name, const kvq::LinearKernels* linear) {
    return {name,         linear,      pack,        read_grid,   narrow_keys,   narrow,
            attend_pages, attend_tile, page_scores, page_bounds, page_evidence, to_half,
            from_half,    delta_read,  delta_fold,  silu,        add,           dot};
}

}  // namespace

// Offers these kernels as set `name`, where `runs` holds. The table is filled only then: compilers
// do it by the very instructions that other processors lack.
#define KVQ_KERNEL_SET(name, runs)                                                \
    const kvq::Kernels* kvq::name##_kernels() {                                   \
        if (!(runs)) return nullptr;                                              \
        static const Kernels table = kernels_named(#name, name##_linear());       \
        return &table;                                                            \
    }
