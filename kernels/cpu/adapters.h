/* LoRA updates of a product: for every row the low-rank update of its sequence's adapter.
 *
 * Both matrices are stored in columns of ADAPTER_WIDE outputs, [outputs / ADAPTER_WIDE][inputs][ADAPTER_WIDE], zero-padded: one
 * vector of outputs at a time is summed over the inputs in order, in four chains for the first matrix and one for the second,
 * for any number of rows. int8 matrices have one scale per output, which multiplies the sum. */
#ifndef LL_ADAPTERS_H
#define LL_ADAPTERS_H

#include "pool.h"
#include "vec.h"

#define ADAPTERS 8
#define ADAPTER_WIDE 16
#define ADAPTER_ROWS 4    /* rows of x that share a pass over the matrices */
#define ADAPTER_CHUNK 256 /* outputs per task */
#define ADAPTER_AHEAD 4096 /* prefetch distance in the first matrix, in bytes */
#define ADAPTER_SIDE 4    /* vectors of outputs summed in parallel */

enum { ADAPTER_FLOAT, ADAPTER_BF16, ADAPTER_INT8 };

typedef struct {
    int64_t rank, at;        /* a multiple of ADAPTER_WIDE; offset of its results in a row of `hidden` */
    int64_t first, n;        /* its outputs */
    const void *down, *up;   /* [k] -> [rank], [rank] -> [n] */
    const float *down_scale, *up_scale; /* int8 only: [rank], [n] */
    const float *gain, *bias; /* DoRA, [n] zero-padded: first y += gain * (y - bias); NULL: none */
} ll_low_rank;

typedef struct {
    const int32_t *places; /* adapter of each row of the step; -1: none */
} ll_adapter_rows;

typedef struct {
    int64_t k, n, form; /* form: storage format of the matrices */
    int64_t most, ranks, uneven, gains; /* maxima over adapters: pieces, sum of ranks, pieces that start inside a vector of outputs, pieces with gains */
    const ll_adapter_rows *rows;
    int64_t count[ADAPTERS];
    const ll_low_rank *pieces[ADAPTERS];
} ll_adapters;

typedef struct {
    const ll_adapters *l; /* NULL: no row has an adapter */
    const int32_t *places;
    const float *x; /* [m][k] */
    float *hidden;  /* [m][ranks] */
    float *out;     /* [m][n] */
    int64_t m;
    uint8_t *late;  /* [n / TILE]: tiles computed before `hidden` was ready, left to adapters_finish; NULL: all outputs are */
    _Atomic int64_t left; /* unfinished tasks of the first product */
} adapters_job;

static int64_t adapters_from; /* index in the step of the next product's first row; the caller holds pool.lock */

INLINE int64_t adapter_size(const int form) { return form == ADAPTER_FLOAT ? 4 : form == ADAPTER_BF16 ? 2 : 1; }

INLINE vf adapter_vector(const void *matrix, int64_t at, const int form)
{
    if (form == ADAPTER_INT8) return vf_cvt(vi_i8((const uint8_t *)matrix + at));
    return form == ADAPTER_BF16 ? vf_bf16((const uint16_t *)matrix + at) : vf_load((const float *)matrix + at);
}

/* The same for one row, with the chains in separate variables: gcc keeps an array in memory. */
INLINE void down_one(const ll_low_rank *p, int64_t k, const float *x, float *to, const int form)
{
    const int64_t size = adapter_size(form);
    for (int64_t column = 0; column < p->rank; column += VW) {
        const char *at = (const char *)p->down + (column / ADAPTER_WIDE * ADAPTER_WIDE * k + column % ADAPTER_WIDE) * size;
        const int64_t step = ADAPTER_WIDE * size;
        vf a = vf_set1(0.0f), b = a, c = a, d = a;
        int64_t i = 0;
        for (; i + 4 <= k; i += 4, at += 4 * step) {
            for (int64_t line = 0; line < 4 * step; line += 64) __builtin_prefetch(at + ADAPTER_AHEAD + line, 0, 2);
            a = vf_fma(adapter_vector(at, 0, form), vf_set1(x[i]), a);
            b = vf_fma(adapter_vector(at + step, 0, form), vf_set1(x[i + 1]), b);
            c = vf_fma(adapter_vector(at + 2 * step, 0, form), vf_set1(x[i + 2]), c);
            d = vf_fma(adapter_vector(at + 3 * step, 0, form), vf_set1(x[i + 3]), d);
        }
        for (; i < k; i++, at += step) a = vf_fma(adapter_vector(at, 0, form), vf_set1(x[i]), a);
        const vf sum = (a + b) + (c + d);
        vf_store(to + column, form == ADAPTER_INT8 ? sum * vf_load(p->down_scale + column) : sum);
    }
}

