// Compiled with AVX-512 and the matrix units of bf16.
#define PACELINE_LEVEL amx
#include "attention.h"
#include "dense_amx.h"
