/* Products of activations with a prepared weight.
 *
 * For every (row of x, row of the weight) the sum runs over blocks of 32 inputs in order, one chain, whatever the
 * number of rows: integer sums within a block are exact, the float steps are the same instructions in every variant.
 * So a row's result does not depend on the batch. Few rows unpack codes in registers; more rows widen a chunk of
 * codes once, in the first-level cache. */
#ifndef LL_MATMUL_H
#define LL_MATMUL_H

#include "activations.h"

#define CHUNK 16  /* blocks whose scales are expanded at a time */
#define FEW (LL_VNNI ? 12 : 3) /* up to so many rows of x unpack codes in registers (Zen 4: 7.0 ms for 8 rows, else 9.3) */
#define FEW_HALF 3             /* the same for groups of 16 */
#define CHUNK_W 8 /* blocks of codes widened to 16 bits: 8 KiB a tile */
#define CHUNK_F 4 /* blocks of unpacked float codes: 8 KiB */
#define AHEAD 8192 /* bytes, into the second-level cache: 12 -> 27 GB/s on one Zen 4 core, 23 -> 40 on two */
#define SLAB 128  /* rows of x that share one unpacking */

typedef struct {
    const ll_weight *w;
    const activations *a;
    const float *bias, *residual; /* residual is laid out like out, and may be it */
    float *out;
    int64_t stride; /* floats between rows of out */
} product;

static void store_tile(const product *p, int64_t tile, int64_t row, const float *sums)
{
    const ll_weight *w = p->w;
    int64_t first = tile * TILE, count = w->n - first < TILE ? w->n - first : TILE;
    float *out = p->out + row * p->stride + first;
    float r[TILE];
    memcpy(r, sums, sizeof r);
    if (w->row_scale)
        for (int i = 0; i < count; i++) r[i] *= w->row_scale[first + i];
    if (p->bias)
        for (int i = 0; i < count; i++) r[i] += p->bias[first + i];
    if (p->residual)
        for (int i = 0; i < count; i++) r[i] += p->residual[row * p->stride + first + i];
    if (count == TILE) memcpy(out, r, sizeof r);
    else memcpy(out, r, (size_t)count * 4);
}

/* ---- integer codes, integer activations, few rows of x ---- */

#if VW == 16
#define PAIR 2 /* tiles taken together: they share the broadcasts of x */
#else
#define PAIR 1
#endif
typedef float tile_floats[CHUNK * 2 * TILE];

/* Memory is asked for AHEAD bytes before it is read: past a tile's end, in the tile that this thread takes next. */
typedef struct { int64_t at, stride, skip; } fetcher;

INLINE fetcher fetch_start(const ll_weight *w)
{
    return (fetcher){AHEAD, round_up(w->tile_bytes / w->blocks, 64), (PAIR - 1) * w->tile_bytes};
}

INLINE void fetch_next(fetcher *f, const ll_weight *w, const uint8_t *const tiles[PAIR], int64_t blocks)
{
    for (; blocks > 0; blocks--) {
        if (f->at >= w->tile_bytes) {
            f->at += f->skip;
            f->skip = 0;
        }
        for (int c = 0; c < PAIR; c++)
            for (int64_t i = 0; i < f->stride; i += 64) __builtin_prefetch(tiles[c] + f->at + i, 0, 2);
        f->at += f->stride;
    }
}

/* Tiles `tile` and, where PAIR is 2, `tile + 1` (`other` = 0: it does not exist and is computed in vain), against
 * `rows` rows of x. */
