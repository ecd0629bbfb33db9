/* Paged attention with online softmax, float32 sums.
 *
 * A query's result is a fixed sequence of steps over absolute key positions: keys in tiles of 32, tiles in segments of
 * 256 with a softmax of their own, segments merged in order. Keys a query does not see add exact zeros or are skipped,
 * so neither the chunk it comes in, nor the batch, nor the split of long contexts over threads changes a bit. */
#ifndef LL_ATTENTION_H
#define LL_ATTENTION_H

#include <math.h>

#include "activations.h"
#include "kv.h"

#define SUB 16   /* keys of a sub-tile: one transposition */
#define KEYS 32  /* keys per softmax step */
#define SEGMENT 256
#define ROW_FLOATS 4096 /* of accumulators per block of query rows: 16 KiB, half the first-level cache */
#define ROWS_MAX 64
#define SPLIT_QUERIES 4 /* a sequence with so few queries is split over its segments */

typedef struct {
    kv_pages pages;
    const float *q;
    float *out;
    const int32_t *block_table; /* [num_seqs, max_pages] */
    const int32_t *cu_query_lens, *seq_lens;
    const float *sinks;         /* [num_heads], or NULL */
    int64_t num_seqs, max_pages, num_heads;
    int64_t window;             /* 0: none */
    float scale, softcap;       /* softcap 0: none */
} ll_attention_args;

/* Rows of one block: flattened (token, head of the KV head) of one sequence. */
typedef struct {
    int64_t seq, kv_head, first_row, rows;
    int64_t first_segment, end_segment;
    float *partial; /* NULL: write the result; else [rows][dim + 2] sums of the one segment */
} attention_task;

typedef struct {
    const ll_attention_args *a;
    const attention_task *tasks;
} attention_job;

typedef struct {
    _Alignas(64) float keys[KEYS * DIM_MAX];   /* transposed: [sub-tile][dim][16 keys] */
    _Alignas(64) float values[KEYS * DIM_MAX];
    _Alignas(64) float q[ROW_FLOATS];
    _Alignas(64) float acc[ROW_FLOATS];       /* the segment's sums, [rows][padded dim] */
    _Alignas(64) float total[ROW_FLOATS];     /* of the segments before */
    float max[ROWS_MAX], sum[ROWS_MAX], total_max[ROWS_MAX], total_sum[ROWS_MAX];
    int64_t low[ROWS_MAX], high[ROWS_MAX];    /* keys [low, high] of a row */
} attention_space;

static const int32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#if VW == 16
INLINE void transpose16(__m512 r[16])
{
    __m512 t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    }
}
#endif

/* 16 consecutive keys in the pages, `first` a multiple of 16; zeros where the sequence has none. */
typedef struct {
    const uint8_t *k[SUB], *v[SUB];
    float k_scale[SUB], v_scale[SUB];
} sub_rows;

INLINE void find_rows(const ll_attention_args *a, const attention_task *t, int64_t first, int64_t low, int64_t high, sub_rows *r,
                      const int64_t format)
{
    static const uint8_t zeros[DIM_MAX * 4];
    const kv_pages *p = &a->pages;
    const int64_t row_bytes = p->dim * kv_bytes(format);
    const int32_t *pages = a->block_table + t->seq * a->max_pages;
    const int whole = p->page_size % SUB == 0; /* the sub-tile lies in one page */
    int64_t page = -1, in_page = 0;
    if (whole) {
        page = pages[first / p->page_size];
        in_page = first % p->page_size;
    }
    for (int j = 0; j < SUB; j++) {
        const int64_t key = first + j;
        if (!whole && key >= low && key <= high) {
            page = pages[key / p->page_size];
            in_page = key % p->page_size - j;
        }
        const int64_t row = (page * p->num_kv_heads + t->kv_head) * p->page_size + in_page + j;
        const int there = key >= low && key <= high && page >= 0;
        r->k[j] = there ? p->k + row * row_bytes : zeros;
        r->v[j] = there ? p->v + row * row_bytes : zeros;
        if (format == KV_INT8 || format == KV_FP8) {
            r->k_scale[j] = there ? p->k_scales[p->one_scale ? 0 : row] : 0.0f;
            r->v_scale[j] = there ? p->v_scales[p->one_scale ? 0 : row] : 0.0f;
        }
    }
}

