// Products in plain C++: run anywhere, and check the others.
#include "vectors_generic.h"

#include "linear.inl"

KVQ_LINEAR_SET(generic, multiply, 0)
