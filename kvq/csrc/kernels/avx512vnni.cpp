// Kernels for processors with AVX-512 and its VNNI.
#include "kernels.h"
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "simd_avx512.h"

#include "kernels.inl"

KVQ_KERNEL_SET(avx512vnni, platform::runs(platform::Instructions::kAvx512Vnni))
#else
KVQ_NO_KERNEL_SET(avx512vnni)
#endif