/* Keys [first, first + 16) of a sequence into the space's sub-tile; those outside [low, high] become zeros. */
INLINE void load_sub(const ll_attention_args *a, const attention_task *t, int64_t first, int64_t low, int64_t high, float *keys,
                     float *values, const int64_t format)
{
    const int64_t dim = a->pages.dim, padded = round_up(dim, 16);
    const int scaled = format == KV_INT8 || format == KV_FP8;
    sub_rows r;
    find_rows(a, t, first, low, high, &r, format);
    int64_t d = 0;
#if VW == 16
    for (; format == KV_BF16 && d + 32 <= dim; d += 32) { /* two dimensions at a time, as the halves of a 32-bit number */
        __m512 pair[16];
        for (int j = 0; j < SUB; j++) pair[j] = _mm512_loadu_ps((const uint16_t *)r.k[j] + d);
        transpose16(pair);
        for (int j = 0; j < 16; j++) {
            vf_store(keys + (d + 2 * j) * SUB, (vf)((vi)pair[j] << 16));
            vf_store(keys + (d + 2 * j + 1) * SUB, (vf)((vi)pair[j] & (int32_t)0xffff0000));
        }
    }
    for (; d + 16 <= dim; d += 16) {
        __m512 one[16];
        for (int j = 0; j < SUB; j++) one[j] = (__m512)kv_vector(r.k[j], d, format);
        transpose16(one);
        for (int j = 0; j < 16; j++) {
            vf key = (vf)one[j];
            vf_store(keys + (d + j) * SUB, scaled ? key * vf_load(r.k_scale) : key);
        }
    }
#endif
    for (; d < padded; d++)
        for (int j = 0; j < SUB; j++) {
            const float key = d < dim ? kv_number(r.k[j], d, format) : 0.0f;
            keys[d * SUB + j] = scaled ? key * r.k_scale[j] : key;
        }
    const int64_t whole = dim - dim % VW;
    for (int j = 0; j < SUB; j++) {
        const float factor = scaled ? r.v_scale[j] : 1.0f;
        for (d = 0; d < whole; d += VW) {
            vf value = kv_vector(r.v[j], d, format);
            vf_store(values + j * padded + d, scaled ? value * vf_set1(factor) : value);
        }
        for (; d < padded; d++) {
            const float value = d < dim ? kv_number(r.v[j], d, format) : 0.0f;
            values[j * padded + d] = scaled ? value * factor : value;
        }
    }
}

/* Asks for the 16 keys and values at `first`, which come next. */
INLINE void fetch_sub(const ll_attention_args *a, const attention_task *t, int64_t first, int64_t high)
{
    const kv_pages *p = &a->pages;
    if (first > high || p->page_size % SUB) return;
    const int64_t page = a->block_table[t->seq * a->max_pages + first / p->page_size], row_bytes = p->dim * kv_bytes(p->format);
    if (page < 0) return;
    const int64_t at = ((page * p->num_kv_heads + t->kv_head) * p->page_size + first % p->page_size) * row_bytes;
    for (int64_t i = 0; i < SUB * row_bytes; i += 64) {
        __builtin_prefetch(p->k + at + i, 0, 2);
        __builtin_prefetch(p->v + at + i, 0, 2);
    }
}

static void load_format(const ll_attention_args *a, const attention_task *t, int64_t first, int64_t low, int64_t high, float *keys,
                        float *values)
{
    switch (a->pages.format) {
    case KV_F32: load_sub(a, t, first, low, high, keys, values, KV_F32); break;
    case KV_BF16: load_sub(a, t, first, low, high, keys, values, KV_BF16); break;
    case KV_F16: load_sub(a, t, first, low, high, keys, values, KV_F16); break;
    case KV_INT8: load_sub(a, t, first, low, high, keys, values, KV_INT8); break;
    default: load_sub(a, t, first, low, high, keys, values, KV_FP8);
    }
}

