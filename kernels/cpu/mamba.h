/* Gated short convolutions and Mamba-2 as fused segments: norm, projection, convolution, state space, gated norm, projection. */
#ifndef LL_MAMBA_H
#define LL_MAMBA_H

#include "recurrent.h"
#include "states.h"

typedef struct {
    int64_t hidden;
    ll_norm norm, post_norm;
    ll_linear_op inputs, out;
    ll_conv conv;
} ll_conv_layer;

typedef struct {
    int64_t hidden, heads, dim, groups, size;
    double eps, shortest, longest; /* eps of the norm; range that time steps are clamped to */
    ll_norm norm;
    ll_linear_op inputs, out;
    ll_conv conv;
    const float *decay, *skip, *dt_bias; /* [heads] */
    const float *gain;                   /* [heads * dim]; NULL: no norm over groups */
} ll_mamba_layer;

typedef struct {
    const ll_conv *conv;
    const ll_mamba_layer *mamba; /* NULL for a gated short convolution */
    const ll_state_slots *kept;
    const ll_sequences *sequences;
    const float *rows;   /* [m][stride], for the tokens from `first` on */
    float *mixed, *made; /* Mamba-2: [m][channels]; [m][inputs of the output projection] */
    int64_t first, m, stride;
} state_segment;

static int64_t conv_blocks(const ll_conv *w) { return (w->channels + CONV_BLOCK - 1) / CONV_BLOCK; }

/* A task is a block of channels of a sequence. */
static void mamba_convolve(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const state_segment *j = arg;
    const ll_conv *w = j->conv;
    const int64_t inner = j->mamba->heads * j->mamba->dim;
    float before[CONV_WIDTH_MAX * CONV_BLOCK];
    for (int64_t task = begin; task < end; task++) {
        const int64_t sequence = task / conv_blocks(w), channel = task % conv_blocks(w) * CONV_BLOCK;
        const int64_t count = w->channels - channel < CONV_BLOCK ? w->channels - channel : CONV_BLOCK;
        int64_t at, last;
        rows_of(j->sequences, sequence, j->first, j->m, &at, &last);
        if (at < last)
            convolve(w, channel, count, j->kept->conv + j->sequences->slots[sequence] * j->kept->conv_stride,
                     j->rows + at * j->stride + inner + channel, j->stride, last - at, before, j->mixed + at * w->channels + channel,
                     w->channels, 1);
    }
}

/* A task is a block of channels of a sequence, gated before and after the convolution. */
static void gated_convolve(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const state_segment *j = arg;
    const ll_conv *w = j->conv;
    float before[CONV_WIDTH_MAX * CONV_BLOCK], x[STATE_RUN * CONV_BLOCK], y[STATE_RUN * CONV_BLOCK];
    for (int64_t task = begin; task < end; task++) {
        const int64_t sequence = task / conv_blocks(w), channel = task % conv_blocks(w) * CONV_BLOCK;
        const int64_t count = w->channels - channel < CONV_BLOCK ? w->channels - channel : CONV_BLOCK;
        float *kept = j->kept->conv + j->sequences->slots[sequence] * j->kept->conv_stride;
        int64_t at, last;
        rows_of(j->sequences, sequence, j->first, j->m, &at, &last);
        for (; at < last; at += STATE_RUN) {
            const int64_t tokens = last - at < STATE_RUN ? last - at : STATE_RUN;
            const float *b = j->rows + at * j->stride + channel, *c = b + w->channels, *h = c + w->channels;
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t i = 0; i < count; i++) x[t * count + i] = b[t * j->stride + i] * h[t * j->stride + i];
            convolve(w, channel, count, kept, x, count, tokens, before, y, count, 0);
            float *to = j->made + at * w->channels + channel;
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t i = 0; i < count; i++) to[t * w->channels + i] = c[t * j->stride + i] * y[t * count + i];
        }
    }
}

/* A task is a head of a sequence: state space over its tokens, skip connection and gate. */
static void mamba_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const state_segment *j = arg;
    const ll_mamba_layer *l = j->mamba;
    const int64_t inner = l->heads * l->dim, channels = j->conv->channels;
    float steps[STATE_RUN], factor[STATE_RUN];
    for (int64_t task = begin; task < end; task++) {
        const int64_t sequence = task / l->heads, head = task % l->heads, of = head / (l->heads / l->groups);
        float *state = j->kept->state + j->sequences->slots[sequence] * j->kept->state_stride + head * l->dim * l->size;
        int64_t at, last;
        rows_of(j->sequences, sequence, j->first, j->m, &at, &last);
        for (; at < last; at += STATE_RUN) {
            const int64_t count = last - at < STATE_RUN ? last - at : STATE_RUN;
            const float *row = j->rows + at * j->stride, *mixed = j->mixed + at * channels, *values = mixed + head * l->dim;
            float *y = j->made + at * inner + head * l->dim;
            for (int64_t t = 0; t < count; t++) {
                const float step = softplus_of(row[t * j->stride + inner + channels + head] + l->dt_bias[head]);
                steps[t] = fminf(fmaxf(step, (float)l->shortest), (float)l->longest);
                factor[t] = expf(steps[t] * l->decay[head]);
            }
            const space_tokens tokens = {values, mixed + inner + of * l->size, mixed + inner + (l->groups + of) * l->size, steps, factor, y,
                                         channels, channels, inner, 1, l->dim, l->size};
            space_head(&tokens, state, count);
            for (int64_t t = 0; t < count; t++)
                for (int64_t i = 0; i < l->dim; i += VW) {
                    const int some = l->dim - i < VW ? (int)(l->dim - i) : VW;
                    const vf gate = activate(load_some(row + t * j->stride + head * l->dim + i, some), 0);
                    const vf given = load_some(y + t * inner + i, some) + load_some(values + t * channels + i, some) * l->skip[head];
                    const vf gated = gate * given;
                    memcpy(y + t * inner + i, &gated, (size_t)some * 4);
                }
        }
    }
}

