/* Paged attention, float32 sums.
 *
 * A query's result is a fixed sequence of operations over absolute key positions: segments of 256 keys, each with its own
 * softmax (all scores, then all values, in tiles of 32), are merged in order. Masked keys add exact zeros or are skipped, so
 * results are bitwise independent of prompt chunking, the batch, and how long contexts are split over threads. */
#ifndef LL_ATTENTION_H
#define LL_ATTENTION_H

#include "attention_tile.h"

#define SPLIT_QUERIES 4 /* sequences with up to this many queries are split into their segments */
/* A page stores 16 tokens of one KV head after those of another. With few queries, a tile is therefore processed for all heads
 * before the next tile: head by head, accesses of 4 KiB would be a page of all heads apart, which probably costs TLB misses
 * (bfloat16, 8 heads of 128, 8,192 tokens, two Zen 4 cores: 11.9 instead of 10.0 GB/s). A task takes fewer heads if a thread
 * would otherwise get fewer tasks than this. */
#define TASKS_PER_THREAD 8
#define ALONE 16384     /* up to this many key elements a call runs on one thread: about 3 us */

/* Blocks of rows, one per KV head: flattened (token, query head of the KV head) of one sequence. */
typedef struct {
    int64_t seq, kv_head, heads, first_row, rows;
    int64_t first_segment, end_segment;
    float *partial; /* NULL: write the result; else [heads][rows][dim + 2] partial results of a single segment */
} attention_task;

typedef struct {
    const ll_attention_args *a;
    const attention_task *tasks;
} attention_job;

/* Merges (max, sum, acc) of a segment into those of the previous segments. */
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
    if (max == -INFINITY) { /* every score is -inf and nothing was summed: all weight goes to the sink, or 0 / 0 */
        for (int64_t d = 0; d < a->pages.dim; d++) out[d] = a->sinks ? 0.0f : f32_bits(0x7fc00000);
        return;
    }
    float factor = 1.0f / sum;
    if (a->sinks) {
        const float sink = a->sinks[head], now = max > sink ? max : sink, keep = expf(max - now);
        factor = keep / (sum * keep + expf(sink - now));
    }
    for (int64_t d = 0; d < a->pages.dim; d++) out[d] = acc[d] * factor;
    if ((a->turned || a->pages.v == a->pages.k) && a->pages.format == KV_INT8) hadamard(out, a->pages.dim); /* latents are stored rotated */
    if (!a->gated) return;
    const float *gate = a->q + (2 * (token * a->num_heads + head) + 1) * a->pages.dim;
    for (int64_t d = 0; d < a->pages.dim; d += VW) {
        const int count = a->pages.dim - d < VW ? (int)(a->pages.dim - d) : VW;
        const vf y = load_some(gate + d, count), gated = load_some(out + d, count) * (a->gated == 2 ? softplus(y) : sigmoid(y));
        memcpy(out + d, &gated, (size_t)count * 4);
    }
}

static void attention_block(const ll_attention_args *a, const attention_task *t, attention_space *s)
{
    const int64_t per_kv = a->num_heads / a->pages.num_kv_heads, dim = a->pages.dim, padded = round_up(dim, 16);
    const int64_t width = key_width(a), wide = key_padded(a);
    const int64_t token0 = a->cu_query_lens[t->seq], seq_len = a->seq_lens[t->seq];
    const int64_t query_len = a->cu_query_lens[t->seq + 1] - token0, rows = t->heads * t->rows;
    const int64_t keys = reads_pages(a, t->rows) ? SUB : KEYS; /* in page order: all heads of a page before the next page */
    int64_t low = INT64_MAX, high = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = t->first_row + r % t->rows, token = row / per_kv, head = (t->kv_head + r / t->rows) * per_kv + row % per_kv;
        const int64_t position = seq_len - query_len + token;
        const float *q = a->q + ((token0 + token) * a->num_heads + head) * width * (1 + !!a->gated);
        float *to = s->q + r * wide;
        memcpy(to, q, (size_t)width * 4);
        if (a->pages.format == KV_INT8) hadamard(to, dim); /* like the keys */
        for (int64_t d = 0; d < wide; d++) to[d] = d < width ? to[d] * a->scale : 0.0f;
        for (int64_t d = 0; d < wide && in_pairs(a); d += 16) { /* in place, into the half that the previous row has left free */
            store_bf16(s->q + (r * wide + d) / 2, vf_load(to + d));
        }
        s->high[r] = position;
        s->low[r] = oldest_key(a, position);
        s->total_max[r] = -INFINITY;
        if (s->low[r] < low) low = s->low[r];
        if (position > high) high = position;
    }
    for (int64_t segment = t->first_segment; segment < t->end_segment; segment++) {
        int64_t begin = segment * SEGMENT, end = begin + SEGMENT;
        if (begin < low) begin = low - low % KEYS;
        if (end > high + 1) end = high + 1;
        const int64_t base = segment * SEGMENT;
        for (int values = 0; values < 2; values++) {
            for (int64_t first = begin; first < end; first += keys) {
                tile_rows tile;
                tile.first = first;
                tile.at = first - base;
                tile.subs = keys == KEYS && first + SUB < end ? 2 : 1;
                tile.far = ll_amd ? 3 * SUB * (values ? v_bytes(a) : dim * kv_bytes(a->pages.format)) : 0;
                for (int u = 0; u < 2; u++) tile.place[u] = find_place(a, t->seq, first + u * SUB, low, high);
                const int64_t next = find_place(a, t->seq, first + keys, low, high);
                for (int64_t h = 0; h < t->heads; h++) {
                    find_tile(a, t->seq, t->kv_head + h, low, high, values, &tile, s);
                    if (h + 1 < t->heads) tile.next = find_next(a, tile.place[0], t->kv_head + h + 1, values, &tile);
                    else tile.next = find_next(a, next, t->kv_head, values, &tile);
                    attention_tile(a, &tile, s, h * t->rows, t->rows, values);
                }
            }
            if (values) continue;
            for (int64_t r = 0; r < rows; r++) soften(a, s, r, base, begin - base, round_up(end - base, SUB));
            memset(s->acc, 0, (size_t)(rows * padded) * 4);
        }
        for (int64_t r = 0; r < rows; r++) {
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
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = t->first_row + r % t->rows, head = (t->kv_head + r / t->rows) * per_kv + row % per_kv;
        write_row(a, token0 + row / per_kv, head, s->total_max[r], s->total_sum[r], s->total + r * padded);
    }
}

