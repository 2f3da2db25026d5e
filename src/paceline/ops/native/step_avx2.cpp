// Compiled with AVX2 and FMA.
#define PACELINE_LEVEL avx2
#include "attention.h"
#include "dense_vectors.h"
