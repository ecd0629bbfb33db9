/* Compressed attention of a layer in one call; the C version of kernels/compressed.py.
 *
 * What a token sees, the last tokens and then entries, is copied next to each other, as pages of a sequence of its own, so that
 * the kernels of paged attention run: a copy of 640 keys of 512 takes about a tenth of the time of 64 heads over them. */
#ifndef LL_COMPRESSED_H
#define LL_COMPRESSED_H

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "segments.h"
#include "select.h"

#define COMPRESSED_ROWS 64        /* tokens processed together: intermediates take some hundred kilobytes per token */
#define SEEN_BYTES (8 << 20)      /* copies of keys at once; more if one token sees more */
#define SEEN_PAGE 16              /* keys of a page of copies */
#define COPIED 64                 /* keys per task that copies */
#define SCORED 16                 /* index keys that are scored together */
#define SCORED_HEADS 4            /* index heads at once */

/* Makes entries, or their index keys. */
typedef struct {
    int64_t width;
    const float *places; /* [ratio][sets * width]: biases of logits */
    ll_norm norm;
    ll_linear_op rows;   /* values, then logits; each [sets][width] */
} ll_pool;

typedef struct {
    int64_t hidden, num_heads, dim, window, interleaved, alone;
    int64_t groups, num_pools, ratio, sets; /* sets: 2 if entries overlap */
    int64_t index_heads, top;               /* 0: every token sees all entries before it */
    double scale;
    ll_norm norm, q_norm, head_norm, kv_norm;
    ll_linear_op inputs, q_up, out, index_q, index_shares;
    ll_pool pools[2];
    const ll_linear_op *narrow; /* [groups] */
    const float *sinks;         /* [num_heads] */
    const float *back;          /* [2][half]: cosines and sines of ratio - 1 positions */
} ll_compressed_layer;

/* Where the sequences of a step keep what their entries are made of, and their entries. */
typedef struct {
    const int32_t *table, *entry_table;  /* [num_seqs][table_width], [num_seqs][entry_table_width] */
    const int32_t *cu_query_lens, *seq_lens;
    const int64_t *entry_slots;          /* [num_tokens] */
    uint8_t *made, *entries;             /* [slots][made_width], [places][entry_width] */
    int64_t num_seqs, table_width, entry_table_width, made_width, entry_width;
    int64_t page_size, unit, wide;       /* unit: tokens that share a place; wide: float32, else bfloat16 */
} ll_entry_step;

/* Intermediate results of the tokens being processed, and what some of them see. */
typedef struct {
    const ll_compressed_layer *l;
    const ll_step *s;
    const ll_entry_step *e;
    int64_t first, m;       /* the tokens */
    int32_t *seq;           /* [m] */
    int64_t *position;      /* [m] */
    float *normed;          /* [m][hidden] */
    float *made;            /* [m][inputs.n] */
    float *asked;           /* [m][query rank] */
    float *queries;         /* [m][heads][dim]; later what was attended, by group */
    float *attended;        /* [m][heads][dim] */
    float *pooled[2];       /* [m][pools[i].rows.n] */
    float *index_q, *shares; /* [m][index heads][index dim], [m][index heads] */
    float *low;             /* [groups][m][rank], then [m][groups][rank] */
    one_product *products;  /* [groups] */
    /* of `count` tokens from `at` on */
    int64_t at, count, cap, entries, blocks; /* cap: keys per token; entries: most of a token; blocks of SCORED entries */
    uint8_t *seen;          /* [count][cap][dim] */
    int64_t bytes;          /* of an element of `seen` */
    float *scores;          /* [count][blocks * SCORED] */
    int32_t *chosen;        /* the same: numbers of entries, the chosen ones first and in order */
    int32_t *pages, *starts, *lens; /* [count][cap / SEEN_PAGE], [count + 1], [count] */
} compressed_room;

INLINE int64_t seen_entries(const compressed_room *r, int64_t i) { return r->l->ratio ? (r->position[i] + 1) / r->l->ratio : 0; }
INLINE int64_t seen_tokens(const compressed_room *r, int64_t i)
{
    return r->position[i] + 1 < r->l->window ? r->position[i] + 1 : r->l->window;
}
INLINE int chooses(const compressed_room *r, int64_t i) { return r->l->top && seen_entries(r, i) > r->l->top; }

