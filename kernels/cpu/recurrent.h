/* Recurrences of the gated delta rule and Mamba-2: a state matrix per head, updated token by token.
 *
 * VW rows of the state are advanced through the tokens together, while they are in L1. A row's arithmetic is the same for any
 * number of tokens: prefill is bit-identical to decoding token by token. */
#ifndef LL_RECURRENT_H
#define LL_RECURRENT_H

#include "pool.h"
#include "vec.h"

#define RUN 128                      /* tokens whose keys stay in L2 until all rows have used them */
#define ABREAST (VW == 16 ? 8 : 4)   /* rows that share the loads of a token */

typedef struct {
    const float *q, *k, *v, *factor, *beta; /* [tokens][heads][dim]; [tokens][v_heads] */
    const float *read;                      /* NULL, or with a factor per key channel: k * factor, both [tokens][v_heads][k_dim] */
    float *state, *y;                       /* state: [slots][v_heads][v_dim][k_dim], slots `stride` floats apart */
    const int64_t *slots;
    const int32_t *starts;
    int64_t stride, k_heads, v_heads, k_dim, v_dim, tiled;
} delta_job;

typedef struct {
    const float *x, *b, *c, *steps, *factor; /* [tokens][heads][dim]; [tokens][groups][size]; [tokens][heads] */
    float *state, *y;                        /* state: [slots][heads][dim][size], slots `stride` floats apart */
    const int64_t *slots;
    const int32_t *starts;
    int64_t stride, heads, groups, dim, size;
} space_job;

/* Per row of the state, a vector of partial sums, and one for the elements after the last whole vector. */
typedef struct {
    vf of[VW];
    float rest[VW];
} row_sums;

/* Reduces the sums, row i to lane i. */
INLINE vf sums_of_rows(row_sums *s)
{
    transpose(s->of);
    UNROLL for (int i = 0; i < VW / 2; i++) s->of[i] = s->of[i] + s->of[i + VW / 2];
    UNROLL for (int i = 0; i < VW / 4; i++) s->of[i] = s->of[i] + s->of[i + VW / 4];
#if VW > 4
    UNROLL for (int i = 0; i < VW / 8; i++) s->of[i] = s->of[i] + s->of[i + VW / 8];
#endif
#if VW > 8
    s->of[0] = s->of[0] + s->of[1];
#endif
    return s->of[0] + vf_load(s->rest);
}

/* S k for `rows` rows from `first` on. */
INLINE void read_rows(const float *s, const float *k, int64_t dim, row_sums *to, int first, const int rows)
{
    const int64_t whole = dim / VW * VW;
    vf sum[ABREAST];
    for (int r = 0; r < rows; r++) sum[r] = vf_set1(0.0f);
    s += first * dim;
    for (int64_t i = 0; i < whole; i += VW) {
        const vf key = vf_load(k + i);
        for (int r = 0; r < rows; r++) sum[r] = vf_fma(vf_load(s + r * dim + i), key, sum[r]);
    }
    for (int r = 0; r < rows; r++) {
        float rest = 0.0f;
        for (int64_t i = whole; i < dim; i++) rest += s[r * dim + i] * k[i];
        to->of[first + r] = sum[r];
        to->rest[first + r] = rest;
    }
}

