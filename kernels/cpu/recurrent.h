/* The gated delta rule and Mamba-2: a matrix of every head that goes from token to token. */
#ifndef LL_RECURRENT_H
#define LL_RECURRENT_H

#include "pool.h"
#include "vec.h"

typedef struct {
    const float *q, *k, *v, *factor, *beta; /* [tokens][heads][dim]; [tokens][v_heads] */
    float *state, *y;                       /* state: [slots][v_heads][v_dim][k_dim], slots `stride` floats apart */
    const int64_t *slots;
    const int32_t *starts;
    int64_t stride, k_heads, v_heads, k_dim, v_dim, tiled;
} delta_job;

/* S = factor S; S = S + beta (v - S k) k^T; returns S q, for one row S of the matrix. */
INLINE float delta_row(float *s, const float *k, const float *q, int64_t dim, float factor, float beta, float v)
{
    const int64_t whole = dim / VW * VW;
    vf sum = {0};
    float rest = 0;
    for (int64_t i = 0; i < whole; i += VW) {
        const vf grown = vf_load(s + i) * factor;
        vf_store(s + i, grown);
        sum += grown * vf_load(k + i);
    }
    for (int64_t i = whole; i < dim; i++) {
        s[i] *= factor;
        rest += s[i] * k[i];
    }
    const float missing = (v - (vf_sum(sum) + rest)) * beta;
    vf read = {0};
    rest = 0;
    for (int64_t i = 0; i < whole; i += VW) {
        const vf learnt = vf_load(s + i) + vf_load(k + i) * missing;
        vf_store(s + i, learnt);
        read += learnt * vf_load(q + i);
    }
    for (int64_t i = whole; i < dim; i++) {
        s[i] += missing * k[i];
        rest += s[i] * q[i];
    }
    return vf_sum(read) + rest;
}

/* A task is a value head of a sequence: its tokens in order. */
static void delta_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const delta_job *j = arg;
    const int64_t ratio = j->v_heads / j->k_heads;
    for (int64_t i = begin; i < end; i++) {
        const int64_t sequence = i / j->v_heads, head = i % j->v_heads;
        const int64_t of = j->tiled ? head % j->k_heads : head / ratio;
        float *state = j->state + j->slots[sequence] * j->stride + head * j->v_dim * j->k_dim;
        for (int64_t t = j->starts[sequence]; t < j->starts[sequence + 1]; t++) {
            const float *k = j->k + (t * j->k_heads + of) * j->k_dim, *q = j->q + (t * j->k_heads + of) * j->k_dim;
            const int64_t at = t * j->v_heads + head;
            const float *v = j->v + at * j->v_dim;
            float *y = j->y + at * j->v_dim;
            for (int64_t r = 0; r < j->v_dim; r++)
                y[r] = delta_row(state + r * j->k_dim, k, q, j->k_dim, j->factor[at], j->beta[at], v[r]);
        }
    }
}

void ll_delta_rule(const delta_job *job, int64_t sequences)
{
    pthread_mutex_lock(&pool.lock);
    pool_run(delta_heads, (void *)job, sequences * job->v_heads);
    pthread_mutex_unlock(&pool.lock);
}

typedef struct {
    const float *x, *b, *c, *steps, *factor; /* [tokens][heads][dim]; [tokens][groups][size]; [tokens][heads] */
    float *state, *y;                        /* state: [slots][heads][dim][size], slots `stride` floats apart */
    const int64_t *slots;
    const int32_t *starts;
    int64_t stride, heads, groups, dim, size;
} space_job;

/* S = factor S + x b^T; returns S c, for one row S of the matrix. */
INLINE float space_row(float *s, const float *b, const float *c, int64_t size, float factor, float x)
{
    const int64_t whole = size / VW * VW;
    vf sum = {0};
    float rest = 0;
    for (int64_t i = 0; i < whole; i += VW) {
        const vf grown = vf_load(s + i) * factor + vf_load(b + i) * x;
        vf_store(s + i, grown);
        sum += grown * vf_load(c + i);
    }
    for (int64_t i = whole; i < size; i++) {
        s[i] = s[i] * factor + b[i] * x;
        rest += s[i] * c[i];
    }
    return vf_sum(sum) + rest;
}

/* A task is a head of a sequence: its tokens in order. */
static void space_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const space_job *j = arg;
    const int64_t ratio = j->heads / j->groups;
    for (int64_t i = begin; i < end; i++) {
        const int64_t sequence = i / j->heads, head = i % j->heads, of = head / ratio;
        float *state = j->state + j->slots[sequence] * j->stride + head * j->dim * j->size;
        for (int64_t t = j->starts[sequence]; t < j->starts[sequence + 1]; t++) {
            const float *b = j->b + (t * j->groups + of) * j->size, *c = j->c + (t * j->groups + of) * j->size;
            const int64_t at = t * j->heads + head;
            for (int64_t r = 0; r < j->dim; r++)
                j->y[at * j->dim + r] = space_row(state + r * j->size, b, c, j->size, j->factor[at],
                                                  j->x[at * j->dim + r] * j->steps[at]);
        }
    }
}

void ll_state_space(const space_job *job, int64_t sequences)
{
    pthread_mutex_lock(&pool.lock);
    pool_run(space_heads, (void *)job, sequences * job->heads);
    pthread_mutex_unlock(&pool.lock);
}

#endif