static void attention_tasks(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const attention_job *job = arg;
    attention_space space;
    for (int64_t i = begin; i < end; i++) attention_block(job->a, &job->tasks[i], &space);
}

/* Merges the segments of split sequences in order: [seqs with few queries][some KV heads][segment]. */
static void merge_split(const ll_attention_args *a, const attention_task *t, int64_t count)
{
    const int64_t padded = round_up(a->pages.dim, 16), per_kv = a->num_heads / a->pages.num_kv_heads;
    _Alignas(64) float total[DIM_MAX];
    for (int64_t r = 0; r < t->heads * t->rows; r++) {
        const int64_t row = t->first_row + r % t->rows, head = (t->kv_head + r / t->rows) * per_kv + row % per_kv;
        float max = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float *from = t[i].partial + r * (padded + 2);
            merge(&max, &sum, total, from[0], from[1], from + 2, padded);
        }
        write_row(a, a->cu_query_lens[t->seq] + row / per_kv, head, max, sum, total);
    }
}

/* Returns 0; -1 if out of memory; -2 for unsupported sizes. The caller holds pool.lock. */
static int attention_locked(const ll_attention_args *a)
{
    const int64_t padded = round_up(a->pages.dim, 16), per_kv = a->num_heads / a->pages.num_kv_heads;
    if (a->pages.dim > DIM_MAX || a->pages.dim < 1 || a->turned > TURNED_MAX || per_kv < 1 || per_kv * a->pages.num_kv_heads != a->num_heads) return -2;
    int64_t most = (a->turned ? ROW_FLOATS : ROW_FLOATS / 2) / key_padded(a);
    if (most > ROWS_MAX) most = ROWS_MAX;
    int64_t tasks = 0, floats = 0, numbers = 0, split_tasks = 0, together = 1; /* together: heads per task of a split sequence */
    attention_task *list = NULL;
    float *partial = NULL;
    for (int pass = 0; pass < 2; pass++) { /* first pass counts with one head per task, second pass fills */
        int64_t count = 0, used = 0;
        for (int64_t seq = 0; seq < a->num_seqs; seq++) {
            const int64_t queries = a->cu_query_lens[seq + 1] - a->cu_query_lens[seq], length = a->seq_lens[seq];
            const int64_t rows = queries * per_kv;
            int64_t heads = 1;
            numbers += a->pages.num_kv_heads * (queries + FEW_QUERY_ROWS) / FEW_QUERY_ROWS * length * key_width(a);
            for (int64_t head = 0; head < a->pages.num_kv_heads; head += heads)
                for (int64_t first = 0; first < rows; first += most) {
                    const int64_t n = rows - first < most ? rows - first : most;
                    const int64_t oldest = length - queries + first / per_kv, newest = length - queries + (first + n - 1) / per_kv;
                    const int64_t begin = oldest_key(a, oldest) / SEGMENT, end = newest / SEGMENT + 1;
                    const int split = queries <= SPLIT_QUERIES && end - begin > 1;
                    if (split && rows <= FEW_QUERY_ROWS) {
                        const int64_t left = a->pages.num_kv_heads - head;
                        heads = together < most / rows ? together : most / rows;
                        if (heads > left) heads = left;
                    }
                    for (int64_t s = begin; s < (split ? end : begin + 1); s++) {
                        if (pass) list[count] = (attention_task){seq, head, heads, first, n, s, split ? s + 1 : end, split ? partial + used : NULL};
                        count++;
                        if (split) used += heads * n * (padded + 2);
                        split_tasks += split && !pass;
                    }
                }
        }
        tasks = count;
        if (pass) break;
        floats = used;
        together = split_tasks / (TASKS_PER_THREAD * pool.wanted);
        if (together < 1) together = 1;
        int64_t list_bytes = round_up(count * (int64_t)sizeof *list, 64);
        uint8_t *memory = scratch(1, list_bytes + floats * 4 + 64);
        if (!memory) return -1;
        list = (attention_task *)memory;
        partial = (float *)(memory + list_bytes);
    }
    attention_job job = {a, list};
    if (numbers / 2 <= ALONE) attention_tasks(&job, 0, tasks, 0); /* counted in both passes */
    else pool_run(attention_tasks, &job, tasks);
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
