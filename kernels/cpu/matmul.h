/* Products of activations with a prepared weight.
 *
 * For every (row of x, row of the weight) the sum runs over blocks of 32 inputs in order, one chain, whatever the
 * number of rows: integer sums within a block are exact, the float steps are the same instructions in every variant.
 * So a row's result does not depend on the batch. One row unpacks codes in registers; more rows unpack a chunk of
 * codes once to bytes (or floats) in the first-level cache. */
#ifndef LL_MATMUL_H
#define LL_MATMUL_H

#include "activations.h"

#define CHUNK 16  /* blocks of unpacked byte codes: 8 KiB */
#define CHUNK_F 4 /* blocks of unpacked float codes: 8 KiB */
#define SLAB 128  /* rows of x that share one unpacking */

typedef struct {
    const ll_weight *w;
    const activations *a;
    const float *bias, *residual;
    float *out;
} product;

static void store_tile(const product *p, int64_t tile, int64_t row, const float *sums)
{
    const ll_weight *w = p->w;
    int64_t first = tile * TILE, count = w->n - first < TILE ? w->n - first : TILE;
    float *out = p->out + row * w->n + first;
    float r[TILE];
    memcpy(r, sums, sizeof r);
    if (w->row_scale)
        for (int i = 0; i < count; i++) r[i] *= w->row_scale[first + i];
    if (p->bias)
        for (int i = 0; i < count; i++) r[i] += p->bias[first + i];
    if (p->residual)
        for (int i = 0; i < count; i++) r[i] += p->residual[row * w->n + first + i];
    if (count == TILE) memcpy(out, r, sizeof r);
    else memcpy(out, r, (size_t)count * 4);
}

/* ---- integer codes, integer activations ---- */

/* One block of one row: adds to acc. */
INLINE vf block_int(vf acc, const vi q[8], const uint8_t *x, const xblock *meta, const float *scale, const float *min,
                    const int halves, const int has_min)
{
    const vf step = vf_set1(meta->scale);
    for (int h = 0; h < halves; h++) {
        vdot d = dot_start(has_min ? 0 : meta->start[h]);
        for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++) dot_quad(&d, q[j], x, j);
        acc = vf_fma(dot_value(d), vf_load(scale + h * TILE) * step, acc);
        if (has_min) acc = vf_fma(vf_load(min + h * TILE), vf_set1(meta->sums[h]), acc);
    }
    return acc;
}

/* One tile, one row of x. */
INLINE void tile_one(const product *p, int64_t tile, int64_t row, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *codes = at + w->at_codes;
    const uint8_t *x = p->a->planes + row * w->blocks * XBYTES;
    const xblock *meta = p->a->meta + row * w->blocks;
    const vlut table = lut_load(w->table);
    float scale[CHUNK * 2 * TILE], min[CHUNK * 2 * TILE], sums[TILE];
    vf acc[NV];
    for (int v = 0; v < NV; v++) acc[v] = vf_set1(0.0f);
    for (int64_t first = 0; first < w->blocks; first += CHUNK) {
        int64_t count = w->blocks - first < CHUNK ? w->blocks - first : CHUNK;
        expand_scales(w, at, first, count, scale, min);
        for (int64_t b = 0; b < count; b++) {
            for (int v = 0; v < NV; v++) {
                vi q[8];
                block_quads(codes + b * block_bytes_of[code], v, code, table, q);
                acc[v] = block_int(acc[v], q, x + b * XBYTES, meta + b, scale + b * halves * TILE + v * VW,
                                   min + b * halves * TILE + v * VW, halves, has_min);
            }
        }
        codes += count * block_bytes_of[code];
        x += count * XBYTES;
        meta += count;
    }
    for (int v = 0; v < NV; v++) vf_store(sums + v * VW, acc[v]);
    store_tile(p, tile, row, sums);
}

