/* Hyper-connections: what a block reads from the residual streams, and how its output is added to them. The C version of
 * kernels/hyper.py. */
#ifndef LL_HYPER_H
#define LL_HYPER_H

#include "layer.h"

#define HYPER_AT_ONCE 128 /* tokens processed together: their streams are four times as wide as other rows */

typedef struct {
    int64_t hidden, count, rank;
    ll_norm norm;          /* [count * hidden]: a weight for each stream, which are normed apart */
    ll_linear_op down, up; /* down: `rank` values, then one gain per stream where the block's output is added */
} ll_hyper_layer;

typedef struct {
    const ll_hyper_layer *l;
    const float *x;
    float *normed, *low, *acted, *gates, *mixed, *gains;
} hyper_job;

static void hyper_norms(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const hyper_job *j = arg;
    const ll_hyper_layer *l = j->l;
    for (int64_t i = begin; i < end; i++)
        norm_row(j->x + i * l->hidden, l->norm.weight + i % l->count * l->hidden, (float)l->norm.eps, l->hidden, j->normed + i * l->hidden);
}

/* silu of the first `rank` values, and the gains from the others */
static void hyper_acts(const hyper_job *j, int64_t m)
{
    const ll_hyper_layer *l = j->l;
    const float share = 1.0f / (float)l->count;
    for (int64_t i = 0; i < m; i++) {
        const float *low = j->low + i * l->down.n;
        for (int64_t r = 0; r < l->rank; r++) {
            const float value = low[r] * share;
            j->acted[i * l->rank + r] = value / (1.0f + expf(-value));
        }
        for (int64_t s = 0; s < l->down.n - l->rank; s++) j->gains[i * l->count + s] = 2.0f / (1.0f + expf(-low[l->rank + s] * share));
    }
}

/* mixed[d] = the mean over streams of sigmoid(gate) * normed */
static void hyper_means(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const hyper_job *j = arg;
    const ll_hyper_layer *l = j->l;
    const float share = 1.0f / (float)l->count;
    for (int64_t i = begin; i < end; i++) {
        const float *gates = j->gates + i * l->count * l->hidden, *normed = j->normed + i * l->count * l->hidden;
        float *mixed = j->mixed + i * l->hidden;
        int64_t d = 0;
        for (; d + VW <= l->hidden; d += VW) {
            vf sum = vf_set1(0.0f);
            for (int64_t s = 0; s < l->count; s++) sum = vf_fma(sigmoid(vf_load(gates + s * l->hidden + d)), vf_load(normed + s * l->hidden + d), sum);
            vf_store(mixed + d, sum * vf_set1(share));
        }
        for (; d < l->hidden; d++) {
            float sum = 0.0f;
            for (int64_t s = 0; s < l->count; s++) sum += normed[s * l->hidden + d] / (1.0f + expf(-gates[s * l->hidden + d]));
            mixed[d] = sum * share;
        }
    }
}

/* x [m][count][hidden] -> mixed [m][hidden], gains [m][count] (unused without gains in `down`) */
static int hyper_in_locked(const ll_hyper_layer *l, const float *x, int64_t m, float *mixed, float *gains)
{
    const int64_t most = m < HYPER_AT_ONCE ? m : HYPER_AT_ONCE, wide = l->count * l->hidden;
    float *normed = (float *)scratch(2, most * (2 * wide + l->down.n + l->rank) * 4);
    if (!normed) return -1;
    hyper_job job = {.l = l, .normed = normed, .gates = normed + most * wide, .low = normed + 2 * most * wide};
    job.acted = job.low + most * l->down.n;
    for (int64_t first = 0; first < m; first += most) {
        const int64_t rows = m - first < most ? m - first : most;
        job.x = x + first * wide;
        job.mixed = mixed + first * l->hidden;
        job.gains = gains + first * l->count;
        if (rows * wide < 16384) hyper_norms(&job, 0, rows * l->count, 0);
        else pool_run(hyper_norms, &job, rows * l->count);
        hint_next(&l->up, rows);
        adapters_from = first;
        int failed = linear_parts(&l->down, normed, rows, NULL, job.low);
        hyper_acts(&job, rows);
        if (!failed) failed = linear_parts(&l->up, job.acted, rows, NULL, job.gates);
        adapters_from = 0;
        if (failed) return -1;
        if (rows < 4) hyper_means(&job, 0, rows, 0);
        else pool_run(hyper_means, &job, rows);
    }
    return 0;
}

/* `hyper_in_locked` with the pool's lock. */
int64_t ll_hyper_in(const ll_hyper_layer *l, const float *x, int64_t m, float *mixed, float *gains)
{
    pthread_mutex_lock(&pool.lock);
    int failed = hyper_in_locked(l, x, m, mixed, gains);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

typedef struct {
    int64_t hidden, count;
    const float *output, *gains;
    float *x;
} hyper_out_job;

static void hyper_adds(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const hyper_out_job *j = arg;
    for (int64_t i = begin; i < end; i++)
        for (int64_t s = 0; s < j->count; s++) {
            const float *output = j->output + i * j->hidden, gain = j->gains[i * j->count + s];
            float *x = j->x + (i * j->count + s) * j->hidden;
            int64_t d = 0;
            for (; d + VW <= j->hidden; d += VW) vf_store(x + d, vf_fma(vf_load(output + d), vf_set1(gain), vf_load(x + d)));
            for (; d < j->hidden; d++) x[d] += output[d] * gain;
        }
}

/* x [m][count][hidden] += output [m][hidden] times the gain of each stream [m][count] */
void ll_hyper_out(int64_t hidden, int64_t count, int64_t m, const float *output, const float *gains, float *x)
{
    hyper_out_job job = {hidden, count, output, gains, x};
    if (m * count * hidden < 65536) {
        hyper_adds(&job, 0, m, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool_run(hyper_adds, &job, m);
    pthread_mutex_unlock(&pool.lock);
}

#endif