/* Scores, softmax step and weighted values of `rows` rows against `subs` sub-tiles from key `first` on. */
INLINE void tile_rows(const ll_attention_args *a, attention_space *s, int64_t row, int64_t first, int subs, const int rows)
{
    const int64_t padded = round_up(a->pages.dim, 16);
    _Alignas(64) float p[4][KEYS];
    const vi lane = vi_load(lane_numbers);
    int live = 0;
    for (int v = 0; v < SUB / VW; v++) { /* both sub-tiles share the broadcasts of q; what lies in an unused one is not read */
        const float *keys = s->keys + v * VW;
        vf chain[4][2][2];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < 4; c++) chain[r][c / 2][c % 2] = vf_set1(0.0f);
        for (int64_t d = 0; d < padded; d += 2)
            for (int t = 0; t < 2; t++) {
                vf first_keys = vf_load(keys + (d + t) * SUB), next_keys = vf_load(keys + (padded + d + t) * SUB);
                for (int r = 0; r < rows; r++) {
                    vf q = vf_set1(s->q[(row + r) * padded + d + t]);
                    chain[r][0][t] = vf_fma(first_keys, q, chain[r][0][t]);
                    chain[r][1][t] = vf_fma(next_keys, q, chain[r][1][t]);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < 2; u++) vf_store(p[r] + u * SUB + v * VW, chain[r][u][0] + chain[r][u][1]);
    }
    for (int r = 0; r < rows; r++) {
        const vi begin = vi_set1((int32_t)(s->low[row + r] - first)), end = vi_set1((int32_t)(s->high[row + r] - first));
        vf top = vf_set1(-INFINITY);
        for (int i = 0; i < subs * SUB; i += VW) {
            vf score = vf_load(p[r] + i);
            if (a->softcap != 0.0f) {
                vf e = vf_exp(score * vf_set1(2.0f / a->softcap));
                score = vf_set1(a->softcap) - vf_set1(2.0f * a->softcap) / (e + vf_set1(1.0f));
            }
            const vi key = lane + vi_set1(i);
            score = vf_select((key >= begin) & (key <= end), score, vf_set1(-INFINITY));
            vf_store(p[r] + i, score);
            top = vf_max(score, top);
        }
        const float before = s->max[row + r], high = vf_hmax(top), now = before > high ? before : high;
        if (now == -INFINITY) {
            memset(p[r], 0, sizeof p[r]);
            continue;
        }
        live = 1;
        vf sum = vf_set1(0.0f);
        for (int v = 0; v < SUB / VW; v++) { /* sums of the same lanes first: sub-tiles left out count as zeros */
            vf of_lane = vf_set1(0.0f);
            for (int u = 0; u < subs; u++) {
                vf e = vf_exp(vf_load(p[r] + u * SUB + v * VW) - vf_set1(now));
                vf_store(p[r] + u * SUB + v * VW, e);
                of_lane = of_lane + e;
            }
            sum = sum + of_lane;
        }
        if (before != now) {
            float shrink;
            vf all = vf_exp(vf_set1(before - now));
            memcpy(&shrink, &all, 4);
            s->max[row + r] = now;
            s->sum[row + r] *= shrink;
            float *to = s->acc + (row + r) * padded;
            for (int64_t d = 0; d < padded; d += VW) vf_store(to + d, vf_load(to + d) * vf_set1(shrink));
        }
        s->sum[row + r] += vf_sum(sum);
    }
    if (!live) return;
    enum { WIDE = VW == 16 ? 4 : 2 };
    for (int64_t d = 0; d < padded;) {
        if (d + WIDE * VW <= padded) {
            vf acc[4][WIDE];
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < WIDE; i++) acc[r][i] = vf_load(s->acc + (row + r) * padded + d + i * VW);
            for (int j = 0; j < subs * SUB; j++)
                for (int i = 0; i < WIDE; i++) {
                    vf value = vf_load(s->values + j * padded + d + i * VW);
                    for (int r = 0; r < rows; r++) acc[r][i] = vf_fma(value, vf_set1(p[r][j]), acc[r][i]);
                }
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < WIDE; i++) vf_store(s->acc + (row + r) * padded + d + i * VW, acc[r][i]);
            d += WIDE * VW;
            continue;
        }
        for (int r = 0; r < rows; r++) {
            vf acc = vf_load(s->acc + (row + r) * padded + d);
            for (int j = 0; j < subs * SUB; j++) acc = vf_fma(vf_load(s->values + j * padded + d), vf_set1(p[r][j]), acc);
            vf_store(s->acc + (row + r) * padded + d, acc);
        }
        d += VW;
    }
}