/* `rows` rows of x against a chunk of byte codes; part [rows][16] goes on. */
INLINE void chunk_int(const uint8_t *codes, const float *scale, const float *min, int64_t count, const uint8_t *x,
                      const xblock *meta, int64_t blocks, float *part, const int rows, const int halves, const int has_min)
{
    for (int v = 0; v < NV; v++) {
        vf acc[8];
        for (int r = 0; r < rows; r++) acc[r] = vf_load(part + r * TILE + v * VW);
        for (int64_t b = 0; b < count; b++) {
            vi q[8];
            for (int j = 0; j < 8; j++) q[j] = vi_load(codes + b * 512 + j * 64 + v * 4 * VW);
            for (int r = 0; r < rows; r++)
                acc[r] = block_int(acc[r], q, x + (r * blocks + b) * XBYTES, meta + r * blocks + b,
                                   scale + b * halves * TILE + v * VW, min + b * halves * TILE + v * VW, halves, has_min);
        }
        for (int r = 0; r < rows; r++) vf_store(part + r * TILE + v * VW, acc[r]);
    }
}

#define CHUNK_INT(NAME, HALVES, HAS_MIN)                                                                            \
    static __attribute__((noinline)) void NAME(const uint8_t *codes, const float *scale, const float *min,         \
                                               int64_t count, const uint8_t *x, const xblock *meta,                \
                                               int64_t blocks, float *part, int64_t rows)                          \
    {                                                                                                               \
        int64_t r = 0;                                                                                              \
        for (; r + 8 <= rows; r += 8)                                                                               \
            chunk_int(codes, scale, min, count, x + r * blocks * XBYTES, meta + r * blocks, blocks, part + r * TILE, 8, HALVES, HAS_MIN); \
        for (; r + 3 <= rows; r += 3)                                                                               \
            chunk_int(codes, scale, min, count, x + r * blocks * XBYTES, meta + r * blocks, blocks, part + r * TILE, 3, HALVES, HAS_MIN); \
        for (; r < rows; r++)                                                                                       \
            chunk_int(codes, scale, min, count, x + r * blocks * XBYTES, meta + r * blocks, blocks, part + r * TILE, 1, HALVES, HAS_MIN); \
    }
CHUNK_INT(chunk_int_zero, 1, 0)
CHUNK_INT(chunk_int_min, 1, 1)
CHUNK_INT(chunk_int_half_zero, 2, 0)
CHUNK_INT(chunk_int_half_min, 2, 1)

INLINE void unpack_blocks(const uint8_t *codes, int64_t count, const int code, vlut table, uint8_t *bytes)
{
    for (int64_t b = 0; b < count; b++)
        for (int v = 0; v < NV; v++) {
            vi q[8];
            block_quads(codes + b * block_bytes_of[code], v, code, table, q);
            for (int j = 0; j < 8; j++) vi_store(bytes + b * 512 + j * 64 + v * 4 * VW, q[j]);
        }
}

static void unpack_chunk(const ll_weight *w, const uint8_t *codes, int64_t count, uint8_t *bytes)
{
    const vlut table = lut_load(w->table);
    switch (w->code) {
    case CODE_4: unpack_blocks(codes, count, CODE_4, table, bytes); break;
    case CODE_4T: unpack_blocks(codes, count, CODE_4T, table, bytes); break;
    case CODE_5: unpack_blocks(codes, count, CODE_5, table, bytes); break;
    case CODE_6: unpack_blocks(codes, count, CODE_6, table, bytes); break;
    case CODE_2: unpack_blocks(codes, count, CODE_2, table, bytes); break;
    case CODE_3: unpack_blocks(codes, count, CODE_3, table, bytes); break;
    default: memcpy(bytes, codes, (size_t)count * 512); break;
    }
}

static void tile_many(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    const ll_weight *w = p->w;
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE;
    const uint8_t *at = w->data + tile * w->tile_bytes, *codes = at + w->at_codes;
    _Alignas(64) uint8_t bytes[CHUNK * 512];
    _Alignas(64) float scale[CHUNK * 2 * TILE], min[CHUNK * 2 * TILE], part[SLAB * TILE];
    memset(part, 0, (size_t)rows * TILE * 4);
    for (int64_t first = 0; first < w->blocks; first += CHUNK) {
        int64_t count = w->blocks - first < CHUNK ? w->blocks - first : CHUNK;
        const uint8_t *from = codes + first * w->block_bytes;
        if (w->code != CODE_8) {
            unpack_chunk(w, from, count, bytes);
            from = bytes;
        }
        expand_scales(w, at, first, count, scale, min);
        const uint8_t *x = p->a->planes + (row * w->blocks + first) * XBYTES;
        const xblock *meta = p->a->meta + row * w->blocks + first;
        (halves == 2 ? has_min ? chunk_int_half_min : chunk_int_half_zero : has_min ? chunk_int_min : chunk_int_zero)(
            from, scale, min, count, x, meta, w->blocks, part, rows);
    }
    for (int64_t r = 0; r < rows; r++) store_tile(p, tile, row + r, part + r * TILE);
}

