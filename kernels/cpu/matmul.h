/* Products of activations with a prepared weight.
 *
 * For every (row of x, row of the weight) the sum runs over blocks of 32 inputs in order, one chain, whatever the
 * number of rows: integer sums within a block are exact, the float steps are the same instructions in every variant.
 * So a row's result does not depend on the batch. Few rows unpack codes in registers; more rows widen a chunk of
 * codes once, in the first-level cache. */
#ifndef LL_MATMUL_H
#define LL_MATMUL_H

#include "matmul_float.h"
#include "matmul_int.h"

/* out = x @ value(w).T (+ bias) (+ residual); the caller holds pool.lock. Returns 0, or -1 without memory. */
static int linear_into(const ll_weight *w, const float *x, int64_t m, const float *bias, const float *residual, float *out, int64_t stride,
                       int exact)
{
    activations a = {.x = x, .m = m, .exact = exact || code_is_float(w->code)};
    a.pairs = MANY_PAIRS && !few_rows(w, m);
    if (prepare_activations(w, &a)) return -1;
    product p = {w, &a, bias, residual, out, stride};
    int64_t slabs = (m + SLAB - 1) / SLAB;
    pool_run(a.exact ? float_tiles : int_tiles, &p, slabs * w->tiles);
    return 0;
}

#include "matmul_amx.h"

/* Lets products of many rows use AMX tiles, after checking that they may and that they agree. Returns whether they do. */
int64_t ll_amx(void)
{
    int64_t on = 0;
#if LL_AMX
    pthread_mutex_lock(&pool.lock);
    amx_on = on = amx_allowed() && amx_agrees(CODE_8, 32) && amx_agrees(CODE_4, 32) && amx_agrees(CODE_6, 16);
    pthread_mutex_unlock(&pool.lock);
#endif
    return on;
}

int64_t ll_linear(const ll_weight *w, const float *x, int64_t m, const float *bias, float *out, int64_t exact)
{
    pthread_mutex_lock(&pool.lock);
    int failed = linear_into(w, x, m, bias, NULL, out, w->n, (int)exact);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
