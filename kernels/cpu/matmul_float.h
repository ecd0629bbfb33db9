/* Products with float activations: dense and E4M3 weights, and integer codes if activations must not be rounded. */
#ifndef LL_MATMUL_FLOAT_H
#define LL_MATMUL_FLOAT_H

#include "matmul_int.h"

/* Group `h` of a block for one row: sum of four chains (input mod 4), then scale and min. */
INLINE vf group_float(vf acc, const vf chain[4], const float *scale, const float *min, const xblock *meta, int h, const int has_min)
{
    acc = vf_fma((chain[0] + chain[1]) + (chain[2] + chain[3]), vf_load(scale), acc);
    return has_min ? vf_fma(vf_load(min), vf_set1(meta->sums[h]), acc) : acc;
}

/* One tile times one row of x, codes unpacked in registers. */
INLINE void tile_float_one(const product *p, int64_t tile, int64_t row, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *ahead = at + w->at_codes + fetches(code), *asked = ahead;
    const int64_t each = w->tile_bytes / w->blocks, chunk = chunk_of(w, CHUNK), step = codes_step(w);
    const float *x = p->a->floats + row * p->a->stride;
    const xblock *meta = p->a->meta + row * p->a->meta_stride;
    const vlut table = lut_load(w->table);
    const vf zero = quad_zero(w);
    _Alignas(64) chunk_floats scale, min;
    vf acc[NV];
    for (int v = 0; v < NV; v++) acc[v] = vf_set1(0.0f);
    for (int64_t first = 0; first < w->blocks; first += chunk) {
        const int64_t count = w->blocks - first < chunk ? w->blocks - first : chunk;
        const uint8_t *codes = at + codes_at(w, first);
        expand_scales(w, at, first, count, scale, min);
        for (int64_t b = 0; b < count; b++, x += BLOCK, meta++, codes += step) {
            asked = fetch_to(asked, ahead + (first + b + 1) * each, 0);
            for (int v = 0; v < NV; v += COLS) {
                vi q[8][COLS];
                if (!code_is_float(code)) block_quads(codes + v * VW * 4, code, table, q);
                for (int h = 0; h < halves; h++) {
                    vf chain[COLS][4];
                    for (int c = 0; c < COLS; c++)
                        for (int t = 0; t < 4; t++) chain[c][t] = vf_set1(0.0f);
                    for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++)
                        for (int t = 0; t < 4; t++)
                            for (int c = 0; c < COLS; c++) {
                                vf value = code_is_float(code) ? float_code(codes, 4 * j + t, v + c, code)
                                                               : code_float((vi)((vu)q[j][c] >> (8 * t)) & 0xff, zero);
                                chain[c][t] = vf_fma(value, vf_set1(x[4 * j + t]), chain[c][t]);
                            }
                    for (int c = 0; c < COLS; c++) {
                        const int64_t lane = (b * halves + h) * TILE + (v + c) * VW;
                        acc[v + c] = group_float(acc[v + c], chain[c], scale + lane, min + lane, meta, h, has_min);
                    }
                }
            }
        }
    }
    float sums[TILE];
    for (int v = 0; v < NV; v++) vf_store(sums + v * VW, acc[v]);
    store_tile(p, tile, row, sums);
}

#define TILES_FLOAT(NAME, CODE, HALVES, HAS_MIN)                                                                \
    static void NAME(const product *p, int64_t begin, int64_t end)                                              \
    {                                                                                                           \
        for (int64_t t = begin; t < end; t++)                                                                   \
            for (int64_t r = 0; r < p->a->m; r++) tile_float_one(p, t, r, CODE, HALVES, HAS_MIN);               \
    }
