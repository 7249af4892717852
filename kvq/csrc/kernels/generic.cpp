// Kernels in plain C++: run anywhere, and check the others.
#include "kernels.h"
#include "simd_generic.h"

#include "kernels.inl"

KVQ_KERNEL_SET(generic, true)