INLINE void down_as(const ll_low_rank *p, int64_t k, const float *x, float *to, int64_t stride, const int rows, const int form)
{
    for (int64_t column = 0; column < p->rank; column += VW) {
        const int64_t start = column / ADAPTER_WIDE * ADAPTER_WIDE * k + column % ADAPTER_WIDE;
        vf sums[ADAPTER_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < 4; c++) sums[r][c] = vf_set1(0.0f);
        int64_t i = 0;
        for (; i + 4 <= k; i += 4) {
            const char *ahead = (const char *)p->down + (start + i * ADAPTER_WIDE) * adapter_size(form) + ADAPTER_AHEAD;
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + 64, 0, 2);
            for (int c = 0; c < 4; c++) {
                const vf w = adapter_vector(p->down, start + (i + c) * ADAPTER_WIDE, form);
                for (int r = 0; r < rows; r++) sums[r][c] = vf_fma(w, vf_set1(x[r * k + i + c]), sums[r][c]);
            }
        }
        for (; i < k; i++) {
            const vf w = adapter_vector(p->down, start + i * ADAPTER_WIDE, form);
            for (int r = 0; r < rows; r++) sums[r][0] = vf_fma(w, vf_set1(x[r * k + i]), sums[r][0]);
        }
        for (int r = 0; r < rows; r++) {
            const vf sum = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
            vf_store(to + r * stride + column, form == ADAPTER_INT8 ? sum * vf_load(p->down_scale + column) : sum);
        }
    }
}

INLINE vf some_of(const float *from, int64_t count)
{
    float all[VW] = {0};
    memcpy(all, from, (size_t)count * 4);
    return vf_load(all);
}

/* `vectors` vectors of a piece's outputs from `j` on, or its last, partial one (not `whole`); `out`: the piece's first output. */
INLINE void up_columns(const ll_low_rank *p, const float *hidden, int64_t stride, float *out, int64_t n, int64_t j, const int vectors, const int whole,
                       const int rows, const int form)
{
    vf given[ADAPTER_ROWS][ADAPTER_SIDE], sums[ADAPTER_ROWS][ADAPTER_SIDE];
    const int64_t count = p->n - j < VW ? p->n - j : VW;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) {
            const vf y = whole ? vf_load(out + r * n + j + c * VW) : some_of(out + r * n + j, count);
            const float *gain = p->gain + j + c * VW, *bias = p->bias + j + c * VW;
            given[r][c] = y;
            if (p->gain) given[r][c] = vf_fma(vf_load(gain), p->bias ? y - vf_load(bias) : y, y);
            sums[r][c] = form == ADAPTER_INT8 ? vf_set1(0.0f) : given[r][c];
        }
    for (int64_t i = 0; i < p->rank; i++)
        for (int c = 0; c < vectors; c++) {
            const int64_t column = j + c * VW, start = column / ADAPTER_WIDE * ADAPTER_WIDE * p->rank + column % ADAPTER_WIDE;
            const vf w = adapter_vector(p->up, start + i * ADAPTER_WIDE, form);
            for (int r = 0; r < rows; r++) sums[r][c] = vf_fma(w, vf_set1(hidden[r * stride + i]), sums[r][c]);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) {
            float y[VW];
            if (form == ADAPTER_INT8) sums[r][c] = vf_fma(sums[r][c], vf_load(p->up_scale + j + c * VW), given[r][c]);
            if (whole) vf_store(out + r * n + j + c * VW, sums[r][c]);
            else vf_store(y, sums[r][c]), memcpy(out + r * n + j, y, (size_t)count * 4);
        }
}