/* The slot of a token of a sequence, in the pages of the last tokens. */
INLINE int64_t slot_of(const compressed_room *r, int64_t i, int64_t token)
{
    const int64_t size = r->e->page_size;
    return (int64_t)r->e->table[r->seq[i] * r->e->table_width + token / size] * size + token % size;
}

/* The row of an entry of a sequence. */
INLINE int64_t entry_of(const compressed_room *r, int64_t i, int64_t number)
{
    const int64_t size = r->e->page_size, last = (number + 1) * r->l->ratio - 1;
    return (int64_t)r->e->entry_table[r->seq[i] * r->e->entry_table_width + last / size] * (size / r->e->unit) + last % size / r->e->unit;
}

/* Elements d.. of a row of float32 or bfloat16; the last ones may be fewer than a vector. */
INLINE vf stored_some(const uint8_t *row, int64_t d, int64_t dim, int64_t wide)
{
    if (d + VW <= dim) return wide ? vf_load((const float *)row + d) : vf_bf16((const uint16_t *)row + d);
    float rest[VW] = {0};
    for (int64_t i = d; i < dim; i++) rest[i - d] = wide ? ((const float *)row)[i] : bf16_to_f32(((const uint16_t *)row)[i]);
    return vf_load(rest);
}

static void store_row(uint8_t *row, const float *x, int64_t dim, int64_t wide)
{
    if (wide) memcpy(row, x, (size_t)dim * 4);
    else
        for (int64_t d = 0; d < dim; d++) ((uint16_t *)row)[d] = f32_to_bf16(x[d]);
}

/* RoPE of the last 2 * half elements, in place. */
INLINE void turn_tail(const compressed_room *r, float *x, int64_t dim, const float *cos, const float *sin)
{
    float *tail = x + dim - 2 * r->s->half;
    rope_head(tail, cos, sin, r->s->half, 2 * r->s->half, (int)r->l->interleaved, tail);
}

/* Norms query latents, stores values and what entries are made of. */
static void compressed_keys(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const ll_compressed_layer *l = r->l;
    const int64_t rank = l->inputs.n - l->dim, half = r->s->half;
    float value[DIM_MAX];
    for (int64_t i = begin; i < end; i++) {
        const float *row = r->made + i * l->inputs.n;
        const int64_t t = r->first + i, slot = r->s->cache.slots[t];
        norm_row(row, l->q_norm.weight, (float)l->q_norm.eps, rank, r->asked + i * rank);
        norm_row(row + rank, l->kv_norm.weight, (float)l->kv_norm.eps, l->dim, value);
        turn_tail(r, value, l->dim, r->s->cos + t * half, r->s->sin + t * half);
        kv_store_key(&r->s->cache.pages, slot, 0, value);
        uint8_t *to = r->e->made + slot * r->e->made_width * (r->e->wide ? 4 : 2);
        for (int64_t p = 0; p < l->num_pools; to += l->pools[p++].rows.n * (r->e->wide ? 4 : 2))
            store_row(to, r->pooled[p] + i * l->pools[p].rows.n, l->pools[p].rows.n, r->e->wide);
    }
}

/* The entry that a token completes: per channel, the mean of its tokens' values, weighted by the softmax of their logits. */
static void make_entry(const compressed_room *r, int64_t i, const ll_pool *pool, int64_t first, float *entry)
{
    const ll_compressed_layer *l = r->l;
    const int64_t span = l->sets * l->ratio, begin = r->position[i] + 1 - span, width = pool->width, wide = r->e->wide;
    const int64_t row_bytes = r->e->made_width * (wide ? 4 : 2);
    for (int64_t d = 0; d < width; d += VW) {
        const int64_t count = width - d < VW ? width - d : VW;
        vf most = vf_set1(-INFINITY), total = vf_set1(0.0f), weights = vf_set1(0.0f);
        for (int pass = 0; pass < 2; pass++)
            for (int64_t t = begin < 0 ? -begin : 0; t < span; t++) {
                const uint8_t *row = r->e->made + slot_of(r, i, begin + t) * row_bytes + first * (wide ? 4 : 2);
                const int64_t own = t / l->ratio * width, end = own + width;
                const vf logit = stored_some(row, l->sets * width + own + d, l->sets * width + end, wide) +
                                 load_some(pool->places + t % l->ratio * l->sets * width + own + d, (int)count);
                if (!pass) {
                    most = vf_max(most, logit);
                    continue;
                }
                const vf share = vf_exp(logit - most);
                total = total + share * stored_some(row, own + d, end, wide);
                weights = weights + share;
            }
        const vf mean = total / weights;
        memcpy(entry + d, &mean, (size_t)count * 4);
    }
    norm_row(entry, pool->norm.weight, (float)pool->norm.eps, width, entry);
}

