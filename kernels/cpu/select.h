/* Sampling primitives over a row of logits: argmax, top-k with probabilities, and a random draw.
 *
 * A row is split into pieces of 4,096 for the threads; sums are added piece by piece, so the result does not depend on the
 * number of threads. */
#ifndef LL_SELECT_H
#define LL_SELECT_H

#include <math.h>

#include "activations.h"

#define PIECE 4096
#define FIRST_DEPTH 8.0f /* the k largest are searched first within this many temperatures of the maximum */

typedef struct {
    float max;
    int64_t at;    /* first index of the maximum */
    double sum;    /* sum of exp((x - max) * inverse); NaN if a logit is NaN */
    int64_t count; /* number of candidates gathered */
} piece;

typedef struct {
    const float *logits;
    int64_t n, pieces;
    float inverse; /* 1 / temperature; 0: no sums */
    float max, threshold;
    piece *parts;
    int32_t *ids;  /* [n] candidates; each piece writes from its own offset on */
} select_job;

static void scan_piece(const select_job *j, int64_t p)
{
    const int64_t first = p * PIECE, count = j->n - first < PIECE ? j->n - first : PIECE;
    const float *x = j->logits + first;
    vf top = vf_set1(-INFINITY);
    vi nan = vi_set1(0);
    int64_t i = 0;
    float max = -INFINITY;
    int bad = 0;
    for (; i + VW <= count; i += VW) {
        vf v = vf_load(x + i);
        nan |= v != v;
        top = vf_max(v, top);
    }
    for (; i < count; i++) {
        bad |= x[i] != x[i];
        if (x[i] > max) max = x[i];
    }
    const float high = vf_hmax(top);
    if (high > max) max = high;
    piece found = {max, first, 0.0, 0};
    bad |= vi_sum(nan) != 0;
    for (i = 0; !bad && i < count && x[i] != max; i++) {}
    found.at = first + (i < count ? i : 0);
    if (bad) {
        found.sum = NAN;
        found.max = NAN;
    } else if (j->inverse > 0.0f && max > -INFINITY) {
        vf sum = vf_set1(0.0f);
        float rest[VW] = {0};
        for (i = 0; i + VW <= count; i += VW) sum = sum + vf_exp((vf_load(x + i) - vf_set1(max)) * vf_set1(j->inverse));
        if (i < count) {
            for (int l = 0; l < VW; l++) rest[l] = i + l < count ? x[i + l] : -INFINITY;
            sum = sum + vf_exp((vf_load(rest) - vf_set1(max)) * vf_set1(j->inverse));
        }
        found.sum = vf_sum(sum);
    }
    j->parts[p] = found;
}

static void scan_pieces(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    for (int64_t p = begin; p < end; p++) scan_piece(arg, p);
}

/* Gathers the indices of logits above the threshold, in order. */
static void gather_pieces(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const select_job *j = arg;
    for (int64_t p = begin; p < end; p++) {
        const int64_t first = p * PIECE, count = j->n - first < PIECE ? j->n - first : PIECE;
        const float *x = j->logits + first;
        int32_t *to = j->ids + first;
        int64_t found = 0;
        for (int64_t i = 0; i < count && j->parts[p].max > j->threshold; i += 64) {
            const int64_t many = count - i < 64 ? count - i : 64;
            if (many == 64) {
                vi above = vi_set1(0);
                for (int l = 0; l < 64; l += VW) above |= vf_load(x + i + l) > vf_set1(j->threshold);
                if (!vi_sum(above)) continue;
            }
            for (int64_t l = i; l < i + many; l++)
                if (x[l] > j->threshold) to[found++] = (int32_t)(first + l);
        }
        j->parts[p].count = found;
    }
}

static void select_pieces(task_fn fn, select_job *j)
{
    if (j->pieces < 8) fn(j, 0, j->pieces, 0);
    else pool_run(fn, j, j->pieces);
}

/* Finds the maximum and the sum of exp(x - max). Returns 0; -1 for NaN or infinity; -2 if no logit is finite. */
static int select_start(select_job *j, double *total, int64_t *at)
{
    select_pieces(scan_pieces, j);
    j->max = -INFINITY;
    *at = 0;
    for (int64_t p = 0; p < j->pieces; p++) {
        if (j->parts[p].max != j->parts[p].max) return -1;
        if (j->parts[p].max > j->max) {
            j->max = j->parts[p].max;
            *at = j->parts[p].at;
        }
    }
    if (j->max == INFINITY) return -1;
    if (j->max == -INFINITY) return -2;
    *total = 0.0;
    for (int64_t p = 0; p < j->pieces; p++)
        if (j->parts[p].max > -INFINITY) *total += j->parts[p].sum * exp((double)(j->parts[p].max - j->max) * j->inverse);
    return 0;
}

/* Whether a comes before b: larger, or equal with the lower index. */
INLINE int comes_before(const float *x, int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); }

