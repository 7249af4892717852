// Kernels in plain C++: run anywhere, and check the others.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "simd_generic.h"

#include "kernels.inl"

namespace kvq {
const Kernels* generic_kernels() {
    static const Kernels table{"generic",      pack,        read_grid,   narrow_keys, narrow,
                               attend_pages, attend_tile, page_scores, page_bounds,
                               page_evidence, to_half,   from_half,  delta_read,  delta_fold,
                               silu,        add,         dot};
    return &table;
}
}  // namespace kvq
