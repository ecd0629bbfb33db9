/* Latent attention (MLA) of a layer in one call; the C version of `latent_attention` in kernels/mixers.py. */
#ifndef LL_LATENT_H
#define LL_LATENT_H

#include "attention.h"
#include "experts.h"
#include "segments.h"

#define LATENT_ROWS 128 /* tokens processed together: intermediates take some hundred kilobytes per token */

typedef struct {
    int64_t hidden, num_heads, rank, turned, still, value, interleaved;
    int64_t gated, alone; /* `qkv` ends with one gate per head, whose sigmoid multiplies the head's output; x is not added */
    ll_norm norm, q_norm, kv_norm, post_norm;
    ll_linear_op qkv, q_up, out;         /* q_up without parts: absent */
    const ll_linear_op *k_up, *v_up;     /* [num_heads] */
} ll_latent_layer;

/* Intermediate results of the tokens being processed. */
typedef struct {
    const ll_latent_layer *l;
    const ll_step *s;
    const float *growth; /* [tokens] factor of each token's queries; NULL: none */
    int64_t first, m;    /* the tokens */
    float *normed;    /* [m][hidden] */
    float *made;      /* [m][queries or query latent, KV latent, RoPE part of the key, gates]: output of qkv */
    float *asked;     /* [m][queries or query latent], normalized */
    float *queries;   /* [m][heads][still + turned]; later the heads' outputs */
    float *apart;     /* [heads][m][still], for per-head products; later [heads][m][value] */
    float *met;       /* [heads][m][rank]: queries in latent space */
    float *q;         /* [m][heads][rank + turned] */
    float *attended;  /* [m][heads][rank] */
    one_product *products;
    int32_t *starts, *lens; /* cu_query_lens and seq_lens for these tokens */
} latent_room;

/* Elements of a token's queries, or of their latent. */
INLINE int64_t queries_of(const ll_latent_layer *l) { return l->qkv.n - l->rank - l->turned - (l->gated ? l->num_heads : 0); }

/* Stores latents and the RoPE parts of the keys. */
static void latent_keys(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const latent_room *r = arg;
    const ll_latent_layer *l = r->l;
    const int64_t of_q = queries_of(l), half = r->s->half;
    const kv_pages *pages = &r->s->cache.pages;
    kv_pages turned = *pages;
    float kept[DIM_MAX], key[TURNED_MAX];
    turned.dim = l->turned;
    for (int64_t i = begin; i < end; i++) {
        const float *row = r->made + i * l->qkv.n, *latent = row + of_q;
        const int64_t t = r->first + i;
        norm_row(latent, l->kv_norm.weight, (float)l->kv_norm.eps, l->rank, kept);
        rope_head(latent + l->rank, r->s->cos + t * half, r->s->sin + t * half, half, l->turned, (int)l->interleaved, key);
        kv_store_key(pages, r->s->cache.slots[t], 0, kept);
        if (l->turned) kv_store_value(&turned, r->s->cache.slots[t], 0, key);
        if (l->q_norm.weight) norm_row(row, l->q_norm.weight, (float)l->q_norm.eps, of_q, r->asked + i * of_q);
        else memcpy(r->asked + i * of_q, row, (size_t)of_q * 4);
        for (int64_t d = 0; r->growth && d < of_q; d++) r->asked[i * of_q + d] *= r->growth[t];
    }
}

/* Splits queries: the RoPE part goes to q, the rest to `apart`, head by head. */
static void latent_queries(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const latent_room *r = arg;
    const ll_latent_layer *l = r->l;
    const int64_t heads = l->num_heads, half = r->s->half;
    const float *from = l->q_up.parts ? r->queries : r->asked;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++) {
            const float *query = from + (i * heads + h) * (l->still + l->turned);
            const int64_t at = (r->first + i) * half;
            memcpy(r->apart + (h * r->m + i) * l->still, query, (size_t)l->still * 4);
            rope_head(query + l->still, r->s->cos + at, r->s->sin + at, half, l->turned, (int)l->interleaved,
                      r->q + (i * heads + h) * (l->rank + l->turned) + l->rank);
        }
}

/* Transposes [heads][m][size] to [m][heads][size] with heads `stride` floats apart, or back. */
static void turn_round(float *by_head, float *by_token, int64_t m, int64_t heads, int64_t size, int64_t stride, int back)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t h = 0; h < heads; h++) {
            float *first = by_head + (h * m + i) * size, *second = by_token + (i * heads + h) * stride;
            if (back) memcpy(first, second, (size_t)size * 4);
            else memcpy(second, first, (size_t)size * 4);
        }
}

/* Multiplies the heads' outputs by the sigmoids of their gates. */
static void gate_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const latent_room *r = arg;
    const int64_t heads = r->l->num_heads, size = r->l->value;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++) {
            const float factor = sigmoid(vf_set1(r->made[(i + 1) * r->l->qkv.n - heads + h]))[0];
            for (int64_t d = 0; d < size; d++) r->queries[(i * heads + h) * size + d] *= factor;
        }
}

