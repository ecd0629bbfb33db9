/* The gated delta rule as a fused segment: norm, projections, convolution, delta rule, gated norm, projection.
 *
 * Between the products, a task is one key head of one sequence with its value heads. Its convolution channels, states and
 * gates belong to no other task, so no synchronization is needed. */
#ifndef LL_DELTA_H
#define LL_DELTA_H

#include "recurrent.h"
#include "states.h"

typedef struct {
    int64_t hidden, k_heads, v_heads, k_dim, v_dim, tiled;
    int64_t wide, sigmoid_gate; /* wide: a decay per key channel; each key head then has one value head */
    int64_t alone;              /* the output replaces x */
    double floor, beta_scale;   /* floor 0: none */
    ll_norm norm, out_norm;
    ll_linear_op inputs, rates, out; /* rates.parts 0: the rates are the last outputs of `inputs` */
    ll_linear_op a_up, z_up;         /* map the last outputs of rates to decays, of inputs to gates; without parts: absent */
    ll_conv conv;
    const float *decay, *dt_bias; /* [v_heads]; dt_bias [v_heads * k_dim] if wide */
} ll_delta_layer;

typedef struct {
    const ll_delta_layer *l;
    const ll_state_slots *kept;
    const ll_sequences *sequences;
    const float *rows, *gates, *betas, *alphas; /* for the tokens from `first` on */
    float *gated;                               /* [m][v_heads * v_dim] */
    float *room;                                /* scratch, `room_size` floats per thread */
    int64_t first, m, row_stride, gate_stride, beta_stride, alpha_stride, room_size;
} delta_segment;

/* Scratch floats per thread: convolved inputs of a key head, outputs, betas, decays and decayed keys of its value heads. */
static int64_t delta_room(const ll_delta_layer *l)
{
    const int64_t decays = l->wide ? 2 * l->k_dim : 1;
    return round_up(STATE_RUN * (2 * l->k_dim + 2 * l->v_dim + 1 + decays) + l->conv.width * (l->k_dim + l->v_dim), 16);
}

/* Scales rows to the L2 norm `length`. */
static void to_length(float *x, int64_t rows, int64_t dim, float length)
{
    for (int64_t r = 0; r < rows; r++, x += dim) {
        vf sums = vf_set1(0.0f);
        float total = 0.0f;
        int64_t i = 0;
        for (; i + VW <= dim; i += VW) sums = vf_fma(vf_load(x + i), vf_load(x + i), sums);
        for (; i < dim; i++) total += x[i] * x[i];
        const float scale = length / sqrtf(vf_sum(sums) + total + 1e-6f);
        for (i = 0; i < dim; i++) x[i] *= scale;
    }
}

/* exp(log decays) of a token's key channels, and its keys times these. */
static void channel_decays(const ll_delta_layer *l, int64_t head, const float *alphas, const float *k, float *factor, float *read)
{
    const float *bias = l->dt_bias + head * l->k_dim;
    for (int64_t i = 0; i < l->k_dim; i += VW) {
        const int some = l->k_dim - i < VW ? (int)(l->k_dim - i) : VW;
        const vf given = load_some(alphas + i, some) + load_some(bias + i, some);
        const vf log = l->floor != 0.0 ? sigmoid(given * -l->decay[head]) * (float)l->floor : softplus(given) * l->decay[head];
        const vf grown = vf_exp(log), keys = load_some(k + i, some) * grown;
        memcpy(factor + i, &grown, (size_t)some * 4);
        memcpy(read + i, &keys, (size_t)some * 4);
    }
}

/* One value head, tokens [at, at + count) of the segment's rows. */
static void delta_value_head(const delta_segment *j, float *state, int64_t head, int64_t at, int64_t count, delta_tokens *given, float *y,
                             float *factor, float *beta, float *read)
{
    const ll_delta_layer *l = j->l;
    const int64_t values = l->v_heads * l->v_dim;
    for (int64_t t = 0; t < count; t++) {
        const float *alphas = j->alphas + (at + t) * j->alpha_stride;
        beta[t] = sigmoid(vf_set1(j->betas[(at + t) * j->beta_stride + head]))[0] * (float)l->beta_scale;
        if (l->wide) channel_decays(l, head, alphas + head * l->k_dim, given->k + t * l->k_dim, factor + t * l->k_dim, read + t * l->k_dim);
        else factor[t] = expf(softplus_of(alphas[head] + l->dt_bias[head]) * l->decay[head]);
    }
    delta_head(given, state + head * l->v_dim * l->k_dim, count);
    for (int64_t t = 0; t < count; t++) {
        const float *gates = j->gates + (at + t) * j->gate_stride + head * l->v_dim;
        float *mixed = y + t * l->v_dim, *to = j->gated + (at + t) * values + head * l->v_dim;
        norm_row(mixed, l->out_norm.weight, (float)l->out_norm.eps, l->v_dim, mixed);
        for (int64_t i = 0; i < l->v_dim; i += VW) {
            const int some = l->v_dim - i < VW ? (int)(l->v_dim - i) : VW;
            const vf z = load_some(gates + i, some), gated = (l->sigmoid_gate ? sigmoid(z) : activate(z, 0)) * load_some(mixed + i, some);
            memcpy(to + i, &gated, (size_t)some * 4);
        }
    }
}