static __attribute__((noinline)) void tile_all_rows(const ll_attention_args *a, attention_space *s, int64_t rows, int64_t first, int subs)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) tile_rows(a, s, r, first, subs, 4);
    if (rows - r == 3) tile_rows(a, s, r, first, subs, 3);
    if (rows - r == 2) tile_rows(a, s, r, first, subs, 2);
    if (rows - r == 1) tile_rows(a, s, r, first, subs, 1);
}

/* (max, sum, acc) of a later segment into those of the segments before it. */
static void merge(float *to_max, float *to_sum, float *to, float max, float sum, const float *acc, int64_t padded)
{
    if (max == -INFINITY) return;
    if (*to_max == -INFINITY) {
        *to_max = max;
        *to_sum = sum;
        memcpy(to, acc, (size_t)padded * 4);
        return;
    }
    const float now = *to_max > max ? *to_max : max;
    float keep, add;
    vf a = vf_exp(vf_set1(*to_max - now)), b = vf_exp(vf_set1(max - now));
    memcpy(&keep, &a, 4);
    memcpy(&add, &b, 4);
    *to_max = now;
    *to_sum = *to_sum * keep + sum * add;
    for (int64_t d = 0; d < padded; d += VW)
        vf_store(to + d, vf_load(to + d) * vf_set1(keep) + vf_load(acc + d) * vf_set1(add));
}

static void write_row(const ll_attention_args *a, int64_t token, int64_t head, float max, float sum, const float *acc)
{
    float *out = a->out + (token * a->num_heads + head) * a->pages.dim;
    float factor = 1.0f / sum;
    if (a->sinks) {
        const float sink = a->sinks[head], now = max > sink ? max : sink, keep = expf(max - now);
        factor = keep / (sum * keep + expf(sink - now));
    }
    for (int64_t d = 0; d < a->pages.dim; d++) out[d] = acc[d] * factor;
}

static void attention_block(const ll_attention_args *a, const attention_task *t, attention_space *s)
{
    const int64_t per_kv = a->num_heads / a->pages.num_kv_heads, dim = a->pages.dim, padded = round_up(dim, 16);
    const int64_t token0 = a->cu_query_lens[t->seq], seq_len = a->seq_lens[t->seq];
    const int64_t query_len = a->cu_query_lens[t->seq + 1] - token0;
    int64_t low = INT64_MAX, high = 0;
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t row = t->first_row + r, token = row / per_kv, head = t->kv_head * per_kv + row % per_kv;
        const int64_t position = seq_len - query_len + token;
        const float *q = a->q + ((token0 + token) * a->num_heads + head) * dim;
        float *to = s->q + r * padded;
        memcpy(to, q, (size_t)dim * 4);
        if (a->pages.format == KV_INT8) hadamard(to, dim); /* as the keys are */
        for (int64_t d = 0; d < padded; d++) to[d] = d < dim ? to[d] * a->scale : 0.0f;
        s->high[r] = position;
        s->low[r] = a->window && position >= a->window ? position - a->window + 1 : 0;
        s->total_max[r] = -INFINITY;
        if (s->low[r] < low) low = s->low[r];
        if (position > high) high = position;
    }
    for (int64_t segment = t->first_segment; segment < t->end_segment; segment++) {
        int64_t begin = segment * SEGMENT, end = begin + SEGMENT;
        if (begin < low) begin = low - low % KEYS;
        if (end > high + 1) end = high + 1;
        for (int64_t r = 0; r < t->rows; r++) {
            s->max[r] = -INFINITY;
            s->sum[r] = 0.0f;
        }
        memset(s->acc, 0, (size_t)(t->rows * padded) * 4);
        for (int64_t first = begin; first < end; first += KEYS) {
            const int subs = first + SUB < end ? 2 : 1;
            for (int u = 0; u < subs; u++) {
                float *keys = s->keys + u * SUB * padded, *values = s->values + u * SUB * padded;
                fetch_sub(a, t, first + KEYS + u * SUB, high);
                load_format(a, t, first + u * SUB, low, high, keys, values);
            }
            tile_all_rows(a, s, t->rows, first, subs);
        }
        for (int64_t r = 0; r < t->rows; r++) {
            if (t->partial) {
                float *to = t->partial + r * (padded + 2);
                to[0] = s->max[r];
                to[1] = s->sum[r];
                memcpy(to + 2, s->acc + r * padded, (size_t)padded * 4);
            } else {
                merge(&s->total_max[r], &s->total_sum[r], s->total + r * padded, s->max[r], s->sum[r], s->acc + r * padded, padded);
            }
        }
    }
    if (t->partial) return;
    for (int64_t r = 0; r < t->rows; r++) {
        const int64_t row = t->first_row + r;
        write_row(a, token0 + row / per_kv, t->kv_head * per_kv + row % per_kv, s->total_max[r], s->total_sum[r],
                  s->total + r * padded);
    }
}

