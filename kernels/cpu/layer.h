/* What the segments of a layer share: norms, products that add to the stream, hints of what is read next. */
#ifndef LL_LAYER_H
#define LL_LAYER_H

#include "matmul.h"
#include "ops.h"

#define AT_ONCE 256 /* tokens: what lies between the products of a layer stays small, and in the cache */

typedef struct {
    const float *weight; /* NULL: no norm */
    double eps;
} ll_norm;

static void norm_into(const ll_norm *norm, const float *x, int64_t m, int64_t dim, float *y)
{
    row_job job = {.x = x, .weight = norm->weight, .y = y, .inner = 1, .dim = dim, .stride = dim, .eps = (float)norm->eps};
    run_rows(norm_rows, &job, m);
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

/* Whether adapters multiply what this product gives: nothing may be added to it before. */
INLINE int has_gains(const ll_linear_op *op) { return op->adapters && op->adapters->gains; }

/* x += post_norm(product), where `product` computes into `out` (or adds x itself when there is no norm). */
static int linear_onto(const ll_linear_op *op, const ll_norm *post, const float *in, int64_t m, float *x, float *spare)
{
    if (!post->weight && !has_gains(op)) return linear_parts(op, in, m, x, x);
    if (linear_parts(op, in, m, NULL, spare)) return -1;
    norm_onto_job job = {post, op->n, spare, x};
    if (m * op->n < 16384) norm_onto_rows(&job, 0, m, 0);
    else pool_run(norm_onto_rows, &job, m);
    return 0;
}

/* Few tokens wait for weights: what comes after the product that runs is asked for meanwhile. Every thread asks for its
 * share of the bytes, which is about where its share of the tiles lies; of parts that lie apart the first is hinted. */
static void hint_next(const ll_linear_op *op, int64_t m)
{
    if (!op || m > FEW) return;
    const uint8_t *begin = op->weight[0]->data, *end = begin + op->weight[0]->tiles * op->weight[0]->tile_bytes;
    for (int64_t i = 1; i < op->parts; i++) {
        const uint8_t *next = op->weight[i]->data;
        if (next < end || next >= end + 64) break; /* the next line at the earliest */
        end = next + op->weight[i]->tiles * op->weight[i]->tile_bytes;
    }
    pool_hint(begin, end - begin);
}

#endif