/* A task is one key head of one sequence with its value heads: processes the segment's tokens of the sequence in order. */
static void delta_key_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    const delta_segment *j = arg;
    const ll_delta_layer *l = j->l;
    const int64_t ratio = l->v_heads / l->k_heads, keys = l->k_heads * l->k_dim;
    float *q = j->room + thread * j->room_size, *k = q + STATE_RUN * l->k_dim, *v = k + STATE_RUN * l->k_dim, *y = v + STATE_RUN * l->v_dim;
    const int64_t decays = STATE_RUN * (l->wide ? l->k_dim : 1);
    float *factor = y + STATE_RUN * l->v_dim, *beta = factor + decays, *read = beta + STATE_RUN, *before = l->wide ? read + decays : read;
    delta_tokens given = {q, k, v, factor, beta, l->wide ? read : NULL, y, l->k_dim, l->v_dim, 1, l->k_dim, l->k_dim, l->v_dim};
    for (int64_t task = begin; task < end; task++) {
        const int64_t sequence = task / l->k_heads, head = task % l->k_heads, slot = j->sequences->slots[sequence];
        int64_t at, last;
        rows_of(j->sequences, sequence, j->first, j->m, &at, &last);
        float *conv = j->kept->conv + slot * j->kept->conv_stride, *state = j->kept->state + slot * j->kept->state_stride;
        for (; at < last; at += STATE_RUN) {
            const float *row = j->rows + at * j->row_stride;
            const int64_t count = last - at < STATE_RUN ? last - at : STATE_RUN;
            convolve(&l->conv, head * l->k_dim, l->k_dim, conv, row + head * l->k_dim, j->row_stride, count, before, q, l->k_dim, 1);
            convolve(&l->conv, keys + head * l->k_dim, l->k_dim, conv, row + keys + head * l->k_dim, j->row_stride, count, before, k, l->k_dim, 1);
            to_length(q, count, l->k_dim, 1.0f / sqrtf((float)l->k_dim));
            to_length(k, count, l->k_dim, 1.0f);
            for (int64_t i = 0; i < ratio; i++) {
                const int64_t value = l->tiled ? head + i * l->k_heads : head * ratio + i, channel = 2 * keys + value * l->v_dim;
                convolve(&l->conv, channel, l->v_dim, conv, row + channel, j->row_stride, count, before, v, l->v_dim, 1);
                delta_value_head(j, state, value, at, count, &given, y, factor, beta, read);
            }
        }
    }
}

/* out [m][up.n] = the last columns of x [m][stride], mapped by `up`; `spare`: scratch for these columns. */
static int up_from(const ll_linear_op *up, const float *x, int64_t stride, int64_t m, float *spare, float *out)
{
    const int64_t k = up->weight[0]->k;
    for (int64_t i = 0; i < m; i++) memcpy(spare + i * k, x + (i + 1) * stride - k, (size_t)k * 4);
    return linear_parts(up, spare, m, NULL, out);
}

/* x [tokens][hidden] += out(norm(y) act(z)), act: silu or sigmoid; `alone`: x = ...; `next` is the following product, for prefetching, or NULL. */
static int gated_delta_locked(const ll_delta_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, const ll_linear_op *next,
                              int64_t tokens, float *x)
{
    const int64_t values = l->v_heads * l->v_dim, most = tokens < AT_ONCE ? tokens : AT_ONCE, room = delta_room(l);
    const int64_t each = l->hidden + l->inputs.n + l->rates.n + values + l->a_up.n + l->z_up.n;
    float *normed = (float *)scratch(2, (most * each + pool.wanted * room) * 4 + 64);
    if (!normed) return -1;
    float *rows = normed + most * l->hidden, *rates = rows + most * l->inputs.n, *gated = rates + most * l->rates.n;
    float *alphas = gated + most * values, *gates = alphas + most * l->a_up.n;
    delta_segment job = {.l = l, .kept = kept, .sequences = sequences, .rows = rows, .gated = gated, .room = gates + most * l->z_up.n,
                         .row_stride = l->inputs.n, .room_size = room};
    job.gates = l->z_up.parts ? gates : rows + 2 * l->k_heads * l->k_dim + values;
    job.gate_stride = l->z_up.parts ? values : l->inputs.n;
    job.betas = l->rates.parts ? rates : rows + l->inputs.n - 2 * l->v_heads;
    job.beta_stride = l->rates.parts ? l->rates.n : l->inputs.n;
    job.alphas = l->a_up.parts ? alphas : job.betas + l->v_heads;
    job.alpha_stride = l->a_up.parts ? l->a_up.n : job.beta_stride;
    for (; job.first < tokens; job.first += AT_ONCE, x += AT_ONCE * l->hidden) {
        job.m = tokens - job.first < AT_ONCE ? tokens - job.first : AT_ONCE;
        norm_into(&l->norm, x, job.m, l->hidden, normed);
        adapters_from = job.first;
        hint_next(&l->out, job.m);
        int failed = linear_parts(&l->inputs, normed, job.m, NULL, rows);
        if (!failed && l->rates.parts) failed = linear_parts(&l->rates, normed, job.m, NULL, rates);
        if (!failed && l->z_up.parts) failed = up_from(&l->z_up, rows, l->inputs.n, job.m, gated, gates);
        if (!failed && l->a_up.parts) failed = up_from(&l->a_up, rates, l->rates.n, job.m, gated, alphas);
        if (!failed) pool_run(delta_key_heads, &job, sequences->num_seqs * l->k_heads);
        hint_next(next, job.m);
        const ll_norm none = {0};
        if (!failed) failed = linear_onto(&l->out, &none, (int)l->alone, gated, job.m, x, normed);
        adapters_from = 0;
        if (failed) return -1;
    }
    return 0;
}

/* `gated_delta_locked` with the pool's lock. */
int64_t ll_gated_delta(const ll_delta_layer *l, const ll_state_slots *kept, const ll_sequences *sequences, int64_t tokens, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = gated_delta_locked(l, kept, sequences, NULL, tokens, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