static void attention_tasks(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const attention_job *job = arg;
    attention_space space;
    for (int64_t i = begin; i < end; i++) attention_block(job->a, &job->tasks[i], &space);
}

/* Segments of a split sequence: [seqs with few queries][kv head][segment], merged in order. */
static void merge_split(const ll_attention_args *a, const attention_task *t, int64_t count)
{
    const int64_t padded = round_up(a->pages.dim, 16), per_kv = a->num_heads / a->pages.num_kv_heads;
    _Alignas(64) float total[DIM_MAX];
    for (int64_t r = 0; r < t->rows; r++) {
        float max = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float *from = t[i].partial + r * (padded + 2);
            merge(&max, &sum, total, from[0], from[1], from + 2, padded);
        }
        write_row(a, a->cu_query_lens[t->seq] + (t->first_row + r) / per_kv, t->kv_head * per_kv + (t->first_row + r) % per_kv, max, sum,
                  total);
    }
}

/* Returns 0; -1 without memory; -2 for sizes it cannot do. The caller holds pool.lock. */
static int attention_locked(const ll_attention_args *a)
{
    const int64_t padded = round_up(a->pages.dim, 16), per_kv = a->num_heads / a->pages.num_kv_heads;
    if (a->pages.dim > DIM_MAX || a->pages.dim < 1 || per_kv < 1 || per_kv * a->pages.num_kv_heads != a->num_heads) return -2;
    int64_t most = ROW_FLOATS / padded < ROWS_MAX ? ROW_FLOATS / padded : ROWS_MAX;
    int64_t tasks = 0, floats = 0;
    attention_task *list = NULL;
    float *partial = NULL;
    for (int pass = 0; pass < 2; pass++) { /* count, then fill */
        int64_t count = 0, used = 0;
        for (int64_t seq = 0; seq < a->num_seqs; seq++) {
            const int64_t queries = a->cu_query_lens[seq + 1] - a->cu_query_lens[seq], length = a->seq_lens[seq];
            const int64_t rows = queries * per_kv;
            for (int64_t head = 0; head < a->pages.num_kv_heads; head++)
                for (int64_t first = 0; first < rows; first += most) {
                    const int64_t n = rows - first < most ? rows - first : most;
                    const int64_t oldest = length - queries + first / per_kv, newest = length - queries + (first + n - 1) / per_kv;
                    const int64_t low = a->window && oldest >= a->window ? oldest - a->window + 1 : 0;
                    const int64_t begin = low / SEGMENT, end = newest / SEGMENT + 1;
                    const int split = queries <= SPLIT_QUERIES && end - begin > 1;
                    for (int64_t s = begin; s < (split ? end : begin + 1); s++) {
                        if (pass) list[count] = (attention_task){seq, head, first, n, s, split ? s + 1 : end, split ? partial + used : NULL};
                        count++;
                        if (split) used += n * (padded + 2);
                    }
                }
        }
        if (pass) break;
        tasks = count;
        floats = used;
        int64_t list_bytes = round_up(tasks * (int64_t)sizeof *list, 64);
        uint8_t *memory = scratch(1, list_bytes + floats * 4 + 64);
        if (!memory) return -1;
        list = (attention_task *)memory;
        partial = (float *)(memory + list_bytes);
    }
    attention_job job = {a, list};
    pool_run(attention_tasks, &job, tasks);
    for (int64_t i = 0, n; floats && i < tasks; i += n) {
        for (n = 1; i + n < tasks && list[i].partial && list[i + n].seq == list[i].seq && list[i + n].kv_head == list[i].kv_head &&
                    list[i + n].first_row == list[i].first_row; n++) {}
        if (list[i].partial) merge_split(a, &list[i], n);
    }
    return 0;
}

int64_t ll_attention(const ll_attention_args *a)
{
    pthread_mutex_lock(&pool.lock);
    int failed = attention_locked(a);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