static void compressed_entries(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const ll_compressed_layer *l = r->l;
    const int64_t half = r->s->half, bytes = r->e->wide ? 4 : 2;
    float entry[DIM_MAX], cos[DIM_MAX / 2], sin[DIM_MAX / 2];
    for (int64_t i = begin; i < end; i++) {
        if ((r->position[i] + 1) % l->ratio) continue;
        const float *c = r->s->cos + (r->first + i) * half, *s = r->s->sin + (r->first + i) * half;
        for (int64_t h = 0; h < half; h++) { /* the angles of its first token */
            cos[h] = c[h] * l->back[h] + s[h] * l->back[half + h];
            sin[h] = s[h] * l->back[h] - c[h] * l->back[half + h];
        }
        uint8_t *to = r->e->entries + r->e->entry_slots[r->first + i] / r->e->unit * r->e->entry_width * bytes;
        for (int64_t p = 0, first = 0; p < l->num_pools; first += l->pools[p++].rows.n) {
            make_entry(r, i, l->pools + p, first, entry);
            turn_tail(r, entry, l->pools[p].width, cos, sin);
            store_row(to, entry, l->pools[p].width, r->e->wide);
            to += l->pools[p].width * bytes;
        }
    }
}

/* Norms and rotates queries; rotates index queries. */
static void compressed_queries(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const ll_compressed_layer *l = r->l;
    const int64_t half = r->s->half, dim = l->index_heads ? l->pools[1].width : 0;
    for (int64_t i = begin; i < end; i++) {
        const float *cos = r->s->cos + (r->first + i) * half, *sin = r->s->sin + (r->first + i) * half;
        for (int64_t h = 0; h < l->num_heads; h++) {
            float *query = r->queries + (i * l->num_heads + h) * l->dim;
            norm_row(query, l->head_norm.weight, (float)l->head_norm.eps, l->dim, query);
            turn_tail(r, query, l->dim, cos, sin);
        }
        for (int64_t h = 0; h < l->index_heads && chooses(r, i); h++) turn_tail(r, r->index_q + (i * l->index_heads + h) * dim, dim, cos, sin);
    }
}

/* Scores of SCORED entries for a token: sums over index heads of relu(q . k), times the head's share; 0 for NaN. */
static void score_entries(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const ll_compressed_layer *l = r->l;
    const int64_t dim = l->pools[1].width, heads = l->index_heads, bytes = r->e->wide ? 4 : 2;
    _Alignas(64) float keys[DIM_MAX * SCORED]; /* [dim][SCORED] */
    for (int64_t task = begin; task < end; task++) {
        const int64_t i = r->at + task / r->blocks, first = task % r->blocks * SCORED, seen = seen_entries(r, i);
        if (!chooses(r, i) || first >= seen) continue;
        for (int64_t n = 0; n < SCORED; n++) {
            const int64_t number = first + n < seen ? first + n : seen - 1;
            const uint8_t *row = r->e->entries + (entry_of(r, i, number) * r->e->entry_width + l->dim) * bytes;
            for (int64_t d = 0; d < dim; d++) keys[d * SCORED + n] = r->e->wide ? ((const float *)row)[d] : bf16_to_f32(((const uint16_t *)row)[d]);
        }
        const float *q = r->index_q + i * heads * dim, *shares = r->shares + i * heads;
        float *scores = r->scores + task * SCORED;
        for (int lanes = 0; lanes < SCORED; lanes += VW) {
            vf total = vf_set1(0.0f);
            for (int64_t h = 0; h < heads; h += SCORED_HEADS) {
                const int some = heads - h < SCORED_HEADS ? (int)(heads - h) : SCORED_HEADS;
                vf sums[SCORED_HEADS];
                for (int k = 0; k < SCORED_HEADS; k++) sums[k] = vf_set1(0.0f);
                if (some == SCORED_HEADS)
                    for (int64_t d = 0; d < dim; d++)
                        for (int k = 0; k < SCORED_HEADS; k++)
                            sums[k] = vf_fma(vf_set1(q[(h + k) * dim + d]), vf_load(keys + d * SCORED + lanes), sums[k]);
                else
                    for (int64_t d = 0; d < dim; d++)
                        for (int k = 0; k < some; k++)
                            sums[k] = vf_fma(vf_set1(q[(h + k) * dim + d]), vf_load(keys + d * SCORED + lanes), sums[k]);
                for (int k = 0; k < some; k++) /* NaN stays */
                    total = vf_fma(vf_select(sums[k] < vf_set1(0.0f), vf_set1(0.0f), sums[k]), vf_set1(shares[h + k]), total);
            }
            vf_store(scores + lanes, vf_select(total != total, vf_set1(0.0f), total));
        }
    }
}