INLINE void tile_few(const product *p, int64_t tile, int64_t other, int64_t row, const int rows, const int code,
                     const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *tiles[PAIR], *codes[PAIR];
    for (int c = 0; c < PAIR; c++) {
        tiles[c] = w->data + (tile + c * other) * w->tile_bytes;
        codes[c] = tiles[c] + w->at_codes;
    }
    const int64_t blocks = w->blocks;
    const uint8_t *x = p->a->planes + row * blocks * XBYTES;
    const xblock *meta = p->a->meta + row * blocks;
    const vlut table = lut_load(w->table);
    const int bytes = block_bytes_of[code];
    fetcher f = fetch_start(w);
    _Alignas(64) tile_floats scale[PAIR], min[PAIR];
    vf acc[4][PAIR][NV];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PAIR; c++)
            for (int v = 0; v < NV; v++) acc[r][c][v] = vf_set1(0.0f);
    for (int64_t first = 0; first < blocks; first += CHUNK) {
        int64_t count = blocks - first < CHUNK ? blocks - first : CHUNK;
        for (int c = 0; c < PAIR; c++) expand_scales(w, tiles[c], first, count, scale[c], min[c]);
        for (int64_t b = 0; b < count; b++, x += XBYTES, meta++) {
            fetch_next(&f, w, tiles, 1);
            for (int v = 0; v < NV; v++) {
                vi q[PAIR][8];
                for (int c = 0; c < PAIR; c++) block_quads(codes[c] + v * 4 * VW, code, table, q[c]);
                for (int h = 0; h < halves; h++) {
                    for (int r = 0; r < rows; r++) {
                        const xblock *m = meta + r * blocks;
                        vdot d[PAIR];
                        for (int c = 0; c < PAIR; c++) d[c] = dot_start(has_min ? 0 : m->start[h]);
                        for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++)
                            for (int c = 0; c < PAIR; c++) dot_quad(&d[c], q[c][j], x + r * blocks * XBYTES, j);
                        for (int c = 0; c < PAIR; c++) {
                            const int64_t at = (b * halves + h) * TILE + v * VW;
                            vf to = acc[r][c][v];
                            to = vf_fma(dot_value(d[c]), vf_load(scale[c] + at) * vf_set1(m->scale), to);
                            if (has_min) to = vf_fma(vf_load(min[c] + at), vf_set1(m->sums[h]), to);
                            acc[r][c][v] = to;
                        }
                    }
                }
            }
            for (int c = 0; c < PAIR; c++) codes[c] += bytes;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PAIR && c <= other; c++) {
            float sums[TILE];
            for (int v = 0; v < NV; v++) vf_store(sums + v * VW, acc[r][c][v]);
            store_tile(p, tile + c, row + r, sums);
        }
}

/* ---- the same for many rows: codes widened to 16 bits once, shared by ROWS rows ---- */

#define ROWS (VW == 16 ? 6 : 4)

typedef struct {
    const uint8_t *pairs[PAIR];  /* [count][16][16 lanes] of 16-bit pairs */
    const float *scale[PAIR], *min[PAIR];
    int64_t count;               /* blocks in the chunk */
    const uint8_t *x;            /* the first row's first block of the chunk */
    const xblock *meta;
    int64_t blocks;              /* between rows of x */
    float *part[PAIR];           /* [rows][16] sums so far */
} chunk;

INLINE void chunk_int(const chunk *k, int64_t row, const int rows, const int halves, const int has_min)
{
    const uint8_t *x = k->x + row * k->blocks * XBYTES;
    const xblock *meta = k->meta + row * k->blocks;
    for (int v = 0; v < NV; v++) {
        vf acc[ROWS][PAIR];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < PAIR; c++) acc[r][c] = vf_load(k->part[c] + (row + r) * TILE + v * VW);
        for (int64_t b = 0; b < k->count; b++) {
            for (int h = 0; h < halves; h++) {
                vi sum[ROWS][PAIR];
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < PAIR; c++) sum[r][c] = vi_set1(has_min ? 0 : meta[r * k->blocks + b].start[h]);
                for (int i = h * 8; i < (halves == 1 ? 16 : h * 8 + 8); i++) {
                    vi q[PAIR];
                    for (int c = 0; c < PAIR; c++) q[c] = vi_load(k->pairs[c] + b * 1024 + i * 64 + v * 4 * VW);
                    for (int r = 0; r < rows; r++) {
                        vi xr = vi_bcast(x + (r * k->blocks + b) * XBYTES + 4 * i);
                        for (int c = 0; c < PAIR; c++) sum[r][c] = madd16(sum[r][c], q[c], xr);
                    }
                }
                for (int c = 0; c < PAIR; c++) {
                    const int64_t at = (b * halves + h) * TILE + v * VW;
                    vf scale = vf_load(k->scale[c] + at), min = has_min ? vf_load(k->min[c] + at) : scale;
                    for (int r = 0; r < rows; r++) {
                        const xblock *m = meta + r * k->blocks + b;
                        acc[r][c] = vf_fma(vf_cvt(sum[r][c]), scale * vf_set1(m->scale), acc[r][c]);
                        if (has_min) acc[r][c] = vf_fma(min, vf_set1(m->sums[h]), acc[r][c]);
                    }
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < PAIR; c++) vf_store(k->part[c] + (row + r) * TILE + v * VW, acc[r][c]);
    }
}

