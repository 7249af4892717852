// Products for ARM processors with the dot products of ARMv8.2 (dotprod).
#if defined(__ARM_FEATURE_DOTPROD)
#include "vectors_neon.h"

#include "linear.inl"

KVQ_LINEAR_SET(neon, multiply, 0)
#endif