/* A task is a token: one norm per group of heads. */
static void mamba_norms(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const state_segment *j = arg;
    const int64_t inner = j->mamba->heads * j->mamba->dim, dim = inner / j->mamba->groups;
    for (int64_t at = begin * inner; at < end * inner; at += dim)
        norm_row(j->made + at, j->mamba->gain + at % inner, (float)j->mamba->eps, dim, j->made + at);
}

/* Convolving few tokens is not worth waking other threads. */
static void run_convolution(task_fn fn, state_segment *job)
{
    const int64_t tasks = job->sequences->num_seqs * conv_blocks(job->conv);
    if (job->m * job->conv->channels < 8192) fn(job, 0, tasks, 0);
    else pool_run(fn, job, tasks);
}

/* x [tokens][hidden] += post(out(mixer of norm(x))); the caller has set the first four members of `job`. */
static int states_locked(state_segment *job, const ll_norm *norm, const ll_norm *post, const ll_linear_op *inputs,
                         const ll_linear_op *out, const ll_linear_op *next, int64_t tokens, int64_t hidden, float *x)
{
    const int64_t most = tokens < AT_ONCE ? tokens : AT_ONCE, channels = job->conv->channels;
    const int64_t inner = job->mamba ? job->mamba->heads * job->mamba->dim : channels;
    float *normed = (float *)scratch(2, most * (hidden + inputs->n + channels + inner) * 4 + 64);
    if (!normed) return -1;
    float *rows = normed + most * hidden;
    job->rows = rows;
    job->mixed = rows + most * inputs->n;
    job->made = job->mixed + most * channels;
    job->stride = inputs->n;
    for (job->first = 0; job->first < tokens; job->first += AT_ONCE, x += AT_ONCE * hidden) {
        job->m = tokens - job->first < AT_ONCE ? tokens - job->first : AT_ONCE;
        norm_into(norm, x, job->m, hidden, normed);
        adapters_from = job->first;
        hint_next(out, job->m);
        int failed = linear_parts(inputs, normed, job->m, NULL, rows);
        if (failed) break;
        if (job->mamba) {
            run_convolution(mamba_convolve, job);
            pool_run(mamba_heads, job, job->sequences->num_seqs * job->mamba->heads);
            if (job->mamba->gain && job->m < 8) mamba_norms(job, 0, job->m, 0);
            else if (job->mamba->gain) pool_run(mamba_norms, job, job->m);
        } else {
            run_convolution(gated_convolve, job);
        }
        hint_next(next, job->m);
        if (linear_onto(out, post, 0, job->made, job->m, x, normed)) break;
    }
    adapters_from = 0;
    return job->first < tokens ? -1 : 0;
}

static int short_conv_locked(const ll_conv_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, const ll_linear_op *next,
                             int64_t tokens, float *x)
{
    state_segment job = {.conv = &l->conv, .kept = kept, .sequences = sequences};
    return states_locked(&job, &l->norm, &l->post_norm, &l->inputs, &l->out, next, tokens, l->hidden, x);
}

static int mamba_locked(const ll_mamba_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, const ll_linear_op *next,
                        int64_t tokens, float *x)
{
    state_segment job = {.conv = &l->conv, .mamba = l, .kept = kept, .sequences = sequences};
    const ll_norm none = {0};
    return states_locked(&job, &l->norm, &none, &l->inputs, &l->out, next, tokens, l->hidden, x);
}

/* x [tokens][hidden] += post(out(c conv(b h))), with b, c and h = inputs(norm(x)) */
int64_t ll_short_conv(const ll_conv_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, int64_t tokens, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = short_conv_locked(l, kept, sequences, NULL, tokens, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* x [tokens][hidden] += out(norm(y silu(z))), y = Mamba-2 state space of norm(x); the norm is optional */
int64_t ll_mamba(const ll_mamba_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, int64_t tokens, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = mamba_locked(l, kept, sequences, NULL, tokens, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