/* How many of the rows left the next step takes: even steps rather than one long and one short. */
INLINE int step_of(int64_t left)
{
    if (left >= 2 * ROWS || left == ROWS) return ROWS;
    if (left > ROWS) return left - ROWS >= 3 || ROWS == 4 ? ROWS : 4;
    return (int)left;
}

#define CHUNK_INT(NAME, HALVES, HAS_MIN)                                                     \
    static __attribute__((noinline)) void NAME(const chunk *k, int64_t rows)                 \
    {                                                                                        \
        for (int64_t r = 0, step; r < rows; r += step) {                                     \
            switch (step = step_of(rows - r)) {                                              \
            case 6: chunk_int(k, r, ROWS == 6 ? 6 : 1, HALVES, HAS_MIN); break;              \
            case 5: chunk_int(k, r, 3, HALVES, HAS_MIN); step = 3; break;                    \
            case 4: chunk_int(k, r, 4, HALVES, HAS_MIN); break;                              \
            case 3: chunk_int(k, r, 3, HALVES, HAS_MIN); break;                              \
            case 2: chunk_int(k, r, 2, HALVES, HAS_MIN); break;                              \
            default: chunk_int(k, r, 1, HALVES, HAS_MIN); break;                             \
            }                                                                                \
        }                                                                                    \
    }
CHUNK_INT(chunk_int_zero, 1, 0)
CHUNK_INT(chunk_int_min, 1, 1)
CHUNK_INT(chunk_int_half_zero, 2, 0)
CHUNK_INT(chunk_int_half_min, 2, 1)

INLINE void widen_as(const uint8_t *codes, int64_t count, const int code, vlut table, uint8_t *pairs)
{
    for (int64_t b = 0; b < count; b++)
        for (int v = 0; v < NV; v++) {
            vi q[8];
            block_quads(codes + b * block_bytes_of[code] + v * 4 * VW, code, table, q);
            for (int j = 0; j < 8; j++) {
                vi_store(pairs + b * 1024 + j * 128 + v * 4 * VW, quad_even(q[j]));
                vi_store(pairs + b * 1024 + j * 128 + 64 + v * 4 * VW, quad_odd(q[j]));
            }
        }
}

static void widen_chunk(const ll_weight *w, const uint8_t *codes, int64_t count, uint8_t *pairs)
{
    const vlut table = lut_load(w->table);
    switch (w->code) {
    case CODE_4: widen_as(codes, count, CODE_4, table, pairs); break;
    case CODE_4T: widen_as(codes, count, CODE_4T, table, pairs); break;
    case CODE_5: widen_as(codes, count, CODE_5, table, pairs); break;
    case CODE_6: widen_as(codes, count, CODE_6, table, pairs); break;
    case CODE_2: widen_as(codes, count, CODE_2, table, pairs); break;
    case CODE_3: widen_as(codes, count, CODE_3, table, pairs); break;
    default: widen_as(codes, count, CODE_8, table, pairs); break;
    }
}

