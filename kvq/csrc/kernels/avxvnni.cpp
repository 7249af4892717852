// Kernels for AVX2 + FMA + F16C + AVX-VNNI.
#include "kernels.h"
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"

#include "kernels.inl"

KVQ_KERNEL_SET(avxvnni, platform::runs(platform::Instructions::kAvxVnni))
#else
KVQ_NO_KERNEL_SET(avxvnni)
#endif