/* S = factor S + x k^T, then S q. `wide`: a factor per column of S. */
INLINE void step_rows(float *s, const float *k, const float *q, int64_t dim, const float *factor, const int wide, const float *x, row_sums *to,
                      int first, const int rows)
{
    const int64_t whole = dim / VW * VW;
    const vf same = vf_set1(*factor);
    vf sum[ABREAST], given[ABREAST];
    for (int r = 0; r < rows; r++) {
        sum[r] = vf_set1(0.0f);
        given[r] = vf_set1(x[first + r]);
    }
    s += first * dim;
    for (int64_t i = 0; i < whole; i += VW) {
        const vf key = vf_load(k + i), query = vf_load(q + i), grows = wide ? vf_load(factor + i) : same;
        for (int r = 0; r < rows; r++) {
            const vf now = vf_fma(vf_load(s + r * dim + i), grows, key * given[r]);
            vf_store(s + r * dim + i, now);
            sum[r] = vf_fma(now, query, sum[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float rest = 0.0f;
        for (int64_t i = whole; i < dim; i++) {
            s[r * dim + i] = s[r * dim + i] * factor[wide ? i : 0] + k[i] * x[first + r];
            rest += s[r * dim + i] * q[i];
        }
        to->of[first + r] = sum[r];
        to->rest[first + r] = rest;
    }
}

#define EACH_ROW(CALL)                                                  \
    do {                                                                \
        int first = 0;                                                  \
        for (; first + ABREAST <= count; first += ABREAST) CALL(ABREAST); \
        for (; first < count; first++) CALL(1);                         \
    } while (0)

/* A head's tokens; strides are in floats. */
typedef struct {
    const float *q, *k, *v, *factor, *beta; /* [tokens][k_dim], [tokens][v_dim], [tokens] */
    const float *read;                      /* NULL, or with a factor per key channel: k * factor, both [tokens][k_dim] */
    float *y;                               /* layout of v */
    int64_t k_stride, v_stride, rate_stride, wide_stride, k_dim, v_dim; /* wide_stride: of `read` and its factors */
} delta_tokens;

/* Advances `count` rows of a head from `row` on through the tokens [begin, end). */
static void delta_run(const delta_tokens *j, float *s, int64_t row, int count, int64_t begin, int64_t end)
{
    const int64_t dim = j->k_dim;
    row_sums sums;
    memset(&sums, 0, sizeof sums);
    for (int64_t t = begin; t < end; t++) {
        const float *k = j->k + t * j->k_stride, *q = j->q + t * j->k_stride;
        const float *factor = j->factor + t * (j->read ? j->wide_stride : j->rate_stride), *read = j->read ? j->read + t * j->wide_stride : k;
        float missing[VW];
#define READ(N) read_rows(s, read, dim, &sums, first, N)
        EACH_ROW(READ);
        const vf seen = j->read ? sums_of_rows(&sums) : sums_of_rows(&sums) * *factor;
        vf_store(missing, (load_some(j->v + t * j->v_stride + row, count) - seen) * j->beta[t * j->rate_stride]);
#define LEARN(N) step_rows(s, k, q, dim, factor, 0, missing, &sums, first, N)
#define LEARN_WIDE(N) step_rows(s, k, q, dim, factor, 1, missing, &sums, first, N)
        if (j->read) EACH_ROW(LEARN_WIDE);
        else EACH_ROW(LEARN);
        const vf y = sums_of_rows(&sums);
        memcpy(j->y + t * j->v_stride + row, &y, (size_t)count * 4);
    }
}

/* Advances a head's state [v_dim][k_dim] through its tokens. */
static void delta_head(const delta_tokens *j, float *state, int64_t tokens)
{
    for (int64_t t = 0; t < tokens; t += RUN)
        for (int64_t row = 0; row < j->v_dim; row += VW)
            delta_run(j, state + row * j->k_dim, row, j->v_dim - row < VW ? (int)(j->v_dim - row) : VW, t, t + RUN < tokens ? t + RUN : tokens);
}

/* A task is a value head of a sequence; its tokens are processed in order. */
static void delta_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const delta_job *j = arg;
    const int64_t k_stride = j->k_heads * j->k_dim, v_stride = j->v_heads * j->v_dim;
    for (int64_t i = begin; i < end; i++) {
        const int64_t sequence = i / j->v_heads, head = i % j->v_heads, first = j->starts[sequence];
        const int64_t of = j->tiled ? head % j->k_heads : head / (j->v_heads / j->k_heads);
        const int64_t keys = first * k_stride + of * j->k_dim, values = first * v_stride + head * j->v_dim, rates = first * j->v_heads + head;
        const delta_tokens tokens = {j->q + keys, j->k + keys, j->v + values, j->factor + (j->read ? rates * j->k_dim : rates), j->beta + rates,
                                     j->read ? j->read + rates * j->k_dim : NULL, j->y + values,
                                     k_stride, v_stride, j->v_heads, j->v_heads * j->k_dim, j->k_dim, j->v_dim};
        delta_head(&tokens, j->state + j->slots[sequence] * j->stride + head * j->v_dim * j->k_dim, j->starts[sequence + 1] - first);
    }
}

void ll_delta_rule(const delta_job *job, int64_t sequences)
{
    pthread_mutex_lock(&pool.lock);
    pool_run(delta_heads, (void *)job, sequences * job->v_heads);
    pthread_mutex_unlock(&pool.lock);
}

/* Like `delta_tokens`, for Mamba-2. */
typedef struct {
    const float *x, *b, *c, *steps, *factor; /* [tokens][dim], [tokens][size], [tokens] */
    float *y;
    int64_t x_stride, b_stride, y_stride, rate_stride, dim, size;
} space_tokens;

static void space_run(const space_tokens *j, float *s, int64_t row, int count, int64_t begin, int64_t end)
{
    const int64_t dim = j->size;
    row_sums sums;
    memset(&sums, 0, sizeof sums);
    for (int64_t t = begin; t < end; t++) {
        const float *b = j->b + t * j->b_stride, *c = j->c + t * j->b_stride, *factor = j->factor + t * j->rate_stride;
        float given[VW];
        vf_store(given, load_some(j->x + t * j->x_stride + row, count) * j->steps[t * j->rate_stride]);
#define STEP(N) step_rows(s, b, c, dim, factor, 0, given, &sums, first, N)
        EACH_ROW(STEP);
        const vf y = sums_of_rows(&sums);
        memcpy(j->y + t * j->y_stride + row, &y, (size_t)count * 4);
    }
}

/* Advances a head's state [dim][size] through its tokens. */
static void space_head(const space_tokens *j, float *state, int64_t tokens)
{
    for (int64_t t = 0; t < tokens; t += RUN)
        for (int64_t row = 0; row < j->dim; row += VW)
            space_run(j, state + row * j->size, row, j->dim - row < VW ? (int)(j->dim - row) : VW, t, t + RUN < tokens ? t + RUN : tokens);
}

/* A task is a head of a sequence; its tokens are processed in order. */
static void space_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const space_job *j = arg;
    const int64_t x_stride = j->heads * j->dim, b_stride = j->groups * j->size;
    for (int64_t i = begin; i < end; i++) {
        const int64_t sequence = i / j->heads, head = i % j->heads, of = head / (j->heads / j->groups), first = j->starts[sequence];
        const int64_t values = first * x_stride + head * j->dim, shared = first * b_stride + of * j->size, rates = first * j->heads + head;
        const space_tokens tokens = {j->x + values, j->b + shared, j->c + shared, j->steps + rates, j->factor + rates, j->y + values,
                                     x_stride, b_stride, x_stride, j->heads, j->dim, j->size};
        space_head(&tokens, j->state + j->slots[sequence] * j->stride + head * j->dim * j->size, j->starts[sequence + 1] - first);
    }
}

void ll_state_space(const space_job *job, int64_t sequences)
{
    pthread_mutex_lock(&pool.lock);
    pool_run(space_heads, (void *)job, sequences * job->heads);
    pthread_mutex_unlock(&pool.lock);
}

#endif