INLINE void up_as(const ll_low_rank *p, const float *hidden, int64_t stride, float *out, int64_t n, int64_t begin, int64_t end, const int rows,
                  const int form)
{
    int64_t j = begin;
    for (; j + ADAPTER_SIDE * VW <= end; j += ADAPTER_SIDE * VW) up_columns(p, hidden, stride, out, n, j, ADAPTER_SIDE, 1, rows, form);
    for (; j + 2 * VW <= end; j += 2 * VW) up_columns(p, hidden, stride, out, n, j, 2, 1, rows, form);
    for (; j + VW <= end; j += VW) up_columns(p, hidden, stride, out, n, j, 1, 1, rows, form);
    if (j < end) up_columns(p, hidden, stride, out, n, j, 1, 0, rows, form);
}

INLINE void down_form(const adapters_job *j, const ll_low_rank *p, int64_t row, int together, const int form)
{
    const int64_t k = j->l->k, ranks = j->l->ranks;
    float *to = j->hidden + row * ranks + p->at;
    if (together) down_as(p, k, j->x + row * k, to, ranks, ADAPTER_ROWS, form);
    else down_one(p, k, j->x + row * k, to, form);
}

INLINE void up_form(const adapters_job *j, const ll_low_rank *p, int64_t row, int together, int64_t begin, int64_t end, const int form)
{
    const ll_adapters *l = j->l;
    const float *from = j->hidden + row * l->ranks + p->at;
    float *out = j->out + row * l->n + p->first;
    if (together) up_as(p, from, l->ranks, out, l->n, begin, end, ADAPTER_ROWS, form);
    else up_as(p, from, l->ranks, out, l->n, begin, end, 1, form);
}

static void down_rows(const adapters_job *j, const ll_low_rank *p, int64_t row, int together)
{
    switch (j->l->form) {
    case ADAPTER_FLOAT: down_form(j, p, row, together, ADAPTER_FLOAT); break;
    case ADAPTER_BF16: down_form(j, p, row, together, ADAPTER_BF16); break;
    default: down_form(j, p, row, together, ADAPTER_INT8);
    }
}

static void up_rows(const adapters_job *j, const ll_low_rank *p, int64_t row, int together, int64_t begin, int64_t end)
{
    switch (j->l->form) {
    case ADAPTER_FLOAT: up_form(j, p, row, together, begin, end, ADAPTER_FLOAT); break;
    case ADAPTER_BF16: up_form(j, p, row, together, begin, end, ADAPTER_BF16); break;
    default: up_form(j, p, row, together, begin, end, ADAPTER_INT8);
    }
}

/* The part of a piece in the product's outputs [begin, end): its vectors that start there. */
INLINE int64_t adapter_begin(const ll_low_rank *p, int64_t begin) { return begin > p->first ? round_up(begin - p->first, ADAPTER_WIDE) : 0; }
INLINE int64_t adapter_end(const ll_low_rank *p, int64_t end)
{
    const int64_t whole = adapter_begin(p, end);
    return whole < p->n ? whole : p->n;
}

/* Number of rows from `row` on processed together: a whole block with the same adapter, or one. */
static int64_t adapter_run(const adapters_job *j, int64_t row, int64_t end)
{
    const int32_t *place = j->places + row;
    return end - row == ADAPTER_ROWS && place[1] == place[0] && place[2] == place[0] && place[3] == place[0] ? ADAPTER_ROWS : 1;
}

/* A task is a block of rows and a piece. */
static void adapters_down(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const adapters_job *j = arg;
    for (int64_t task = begin; task < end; task++) {
        const int64_t first = task / j->l->most * ADAPTER_ROWS, piece = task % j->l->most;
        const int64_t last = first + ADAPTER_ROWS < j->m ? first + ADAPTER_ROWS : j->m;
        for (int64_t row = first, count; row < last; row += count) {
            const int32_t place = j->places[row];
            count = adapter_run(j, row, last);
            if (place >= 0 && piece < j->l->count[place]) down_rows(j, j->l->pieces[place] + piece, row, count > 1);
        }
    }
}

