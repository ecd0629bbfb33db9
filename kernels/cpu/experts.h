/* Mixture of experts in one call: router, selection, and the products of all experts with tokens, many of them in one pool
 * call. The C version of kernels/experts.py. */
#ifndef LL_EXPERTS_H
#define LL_EXPERTS_H

#include "layer.h"
#include "matmul.h"
#include "ops.h"

#define PAIRS 256        /* (token, expert) pairs processed together: intermediates stay in the cache */
#define AT_ONCE_MOST 64  /* products per pool call */
#define EXPERTS_MAX 4096 /* localllm/checkpoint/fields.py */

enum { ROUTE_SOFTMAX, ROUTE_SOFTMAX_TOPK, ROUTE_SIGMOID, ROUTE_SIGMOID_TOPK, ROUTE_SQRT_SOFTPLUS };

typedef struct {
    int64_t hidden, intermediate, shared, num_experts, top_k, router_kind, renormalise, act, groups, group_top_k;
    int64_t share_inputs; /* expert weights multiply the inputs instead of the outputs */
    int64_t alone;        /* the output replaces x */
    double scale, limit, shared_limit, shared_scale; /* limit 0: none */
    const float *choice_bias; /* [num_experts], or NULL */
    ll_norm norm, post_norm;
    ll_linear_op router, shared_gate_up, shared_down, shared_gate; /* without parts: absent */
    const ll_linear_op *gate_up, *down; /* [num_experts] */
} ll_experts_layer;

typedef struct {
    const ll_linear_op *op;
    const float *x; /* [m][k] */
    float *out;     /* [m][n] */
    int64_t m;
} one_product;

typedef struct {
    int64_t count, first[AT_ONCE_MOST + 1]; /* first task of each product */
    activations a[AT_ONCE_MOST];
    product p[AT_ONCE_MOST];
} products_job;

static void product_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    products_job *j = arg;
    for (int64_t i = 0; i < j->count && j->first[i] < end; i++) {
        if (j->first[i + 1] <= begin) continue;
        const int64_t from = begin > j->first[i] ? begin - j->first[i] : 0;
        const int64_t to = (end < j->first[i + 1] ? end : j->first[i + 1]) - j->first[i];
        (j->a[i].exact ? float_tiles : int_tiles)(&j->p[i], from, to, thread);
    }
}

/* Runs independent products; parts of one stay together. Returns 0, or -1 if out of memory. */
static int run_products(const one_product *each, int64_t count)
{
    static products_job job; /* the caller holds pool.lock */
    while (count > 0) {
        int64_t taken = 0, bytes = 0;
        job.count = 0;
        for (; taken < count && job.count + each[taken].op->parts <= AT_ONCE_MOST; taken++) {
            const one_product *o = each + taken;
            for (int64_t part = 0, at = 0; part < o->op->parts; at += o->op->weight[part++]->n) {
                const ll_weight *w = o->op->weight[part];
                const int64_t i = job.count++;
                job.a[i] = (activations){.x = o->x, .m = o->m, .exact = o->op->takes[part] == TAKE_FLOATS || code_is_float(w->code)};
                job.a[i].form = x_form(w, o->m, o->op->takes[part]);
                job.p[i] = (product){w, &job.a[i], o->op->bias[part], NULL, o->out + at, o->op->n, 0};
                job.first[i + 1] = (i ? job.first[i] : 0) + (o->m + SLAB - 1) / SLAB * w->tiles;
                bytes += activation_bytes(w, &job.a[i]);
            }
        }
        uint8_t *memory = scratch(0, bytes);
        if (!memory) return -1;
        for (int64_t i = 0; i < job.count; i++) {
            const activations *before = i ? &job.a[i - 1] : NULL;
            if (i && before->x == job.a[i].x && before->m == job.a[i].m && prepares_alike(job.p[i - 1].w, before, job.p[i].w, &job.a[i])) {
                job.a[i] = *before;
                continue;
            }
            prepare_activations(job.p[i].w, &job.a[i], memory);
            memory += activation_bytes(job.p[i].w, &job.a[i]);
        }
        pool_run(product_tiles, &job, job.first[job.count]);
        each += taken;
        count -= taken;
    }
    return 0;
}

INLINE float exp_of(float x)
{
    float out[VW];
    vf_store(out, vf_exp(vf_set1(x)));
    return out[0];
}

/* s = exp(s - largest), divided by their sum */
static void softmax_row(float *s, int64_t n)
{
    float largest = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < n; i++) largest = s[i] > largest ? s[i] : largest;
    for (int64_t i = 0; i < n; i++) total += s[i] = exp_of(s[i] - largest);
    for (int64_t i = 0; i < n; i++) s[i] /= total;
}

/* Index of the largest element that is not taken, ties to the lower index; always returns one. */
static int64_t best_left(const float *s, const uint8_t *taken, int64_t n)
{
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || s[i] > s[best])) best = i;
    return best;
}

