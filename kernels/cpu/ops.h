/* Row-wise ops of a decoder layer in float32: everything except products and attention. */
#ifndef LL_OPS_H
#define LL_OPS_H

#include <math.h>

#include "activate.h"
#include "activations.h"
#include "kv.h"

/* y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] */
static void norm_row(const float *x, const float *weight, float eps, int64_t dim, float *y)
{
    vf sums[4];
    float tail = 0.0f;
    int64_t i = 0;
    for (int c = 0; c < 4; c++) sums[c] = vf_set1(0.0f);
    for (; i + 4 * VW <= dim; i += 4 * VW)
        for (int c = 0; c < 4; c++) {
            vf a = vf_load(x + i + c * VW);
            sums[c] = vf_fma(a, a, sums[c]);
        }
    for (; i + VW <= dim; i += VW) sums[0] = vf_fma(vf_load(x + i), vf_load(x + i), sums[0]);
    for (; i < dim; i++) tail += x[i] * x[i];
    const float total = vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
    const float scale = 1.0f / sqrtf(total / (float)dim + eps);
    for (i = 0; i + VW <= dim; i += VW)
        vf_store(y + i, vf_load(x + i) * vf_set1(scale) * vf_load(weight + i));
    for (; i < dim; i++) y[i] = x[i] * scale * weight[i];
}

/* y[i] = (x[i] - mean(x)) / sqrt(var(x) + eps) * weight[i] + bias[i] */
static void layer_norm_row(const float *x, const float *weight, const float *bias, float eps, int64_t dim, float *y)
{
    vf sums[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + 2 * VW <= dim; i += 2 * VW)
        for (int c = 0; c < 2; c++) sums[c] = sums[c] + vf_load(x + i + c * VW);
    for (; i < dim; i++) tail += x[i];
    const float mean = (vf_sum(sums[0] + sums[1]) + tail) / (float)dim;
    sums[0] = sums[1] = vf_set1(0.0f);
    tail = 0.0f;
    for (i = 0; i + 2 * VW <= dim; i += 2 * VW)
        for (int c = 0; c < 2; c++) {
            const vf a = vf_load(x + i + c * VW) - vf_set1(mean);
            sums[c] = vf_fma(a, a, sums[c]);
        }
    for (; i < dim; i++) tail += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / sqrtf((vf_sum(sums[0] + sums[1]) + tail) / (float)dim + eps);
    for (i = 0; i + VW <= dim; i += VW)
        vf_store(y + i, vf_fma((vf_load(x + i) - vf_set1(mean)) * vf_set1(scale), vf_load(weight + i), vf_load(bias + i)));
    for (; i < dim; i++) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

/* y = act(gate) * up; gate_up: dim gates, then dim ups; limit 0: none */
static void activate_row(const float *gate_up, int64_t dim, int act, float limit, float *y)
{
    int64_t i = 0;
    if (act <= ACT_GELU && limit == 0.0f) /* 5 % less time than through `gated` */
        for (; i + VW <= dim; i += VW) vf_store(y + i, activate(vf_load(gate_up + i), act) * vf_load(gate_up + dim + i));
    for (; i + VW <= dim; i += VW) vf_store(y + i, gated(vf_load(gate_up + i), vf_load(gate_up + dim + i), act, limit));
    if (i == dim) return;
    float gate[VW] = {0}, up[VW] = {0}, out[VW];
    memcpy(gate, gate_up + i, (size_t)(dim - i) * 4);
    memcpy(up, gate_up + dim + i, (size_t)(dim - i) * 4);
    vf_store(out, gated(vf_load(gate), vf_load(up), act, limit));
    memcpy(y + i, out, (size_t)(dim - i) * 4);
}

/* RoPE on the first 2 * half dimensions of a head; y may be x. */
static void rope_head(const float *x, const float *cos, const float *sin, int64_t half, int64_t dim, int interleaved, float *y)
{
    if (interleaved) {
        for (int64_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            y[2 * i] = a * cos[i] - b * sin[i];
            y[2 * i + 1] = b * cos[i] + a * sin[i];
        }
    } else {
        int64_t i = 0;
        for (; i + VW <= half; i += VW) {
            vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cos + i), s = vf_load(sin + i);
            vf_store(y + i, a * c - b * s);
            vf_store(y + half + i, b * c + a * s);
        }
        for (; i < half; i++) {
            float a = x[i], b = x[half + i];
            y[i] = a * cos[i] - b * sin[i];
            y[half + i] = b * cos[i] + a * sin[i];
        }
    }
    if (y != x) memcpy(y + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * 4);
}

