#include "rotary.h"

#include <cmath>
#include <cstring>

namespace kvq {

void normalize(float* x, const float* weight, int dim, float eps) {
    double squares = 0;
    for (int i = 0; i < dim; i++) squares += static_cast<double>(x[i]) * x[i];
    const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / dim) + eps);
    for (int i = 0; i < dim; i++) x[i] = x[i] * inverse * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, int pairs) {
    for (int i = 0; i < pairs; i++) {
        const float a = x[i], b = x[i + pairs];
        x[i] = a * cos[i] - b * sin[i];
        x[i + pairs] = b * cos[i] + a * sin[i];
    }
}

void fill_rope(float position, const float* inv_freq, int pairs, float factor, float* cos,
               float* sin) {
    for (int i = 0; i < pairs; i++) {
        const float angle = position * inv_freq[i];
        cos[i] = std::cos(angle) * factor;
        sin[i] = std::sin(angle) * factor;
    }
}

void hadamard(float* x, int rows, int dim) {
    const int length = dim & -dim;
    const float norm = 1.0f / std::sqrt(static_cast<float>(length));
    for (float* end = x + rows * dim; x < end; x += length) {
        for (int half = 1; half < length; half *= 2)
            for (int start = 0; start < length; start += 2 * half)
                for (int i = start; i < start + half; i++) {
                    const float a = x[i], b = x[i + half];
                    x[i] = a + b;
                    x[i + half] = a - b;
                }
        for (int i = 0; i < length; i++) x[i] *= norm;
    }
}

const float* Rotated::queries(const Block& block, int32_t delta) {
    const bool stored_turned = form_ & kRotatedKeys;
    if (delta == 0 && !stored_turned) return block.q;
    if (!filled_ || delta != delta_) {
        filled_ = true;
        delta_ = delta;
        std::memcpy(rows_, block.q,
                    sizeof(float) * static_cast<size_t>(block.rows * block.head_dim));
        if (delta != 0) {
            float cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
            fill_rope(-static_cast<float>(delta), inv_freq_, pairs_, 1.0f, cos, sin);
            for (int r = 0; r < block.rows; r++)
                rotate(rows_ + r * block.head_dim, cos, sin, pairs_);
        }
        if (stored_turned) hadamard(rows_, block.rows, block.head_dim);
    }
    return rows_;
}

}  // namespace kvq
