/* The C side of localllm's CPU kernels: one translation unit, compiled for one instruction set by build.py. */
#include "vec.h"

#include "pool.h"
#include "weight.h"
#include "pack.h"
#include "activations.h"
#include "matmul.h"

/* What the loader checks before it trusts this file. */
int64_t ll_abi(void) { return (int64_t)sizeof(ll_weight) << 32 | (int64_t)VW << 8 | LL_VNNI; }