static int by_number(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* The entries with the highest scores, of equal ones the first, in order. */
static void choose_entries(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    for (int64_t n = begin; n < end; n++) {
        const int64_t i = r->at + n, seen = seen_entries(r, i);
        if (!chooses(r, i)) continue;
        int32_t *ids = r->chosen + n * r->blocks * SCORED;
        for (int64_t k = 0; k < seen; k++) ids[k] = (int32_t)k;
        select_first(r->scores + n * r->blocks * SCORED, ids, seen, r->l->top);
        qsort(ids, (size_t)r->l->top, 4, by_number);
    }
}

/* Copies what tokens see, COPIED keys at a time. */
static void copy_seen(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const kv_pages *pages = &r->s->cache.pages;
    const int64_t dim = r->l->dim, tasks = (r->cap + COPIED - 1) / COPIED, stored = kv_bytes(pages->format), own = r->e->wide ? 4 : 2;
    const int is_same = pages->format == (r->bytes == 4 ? KV_F32 : KV_BF16);
    float wide[DIM_MAX + VW];
    for (int64_t task = begin; task < end; task++) {
        const int64_t n = task / tasks, i = r->at + n, tokens = seen_tokens(r, i), last = r->lens[n];
        const int64_t from = task % tasks * COPIED, to = from + COPIED < last ? from + COPIED : last;
        for (int64_t key = from; key < to; key++) {
            uint8_t *out = r->seen + (n * r->cap + key) * dim * r->bytes;
            if (key < tokens) {
                const int64_t slot = slot_of(r, i, r->position[i] + 1 - tokens + key);
                const uint8_t *row = pages->k + slot * dim * stored;
                if (is_same) {
                    memcpy(out, row, (size_t)(dim * stored));
                    continue;
                }
                const float scale = !pages->k_scales ? 1.0f : pages->k_scales[pages->one_scale ? 0 : slot];
                for (int64_t d = 0; d < dim; d++) wide[d] = kv_number(row, d, pages->format) * scale;
                if (pages->format == KV_INT8) hadamard(wide, dim);
            } else {
                const int64_t number = key - tokens;
                const int64_t entry = entry_of(r, i, chooses(r, i) ? r->chosen[n * r->blocks * SCORED + number] : number);
                const uint8_t *row = r->e->entries + entry * r->e->entry_width * own;
                if (own == r->bytes) {
                    memcpy(out, row, (size_t)(dim * own));
                    continue;
                }
                for (int64_t d = 0; d < dim; d++) wide[d] = own == 4 ? ((const float *)row)[d] : bf16_to_f32(((const uint16_t *)row)[d]);
            }
            store_row(out, wide, dim, r->bytes == 4);
        }
    }
}

/* Rotates back what was attended, and regroups it: [groups][m][heads of a group][dim]. */
static void regroup_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const compressed_room *r = arg;
    const ll_compressed_layer *l = r->l;
    const int64_t half = r->s->half, each = l->num_heads / l->groups;
    float back[DIM_MAX / 2];
    for (int64_t i = begin; i < end; i++) {
        const float *cos = r->s->cos + (r->first + i) * half, *sin = r->s->sin + (r->first + i) * half;
        for (int64_t h = 0; h < half; h++) back[h] = -sin[h];
        for (int64_t h = 0; h < l->num_heads; h++) {
            float *head = r->queries + ((h / each * r->m + i) * each + h % each) * l->dim;
            memcpy(head, r->attended + (i * l->num_heads + h) * l->dim, (size_t)l->dim * 4);
            turn_tail(r, head, l->dim, cos, back);
        }
    }
}

