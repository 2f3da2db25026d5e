// Any processor that the compiler knows.
#define PACELINE_LEVEL portable
#include "attention.h"
#include "dense_vectors.h"