/* Sets experts outside the best groups to -inf; a group's score is its best expert, or the sum of its best two. */
static void keep_groups(const ll_experts_layer *l, float *wanted)
{
    static float of_groups[EXPERTS_MAX]; /* the caller holds pool.lock */
    uint8_t taken[EXPERTS_MAX] = {0};
    const int64_t size = l->num_experts / l->groups;
    for (int64_t g = 0; g < l->groups; g++) {
        uint8_t seen[EXPERTS_MAX] = {0};
        const int64_t first = best_left(wanted + g * size, seen, size);
        of_groups[g] = wanted[g * size + first];
        seen[first] = 1;
        if (l->router_kind == ROUTE_SIGMOID && size > 1) of_groups[g] += wanted[g * size + best_left(wanted + g * size, seen, size)];
    }
    for (int64_t i = 0; i < l->group_top_k; i++) taken[best_left(of_groups, taken, l->groups)] = 1;
    for (int64_t e = 0; e < l->num_experts; e++)
        if (!taken[e / size]) wanted[e] = -INFINITY;
}

/* Selects one token's experts and their weights from logits [num_experts]; `wanted`: scratch of the same size. */
static void route_row(const ll_experts_layer *l, float *scores, float *wanted, int32_t *chosen, float *shares)
{
    const int64_t n = l->num_experts, k = l->top_k;
    uint8_t taken[EXPERTS_MAX];
    float total = 0.0f;
    memset(taken, 0, (size_t)n);
    if (l->router_kind == ROUTE_SOFTMAX) softmax_row(scores, n);
    else if (l->router_kind == ROUTE_SIGMOID)
        for (int64_t e = 0; e < n; e++) scores[e] = 1.0f / (1.0f + exp_of(-scores[e]));
    else if (l->router_kind == ROUTE_SQRT_SOFTPLUS)
        for (int64_t e = 0; e < n; e++) scores[e] = sqrtf(softplus_of(scores[e]));
    for (int64_t e = 0; e < n; e++) wanted[e] = scores[e] + (l->choice_bias ? l->choice_bias[e] : 0.0f);
    if (l->groups > 1) keep_groups(l, wanted);
    for (int64_t i = 0; i < k; i++) {
        const int64_t best = best_left(wanted, taken, n);
        taken[best] = 1;
        chosen[i] = (int32_t)best;
        shares[i] = scores[best];
    }
    if (l->router_kind == ROUTE_SOFTMAX_TOPK) softmax_row(shares, k);
    else if (l->router_kind == ROUTE_SIGMOID_TOPK)
        for (int64_t i = 0; i < k; i++) shares[i] = 1.0f / (1.0f + exp_of(-shares[i]));
    if (l->renormalise && l->router_kind != ROUTE_SOFTMAX_TOPK) {
        for (int64_t i = 0; i < k; i++) total += shares[i];
        for (int64_t i = 0; i < k; i++) shares[i] /= total + 1e-20f;
    }
    for (int64_t i = 0; i < k; i++) shares[i] *= (float)l->scale;
}

/* Intermediate results of the tokens being processed. */
typedef struct {
    float *normed, *total, *scores, *shares, *gathered, *gate_up, *acted;
    int32_t *chosen, *first, *pairs; /* first: start of each expert's pairs; pairs: token * top_k + slot, by expert */
    one_product *products;
} mixture_room;

/* Runs experts with tokens from `begin` on, up to PAIRS pairs, and adds their outputs to `total`. Returns the next expert, or
 * -1 if out of memory. */
static int64_t some_experts(const ll_experts_layer *l, const mixture_room *r, int64_t rows, int64_t begin)
{
    const int64_t hidden = l->hidden, inner = l->intermediate, k = l->top_k, at = r->first[begin];
    int64_t end = begin, count = 0;
    for (; end < l->num_experts && r->first[end + 1] - at <= PAIRS; end++) {
        const int64_t from = r->first[end] - at, m = r->first[end + 1] - at - from;
        if (!m) continue;
        const int gathers = rows > 1 || l->share_inputs;
        for (int64_t i = 0; gathers && i < m; i++) {
            const int64_t pair = r->pairs[at + from + i];
            const float *row = r->normed + pair / k * hidden;
            float *to = r->gathered + (from + i) * hidden;
            if (!l->share_inputs) memcpy(to, row, (size_t)hidden * 4);
            else for (int64_t d = 0; d < hidden; d++) to[d] = row[d] * r->shares[pair];
        }
        const float *x = gathers ? r->gathered + from * hidden : r->normed;
        r->products[count++] = (one_product){&l->gate_up[end], x, r->gate_up + from * 2 * inner, m};
    }
    const int64_t num_pairs = r->first[end] - at;
    if (!count) return end;
    hint_next(&l->down[r->products[0].op - l->gate_up], rows);
    if (run_products(r->products, count)) return -1;
    activate_all(r->gate_up, num_pairs, inner, l->act, l->limit, r->acted);
    for (int64_t i = 0; i < count; i++) {
        one_product *o = r->products + i;
        const int64_t from = (o->out - r->gate_up) / (2 * inner);
        *o = (one_product){&l->down[o->op - l->gate_up], r->acted + from * inner, r->gathered + from * hidden, o->m};
    }
    if (run_products(r->products, count)) return -1;
    for (int64_t i = 0; i < num_pairs; i++) { /* in order of experts for every token */
        const int64_t pair = r->pairs[at + i];
        const float *given = r->gathered + i * hidden, share = l->share_inputs ? 1.0f : r->shares[pair];
        float *total = r->total + pair / k * hidden;
        for (int64_t d = 0; d < hidden; d++) total[d] += given[d] * share;
    }
    return end;
}