static void tile_many(const product *p, int64_t tile, int64_t other, int64_t row, int64_t rows)
{
    const ll_weight *w = p->w;
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE;
    _Alignas(64) uint8_t pairs[PAIR][CHUNK_W * 1024];
    _Alignas(64) tile_floats scale[PAIR], min[PAIR];
    _Alignas(64) float part[PAIR][SLAB * TILE];
    const uint8_t *tiles[PAIR];
    fetcher f = fetch_start(w);
    chunk k = {.blocks = w->blocks};
    for (int c = 0; c < PAIR; c++) {
        tiles[c] = w->data + (tile + c * other) * w->tile_bytes;
        memset(part[c], 0, (size_t)rows * TILE * 4);
        k.pairs[c] = pairs[c];
        k.scale[c] = scale[c];
        k.min[c] = min[c];
        k.part[c] = part[c];
    }
    for (int64_t first = 0; first < w->blocks; first += CHUNK_W) {
        k.count = w->blocks - first < CHUNK_W ? w->blocks - first : CHUNK_W;
        fetch_next(&f, w, tiles, k.count);
        for (int c = 0; c < PAIR; c++) {
            widen_chunk(w, tiles[c] + w->at_codes + first * w->block_bytes, k.count, pairs[c]);
            expand_scales(w, tiles[c], first, k.count, scale[c], min[c]);
        }
        k.x = p->a->planes + (row * w->blocks + first) * XBYTES;
        k.meta = p->a->meta + row * w->blocks + first;
        (halves == 2 ? has_min ? chunk_int_half_min : chunk_int_half_zero : has_min ? chunk_int_min : chunk_int_zero)(&k, rows);
    }
    for (int c = 0; c < PAIR && c <= other; c++)
        for (int64_t r = 0; r < rows; r++) store_tile(p, tile + c, row + r, part[c] + r * TILE);
}

#define TILES_FEW(NAME, CODE, HALVES, HAS_MIN)                                                                       \
    static void NAME(const product *p, int64_t begin, int64_t end)                                                   \
    {                                                                                                                \
        for (int64_t t = begin * PAIR; t < end * PAIR && t < p->w->tiles; t += PAIR) {                               \
            const int64_t other = PAIR == 2 && t + 1 < p->w->tiles;                                                  \
            int64_t r = 0;                                                                                           \
            for (; HALVES == 1 && r + 4 <= p->a->m; r += 4) tile_few(p, t, other, r, 4, CODE, HALVES, HAS_MIN);      \
            for (; HALVES == 1 && r + 2 <= p->a->m; r += 2) tile_few(p, t, other, r, 2, CODE, HALVES, HAS_MIN);      \
            for (; r < p->a->m; r++) tile_few(p, t, other, r, 1, CODE, HALVES, HAS_MIN);                             \
        }                                                                                                            \
    }
TILES_FEW(few_8_zero, CODE_8, 1, 0)
TILES_FEW(few_4_zero, CODE_4, 1, 0)
TILES_FEW(few_4_min, CODE_4, 1, 1)
TILES_FEW(few_4t_zero, CODE_4T, 1, 0)
TILES_FEW(few_4t_half, CODE_4T, 2, 0)
TILES_FEW(few_5_zero, CODE_5, 1, 0)
TILES_FEW(few_5_min, CODE_5, 1, 1)
TILES_FEW(few_6_half, CODE_6, 2, 0)
TILES_FEW(few_2_half, CODE_2, 2, 1)
TILES_FEW(few_3_half, CODE_3, 2, 0)

/* The function for m rows and a range of tiles; NULL for many rows, and for combinations no format has. */
static void (*few_rows(const ll_weight *w, int64_t m))(const product *, int64_t, int64_t)
{
    const int half = w->group == 16, min = w->min_kind != NUM_NONE;
    if (m > (half ? FEW_HALF : FEW)) return NULL;
    switch (w->code) {
    case CODE_8: return half || min ? NULL : few_8_zero;
    case CODE_4: return half ? NULL : min ? few_4_min : few_4_zero;
    case CODE_4T: return min ? NULL : half ? few_4t_half : few_4t_zero;
    case CODE_5: return half ? NULL : min ? few_5_min : few_5_zero;
    case CODE_6: return half && !min ? few_6_half : NULL;
    case CODE_2: return half && min ? few_2_half : NULL;
    case CODE_3: return half && !min ? few_3_half : NULL;
    default: return NULL;
    }
}