static void run_few(task_fn fn, compressed_room *r, int64_t count)
{
    if (count < 2) fn(r, 0, count, 0);
    else pool_run(fn, r, count);
}

/* Attention of the tokens [at, at + count) of the current ones. */
static int attend_seen(compressed_room *r)
{
    const ll_compressed_layer *l = r->l;
    int any = 0;
    for (int64_t n = 0; n < r->count; n++) any |= chooses(r, r->at + n);
    if (any) {
        run_few(score_entries, r, r->count * r->blocks);
        run_few(choose_entries, r, r->count);
    }
    run_few(copy_seen, r, r->count * ((r->cap + COPIED - 1) / COPIED));
    const kv_pages pages = {r->seen, r->seen, NULL, NULL, 1, SEEN_PAGE, l->dim, r->bytes == 4 ? KV_F32 : KV_BF16, 0};
    const int64_t row = l->num_heads * l->dim;
    const ll_attention_args args = {.pages = pages, .q = r->queries + r->at * row, .out = r->attended + r->at * row, .block_table = r->pages,
                                    .cu_query_lens = r->starts, .seq_lens = r->lens, .sinks = l->sinks, .num_seqs = r->count,
                                    .max_pages = r->cap / SEEN_PAGE, .num_heads = l->num_heads, .scale = (float)l->scale};
    return attention_locked(&args);
}

/* Plans how many of the current tokens from `at` on are attended together, and gives them memory after the intermediates. */
static int plan_seen(compressed_room *r)
{
    const int64_t dim = r->l->dim;
    r->cap = r->entries = 0;
    for (r->count = 0; r->at + r->count < r->m; r->count++) {
        const int64_t i = r->at + r->count, all = seen_entries(r, i), some = chooses(r, i) ? r->l->top : all;
        const int64_t cap = round_up(seen_tokens(r, i) + some, SEEN_PAGE);
        if (r->count && (r->count + 1) * (cap > r->cap ? cap : r->cap) * dim * r->bytes > SEEN_BYTES) break;
        if (cap > r->cap) r->cap = cap;
        if (chooses(r, i) && all > r->entries) r->entries = all;
    }
    r->blocks = (r->entries + SCORED - 1) / SCORED;
    const int64_t keys = round_up(r->count * r->cap * dim * r->bytes, 64), scores = r->count * r->blocks * SCORED * 4;
    const int64_t numbers = r->count * (r->cap / SEEN_PAGE + 2) + 1;
    uint8_t *memory = scratch(2, keys + 2 * scores + numbers * 4);
    if (!memory) return -1;
    r->seen = memory;
    r->scores = (float *)(memory + keys);
    r->chosen = (int32_t *)(memory + keys + scores);
    r->pages = (int32_t *)(memory + keys + 2 * scores);
    r->starts = r->pages + r->count * (r->cap / SEEN_PAGE);
    r->lens = r->starts + r->count + 1;
    for (int64_t page = 0; page < r->count * (r->cap / SEEN_PAGE); page++) r->pages[page] = (int32_t)page;
    for (int64_t n = 0; n <= r->count; n++) r->starts[n] = (int32_t)n;
    for (int64_t n = 0; n < r->count; n++) {
        const int64_t i = r->at + n, all = seen_entries(r, i);
        r->lens[n] = (int32_t)(seen_tokens(r, i) + (chooses(r, i) ? r->l->top : all));
    }
    return 0;
}

