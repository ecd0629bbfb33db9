/* Products with weights whose scales are small integers that share a float for 256 inputs: K-quants and IQ4_XS.
 *
 * Activations have one scale for the same 256 inputs, 14 bits each, so scales are multiplied as integers, exactly, and
 * floats come in once in 256 inputs. Many rows meet codes that were multiplied by their scales while they were widened to 16
 * bits: a sum is a chain of `vpdpwssd` and nothing else. Mins are pairs of 16 bits, too. */
#ifndef LL_MATMUL_SUPER_H
#define LL_MATMUL_SUPER_H

#include "product.h"

/* Whether scales are integers that are multiplied as such; mins are of the same kind then. */
INLINE int is_super(const ll_weight *w)
{
    return MANY_PAIRS && w->scale_kind == NUM_SUB8 && w->k % SUPER == 0 && !w->perm && !w->pre_scale;
}

#define SUPER_BLOCKS (SUPER / BLOCK)
#define SUPER_ROWS (VW == 16 ? 8 : 4) /* rows of x that share a load of codes */
/* Up to so many rows of x unpack codes in registers (two Zen 4 cores, Q4_K 6,144 x 2,048: no difference for 16 rows, 2.06 ms
 * instead of 1.64 for 24; Q6_K 2,048 x 6,144, groups of 16: 0.48 instead of 0.56 for 3, 0.96 and 0.82 for 4, 1.00 and 0.76
 * for 6). */
#define SUPER_FEW(halves) (LL_VNNI && (halves) == 1 ? 16 : 3)

/* Blocks whose products, each at most code * scale * X_MAX_SUPER, are summed within 32 bits. */
INLINE int chain_of(const int code) { return code == CODE_6 || code == CODE_4T ? 2 : code == CODE_5 ? 4 : SUPER_BLOCKS; }

/* Scales of 16 bits, twice a lane. */
INLINE vi twice_i8(const uint8_t *at)
{
    const vi one = vi_i8(at);
    return (one & 0xffff) | one << 16;
}

/* Mins of two groups, which meet the sums of their inputs. */
INLINE vi min_pair(const uint8_t *at) { return vi_u8(at) | vi_u8(at + TILE) << 16; }

INLINE vf super_factor(const uint16_t *scale, float of_x) { return vf_f16(scale) * vf_set1(of_x); }

/* One tile against `rows` rows of x. */
INLINE void super_few(const product *p, int64_t tile, int64_t row, const int rows, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *codes = at + w->at_codes, *scale = at, *min = at + w->at_min;
    const uint16_t *super_scale = (const uint16_t *)(at + w->at_super_scale), *super_min = (const uint16_t *)(at + w->at_super_min);
    const int64_t bytes = block_bytes_of[code], x_stride = p->a->x_stride, meta_stride = p->a->meta_stride;
    const uint8_t *x = p->a->planes + row * x_stride;
    const xblock *meta = p->a->meta + row * meta_stride;
    const vlut table = lut_load(w->table);
    const int64_t ahead = row ? w->tile_bytes : AHEAD(code); /* the tile is in the cache for later rows */
    const uint8_t *head = at + w->tile_bytes; /* of the next tile: scales, and what comes first of its codes */
    const int64_t step = row ? 0 : round_up((w->at_codes + ahead) / w->blocks, 64);
    vf acc[4][NV];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = vf_set1(0.0f);
    for (int64_t s = 0; s < w->supers; s++, super_scale += TILE, super_min += TILE) {
        const xblock *of = meta;
        vi sums[4][NV], mins[4][NV];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < NV; v++) sums[r][v] = mins[r][v] = vi_set1(0);
        for (int b = 0; b < SUPER_BLOCKS; b++, x += XBYTES, meta++, codes += bytes, scale += halves * TILE) {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(codes + ahead + i, 0, 2);
            for (const uint8_t *end = head + step; head < end; head += 64) __builtin_prefetch(head, 0, 2);
            for (int v = 0; v < NV; v += COLS) {
                vi q[8][COLS];
                block_quads(codes + v * VW * 4, code, table, q);
                for (int h = 0; h < halves; h++)
                    for (int r = 0; r < rows; r++) {
                        vdot d[COLS];
                        for (int c = 0; c < COLS; c++) d[c] = dot_start(has_min ? 0 : meta[r * meta_stride].start[h]);
                        for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++)
                            for (int c = 0; c < COLS; c++) dot_quad(&d[c], q[j][c], x + r * x_stride, j);
                        for (int c = 0; c < COLS; c++) sums[r][v + c] += dot_sum(d[c]) * vi_i8(scale + h * TILE + (v + c) * VW);
                    }
                if (has_min && (halves == 2 || b % 2 == 0))
                    for (int c = 0; c < COLS; c++) {
                        const vi pair = min_pair(min + (v + c) * VW);
                        for (int r = 0; r < rows; r++) mins[r][v + c] = madd16(mins[r][v + c], pair, vi_set1(meta[r * meta_stride].start[0]));
                    }
            }
            if (has_min && (halves == 2 || b % 2 == 0)) min += 2 * TILE;
            if ((b + 1) % chain_of(code)) continue;
            for (int v = 0; v < NV; v++)
                for (int r = 0; r < rows; r++) {
                    acc[r][v] = vf_fma(vf_cvt(sums[r][v]), super_factor(super_scale + v * VW, of[r * meta_stride].scale), acc[r][v]);
                    sums[r][v] = vi_set1(0);
                }
        }
        for (int v = 0; has_min && v < NV; v++)
            for (int r = 0; r < rows; r++)
                acc[r][v] = vf_fma(vf_cvt(mins[r][v]), super_factor(super_min + v * VW, of[r * meta_stride].min_scale), acc[r][v]);
    }
    for (int r = 0; r < rows; r++) {
        float sums[TILE];
        for (int v = 0; v < NV; v++) vf_store(sums + v * VW, acc[r][v]);
        store_tile(p, tile, row + r, sums);
    }
}

