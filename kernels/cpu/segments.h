/* Fused segments of a decoder layer: one call each, without Python or allocations between their ops. */
#ifndef LL_SEGMENTS_H
#define LL_SEGMENTS_H

#include "attention.h"
#include "delta.h"
#include "experts.h"
#include "layer.h"
#include "mamba.h"
#include "matmul.h"
#include "ops.h"
#include "pack.h"
#include "select.h"

typedef struct {
    int64_t hidden, num_heads, num_kv_heads, head_dim, interleaved;
    int64_t value_dim; /* elements of a value head, at most head_dim; the pages hold zeros after them */
    int64_t gated; /* each query is followed by its gate, in q and in `qkv`; 2: `qkv` has one gate per head, after all queries */
    int64_t softplus;   /* softplus(gate) multiplies the output, not sigmoid(gate) */
    int64_t late_norms; /* norms of queries and keys after RoPE */
    int64_t alone;      /* the output replaces x */
    int64_t parallel;   /* the feed-forward layer has the same input: it runs before the output is added */
    double value_scale;
    ll_norm norm, q_norm, k_norm, post_norm;
    ll_linear_op qkv, out;
} ll_attention_layer;

typedef struct {
    int64_t hidden, intermediate, act, alone; /* alone: x is not added */
    double limit; /* as in `ll_experts_layer` */
    ll_norm norm, post_norm, sum_norm; /* sum_norm: of x after the output is added */
    ll_linear_op gate_up, down;
} ll_mlp_layer;

/* This step's tokens. */
typedef struct {
    int64_t num_tokens, half;
    const float *cos, *sin; /* [rows][half] */
    const int64_t *rows;    /* [num_tokens] row of cos and sin of each token; NULL: one row per token, in order */
    kv_target cache;
} ll_step;

typedef struct {
    const ll_attention_layer *l;
    const ll_step *s;
    const float *qkv; /* for the tokens from `first` on */
    float *q;
    int64_t first;
} split_job;

/* QK-norm, RoPE and KV write. */
static void split_tokens(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const split_job *j = arg;
    const ll_attention_layer *l = j->l;
    const int64_t dim = l->head_dim, heads = l->num_heads, kv = l->num_kv_heads, half = j->s->half, width = dim * (1 + !!l->gated);
    const int64_t step = l->gated == 2 ? dim : width, queries = heads * (l->gated == 2 ? dim + 1 : width);
    const int64_t values = l->value_dim;
    const kv_pages *pages = &j->s->cache.pages;
    float head[DIM_MAX];
    for (int64_t i = begin; i < end; i++) {
        const int64_t t = j->first + i, slot = j->s->cache.slots[t];
        const int64_t turn = (j->s->rows ? j->s->rows[t] : t) * half;
        const float *row = j->qkv + i * (queries + kv * (dim + values)), *keys = row + queries, *cos = j->s->cos + turn, *sin = j->s->sin + turn;
        for (int64_t h = 0; h < heads + kv; h++) {
            const ll_norm *norm = h < heads ? &l->q_norm : &l->k_norm;
            const float *from = h < heads ? row + h * step : keys + (h - heads) * dim;
            float *to = h < heads ? j->q + (t * heads + h) * width : head;
            if (h < heads && l->gated == 1) memcpy(to + dim, from + dim, (size_t)dim * 4);
            for (int64_t d = 0; h < heads && l->gated == 2 && d < dim; d++) to[dim + d] = row[heads * dim + h];
            if (norm->weight && !l->late_norms) {
                norm_row(from, norm->weight, (float)norm->eps, dim, to);
                from = to;
            }
            rope_head(from, cos, sin, half, dim, (int)l->interleaved, to);
            if (norm->weight && l->late_norms) norm_row(to, norm->weight, (float)norm->eps, dim, to);
            if (h >= heads) kv_store_key(pages, slot, h - heads, head);
        }
        for (int64_t h = 0; h < kv; h++) {
            const float *value = keys + kv * dim + h * values;
            if (values < dim || l->value_scale != 1.0) {
                for (int64_t d = 0; d < dim; d++) head[d] = d < values ? value[d] * (float)l->value_scale : 0.0f;
                value = head;
            }
            kv_store_value(pages, slot, h, value);
        }
    }
}

