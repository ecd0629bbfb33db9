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

/* Fills `a` for m rows of x and a product with w. */
static activations activations_of(const ll_weight *w, const float *x, int64_t m, int exact)
{
    activations a = {.x = x, .m = m, .exact = exact || code_is_float(w->code)};
    a.pairs = MANY_PAIRS && !few_rows(w, m);
    return a;
}

/* out = x @ value(w).T (+ bias) (+ residual); the caller holds pool.lock. Returns 0, or -1 without memory. */
static int linear_into(const ll_weight *w, const float *x, int64_t m, const float *bias, const float *residual, float *out, int64_t stride,
                       int exact)
{
    activations a = activations_of(w, x, m, exact);
    uint8_t *memory = scratch(0, activation_bytes(w, &a));
    if (!memory) return -1;
    prepare_activations(w, &a, memory);
    product p = {w, &a, bias, residual, out, stride};
    int64_t slabs = (m + SLAB - 1) / SLAB;
    pool_run(a.exact ? float_tiles : int_tiles, &p, slabs * w->tiles);
    return 0;
}

#define PARTS 4

/* y = x W^T + b, in parts whose outputs lie end to end. */
typedef struct {
    int64_t parts, n; /* n: outputs of all parts */
    const ll_weight *weight[PARTS];
    const float *bias[PARTS];
    int64_t exact[PARTS];
} ll_linear_op;

typedef struct {
    int64_t parts;
    activations a[PARTS];
    product p[PARTS];
} parts_job;

static void part_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    parts_job *j = arg;
    for (int64_t i = 0; i < j->parts && end > 0; i++) {
        const int64_t tiles = j->p[i].w->tiles;
        if (begin < tiles) (j->a[i].exact ? float_tiles : int_tiles)(&j->p[i], begin, end < tiles ? end : tiles, thread);
        begin = begin > tiles ? begin - tiles : 0;
        end -= tiles;
    }
}

/* The same for all parts. Those of few rows are one call of the pool: each would end with threads that wait for one
 * another. */
static int linear_parts(const ll_linear_op *op, const float *x, int64_t m, const float *residual, float *out)
{
    parts_job job = {.parts = op->parts};
    int64_t at = 0, bytes = 0, tiles = 0;
    for (int64_t i = 0; i < op->parts; i++) {
        const ll_weight *w = op->weight[i];
        const float *onto = residual ? residual + at : NULL;
        if (op->parts == 1 || m > FEW) {
            if (linear_into(w, x, m, op->bias[i], onto, out + at, op->n, (int)op->exact[i])) return -1;
        } else {
            job.a[i] = activations_of(w, x, m, (int)op->exact[i]);
            job.p[i] = (product){w, &job.a[i], op->bias[i], onto, out + at, op->n};
            bytes += activation_bytes(w, &job.a[i]);
            tiles += w->tiles;
        }
        at += w->n;
    }
    if (!tiles) return 0;
    uint8_t *memory = scratch(0, bytes);
    if (!memory) return -1;
    for (int64_t i = 0; i < op->parts; i++) {
        prepare_activations(op->weight[i], &job.a[i], memory);
        memory += activation_bytes(op->weight[i], &job.a[i]);
    }
    pool_run(part_tiles, &job, tiles);
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