INLINE int64_t tile_groups(const ll_weight *w) { return (w->tiles + PAIR - 1) / PAIR; }

static void int_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    if (!p->a->paired) {
        few_rows(p->w, p->a->m)(p, begin, end);
        return;
    }
    const int64_t groups = tile_groups(p->w);
    for (int64_t i = begin; i < end; i++) {
        int64_t tile = i % groups * PAIR, row = i / groups * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB;
        tile_many(p, tile, PAIR == 2 && tile + 1 < p->w->tiles, row, rows);
    }
}

/* ---- float activations: dense and E4M3 weights, and integer codes when nothing may be rounded ---- */

/* One block: four chains (input mod 4), then scale and min. q [32][16] floats. */
INLINE void chunk_float(const float *q, const float *scale, const float *min, int64_t count, const float *x, int64_t stride,
                        const xblock *meta, int64_t blocks, float *part, const int rows, const int halves, const int has_min)
{
    for (int v = 0; v < NV; v++) {
        for (int64_t b = 0; b < count; b++) {
            for (int h = 0; h < halves; h++) {
                const int length = BLOCK / halves;
                const float *qb = q + (b * BLOCK + h * length) * TILE + v * VW;
                vf chain[6][4];
                for (int r = 0; r < rows; r++)
                    for (int t = 0; t < 4; t++) chain[r][t] = vf_set1(0.0f);
                for (int i = 0; i < length; i += 4)
                    for (int t = 0; t < 4; t++) {
                        vf c = vf_load(qb + (i + t) * TILE);
                        for (int r = 0; r < rows; r++)
                            chain[r][t] = vf_fma(c, vf_set1(x[r * stride + b * BLOCK + h * length + i + t]), chain[r][t]);
                    }
                for (int r = 0; r < rows; r++) {
                    float *to = part + r * TILE + v * VW;
                    vf sum = (chain[r][0] + chain[r][1]) + (chain[r][2] + chain[r][3]);
                    vf acc = vf_fma(sum, vf_load(scale + (b * halves + h) * TILE + v * VW), vf_load(to));
                    if (has_min) acc = vf_fma(vf_load(min + (b * halves + h) * TILE + v * VW), vf_set1(meta[r * blocks + b].sums[h]), acc);
                    vf_store(to, acc);
                }
            }
        }
    }
}

#define CHUNK_FLOAT(NAME, HALVES, HAS_MIN)                                                                          \
    static __attribute__((noinline)) void NAME(const float *q, const float *scale, const float *min, int64_t count, \
                                               const float *x, int64_t stride, const xblock *meta, int64_t blocks,  \
                                               float *part, int64_t rows)                                           \
    {                                                                                                               \
        int64_t r = 0;                                                                                              \
        for (; r + (VW == 16 ? 6 : 3) <= rows; r += (VW == 16 ? 6 : 3))                                             \
            chunk_float(q, scale, min, count, x + r * stride, stride, meta + r * blocks, blocks, part + r * TILE, VW == 16 ? 6 : 3, HALVES, HAS_MIN); \
        for (; r < rows; r++)                                                                                       \
            chunk_float(q, scale, min, count, x + r * stride, stride, meta + r * blocks, blocks, part + r * TILE, 1, HALVES, HAS_MIN); \
    }
CHUNK_FLOAT(chunk_float_zero, 1, 0)
CHUNK_FLOAT(chunk_float_min, 1, 1)
CHUNK_FLOAT(chunk_float_half_zero, 2, 0)
CHUNK_FLOAT(chunk_float_half_min, 2, 1)