/* Moves the first `k` of ids[0..n) in this order to the front, sorted: quickselect, then a sort. */
static void select_first(const float *x, int32_t *ids, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (low < high && k < n) {
        const int32_t pivot = ids[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (comes_before(x, ids[i], pivot)) i++;
            while (comes_before(x, pivot, ids[j])) j--;
            if (i <= j) {
                int32_t t = ids[i];
                ids[i++] = ids[j];
                ids[j--] = t;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
}

static void sort_ids(const float *x, int32_t *ids, int64_t n) /* heap sort: no worst case */
{
    for (int64_t end = n, start = n / 2; end > 1;) {
        int32_t moved;
        if (start > 0) {
            moved = ids[--start];
        } else {
            moved = ids[--end];
            ids[end] = ids[0];
        }
        int64_t hole = start;
        for (int64_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && comes_before(x, ids[child], ids[child + 1])) child++;
            if (!comes_before(x, moved, ids[child])) break;
            ids[hole] = ids[child];
        }
        ids[hole] = moved;
    }
}

static int select_locked(select_job *j, int64_t n, int64_t candidates)
{
    j->n = n;
    j->pieces = (n + PIECE - 1) / PIECE;
    const int64_t bytes = round_up(j->pieces * (int64_t)sizeof(piece), 64);
    uint8_t *memory = scratch(1, bytes + (candidates ? n * 4 : 0));
    j->parts = (piece *)memory;
    j->ids = (int32_t *)(memory + bytes);
    return memory ? 0 : -3;
}

/* Argmax of n logits, ties to the lower index. Returns 0; -1 (also stored in out) if one is NaN; -3 if out of memory. */
static int argmax_locked(const float *logits, int64_t n, int64_t *out)
{
    select_job j = {.logits = logits};
    if (select_locked(&j, n, 0)) return -3;
    select_pieces(scan_pieces, &j);
    float max = -INFINITY;
    *out = 0;
    for (int64_t p = 0; p < j.pieces; p++) {
        if (j.parts[p].max != j.parts[p].max) {
            *out = -1;
            return -1;
        }
        if (j.parts[p].max > max) {
            max = j.parts[p].max;
            *out = j.parts[p].at;
        }
    }
    return 0;
}

/* Argmax of every row. */
int64_t ll_argmax(const float *logits, int64_t rows, int64_t n, int64_t *out)
{
    int64_t state = 0;
    pthread_mutex_lock(&pool.lock);
    for (int64_t r = 0; r < rows && !state; r++) state = argmax_locked(logits + r * n, n, out + r);
    pthread_mutex_unlock(&pool.lock);
    return state;
}

/* The k <= n largest of n logits, best first, and their probabilities at a temperature. Returns 0, select_start's errors, or -3
 * if out of memory. */
int64_t ll_top(const float *logits, int64_t n, int64_t k, double temperature, float *probabilities, int64_t *out)
{
    double total;
    int64_t at;
    select_job j = {.logits = logits, .inverse = (float)(1.0 / temperature)};
    pthread_mutex_lock(&pool.lock);
    int64_t state = select_locked(&j, n, 1);
    if (!state) state = select_start(&j, &total, &at);
    int64_t found = 0;
    for (float depth = FIRST_DEPTH * (float)temperature; !state; depth *= 4.0f) {
        j.threshold = j.max - depth;
        if (depth > 1e30f || !(j.threshold > -1e30f)) j.threshold = -INFINITY;
        select_pieces(gather_pieces, &j);
        found = 0;
        for (int64_t p = 0; p < j.pieces; p++) {
            memmove(j.ids + found, j.ids + p * PIECE, (size_t)j.parts[p].count * 4);
            found += j.parts[p].count;
        }
        if (found >= k || j.threshold == -INFINITY) break;
    }
    if (!state) {
        for (int64_t i = 0; found < k && i < n; i++) /* fill up with logits of -infinity, in order */
            if (logits[i] == -INFINITY) j.ids[found++] = (int32_t)i;
        select_first(logits, j.ids, found, k);
        sort_ids(logits, j.ids, k);
        for (int64_t i = 0; i < k; i++) {
            out[i] = j.ids[i];
            probabilities[i] = (float)(exp((double)(logits[j.ids[i]] - j.max) * j.inverse) / total);
        }
    }
    pthread_mutex_unlock(&pool.lock);
    return state;
}

/* Draws one of n logits by inverse CDF at a temperature, with `chance` uniform in [0, 1). Returns its index, or ll_top's
 * errors. */
int64_t ll_draw(const float *logits, int64_t n, double temperature, double chance)
{
    double total, before = 0.0;
    int64_t at;
    select_job j = {.logits = logits, .inverse = (float)(1.0 / temperature)};
    pthread_mutex_lock(&pool.lock);
    int64_t state = select_locked(&j, n, 0);
    if (!state) state = select_start(&j, &total, &at);
    if (!state) {
        const double wanted = chance * total;
        state = at; /* fallback if rounding leaves no index past the target */
        for (int64_t p = 0, done = 0; p < j.pieces && !done; p++) {
            if (j.parts[p].max == -INFINITY) continue;
            const double mass = j.parts[p].sum * exp((double)(j.parts[p].max - j.max) * j.inverse);
            if (before + mass <= wanted) {
                before += mass;
                continue;
            }
            const int64_t end = (p + 1) * PIECE < n ? (p + 1) * PIECE : n;
            for (int64_t i = p * PIECE; i < end && !done; i++) {
                const double own = exp((double)(logits[i] - j.max) * j.inverse);
                if (own > 0.0) state = i; /* the last one in the piece, in case the sums differ by rounding */
                before += own;
                done = before > wanted;
            }
            done = 1;
        }
    }
    pthread_mutex_unlock(&pool.lock);
    return state;
}

#endif