#define TILES_ONE(NAME, CODE, HALVES, HAS_MIN)                                                                       \
    static void NAME(const product *p, int64_t begin, int64_t end)                                                   \
    {                                                                                                                \
        for (int64_t t = begin; t < end; t++) tile_one(p, t, 0, CODE, HALVES, HAS_MIN);                              \
    }
TILES_ONE(one_8_zero, CODE_8, 1, 0)
TILES_ONE(one_8_min, CODE_8, 1, 1)
TILES_ONE(one_4_zero, CODE_4, 1, 0)
TILES_ONE(one_4_min, CODE_4, 1, 1)
TILES_ONE(one_4t_zero, CODE_4T, 1, 0)
TILES_ONE(one_4t_half, CODE_4T, 2, 0)
TILES_ONE(one_5_zero, CODE_5, 1, 0)
TILES_ONE(one_5_min, CODE_5, 1, 1)
TILES_ONE(one_6_half, CODE_6, 2, 0)
TILES_ONE(one_2_half, CODE_2, 2, 1)
TILES_ONE(one_3_half, CODE_3, 2, 0)

/* The function for one row and all its tiles; NULL for combinations no format has. */
static void (*one_row(const ll_weight *w))(const product *, int64_t, int64_t)
{
    const int half = w->group == 16, min = w->min_kind != NUM_NONE;
    switch (w->code) {
    case CODE_8: return half ? NULL : min ? one_8_min : one_8_zero;
    case CODE_4: return half ? NULL : min ? one_4_min : one_4_zero;
    case CODE_4T: return min ? NULL : half ? one_4t_half : one_4t_zero;
    case CODE_5: return half ? NULL : min ? one_5_min : one_5_zero;
    case CODE_6: return half && !min ? one_6_half : NULL;
    case CODE_2: return half && min ? one_2_half : NULL;
    case CODE_3: return half && !min ? one_3_half : NULL;
    default: return NULL;
    }
}

static void int_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    void (*one)(const product *, int64_t, int64_t) = one_row(p->w);
    if (p->a->m == 1 && one) {
        one(p, begin, end);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / p->w->tiles * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB;
        tile_many(p, i % p->w->tiles, row, rows);
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
    _Alignas(64) uint8_t bytes[CHUNK_F * 512];
    const vf zero = quad_zero(w);
    unpack_chunk(w, from, count, bytes);
    for (int64_t b = 0; b < count; b++)
        for (int j = 0; j < 8; j++)
            for (int v = 0; v < NV; v++) {
                vi q = vi_load(bytes + b * 512 + j * 64 + v * 4 * VW);
                for (int t = 0; t < 4; t++) vf_store(to + (b * BLOCK + 4 * j + t) * TILE + v * VW, quad_floats(q, t, zero));
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
static int linear_locked(const ll_weight *w, const float *x, int64_t m, const float *bias, const float *residual, float *out, int exact)
{
    activations a = {.x = x, .m = m, .exact = exact || code_is_float(w->code)};
    if (prepare_activations(w, &a)) return -1;
    product p = {w, &a, bias, residual, out};
    pool_run(a.exact ? float_tiles : int_tiles, &p, w->tiles * ((m + SLAB - 1) / SLAB));
    return 0;
}

int64_t ll_linear(const ll_weight *w, const float *x, int64_t m, const float *bias, float *out, int64_t exact)
{
    pthread_mutex_lock(&pool.lock);
    int failed = linear_locked(w, x, m, bias, NULL, out, (int)exact);
    pthread_mutex_unlock(&pool.lock);
    return failed;
}

#endif
