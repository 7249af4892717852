// Kernels for ARM processors with the dot products of ARMv8.2 (dotprod).
#include "kernels.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"

#include "kernels.inl"

KVQ_KERNEL_SET(neon, platform::runs(platform::Instructions::kDotProducts))
#else
KVQ_NO_KERNEL_SET(neon)
#endif