/* One product per head: x and out [heads][m][...]. */
static int by_head(const latent_room *r, const ll_linear_op *each, const float *x, int64_t k, float *out)
{
    for (int64_t h = 0; h < r->l->num_heads; h++)
        r->products[h] = (one_product){each + h, x + h * r->m * k, out + h * r->m * each->n, r->m};
    return run_products(r->products, r->l->num_heads);
}

static void run_tokens(task_fn fn, latent_room *r)
{
    if (r->m < 8) fn(r, 0, r->m, 0);
    else pool_run(fn, r, r->m);
}

/* Causal attention of the current tokens' queries. */
static int latent_attend(const latent_room *r, const ll_attention_args *given)
{
    ll_attention_args args = *given;
    const int32_t first = (int32_t)r->first, end = (int32_t)(r->first + r->m);
    if (!r->l->turned) { /* keys are latents alone, like values */
        args.pages.v = args.pages.k;
        args.pages.v_scales = args.pages.k_scales;
    }
    args.q = r->q;
    args.out = r->attended;
    args.cu_query_lens = r->starts;
    args.seq_lens = r->lens;
    r->starts[0] = 0;
    for (int64_t seq = 0; seq < given->num_seqs; seq++) {
        const int32_t last = given->cu_query_lens[seq + 1], to = last < first ? first : last > end ? end : last;
        r->starts[seq + 1] = to - first;
        r->lens[seq] = given->seq_lens[seq] - (last > to ? last - to : 0);
    }
    return attention_locked(&args);
}

static int latent_rows(latent_room *r, const ll_attention_args *given, float *x)
{
    const ll_latent_layer *l = r->l;
    const int64_t m = r->m, heads = l->num_heads;
    norm_into(&l->norm, x, m, l->hidden, r->normed);
    adapters_from = r->first;
    if (linear_parts(&l->qkv, r->normed, m, NULL, r->made)) return -1;
    run_tokens(latent_keys, r);
    if (l->q_up.parts && linear_parts(&l->q_up, r->asked, m, NULL, r->queries)) return -1;
    run_tokens(latent_queries, r);
    if (by_head(r, l->k_up, r->apart, l->still, r->met)) return -1;
    turn_round(r->met, r->q, m, heads, l->rank, l->rank + l->turned, 0);
    if (latent_attend(r, given)) return -1;
    turn_round(r->met, r->attended, m, heads, l->rank, l->rank, 1);
    if (by_head(r, l->v_up, r->met, l->rank, r->apart)) return -1;
    turn_round(r->apart, r->queries, m, heads, l->value, l->value, 0);
    if (l->gated) run_tokens(gate_heads, r);
    float *spare = (float *)scratch(2, m * l->hidden * 4);
    return spare ? linear_onto(&l->out, &l->post_norm, (int)l->alone, r->queries, m, x, spare) : -1;
}

static int latent_locked(const ll_latent_layer *l, const ll_step *s, const ll_attention_args *given, const float *growth, float *x)
{
    const int64_t most = s->num_tokens < LATENT_ROWS ? s->num_tokens : LATENT_ROWS, heads = l->num_heads;
    const int64_t of_q = queries_of(l), asked = l->still + l->turned;
    const int64_t single = l->still > l->value ? l->still : l->value, query = asked > l->value ? asked : l->value;
    const int64_t each[8] = {l->hidden, l->qkv.n, of_q, heads * query, heads * single, heads * l->rank, heads * (l->rank + l->turned),
                             heads * l->rank};
    int64_t floats = 0;
    for (int i = 0; i < 8; i++) floats += each[i];
    uint8_t *memory = scratch(3, heads * (int64_t)sizeof(one_product) + most * floats * 4 + (2 * given->num_seqs + 1) * 4);
    if (!memory) return -1;
    latent_room r = {.l = l, .s = s, .growth = growth, .products = (one_product *)memory};
    float *at = (float *)(memory + heads * (int64_t)sizeof(one_product)), **parts[8] = {&r.normed, &r.made, &r.asked, &r.queries,
                                                                                       &r.apart, &r.met, &r.q, &r.attended};
    for (int i = 0; i < 8; i++) {
        *parts[i] = at;
        at += most * each[i];
    }
    r.starts = (int32_t *)at;
    r.lens = r.starts + given->num_seqs + 1;
    int failed = 0;
    for (; r.first < s->num_tokens && !failed; r.first += LATENT_ROWS) {
        r.m = s->num_tokens - r.first < LATENT_ROWS ? s->num_tokens - r.first : LATENT_ROWS;
        failed = latent_rows(&r, given, x + r.first * l->hidden);
    }
    adapters_from = 0;
    return failed;
}

/* x += post_norm(out(latent attention of norm(x))); writes latents. `given`: attention arguments without q and out. */
int64_t ll_latent(const ll_latent_layer *l, const ll_step *s, const ll_attention_args *given, const float *growth, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = latent_locked(l, s, given, growth, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
