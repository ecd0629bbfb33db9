/* Hyper-connections: what a block reads from the residual streams, and how its output is added to them, in both kinds. The C
 * version of kernels/hyper.py. */
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

#define MIXED_MOST 16    /* streams */
#define MIXED_TOGETHER 4 /* tokens whose products with a row of fn are computed together */

/* Manifold-constrained hyper-connections: `MixedWeights` */
typedef struct {
    int64_t hidden, count, rounds;
    double eps, norm_eps;
    const float *fn, *base, *scale;
} ll_mixed_layer;

typedef struct {
    const ll_mixed_layer *l;
    const float *x, *output;
    float *products; /* [m][rows of fn + 1]: the last is the sum of squares */
    float *mixed, *gains, *streams;
    int64_t m;
} mixed_job;

/* The products of `count` tokens and one row; a token's sum does not depend on `count`. */
INLINE void mixed_dots(const float *x, const float *row, int64_t wide, int count, float *out, int64_t stride)
{
    vf sums[MIXED_TOGETHER][2];
    for (int t = 0; t < count; t++) sums[t][0] = sums[t][1] = vf_set1(0.0f);
    int64_t d = 0;
    for (; d + 2 * VW <= wide; d += 2 * VW)
        for (int half = 0; half < 2; half++) {
            const vf factor = vf_load((row ? row : x) + d + half * VW);
            for (int t = 0; t < count; t++) {
                const vf value = vf_load(x + t * wide + d + half * VW);
                sums[t][half] = vf_fma(row ? factor : value, value, sums[t][half]);
            }
        }
    for (int t = 0; t < count; t++) {
        float total = vf_sum(sums[t][0] + sums[t][1]);
        for (int64_t e = d; e < wide; e++) total += x[t * wide + e] * (row ? row[e] : x[t * wide + e]);
        out[t * stride] = total;
    }
}

/* An item is a row of fn, or the sum of squares, for a few tokens. */
static void mixed_products(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const mixed_job *j = arg;
    const int64_t count = j->l->count, wide = count * j->l->hidden, rows = (2 + count) * count + 1;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i / rows * MIXED_TOGETHER, r = i % rows;
        const float *x = j->x + first * wide, *row = r + 1 < rows ? j->l->fn + r * wide : NULL;
        float *out = j->products + first * rows + r;
        switch (j->m - first) {
        case 1: mixed_dots(x, row, wide, 1, out, rows); break;
        case 2: mixed_dots(x, row, wide, 2, out, rows); break;
        case 3: mixed_dots(x, row, wide, 3, out, rows); break;
        default: mixed_dots(x, row, wide, MIXED_TOGETHER, out, rows);
        }
    }
}

/* Divides the rows (or columns) of a matrix by their sums. */
INLINE void mixed_divide(float *matrix, int64_t count, int64_t along, int64_t across, float eps)
{
    for (int64_t i = 0; i < count; i++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < count; k++) sum += matrix[i * across + k * along];
        for (int64_t k = 0; k < count; k++) matrix[i * across + k * along] /= sum + eps;
    }
}