/* The second product for a block of rows and the outputs [begin, end). */
static void adapters_add(const adapters_job *j, int64_t first, int64_t begin, int64_t end)
{
    const int64_t last = first + ADAPTER_ROWS < j->m ? first + ADAPTER_ROWS : j->m;
    for (int64_t row = first, count; row < last; row += count) {
        const int32_t place = j->places[row];
        count = adapter_run(j, row, last);
        for (int64_t i = 0; place >= 0 && i < j->l->count[place]; i++) {
            const ll_low_rank *p = j->l->pieces[place] + i;
            const int64_t from = adapter_begin(p, begin), to = adapter_end(p, end);
            if (from < to) up_rows(j, p, row, count > 1, from, to);
        }
    }
}

/* Prefetches the data of the second matrix that `adapters_add` reads. */
static void adapters_fetch(const adapters_job *j, int64_t begin, int64_t end)
{
    for (int64_t row = 0; row < j->m; row++) {
        const int32_t place = j->places[row];
        for (int64_t i = 0; place >= 0 && (!row || place != j->places[row - 1]) && i < j->l->count[place]; i++) {
            const ll_low_rank *p = j->l->pieces[place] + i;
            const int64_t line = p->rank * adapter_size((int)j->l->form);
            const int64_t from = adapter_begin(p, begin), to = adapter_end(p, end);
            for (int64_t at = from * line; at < to * line; at += 64) __builtin_prefetch((const char *)p->up + at, 0, 2);
            for (int64_t at = from; at < to && p->up_scale; at += 16) __builtin_prefetch(p->up_scale + at, 0, 2);
        }
    }
}

static int64_t adapters_chunks(const adapters_job *j) { return (j->l->n + ADAPTER_CHUNK - 1) / ADAPTER_CHUNK; }

/* A task is a block of rows and a chunk of outputs. */
static void adapters_up(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const adapters_job *j = arg;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = task % adapters_chunks(j) * ADAPTER_CHUNK;
        adapters_add(j, task / adapters_chunks(j) * ADAPTER_ROWS, from, from + ADAPTER_CHUNK);
    }
}

/* The job for `m` rows from `adapters_from` on; its `l` is NULL if none of them has an adapter with pieces here. */
static adapters_job adapters_of(const ll_adapters *l, const float *x, int64_t m, float *out)
{
    adapters_job job = {.x = x, .out = out, .m = m};
    if (!l || !l->most) return job;
    job.places = l->rows->places + adapters_from;
    for (int64_t row = 0; row < m && !job.l; row++)
        if (job.places[row] >= 0 && l->count[job.places[row]]) job.l = l;
    return job;
}

static int64_t adapters_bytes(const adapters_job *j) { return j->l ? j->m * j->l->ranks * 4 + j->l->n / TILE + 128 : 0; }

static int64_t adapters_down_tasks(const adapters_job *j) { return j->l ? (j->m + ADAPTER_ROWS - 1) / ADAPTER_ROWS * j->l->most : 0; }

/* Assigns memory to a job. For few rows, updates are added when a tile is computed, unless pieces start inside a vector, or
 * tiles not at a multiple of TILE (`uneven`). */
static void adapters_take(adapters_job *j, uint8_t *memory, int64_t uneven)
{
    if (!j->l) return;
    j->hidden = (float *)memory;
    atomic_store(&j->left, adapters_down_tasks(j));
    if (uneven || j->l->uneven || j->m > ADAPTER_ROWS) return;
    j->late = memory + j->m * j->l->ranks * 4;
    memset(j->late, 0, (size_t)((j->l->n + TILE - 1) / TILE));
    const int32_t place = j->places[0]; /* prefetch what the first tasks read while x is prepared */
    for (int64_t i = 0; place >= 0 && i < j->l->count[place]; i++)
        for (int64_t at = 0; at < ADAPTER_AHEAD; at += 64) __builtin_prefetch((const char *)j->l->pieces[place][i].down + at, 0, 2);
}

/* The second product, after the first one and `out` are complete. */
static void adapters_finish(adapters_job *j)
{
    if (!j->l) return;
    if (!j->late) pool_run(adapters_up, j, (j->m + ADAPTER_ROWS - 1) / ADAPTER_ROWS * adapters_chunks(j));
    else
        for (int64_t at = 0; at < j->l->n; at += TILE)
            if (j->late[at / TILE]) adapters_add(j, 0, at, at + TILE);
}

#endif