/* Destination of the keys and values of a step's tokens. */
typedef struct {
    kv_pages pages;
    const int64_t *slots; /* [num_tokens] */
} kv_target;

typedef struct {
    const float *x, *weight, *bias, *cos, *sin; /* bias: of a LayerNorm; NULL: RMSNorm */
    float *y;
    int64_t inner, dim, stride, half; /* rows [outer][inner][dim], `stride` floats between outer ones */
    int64_t apart; /* floats between the weights of inner rows; 0: the same for all */
    float eps, limit;
    int flag; /* activation, interleaved */
} row_job;

static void norm_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_job *j = arg;
    for (int64_t i = begin; i < end; i++) {
        const float *x = j->x + i / j->inner * j->stride + i % j->inner * j->dim;
        if (j->bias) layer_norm_row(x, j->weight, j->bias, j->eps, j->dim, j->y + i * j->dim);
        else norm_row(x, j->weight + i % j->inner * j->apart, j->eps, j->dim, j->y + i * j->dim);
    }
}

static void activate_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_job *j = arg;
    for (int64_t i = begin; i < end; i++) activate_row(j->x + i * 2 * j->dim, j->dim, j->flag, j->limit, j->y + i * j->dim);
}

static void rope_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_job *j = arg;
    for (int64_t i = begin; i < end; i++) {
        const int64_t token = i / j->inner;
        rope_head(j->x + token * j->stride + i % j->inner * j->dim, j->cos + token * j->half, j->sin + token * j->half, j->half,
                  j->dim, j->flag, j->y + i * j->dim);
    }
}

/* Processes the rows of a job, on all threads if there is enough work. The caller holds pool.lock. */
static void run_rows(task_fn fn, row_job *job, int64_t rows)
{
    if (rows * job->dim < 16384) fn(job, 0, rows, 0);
    else pool_run(fn, job, rows);
}

static void run_rows_alone(task_fn fn, row_job *job, int64_t rows)
{
    if (rows * job->dim < 16384) { /* too little work for the pool */
        fn(job, 0, rows, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool_run(fn, job, rows);
    pthread_mutex_unlock(&pool.lock);
}

/* x [outer][inner][dim], outer ones `stride` floats apart -> y contiguous */
void ll_rms_norm(const float *x, int64_t outer, int64_t inner, int64_t dim, int64_t stride, const float *weight, double eps, float *y)
{
    row_job job = {.x = x, .weight = weight, .y = y, .inner = inner, .dim = dim, .stride = stride, .eps = (float)eps};
    run_rows_alone(norm_rows, &job, outer * inner);
}

/* gate_up [rows][2 dim] -> y [rows][dim] */
void ll_activate(const float *gate_up, int64_t rows, int64_t dim, int64_t act, double limit, float *y)
{
    row_job job = {.x = gate_up, .y = y, .inner = 1, .dim = dim, .limit = (float)limit, .flag = (int)act};
    run_rows_alone(activate_rows, &job, rows);
}

/* `ll_activate` within a layer. The caller holds pool.lock. */
static void activate_all(const float *gate_up, int64_t rows, int64_t dim, int64_t act, double limit, float *y)
{
    row_job job = {.x = gate_up, .y = y, .inner = 1, .dim = dim, .limit = (float)limit, .flag = (int)act};
    if (rows * dim < 4096) activate_rows(&job, 0, rows, 0);
    else pool_run(activate_rows, &job, rows); /* an exponential per element */
}

/* x [tokens][heads][dim], tokens `stride` floats apart -> y contiguous; cos, sin [tokens][half] */
void ll_rope(const float *x, int64_t tokens, int64_t heads, int64_t dim, int64_t stride, const float *cos, const float *sin, int64_t half,
             int64_t interleaved, float *y)
{
    row_job job = {.x = x, .cos = cos, .sin = sin, .y = y, .inner = heads, .dim = dim, .stride = stride, .half = half, .flag = (int)interleaved};
    run_rows_alone(rope_rows, &job, tokens * heads);
}

/* k, v [tokens][heads][dim], tokens `k_stride` and `v_stride` floats apart, into their slots */
void ll_kv_write(const float *k, int64_t k_stride, const float *v, int64_t v_stride, int64_t tokens, const kv_target *target)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < target->pages.num_kv_heads; h++) {
            kv_store_key(&target->pages, target->slots[t], h, k + t * k_stride + h * target->pages.dim);
            kv_store_value(&target->pages, target->slots[t], h, v + t * v_stride + h * target->pages.dim);
        }
}

#endif