TILES_FLOAT(float_f32, CODE_F32, 1, 0)
TILES_FLOAT(float_f16, CODE_F16, 1, 0)
TILES_FLOAT(float_bf16, CODE_BF16, 1, 0)
TILES_FLOAT(float_e4m3, CODE_E4M3, 1, 0)
TILES_FLOAT(float_8_zero, CODE_8, 1, 0)
TILES_FLOAT(float_4_zero, CODE_4, 1, 0)
TILES_FLOAT(float_4_min, CODE_4, 1, 1)
TILES_FLOAT(float_5_zero, CODE_5, 1, 0)
TILES_FLOAT(float_6_half, CODE_6, 2, 0)

/* The function for very few rows; NULL if codes are unpacked into memory first. */
static void (*few_float_rows(const ll_weight *w, int64_t m))(const product *, int64_t, int64_t)
{
    const int half = w->group == 16, min = w->min_kind != NUM_NONE;
    if (m > FEW_FLOAT || (half && w->code != CODE_6)) return NULL;
    switch (w->code) {
    case CODE_F32: return min ? NULL : float_f32;
    case CODE_F16: return min ? NULL : float_f16;
    case CODE_BF16: return min ? NULL : float_bf16;
    case CODE_E4M3: return min ? NULL : float_e4m3;
    case CODE_8: return min ? NULL : float_8_zero;
    case CODE_4: return min ? float_4_min : float_4_zero;
    case CODE_5: return min ? NULL : float_5_zero;
    case CODE_6: return half && !min ? float_6_half : NULL;
    default: return NULL;
    }
}

#define ROWS_F (VW == 16 ? 6 : 3) /* 4 chains each: 24 of 32 registers, 12 of 16 */

/* Chunks of codes as floats, q [count * 32][32], shared by ROWS_F rows. */
INLINE void chunk_float(const float *q, const float *scale, const float *min, int64_t count, const float *x, int64_t stride,
                        const xblock *meta, int64_t blocks, float *part, const int rows, const int halves, const int has_min)
{
    const int length = BLOCK / halves;
    for (int v = 0; v < NV; v++)
        for (int64_t b = 0; b < count * halves; b++) { /* groups with one scale each */
            const float *qb = q + b * length * TILE + v * VW, *xb = x + b * length;
            vf chain[ROWS_F][4];
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < 4; t++) chain[r][t] = vf_set1(0.0f);
            for (int i = 0; i < length; i += 4)
                for (int t = 0; t < 4; t++) {
                    vf code = vf_load(qb + (i + t) * TILE);
                    for (int r = 0; r < rows; r++) chain[r][t] = vf_fma(code, vf_set1(xb[r * stride + i + t]), chain[r][t]);
                }
            const int64_t lane = b * TILE + v * VW;
            for (int r = 0; r < rows; r++) {
                float *to = part + r * TILE + v * VW;
                vf_store(to, group_float(vf_load(to), chain[r], scale + lane, min + lane, meta + r * blocks + b / halves,
                                         (int)(b % halves), has_min));
            }
        }
}

#define CHUNK_FLOAT(NAME, HALVES, HAS_MIN)                                                                          \
    static __attribute__((noinline)) void NAME(const float *q, const float *scale, const float *min, int64_t count, \
                                               const float *x, int64_t stride, const xblock *meta, int64_t blocks,  \
                                               float *part, int64_t rows)                                           \
    {                                                                                                               \
        int64_t r = 0;                                                                                              \
        for (; r + ROWS_F <= rows; r += ROWS_F)                                                                     \
            chunk_float(q, scale, min, count, x + r * stride, stride, meta + r * blocks, blocks, part + r * TILE, ROWS_F, HALVES, HAS_MIN); \
        for (; r < rows; r++)                                                                                       \
            chunk_float(q, scale, min, count, x + r * stride, stride, meta + r * blocks, blocks, part + r * TILE, 1, HALVES, HAS_MIN); \
    }
CHUNK_FLOAT(chunk_float_zero, 1, 0)
CHUNK_FLOAT(chunk_float_min, 1, 1)
CHUNK_FLOAT(chunk_float_half_zero, 2, 0)
CHUNK_FLOAT(chunk_float_half_min, 2, 1)