static int attn_in_locked(const ll_attention_layer *l, const float *x, const ll_step *s, float *q)
{
    const int64_t width = l->qkv.n, most = s->num_tokens < AT_ONCE ? s->num_tokens : AT_ONCE;
    float *normed = (float *)scratch(2, most * (l->hidden + width) * 4), *qkv = normed + most * l->hidden;
    if (!normed) return -1;
    for (int64_t first = 0; first < s->num_tokens; first += AT_ONCE) {
        const int64_t m = s->num_tokens - first < AT_ONCE ? s->num_tokens - first : AT_ONCE;
        norm_into(&l->norm, x + first * l->hidden, m, l->hidden, normed);
        adapters_from = first;
        const int failed = linear_parts(&l->qkv, normed, m, NULL, qkv);
        adapters_from = 0;
        if (failed) return -1;
        split_job job = {l, s, qkv, q, first};
        if (m < 8) split_tokens(&job, 0, m, 0);
        else pool_run(split_tokens, &job, m);
    }
    return 0;
}

static int attn_out_locked(const ll_attention_layer *l, const float *attended, int64_t m, float *x)
{
    float *spare = (float *)scratch(2, l->post_norm.weight || has_gains(&l->out) ? m * l->hidden * 4 : 4);
    return spare ? linear_onto(&l->out, &l->post_norm, (int)l->alone, attended, m, x, spare) : -1;
}

static int mlp_rows(const ll_mlp_layer *l, const ll_linear_op *next, int64_t m, float *x)
{
    const int64_t most = m < AT_ONCE ? m : AT_ONCE;
    float *normed = (float *)scratch(2, most * (l->hidden + 3 * l->intermediate) * 4);
    float *gate_up = normed + most * l->hidden, *acted = gate_up + most * 2 * l->intermediate;
    if (!normed) return -1;
    for (; m > 0; m -= AT_ONCE, x += AT_ONCE * l->hidden, adapters_from += AT_ONCE) {
        const int64_t rows = m < AT_ONCE ? m : AT_ONCE;
        norm_into(&l->norm, x, rows, l->hidden, normed);
        hint_next(&l->down, m);
        if (l->act <= ACT_GELU && l->limit == 0.0 && gates(&l->gate_up, rows)) {
            if (linear_gated(&l->gate_up, normed, rows, (int)l->act, acted)) return -1;
        } else {
            if (linear_parts(&l->gate_up, normed, rows, NULL, gate_up)) return -1;
            activate_all(gate_up, rows, l->intermediate, l->act, l->limit, acted);
        }
        hint_next(next, m);
        if (linear_onto(&l->down, &l->post_norm, (int)l->alone, acted, rows, x, normed)) return -1;
        if (l->sum_norm.weight) norm_into(&l->sum_norm, x, rows, l->hidden, x);
    }
    return 0;
}

static int mlp_locked(const ll_mlp_layer *l, const ll_linear_op *next, int64_t m, float *x)
{
    const int failed = mlp_rows(l, next, m, x);
    adapters_from = 0;
    return failed;
}

typedef struct {
    int64_t hidden;
    ll_norm norm;
    ll_linear_op linear;
    double softcap; /* 0: none */
} ll_head_layer;

/* y = softcap * tanh(y / softcap), using the same exp as the other ops. */
static void softcap_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_job *j = arg;
    const vf cap = vf_set1(j->eps), twice = vf_set1(2.0f / j->eps);
    for (int64_t i = begin * j->dim; i < end * j->dim; i += VW) {
        float rest[VW] = {0};
        const int64_t left = end * j->dim - i;
        vf y = left >= VW ? vf_load(j->y + i) : (memcpy(rest, j->y + i, (size_t)left * 4), vf_load(rest));
        y = cap - (cap + cap) / (vf_exp(y * twice) + vf_set1(1.0f));
        vf_store(rest, y);
        memcpy(j->y + i, rest, (size_t)(left < VW ? left : VW) * 4);
    }
}

static int head_locked(const ll_head_layer *l, const float *x, int64_t m, float *logits)
{
    float *normed = (float *)scratch(2, m * l->hidden * 4);
    if (!normed) return -1;
    norm_into(&l->norm, x, m, l->hidden, normed);
    if (linear_parts(&l->linear, normed, m, NULL, logits)) return -1;
    if (l->softcap != 0.0) {
        row_job job = {.y = logits, .dim = 1024, .eps = (float)l->softcap};
        const int64_t whole = m * l->linear.n / 1024;
        run_rows(softcap_rows, &job, whole);
        job.y = logits + whole * 1024;
        job.dim = m * l->linear.n - whole * 1024;
        if (job.dim) softcap_rows(&job, 0, 1, 0);
    }
    return 0;
}

