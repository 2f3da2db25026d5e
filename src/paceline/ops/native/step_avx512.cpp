// Compiled with AVX-512.
#define PACELINE_LEVEL avx512
#include "attention.h"
#include "dense_vectors.h"