/* The weights of a token from its products, and the sum of its streams. */
static void mixed_sums(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const mixed_job *j = arg;
    const ll_mixed_layer *l = j->l;
    const int64_t n = l->count, hidden = l->hidden, rows = (2 + n) * n + 1;
    const float eps = (float)l->eps;
    for (int64_t i = begin; i < end; i++) {
        const float *made = j->products + i * rows, *x = j->x + i * n * hidden;
        const float size = 1.0f / sqrtf(made[rows - 1] / (float)(n * hidden) + (float)l->norm_eps);
        float before[MIXED_MOST], *gains = j->gains + i * (n + n * n), *matrix = gains + n, *mixed = j->mixed + i * hidden;
        for (int64_t s = 0; s < n; s++) {
            before[s] = 1.0f / (1.0f + expf(-(made[s] * size * l->scale[0] + l->base[s]))) + eps;
            gains[s] = 2.0f / (1.0f + expf(-(made[n + s] * size * l->scale[1] + l->base[n + s])));
            float most = -INFINITY, sum = 0.0f;
            for (int64_t k = 0; k < n; k++) {
                const int64_t at = 2 * n + s * n + k;
                matrix[s * n + k] = made[at] * size * l->scale[2] + l->base[at];
                if (matrix[s * n + k] > most) most = matrix[s * n + k];
            }
            for (int64_t k = 0; k < n; k++) sum += matrix[s * n + k] = expf(matrix[s * n + k] - most);
            for (int64_t k = 0; k < n; k++) matrix[s * n + k] = matrix[s * n + k] / sum + eps;
        }
        mixed_divide(matrix, n, n, 1, eps);
        for (int64_t round = 1; round < l->rounds; round++) {
            mixed_divide(matrix, n, 1, n, eps);
            mixed_divide(matrix, n, n, 1, eps);
        }
        int64_t d = 0;
        for (; d + VW <= hidden; d += VW) {
            vf sum = vf_load(x + d) * vf_set1(before[0]);
            for (int64_t s = 1; s < n; s++) sum = vf_fma(vf_load(x + s * hidden + d), vf_set1(before[s]), sum);
            vf_store(mixed + d, sum);
        }
        for (; d < hidden; d++) {
            mixed[d] = x[d] * before[0];
            for (int64_t s = 1; s < n; s++) mixed[d] += x[s * hidden + d] * before[s];
        }
    }
}

/* x [m][count][hidden] -> mixed [m][hidden], gains [m][count + count * count] */
int64_t ll_mixed_in(const ll_mixed_layer *l, const float *x, int64_t m, float *mixed, float *gains)
{
    const int64_t rows = (2 + l->count) * l->count + 1;
    pthread_mutex_lock(&pool.lock);
    float *products = (float *)scratch(2, m * rows * 4);
    if (products && m) {
        mixed_job job = {.l = l, .x = x, .products = products, .mixed = mixed, .gains = gains, .m = m};
        const int64_t items = (m + MIXED_TOGETHER - 1) / MIXED_TOGETHER * rows;
        if (items * l->count * l->hidden < 65536) mixed_products(&job, 0, items, 0);
        else pool_run(mixed_products, &job, items);
        if (m < 4) mixed_sums(&job, 0, m, 0);
        else pool_run(mixed_sums, &job, m);
    }
    pthread_mutex_unlock(&pool.lock);
    return products || !m ? 0 : -1;
}

static void mixed_adds(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const mixed_job *j = arg;
    const int64_t n = j->l->count, hidden = j->l->hidden;
    for (int64_t i = begin; i < end; i++) {
        const float *output = j->output + i * hidden, *gains = j->gains + i * (n + n * n), *matrix = gains + n;
        float *x = j->streams + i * n * hidden;
        int64_t d = 0;
        for (; d + VW <= hidden; d += VW) {
            vf old[MIXED_MOST];
            for (int64_t s = 0; s < n; s++) old[s] = vf_load(x + s * hidden + d);
            for (int64_t to = 0; to < n; to++) {
                vf sum = vf_load(output + d) * vf_set1(gains[to]);
                for (int64_t s = 0; s < n; s++) sum = vf_fma(old[s], vf_set1(matrix[s * n + to]), sum);
                vf_store(x + to * hidden + d, sum);
            }
        }
        for (; d < hidden; d++) {
            float old[MIXED_MOST];
            for (int64_t s = 0; s < n; s++) old[s] = x[s * hidden + d];
            for (int64_t to = 0; to < n; to++) {
                float sum = output[d] * gains[to];
                for (int64_t s = 0; s < n; s++) sum += old[s] * matrix[s * n + to];
                x[to * hidden + d] = sum;
            }
        }
    }
}

/* x [m][count][hidden] becomes its mixture plus output [m][hidden] times the gain of each stream. */
void ll_mixed_out(int64_t hidden, int64_t count, int64_t m, const float *output, const float *gains, float *x)
{
    const ll_mixed_layer sizes = {.hidden = hidden, .count = count};
    mixed_job job = {.l = &sizes, .output = output, .gains = (float *)gains, .streams = x, .m = m};
    if (m * count * hidden < 65536) {
        mixed_adds(&job, 0, m, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool_run(mixed_adds, &job, m);
    pthread_mutex_unlock(&pool.lock);
}

#endif