/* x [m][hidden] -> logits [m][n] */
int64_t ll_head(const ll_head_layer *l, const float *x, int64_t m, float *logits)
{
    pthread_mutex_lock(&pool.lock);
    int failed = head_locked(l, x, m, logits);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* RoPE and pages, shared by the layers of one cache group. */
typedef struct {
    const float *cos, *sin;      /* [rows][half], as in ll_step */
    const int32_t *block_table;  /* [num_seqs][max_pages] */
    const int64_t *slots;        /* [num_tokens] */
    int64_t half, max_pages;
} ll_view;

#define VIEWS 4

typedef struct {
    const ll_attention_layer *attention;
    const ll_delta_layer *delta; /* at most one of these, instead of attention */
    const ll_conv_layer *conv;
    const ll_mamba_layer *mamba; /* or besides attention: both read x, and both outputs are added */
    const ll_mlp_layer *mlp;
    const ll_experts_layer *experts; /* instead of mlp, or NULL */
    const float *sinks;   /* [num_heads], or NULL */
    kv_pages pages;
    ll_state_slots kept;
    int64_t view, window; /* window: as in ll_attention_args */
    double scale, softcap;
} ll_decoder_layer;

typedef struct {
    int64_t num_layers, num_tokens, num_seqs, num_rows;
    const int32_t *cu_query_lens, *seq_lens;
    const int64_t *rows; /* [num_rows] tokens whose hidden states are returned: last tokens of some sequences; NULL: all */
    const int64_t *positions; /* [num_tokens] rows of the views' cos and sin; NULL: one row per token */
    /* embedding and head, if computed by this call, for all tokens */
    const ll_weight *embedding; /* NULL: x holds the embedded tokens */
    const int64_t *token_ids;
    double embedding_scale;
    const ll_head_layer *head; /* NULL: no logits */
    float *logits;             /* [num_tokens][n] */
    int64_t *best;             /* [num_tokens] argmax of the logits, ties to the lower index, -1 if one is NaN; NULL: not computed */
    ll_sequences sequences;    /* for recurrent layers */
    ll_view views[VIEWS];
} ll_pass;

/* Moves the requested rows of q and x to the front, and sets `cu_rows` to their cu_query_lens. */
static void pick_rows(const ll_pass *p, int64_t width, int64_t hidden, float *q, float *x, int32_t *cu_rows)
{
    for (int64_t row = 0, seq = 0; seq <= p->num_seqs; seq++) {
        while (row < p->num_rows && p->rows[row] < p->cu_query_lens[seq]) row++;
        cu_rows[seq] = (int32_t)row;
    }
    for (int64_t i = 0; i < p->num_rows; i++) { /* rows ascend, so nothing is overwritten before it is read */
        memmove(q + i * width, q + p->rows[i] * width, (size_t)width * 4);
        memmove(x + i * hidden, x + p->rows[i] * hidden, (size_t)hidden * 4);
    }
}

static const ll_linear_op *first_product(const ll_decoder_layer *d)
{
    if (d->attention) return &d->attention->qkv;
    return d->delta ? &d->delta->inputs : d->conv ? &d->conv->inputs : &d->mamba->inputs;
}

static int states_mixer(const ll_decoder_layer *d, const ll_pass *p, const ll_linear_op *next, float *x)
{
    if (d->delta) return gated_delta_locked(d->delta, &d->kept, &p->sequences, next, p->num_tokens, x);
    if (d->conv) return short_conv_locked(d->conv, &d->kept, &p->sequences, next, p->num_tokens, x);
    return mamba_locked(d->mamba, &d->kept, &p->sequences, next, p->num_tokens, x);
}

static int ffn_locked(const ll_decoder_layer *d, const ll_linear_op *next, int64_t rows, float *x)
{
    return d->experts ? experts_locked(d->experts, next, rows, x) : mlp_locked(d->mlp, next, rows, x);
}

/* Runs a layer's mixer, and a parallel feed-forward layer; x keeps all rows, or only the requested ones if `picks`. */
static int mixer_locked(const ll_decoder_layer *d, const ll_pass *p, int picks, const ll_linear_op *after, float *q, float *attended,
                        int32_t *cu_rows, float *x)
{
    const ll_linear_op *next = d->experts ? &d->experts->router : &d->mlp->gate_up;
    const int64_t rows = picks ? p->num_rows : p->num_tokens;
    const ll_attention_layer *l = d->attention;
    if (!l) {
        if (states_mixer(d, p, next, x)) return -1;
        if (picks) pick_rows(p, 0, d->experts ? d->experts->hidden : d->mlp->hidden, q, x, cu_rows);
        return 0;
    }
    const ll_view *view = &p->views[d->view];
    const ll_step step = {p->num_tokens, view->half, view->cos, view->sin, p->positions, {d->pages, view->slots}};
    const ll_attention_args args = {d->pages, q, attended, view->block_table, picks ? cu_rows : p->cu_query_lens, p->seq_lens, d->sinks,
                                    p->num_seqs, view->max_pages, l->num_heads, d->window, (float)d->scale, (float)d->softcap, 0, l->gated ? 1 + !!l->softplus : 0};
    hint_next(d->mamba ? &d->mamba->inputs : l->parallel ? next : &l->out, rows);
    if (attn_in_locked(l, x, &step, q)) return -1;
    if (d->mamba && mamba_locked(d->mamba, &d->kept, &p->sequences, &l->out, p->num_tokens, x)) return -1;
    if (!rows) return 0;
    if (picks) pick_rows(p, l->num_heads * l->head_dim * (1 + !!l->gated), l->hidden, q, x, cu_rows);
    if (attention_locked(&args)) return -1;
    for (int64_t i = 1; l->value_dim < l->head_dim && i < rows * l->num_heads; i++) /* heads without the zeros of their values */
        memmove(attended + i * l->value_dim, attended + i * l->head_dim, (size_t)l->value_dim * 4);
    if (l->parallel) {
        if (ffn_locked(d, &l->out, rows, x)) return -1;
        hint_next(after, rows);
    } else {
        hint_next(next, rows);
    }
    return attn_out_locked(l, attended, rows, x);
}

/* Runs one layer; `next` is the following product, for prefetching, or NULL. The last layer stores keys, values and states of
 * all tokens, but computes everything else only for the requested rows (one for a long prompt); `cu_rows`: scratch for their
 * cu_query_lens. */
static int decoder_layer(const ll_decoder_layer *d, const ll_pass *p, int is_last, const ll_linear_op *next, float *q, float *attended,
                         int32_t *cu_rows, float *x)
{
    const int picks = is_last && p->rows;
    const int64_t rows = picks ? p->num_rows : p->num_tokens;
    if (mixer_locked(d, p, picks, next, q, attended, cu_rows, x)) return -1;
    if (!rows || (d->attention && d->attention->parallel)) return 0;
    return ffn_locked(d, next, rows, x);
}

static int embed_locked(const ll_pass *p, float *x)
{
    if (unpack_locked(p->embedding, p->token_ids, p->num_tokens, x)) return -3;
    if (p->embedding_scale == 1.0) return 0;
    for (int64_t i = 0; i < p->num_tokens * p->embedding->k; i++) x[i] *= (float)p->embedding_scale;
    return 0;
}

/* Runs all layers of a forward pass, x [num_tokens][hidden] in place; with `rows`, the results are its first num_rows rows.
 * Returns 0, -1 if out of memory, -3 for a token id outside the embedding. */
int64_t ll_decoder(const ll_decoder_layer *layers, const ll_pass *p, float *x)
{
    int64_t widest = 0;
    for (int64_t i = 0; i < p->num_layers; i++) {
        const ll_attention_layer *l = layers[i].attention;
        if (l && l->num_heads * l->head_dim * (1 + !!l->gated) > widest) widest = l->num_heads * l->head_dim * (1 + !!l->gated);
    }
    pthread_mutex_lock(&pool.lock);
    float *q = (float *)scratch(3, 2 * p->num_tokens * widest * 4 + (p->num_seqs + 1) * 4), *attended = q + p->num_tokens * widest;
    int failed = !q ? -1 : p->embedding ? embed_locked(p, x) : 0;
    for (int64_t i = 0; i < p->num_layers && !failed; i++) {
        const int is_last = i + 1 == p->num_layers;
        const ll_linear_op *next = !is_last ? first_product(&layers[i + 1]) : p->head ? &p->head->linear : NULL;
        failed = decoder_layer(&layers[i], p, is_last, next, q, attended, (int32_t *)(attended + p->num_tokens * widest), x);
    }
    if (!failed && p->head) failed = head_locked(p->head, x, p->num_tokens, p->logits);
    for (int64_t t = 0; !failed && p->head && p->best && t < p->num_tokens; t++)
        if (argmax_locked(p->logits + t * p->head->linear.n, p->head->linear.n, p->best + t) == -3) failed = -1;
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* x [num_tokens][hidden] -> q [num_tokens][heads][dim]; stores keys and values */
int64_t ll_attn_in(const ll_attention_layer *l, const float *x, const ll_step *s, float *q)
{
    pthread_mutex_lock(&pool.lock);
    int failed = attn_in_locked(l, x, s, q);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* x += post_norm(attended W^T) */
int64_t ll_attn_out(const ll_attention_layer *l, const float *attended, int64_t m, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = attn_out_locked(l, attended, m, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* x += post_norm(down(act(gate) * up)), gate and up of norm(x) */
int64_t ll_mlp(const ll_mlp_layer *l, int64_t m, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = mlp_locked(l, NULL, m, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

/* x += post_norm(mixture of experts of norm(x)) */
int64_t ll_experts(const ll_experts_layer *l, int64_t m, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = experts_locked(l, NULL, m, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