/* ---- the same for many rows ---- */

typedef struct {
    uint8_t codes[SUPER_BLOCKS * WIDE_BLOCK(0)]; /* times their scales: [pairs][32 lanes] */
    int32_t mins[SUPER_BLOCKS][TILE];            /* pairs */
    const uint16_t *scale, *min;
    const uint8_t *x;
    const xblock *meta;
    int64_t x_stride, meta_stride;
    float *part; /* [rows][32] sums so far */
} super_chunk;

INLINE void super_widen(const uint8_t *codes, const uint8_t *scale, const int code, const int halves, vlut table, int32_t offset, uint8_t *to)
{
    const vh zero = (vh)vi_set1(offset * 0x10001);
    for (int64_t b = 0; b < SUPER_BLOCKS; b++)
        for (int v = 0; v < NV; v += COLS) {
            vi q[8][COLS];
            block_quads(codes + b * block_bytes_of[code] + v * VW * 4, code, table, q);
            vh by[2][COLS];
            for (int h = 0; h < halves; h++)
                for (int c = 0; c < COLS; c++) by[h][c] = (vh)twice_i8(scale + (b * halves + h) * TILE + (v + c) * VW);
            for (int j = 0; j < 8; j++)
                for (int c = 0; c < COLS; c++) {
                    const vh times = by[j * halves / 8][c];
                    uint8_t *at = to + b * WIDE_BLOCK(0) + (2 * j * TILE + (v + c) * VW) * 4;
                    vi_store(at, (vi)(((vh)quad_even(q[j][c]) - zero) * times));
                    vi_store(at + TILE * 4, (vi)(((vh)quad_odd(q[j][c]) - zero) * times));
                }
        }
}

INLINE void super_rows(const super_chunk *k, int64_t row, const int rows, const int chain, const int halves, const int has_min)
{
    const uint8_t *x = k->x + row * k->x_stride;
    const xblock *meta = k->meta + row * k->meta_stride;
    for (int v = 0; v < NV; v += COLS) {
        float *part = k->part + row * TILE + v * VW;
        for (int b = 0; b < SUPER_BLOCKS; b += chain) {
            vi sum[SUPER_ROWS][COLS];
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < COLS; c++) sum[r][c] = vi_set1(0);
            const uint8_t *codes = k->codes + b * WIDE_BLOCK(0) + v * VW * 4, *from = x + b * XBYTES;
            for (int i = 0; i < chain * BLOCK / 2; i++) {
                vi q[COLS];
                for (int c = 0; c < COLS; c++) q[c] = vi_load(codes + (i * TILE + c * VW) * 4);
                for (int r = 0; r < rows; r++) {
                    const vi pair = vi_bcast(from + r * k->x_stride + 4 * i);
                    for (int c = 0; c < COLS; c++) sum[r][c] = madd16(sum[r][c], q[c], pair);
                }
            }
            for (int r = 0; r < rows; r++) {
                const xblock *m = meta + r * k->meta_stride;
                vi mins[COLS];
                for (int c = 0; c < COLS; c++) mins[c] = vi_set1(0);
                for (int i = 0; has_min && b + chain == SUPER_BLOCKS && i < SUPER_BLOCKS * halves / 2; i++)
                    for (int c = 0; c < COLS; c++)
                        mins[c] = madd16(mins[c], vi_load(&k->mins[i][(v + c) * VW]), vi_set1(m[2 * i / halves].start[0]));
                for (int c = 0; c < COLS; c++) {
                    float *to = part + r * TILE + c * VW;
                    vf y = vf_fma(vf_cvt(sum[r][c]), super_factor(k->scale + (v + c) * VW, m->scale), vf_load(to));
                    if (has_min && b + chain == SUPER_BLOCKS) y = vf_fma(vf_cvt(mins[c]), super_factor(k->min + (v + c) * VW, m->min_scale), y);
                    vf_store(to, y);
                }
            }
        }
    }
}