/* Selects experts for `rows` normalized tokens and sorts the pairs by expert. */
static int choose_experts(const ll_experts_layer *l, const mixture_room *r, int64_t rows)
{
    const int64_t n = l->num_experts, k = l->top_k;
    if (linear_parts(&l->router, r->normed, rows, NULL, r->scores)) return -1;
    memset(r->first, 0, (size_t)(n + 2) * 4);
    for (int64_t t = 0; t < rows; t++) route_row(l, r->scores + t * n, r->scores + rows * n, r->chosen + t * k, r->shares + t * k);
    for (int64_t i = 0; i < rows * k; i++) r->first[r->chosen[i] + 2]++;
    for (int64_t e = 0; e <= n; e++) r->first[e + 1] += r->first[e]; /* first[e + 1]: where the next pair of e goes */
    for (int64_t i = 0; i < rows * k; i++) r->pairs[r->first[r->chosen[i] + 1]++] = (int32_t)i;
    return 0;
}

/* Adds the shared expert's output for all rows to `total`. */
static int shared_expert(const ll_experts_layer *l, const mixture_room *r, int64_t rows)
{
    const int64_t hidden = l->hidden;
    if (!l->shared) return 0;
    if (linear_parts(&l->shared_gate_up, r->normed, rows, NULL, r->gate_up)) return -1;
    activate_all(r->gate_up, rows, l->shared, l->act, l->shared_limit, r->acted);
    if (linear_parts(&l->shared_down, r->acted, rows, NULL, r->gathered)) return -1;
    if (l->shared_gate.parts && linear_parts(&l->shared_gate, r->normed, rows, NULL, r->scores)) return -1;
    for (int64_t t = 0; t < rows; t++) {
        const float share = (float)l->shared_scale * (l->shared_gate.parts ? 1.0f / (1.0f + exp_of(-r->scores[t])) : 1.0f);
        for (int64_t d = 0; d < hidden; d++) r->total[t * hidden + d] += r->gathered[t * hidden + d] * share;
    }
    return 0;
}

/* x += post_norm(mixture of experts of norm(x)); `next` is the following product, for prefetching, or NULL. */
static int experts_locked(const ll_experts_layer *l, const ll_linear_op *next, int64_t m, float *x)
{
    const int64_t most = m < PAIRS ? m : PAIRS, n = l->num_experts, k = l->top_k, hidden = l->hidden;
    const int64_t held = most * k < PAIRS ? most * k : PAIRS; /* pairs per call; one expert has at most `most` */
    const int64_t wide = held * l->intermediate > most * l->shared ? held * l->intermediate : most * l->shared;
    const int64_t floats = (2 * most + (held > most ? held : most)) * hidden + (most + 1) * n + most * k + 3 * wide;
    const int64_t ints = 2 * most * k + n + 2;
    one_product *products = (one_product *)scratch(2, held * (int64_t)sizeof(one_product) + (floats + ints) * 4);
    mixture_room r = {.products = products, .normed = (float *)(products + held)};
    if (!products) return -1;
    r.total = r.normed + most * hidden;
    r.gathered = r.total + most * hidden;
    r.scores = r.gathered + (held > most ? held : most) * hidden;
    r.shares = r.scores + (most + 1) * n;
    r.gate_up = r.shares + most * k;
    r.acted = r.gate_up + 2 * wide;
    r.chosen = (int32_t *)(r.acted + wide);
    r.pairs = r.chosen + most * k;
    r.first = r.pairs + most * k;
    for (int64_t done = 0; done < m; done += most, x += most * hidden) {
        const int64_t rows = m - done < most ? m - done : most;
        norm_into(&l->norm, x, rows, hidden, r.normed);
        if (choose_experts(l, &r, rows)) return -1;
        memset(r.total, 0, (size_t)(rows * hidden) * 4);
        for (int64_t expert = 0; expert < n;)
            if ((expert = some_experts(l, &r, rows, expert)) < 0) return -1;
        if (shared_expert(l, &r, rows)) return -1;
        hint_next(next, m);
        if (l->post_norm.weight) {
            norm_onto_job job = {&l->post_norm, hidden, r.total, x};
            norm_onto_rows(&job, 0, rows, 0);
        } else if (l->alone)
            memcpy(x, r.total, (size_t)(rows * hidden) * 4);
        else
            for (int64_t i = 0; i < rows * hidden; i++) x[i] += r.total[i];
    }
    return 0;
}

#endif
