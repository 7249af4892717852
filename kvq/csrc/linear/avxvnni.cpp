// Products for AVX2 processors that have AVX-VNNI too: vpdpbusd on 256-bit vectors.
#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"

#include "linear.inl"

KVQ_LINEAR_SET(avxvnni, multiply, 0)
#endif
