// Compiled with AVX2, FMA and F16C.
#define PACELINE_LEVEL avx2
#include "plain.h"
