// Products for AVX-512 with VNNI, on 512-bit vectors.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "vectors_avx512.h"

#include "linear.inl"

KVQ_LINEAR_SET(avx512vnni, multiply, 0)
#endif