static int compressed_rows(compressed_room *r, float *x)
{
    const ll_compressed_layer *l = r->l;
    const int64_t m = r->m, inner = l->num_heads / l->groups * l->dim, rank = l->narrow[0].n;
    int asks = 0;
    for (int64_t i = 0; i < m; i++) asks |= chooses(r, i);
    norm_into(&l->norm, x, m, l->hidden, r->normed);
    adapters_from = r->first;
    if (linear_parts(&l->inputs, r->normed, m, NULL, r->made)) return -1;
    for (int64_t p = 0; p < l->num_pools; p++)
        if (linear_parts(&l->pools[p].rows, r->normed, m, NULL, r->pooled[p])) return -1;
    if (asks && linear_parts(&l->index_shares, r->normed, m, NULL, r->shares)) return -1;
    run_few(compressed_keys, r, m);
    if (l->num_pools) run_few(compressed_entries, r, m);
    if (linear_parts(&l->q_up, r->asked, m, NULL, r->queries)) return -1;
    if (asks && linear_parts(&l->index_q, r->asked, m, NULL, r->index_q)) return -1;
    run_few(compressed_queries, r, m);
    for (r->at = 0; r->at < m; r->at += r->count)
        if (plan_seen(r) || attend_seen(r)) return -1;
    run_few(regroup_heads, r, m);
    float *by_group = r->low, *low = r->low + l->groups * m * rank;
    for (int64_t g = 0; g < l->groups; g++) r->products[g] = (one_product){l->narrow + g, r->queries + g * m * inner, by_group + g * m * rank, m};
    if (run_products(r->products, l->groups)) return -1;
    turn_round(by_group, low, m, l->groups, rank, rank, 0);
    const ll_norm none = {NULL, NULL, 0.0};
    float *spare = (float *)scratch(2, m * l->hidden * 4);
    return spare ? linear_onto(&l->out, &none, (int)l->alone, low, m, x, spare) : -1;
}

static int compressed_locked(const ll_compressed_layer *l, const ll_step *s, const ll_entry_step *e, float *x)
{
    const int64_t most = s->num_tokens < COMPRESSED_ROWS ? s->num_tokens : COMPRESSED_ROWS, heads = l->num_heads;
    const int64_t of_index = l->index_heads ? l->index_heads * (l->pools[1].width + 1) : 0;
    const int64_t each[10] = {l->hidden, l->inputs.n, l->inputs.n - l->dim, heads * l->dim, heads * l->dim,
                              l->num_pools > 0 ? l->pools[0].rows.n : 0, l->num_pools > 1 ? l->pools[1].rows.n : 0, of_index,
                              of_index ? l->index_heads : 0, 2 * l->groups * l->narrow[0].n};
    int64_t floats = 0;
    for (int i = 0; i < 10; i++) floats += each[i];
    const int64_t numbers = most * 16, products = l->groups * (int64_t)sizeof(one_product);
    uint8_t *memory = scratch(3, numbers + products + most * floats * 4);
    if (!memory) return -1;
    compressed_room r = {.l = l, .s = s, .e = e, .products = (one_product *)(memory + numbers)};
    r.position = (int64_t *)memory;
    r.seq = (int32_t *)(memory + most * 8);
    float *at = (float *)(memory + numbers + products);
    float **parts[10] = {&r.normed, &r.made, &r.asked, &r.queries, &r.attended, &r.pooled[0], &r.pooled[1], &r.index_q, &r.shares, &r.low};
    for (int i = 0; i < 10; i++) {
        *parts[i] = at;
        at += most * each[i];
    }
    const int64_t format = s->cache.pages.format;
    r.bytes = format == KV_F32 || format == KV_F16 || e->wide ? 4 : 2;
    int failed = 0;
    int64_t seq = 0;
    for (; r.first < s->num_tokens && !failed; r.first += COMPRESSED_ROWS) {
        r.m = s->num_tokens - r.first < COMPRESSED_ROWS ? s->num_tokens - r.first : COMPRESSED_ROWS;
        for (int64_t i = 0; i < r.m; i++) {
            const int64_t t = r.first + i;
            while (e->cu_query_lens[seq + 1] <= t) seq++;
            r.seq[i] = (int32_t)seq;
            r.position[i] = e->seq_lens[seq] - (e->cu_query_lens[seq + 1] - t);
        }
        failed = compressed_rows(&r, x + r.first * l->hidden);
    }
    adapters_from = 0;
    return failed;
}

/* x += out(compressed attention of norm(x)); writes the last tokens, what entries are made of, and entries. */
int64_t ll_compressed(const ll_compressed_layer *l, const ll_step *s, const ll_entry_step *e, float *x)
{
    pthread_mutex_lock(&pool.lock);
    int failed = compressed_locked(l, s, e, x);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
