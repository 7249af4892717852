// Kernels for AVX2 + FMA + F16C.
#include "kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"

#include "kernels.inl"

KVQ_KERNEL_SET(avx2, platform::runs(platform::Instructions::kAvx2))
#else
KVQ_NO_KERNEL_SET(avx2)
#endif