/* part [rows][32] = sums of rows row.. of x against a tile */
INLINE void super_sums_as(const product *p, int64_t tile, int64_t row, int64_t rows, float *part, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *codes = at + w->at_codes, *scale = at, *min = at + w->at_min;
    const vlut table = lut_load(w->table);
    const int64_t bytes = SUPER_BLOCKS * block_bytes_of[code];
    _Alignas(64) super_chunk k;
    k.scale = (const uint16_t *)(at + w->at_super_scale);
    k.min = (const uint16_t *)(at + w->at_super_min);
    k.x = p->a->planes + row * p->a->x_stride;
    k.meta = p->a->meta + row * p->a->meta_stride;
    k.x_stride = p->a->x_stride;
    k.meta_stride = p->a->meta_stride;
    k.part = part;
    memset(part, 0, (size_t)rows * TILE * 4);
    for (int64_t s = 0; s < w->supers; s++) {
        super_widen(codes, scale, code, halves, table, has_min ? 0 : (int32_t)w->zero_offset, k.codes);
        codes += bytes;
        scale += SUPER_BLOCKS * halves * TILE;
        for (int i = 0; has_min && i < SUPER_BLOCKS * halves / 2; i++, min += 2 * TILE)
            for (int v = 0; v < TILE; v += VW) vi_store(&k.mins[i][v], min_pair(min + v));
        int64_t r = 0;
        for (; SUPER_ROWS > 4 && r + SUPER_ROWS <= rows; r += SUPER_ROWS) super_rows(&k, r, SUPER_ROWS, chain_of(code), halves, has_min);
        for (; r + 4 <= rows; r += 4) super_rows(&k, r, 4, chain_of(code), halves, has_min);
        for (; r + 2 <= rows; r += 2) super_rows(&k, r, 2, chain_of(code), halves, has_min);
        for (; r < rows; r++) super_rows(&k, r, 1, chain_of(code), halves, has_min);
        k.scale += TILE;
        k.min += TILE;
        k.x += SUPER_BLOCKS * XBYTES;
        k.meta += SUPER_BLOCKS;
        /* what comes next is fetched while the many rows are computed */
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(codes + i, 0, 2);
    }
}

#define SUPER_PRODUCT(NAME, CODE, HALVES, HAS_MIN)                                                          \
    static void NAME##_few(const product *p, int64_t begin, int64_t end)                                    \
    {                                                                                                       \
        for (int64_t t = begin; t < end; t++) {                                                             \
            int64_t r = 0;                                                                                  \
            for (; HALVES == 1 && r + 4 <= p->a->m; r += 4) super_few(p, t, r, 4, CODE, HALVES, HAS_MIN);   \
            for (; r + 2 <= p->a->m; r += 2) super_few(p, t, r, 2, CODE, HALVES, HAS_MIN);                  \
            for (; r < p->a->m; r++) super_few(p, t, r, 1, CODE, HALVES, HAS_MIN);                          \
        }                                                                                                   \
    }                                                                                                       \
    static void NAME##_sums(const product *p, int64_t tile, int64_t row, int64_t rows, float *part)         \
    {                                                                                                       \
        super_sums_as(p, tile, row, rows, part, CODE, HALVES, HAS_MIN);                                     \
    }
#if MANY_PAIRS
SUPER_PRODUCT(super_2, CODE_2, 2, 1)
SUPER_PRODUCT(super_3, CODE_3, 2, 0)
SUPER_PRODUCT(super_4, CODE_4, 1, 1)
SUPER_PRODUCT(super_4t, CODE_4T, 1, 0)
SUPER_PRODUCT(super_5, CODE_5, 1, 1)
SUPER_PRODUCT(super_6, CODE_6, 2, 0)
static const struct {
    void (*few)(const product *, int64_t, int64_t);
    void (*sums)(const product *, int64_t, int64_t, int64_t, float *);
} super_of[] = {[CODE_2] = {super_2_few, super_2_sums}, [CODE_3] = {super_3_few, super_3_sums},    [CODE_4] = {super_4_few, super_4_sums},
                [CODE_5] = {super_5_few, super_5_sums}, [CODE_4T] = {super_4t_few, super_4t_sums}, [CODE_6] = {super_6_few, super_6_sums}};
#endif

#endif