INLINE void float_blocks_as(const uint8_t *from, int64_t count, const int code, float *to)
{
    for (int64_t b = 0; b < count; b++)
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < NV; v++)
                vf_store(to + (b * BLOCK + i) * TILE + v * VW, float_code(from + b * block_bytes_of[code], i, v, code));
}

INLINE void float_codes_as(const ll_weight *w, const uint8_t *from, int64_t count, const int code, vlut table, float *to)
{
    const vf zero = quad_zero(w);
    const int64_t step = codes_step(w);
    for (int64_t b = 0; b < count; b++)
        for (int v = 0; v < NV; v += COLS) {
            vi q[8][COLS];
            block_quads(from + b * step + v * VW * 4, code, table, q);
            for (int j = 0; j < 8; j++)
                for (int t = 0; t < 4; t++)
                    for (int c = 0; c < COLS; c++)
                        vf_store(to + (b * BLOCK + 4 * j + t) * TILE + (v + c) * VW,
                                 code_float((vi)((vu)q[j][c] >> (8 * t)) & 0xff, zero));
        }
}

/* Codes of a chunk as floats [count * 32][32], minus the zero offset. */
static void floats_chunk(const ll_weight *w, const uint8_t *from, int64_t count, float *to)
{
    switch (w->code) {
    case CODE_F32: float_blocks_as(from, count, CODE_F32, to); return;
    case CODE_F16: float_blocks_as(from, count, CODE_F16, to); return;
    case CODE_BF16: float_blocks_as(from, count, CODE_BF16, to); return;
    case CODE_E4M3: float_blocks_as(from, count, CODE_E4M3, to); return;
    }
    const vlut table = lut_load(w->table);
    switch (w->code) {
    case CODE_4: float_codes_as(w, from, count, CODE_4, table, to); break;
    case CODE_4T: float_codes_as(w, from, count, CODE_4T, table, to); break;
    case CODE_5: float_codes_as(w, from, count, CODE_5, table, to); break;
    case CODE_6: float_codes_as(w, from, count, CODE_6, table, to); break;
    case CODE_2: float_codes_as(w, from, count, CODE_2, table, to); break;
    case CODE_3: float_codes_as(w, from, count, CODE_3, table, to); break;
    default: float_codes_as(w, from, count, CODE_8, table, to); break;
    }
}

static void tile_float(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    const ll_weight *w = p->w;
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE;
    const uint8_t *at = w->data + tile * w->tile_bytes;
    _Alignas(64) float q[CHUNK_F * BLOCK * TILE], scale[CHUNK_F * 2 * TILE], min[CHUNK_F * 2 * TILE];
    _Alignas(64) float part[SLAB * TILE];
    memset(part, 0, (size_t)rows * TILE * 4);
    for (int64_t first = 0; first < w->blocks; first += CHUNK_F) {
        int64_t count = w->blocks - first < CHUNK_F ? w->blocks - first : CHUNK_F;
        floats_chunk(w, at + codes_at(w, first), count, q);
        expand_scales(w, at, first, count, scale, min);
        (halves == 2 ? has_min ? chunk_float_half_min : chunk_float_half_zero : has_min ? chunk_float_min : chunk_float_zero)(
            q, scale, min, count, p->a->floats + row * p->a->stride + first * BLOCK, p->a->stride,
            p->a->meta + row * p->a->meta_stride + first, p->a->meta_stride, part, rows);
    }
    for (int64_t r = 0; r < rows; r++) store_tile(p, tile, row + r, part + r * TILE);
}

static void float_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    void (*few)(const product *, int64_t, int64_t) = few_float_rows(p->w, p->a->m);
    if (few) {
        few(p, begin, end);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / p->w->tiles * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB;
        tile_float(p, i % p->w->tiles, row, rows);
    }
}

#endif
