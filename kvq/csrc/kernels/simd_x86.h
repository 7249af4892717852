// What AVX2 and AVX-512 share. Meanings: simd_generic.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define KVQ_UNROLL _Pragma("GCC unroll 8")

namespace {

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// The bits of four bytes, as one number.
inline int32_t bits_of(const void* quad) {
    int32_t bits;
    std::memcpy(&bits, quad, sizeof bits);
    return bits;
}

// Each round moves one bit of a number's row to its place in the row.
inline void transpose(const uint16_t* const* rows, float* out, int stride) {
    __m128i x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i]));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            y[2 * i] = _mm_unpacklo_epi16(x[i], x[i + 4]);
            y[2 * i + 1] = _mm_unpackhi_epi16(x[i], x[i + 4]);
        }
        std::memcpy(x, y, sizeof x);
    }
    for (int i = 0; i < 8; i++) _mm256_storeu_ps(out + i * stride, _mm256_cvtph_ps(x[i]));
}

}  // namespace