INLINE void float_blocks_as(const uint8_t *from, int64_t count, const int code, float *to)
{
    const int64_t bytes = block_bytes_of[code];
    for (int64_t b = 0; b < count; b++)
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < NV; v++) vf_store(to + (b * BLOCK + i) * TILE + v * VW, float_code(from + b * bytes, i, v, code));
}

/* Codes of a chunk as floats [count * 32][16], zero offset taken off. */
static void floats_chunk(const ll_weight *w, const uint8_t *from, int64_t count, float *to)
{
    switch (w->code) {
    case CODE_F32: float_blocks_as(from, count, CODE_F32, to); return;
    case CODE_F16: float_blocks_as(from, count, CODE_F16, to); return;
    case CODE_BF16: float_blocks_as(from, count, CODE_BF16, to); return;
    case CODE_E4M3: float_blocks_as(from, count, CODE_E4M3, to); return;
    }
    _Alignas(64) uint8_t pairs[CHUNK_F * 1024];
    const vf zero = quad_zero(w);
    widen_chunk(w, from, count, pairs);
    for (int64_t b = 0; b < count; b++)
        for (int j = 0; j < 8; j++)
            for (int v = 0; v < NV; v++) {
                const uint8_t *at = pairs + b * 1024 + j * 128 + v * 4 * VW;
                vi even = vi_load(at), odd = vi_load(at + 64);
                float *f = to + (b * BLOCK + 4 * j) * TILE + v * VW;
                vf_store(f, code_float(even & 0xffff, zero));
                vf_store(f + TILE, code_float(odd & 0xffff, zero));
                vf_store(f + 2 * TILE, code_float((vi)((vu)even >> 16), zero));
                vf_store(f + 3 * TILE, code_float((vi)((vu)odd >> 16), zero));
            }
}

static void tile_float(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    const ll_weight *w = p->w;
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE;
    const uint8_t *at = w->data + tile * w->tile_bytes, *codes = at + w->at_codes;
    _Alignas(64) float q[CHUNK_F * BLOCK * TILE], scale[CHUNK_F * 2 * TILE], min[CHUNK_F * 2 * TILE], part[SLAB * TILE];
    memset(part, 0, (size_t)rows * TILE * 4);
    for (int64_t first = 0; first < w->blocks; first += CHUNK_F) {
        int64_t count = w->blocks - first < CHUNK_F ? w->blocks - first : CHUNK_F;
        floats_chunk(w, codes + first * w->block_bytes, count, q);
        expand_scales(w, at, first, count, scale, min);
        (halves == 2 ? has_min ? chunk_float_half_min : chunk_float_half_zero : has_min ? chunk_float_min : chunk_float_zero)(
            q, scale, min, count, p->a->floats + row * p->a->stride + first * BLOCK, p->a->stride,
            p->a->meta + row * w->blocks + first, w->blocks, part, rows);
    }
    for (int64_t r = 0; r < rows; r++) store_tile(p, tile, row + r, part + r * TILE);
}

static void float_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / p->w->tiles * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB;
        tile_float(p, i % p->w->tiles, row, rows);
    }
}

/* out = x @ value(w).T (+ bias) (+ residual); the caller holds pool.lock. Returns 0, or -1 without memory. */
static int linear_into(const ll_weight *w, const float *x, int64_t m, const float *bias, const float *residual, float *out, int64_t stride,
                       int exact)
{
    activations a = {.x = x, .m = m, .exact = exact || code_is_float(w->code)};
    a.paired = !few_rows(w, m);
    if (prepare_activations(w, &a)) return -1;
    product p = {w, &a, bias, residual, out, stride};
    int64_t slabs = (m + SLAB - 1) / SLAB;
    pool_run(a.exact ? float_tiles : int_tiles, &p, slabs * (a.exact ? w->tiles : tile_groups(w)));
    return 0;
}

int64_t ll_linear(const ll_weight *w, const float *x, int64_t m, const float *bias, float *out, int64_t exact)
{
    pthread_mutex_lock(&pool.lock);
    int failed = linear_into(w, x, m, bias, NULL, out, w->n, (int)exact);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
