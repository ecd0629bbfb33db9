/* Shared by the segments of a layer: norms, products with residual, prefetch hints. */
#ifndef LL_LAYER_H
#define LL_LAYER_H

#include "matmul.h"
#include "ops.h"

#define AT_ONCE 256 /* tokens processed together: intermediate results of a layer stay in the cache */

typedef struct {
    const float *weight; /* NULL: no norm */
    const float *bias;   /* NULL: RMSNorm, else LayerNorm; only for norms of inputs, see `norm_into` */
    double eps;
    int64_t groups; /* of an RMSNorm of inputs: values are normed in as many groups, each by itself */
} ll_norm;

/* y = norm(x), or a copy of x without a norm */
static void norm_into(const ll_norm *norm, const float *x, int64_t m, int64_t dim, float *y)
{
    if (!norm->weight) {
        memcpy(y, x, (size_t)(m * dim) * 4);
        return;
    }
    const int64_t groups = norm->groups > 1 ? norm->groups : 1, size = dim / groups;
    row_job job = {.x = x, .weight = norm->weight, .bias = norm->bias, .y = y, .inner = groups, .dim = size, .stride = dim,
                   .apart = groups > 1 ? size : 0, .eps = (float)norm->eps};
    run_rows(norm_rows, &job, m * groups);
}

typedef struct {
    const ll_norm *norm;
    int64_t dim;
    float *spare, *x;
} norm_onto_job;

/* x += norm(spare) */
static void norm_onto_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const norm_onto_job *j = arg;
    for (int64_t i = begin; i < end; i++) {
        float *spare = j->spare + i * j->dim, *x = j->x + i * j->dim;
        if (j->norm->weight) norm_row(spare, j->norm->weight, (float)j->norm->eps, j->dim, spare);
        for (int64_t d = 0; d < j->dim; d++) x[d] += spare[d];
    }
}

/* Whether adapters scale this product's outputs (DoRA), so that nothing may be added to them before. */
INLINE int has_gains(const ll_linear_op *op) { return op->adapters && op->adapters->gains; }

/* x += post_norm(op(in)); without a norm the product adds x itself. `alone`: x = op(in). */
static int linear_onto(const ll_linear_op *op, const ll_norm *post, int alone, const float *in, int64_t m, float *x, float *spare)
{
    if (alone) return linear_parts(op, in, m, NULL, x);
    if (!post->weight && !has_gains(op)) return linear_parts(op, in, m, x, x);
    if (linear_parts(op, in, m, NULL, spare)) return -1;
    norm_onto_job job = {post, op->n, spare, x};
    if (m * op->n < 16384) norm_onto_rows(&job, 0, m, 0);
    else pool_run(norm_onto_rows, &job, m);
    return 0;
}

/* With few tokens, products wait for weights: prefetch the next product's while the current one runs. Each thread prefetches
 * its share of the bytes, which is about its share of the tiles; if parts are not contiguous, only the first is hinted. */
static void hint_next(const ll_linear_op *op, int64_t m)
{
    if (!op || m > FEW) return;
    const uint8_t *begin = op->weight[0]->data, *end = begin + op->weight[0]->tiles * op->weight[0]->tile_bytes;
    for (int64_t i = 1; i < op->parts; i++) {
        const uint8_t *next = op->weight[i]->data;
        if (next < end || next >= end + 64) break; /* not contiguous */
        end = next + op->weight[i]->tiles * op->weight[i]->tile_bytes;
    }
    pool_hint(begin, end - begin);
}

#endif
