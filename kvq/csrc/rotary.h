// Norm and rotation of one head's row, and queries turned back for moved pages.
#pragma once
#include "kernels/kernels.h"

namespace kvq {

// RMSNorm over one head, in place.
void normalize(float* x, const float* weight, int dim, float eps);
// Rotates pairs (i, i + pairs) of one head, in place.
void rotate(float* x, const float* cos, const float* sin, int pairs);
void fill_rope(float position, const float* inv_freq, int pairs, float factor, float* cos,
               float* sin);

// Multiplies blocks of channels, as long as the largest power of two that divides dim, by the
// orthonormal Hadamard matrix, in place.
void hadamard(float* x, int rows, int dim);

// The block's queries as keys must be met, pages' by their form, floating-point ones without. q . (R_delta k) = (R_-delta q) . k, so a moved
// page costs a rotation of them, and then (H q) . (H k) = q . k where keys are stored as H k. The
// newest are kept, as neighbours mostly move alike.
class Rotated {
public:
    Rotated(const float* inv_freq, int pairs, int form = 0)
        : inv_freq_(inv_freq), pairs_(pairs), form_(form) {}
    const float* queries(const Block& block, int32_t delta);

private:
    const float* inv_freq_;
    int pairs_, form_;
    bool filled_ = false;
    int32_t delta_ = 0;
    alignas(64) float rows_[kBlockRows * kMaxHeadDim];
};

}  // namespace kvq
