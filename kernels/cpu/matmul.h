/* Products of activations with a prepared weight.
 *
 * For every (row of x, row of the weight) the sum runs over blocks of 32 inputs in order, in one chain, for any number of
 * rows: integer sums within a block, or within 256 inputs (matmul_super.h), are exact, and the float steps are the same
 * instructions in every variant. So results are batch-invariant. Few rows unpack codes in registers; more rows widen a
 * chunk of codes once, into L1. */
#ifndef LL_MATMUL_H
#define LL_MATMUL_H

#include "adapters.h"
#include "matmul_float.h"
#include "matmul_int.h"

#define PARTS 4

/* y = x W^T + b, in parts with concatenated outputs. */
typedef struct {
    int64_t parts, n; /* n: outputs of all parts */
    const ll_weight *weight[PARTS];
    const float *bias[PARTS];
    int64_t takes[PARTS]; /* TAKE_INT16, ... */
    const ll_adapters *adapters; /* NULL: none */
} ll_linear_op;

typedef struct {
    int64_t parts, slabs;
    activations a[PARTS];
    product p[PARTS];
    adapters_job added;
} parts_job;

static void part_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    parts_job *j = arg;
    adapters_job *added = &j->added;
    const int64_t down = adapters_down_tasks(added);
    if (begin < down) {
        const int64_t stop = end < down ? end : down;
        adapters_down(added, begin, stop, thread);
        atomic_fetch_sub(&added->left, stop - begin);
    }
    begin = begin > down ? begin - down : 0;
    end -= down;
    const int64_t from = begin * TILE, to = end * TILE;
    if (added->late) adapters_fetch(added, from, to);
    for (int64_t i = 0; i < j->parts && end > 0; i++) {
        const int64_t tasks = j->slabs * j->p[i].w->tiles;
        if (begin < tasks) (j->a[i].exact ? float_tiles : int_tiles)(&j->p[i], begin, end < tasks ? end : tasks, thread);
        begin = begin > tasks ? begin - tasks : 0;
        end -= tasks;
    }
    if (!added->late || to <= from) return;
    /* do not wait for the other threads, which may have been preempted */
    if (atomic_load(&added->left)) memset(added->late + from / TILE, 1, (size_t)((to - from) / TILE));
    else adapters_add(added, 0, from, to);
}

/* out = x @ value(w).T (+ bias) (+ residual) for all parts; the caller holds pool.lock. Returns 0, or -1 if out of memory.
 * All parts share one pool call, as each call ends with a barrier. */
static int linear_parts(const ll_linear_op *op, const float *x, int64_t m, const float *residual, float *out)
{
    parts_job job = {.parts = op->parts, .slabs = (m + SLAB - 1) / SLAB};
    int64_t at = 0, bytes = 0, tasks = 0, uneven = 0;
    for (int64_t i = 0; i < op->parts; i++) {
        const ll_weight *w = op->weight[i];
        job.a[i] = (activations){.x = x, .m = m, .exact = op->takes[i] == TAKE_FLOATS || code_is_float(w->code)};
        job.a[i].form = x_form(w, m, op->takes[i]);
        job.p[i] = (product){w, &job.a[i], op->bias[i], residual ? residual + at : NULL, out + at, op->n, 0};
        bytes += activation_bytes(w, &job.a[i]);
        tasks += job.slabs * w->tiles;
        uneven |= at % TILE;
        at += w->n;
    }
    job.added = adapters_of(op->adapters, x, m, out);
    uint8_t *memory = scratch(0, bytes + adapters_bytes(&job.added));
    if (!memory) return -1;
    adapters_take(&job.added, memory + round_up(bytes, 64), uneven);
    for (int64_t i = 0; i < op->parts; i++) {
        if (i && prepares_alike(op->weight[i - 1], &job.a[i - 1], op->weight[i], &job.a[i])) {
            job.a[i] = job.a[i - 1];
            continue;
        }
        prepare_activations(op->weight[i], &job.a[i], memory);
        memory += activation_bytes(op->weight[i], &job.a[i]);
    }
    pool_run(part_tiles, &job, tasks + adapters_down_tasks(&job.added));
    adapters_finish(&job.added);
    return 0;
}

/* Whether act(gate) * up of many rows can be fused into one product: gate and up are one weight of whole tiles. */
static int gates(const ll_linear_op *op, int64_t m)
{
    const ll_weight *w = op->weight[0];
    return op->parts == 1 && !op->adapters && op->takes[0] != TAKE_FLOATS && !code_is_float(w->code) && !few_rows(w, m, op->takes[0] == TAKE_INT8) && w->n % (2 * TILE) == 0;
}

/* out [m][n / 2] = act(gate) * up of x, if `gates`. */
static int linear_gated(const ll_linear_op *op, const float *x, int64_t m, int gelu, float *out)
{
    const ll_weight *w = op->weight[0];
    activations a = {.x = x, .m = m, .form = x_form(w, m, op->takes[0])};
    uint8_t *memory = scratch(0, activation_bytes(w, &a));
    if (!memory) return -1;
    prepare_activations(w, &a, memory);
    product p = {w, &a, op->bias[0], NULL, out, w->n / 2, gelu};
    pool_run(gated_tiles, &p, (m + SLAB - 1) / SLAB * (w->tiles / 2));
    return 0;
}

static int linear_into(const ll_weight *w, const float *x, int64_t m, const float *bias, float *out, int64_t takes)
{
    const ll_linear_op op = {1, w->n, {w}, {bias}, {takes}, NULL};
    return linear_parts(&op, x, m, NULL, out);
}

int64_t ll_linear(const ll_weight *w, const float *x, int64_t m, const float *bias, float *out, int64_t takes)
{
    pthread_mutex_lock(&pool.lock);
    int failed = linear_into(w, x, m, bias, out, takes);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* out [m][n] += adapter updates of the step's rows for this product of x [m][k] */
int64_t ll_adapt(const ll_adapters *l, const float *x, int64_t m, float *out)
{
    pthread_mutex_lock(&pool.lock);
    adapters_job job = adapters_of(l, x, m, out);
    job.hidden = job.l ? (float *)scratch(0, adapters_bytes(&job)) : NULL;
    const int failed = job.l && !job.hidden;
    if (!failed) {
        pool_run(adapters_down, &job, adapters_down_tasks(&job));
        adapters_finish(&job);
    }
    pthread_mutex_unlock(&pool.lock);
    return -failed;
}

#endif
