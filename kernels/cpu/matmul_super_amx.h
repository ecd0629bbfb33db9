/* Products of many rows with K-quants and IQ4_XS on AMX tiles.
 *
 * Codes times scales have 10 to 13 bits, activations 14: each is split into two bytes, 128 * high + low. The four byte products
 * go into three sums, which are exact; the float steps are those of `super_rows`, so results are bit-identical, which `ll_amx`
 * verifies (amx_check.h). Three products would suffice (A. Karatsuba), but the sums of bytes that they need do not fit in L1
 * with the rest. */
#ifndef LL_MATMUL_SUPER_AMX_H
#define LL_MATMUL_SUPER_AMX_H

#include "matmul_amx.h"
#include "matmul_super.h"

#if LL_AMX
#define TILE_BYTES (AMX_ROWS * 64) /* bytes per tile: 16 rows of x with 64 inputs, or 16 quads of codes with 16 columns */
#define TILE_STEPS (SUPER / 64)    /* tiles per 256 inputs */

typedef int32_t tiles_sums[6][AMX_ROWS][VW]; /* for both halves of the columns: high * high, high * low + low * high, low * low */
/* Factors of 256 inputs, shared by all rows. */
typedef struct {
    vf scale[2], min[2];
    vi mins[SUPER_BLOCKS][2]; /* pairs */
} tiles_factors;

/* Tile sums of a chain of inputs, to be added to the results of 16 rows. */
typedef struct {
    int32_t (*sums)[AMX_ROWS][VW];
    const tiles_factors *factors;
    const xblock *meta;
    float *part;
} tiles_done;

/* Splits the even and odd codes of a quad, 16 bits each, into high and low bytes in the order of the codes. `is_signed`: low
 * bytes are -64 .. 63, otherwise 0 .. 127. */
INLINE void digits_of_codes(vh even, vh odd, const int is_signed, uint8_t *high, uint8_t *low)
{
    const __m512i evens = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(64);
    __m512i e = (__m512i)even, o = (__m512i)odd;
    if (is_signed) e = _mm512_add_epi16(e, half), o = _mm512_add_epi16(o, half);
    const __m512i bits = _mm512_and_si512(_mm512_ternarylogic_epi32(evens, e, _mm512_slli_epi16(o, 8), 0xca), _mm512_set1_epi8(127));
    _mm512_store_si512(low, is_signed ? _mm512_sub_epi8(bits, _mm512_set1_epi8(64)) : bits);
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(evens, _mm512_srli_epi16(e, 7), _mm512_slli_epi16(o, 1), 0xca));
}

/* codes = codes of 256 inputs of a tile times their scales: [high bytes, low bytes][quads][32 lanes][4] */
INLINE void tiles_widen(const uint8_t *packed, const uint8_t *scale, const int code, const int halves, vlut table, const int has_min, int32_t offset, uint8_t codes[2][SUPER / 4][PLANE])
{
    for (int64_t b = 0; b < SUPER_BLOCKS; b++) {
        vi q[8][COLS];
        block_quads(packed + b * block_bytes_of[code], code, table, q);
        for (int h = 0; h < halves; h++)
            for (int c = 0; c < COLS; c++) {
                const uint8_t *at = scale + (b * halves + h) * TILE + c * VW;
                const quad_scales by = quad_scales_at(at);
                const vh zero = has_min ? (vh)vi_set1(0) : scaled_zero(at, offset);
                for (int j = 8 / halves * h; j < 8 / halves * (h + 1); j++)
                    digits_of_codes((vh)even_codes(q[j][c], by) - zero, (vh)odd_codes(q[j][c], by) - zero, !has_min, codes[0][8 * b + j] + c * 64, codes[1][8 * b + j] + c * 64);
            }
    }
}

INLINE void tiles_factors_of(const ll_weight *w, const uint8_t *at, const int halves, const int has_min, tiles_factors *f)
{
    for (int c = 0; c < 2; c++) {
        f->scale[c] = vf_f16((const uint16_t *)(at + w->at_super_scale) + c * VW);
        f->min[c] = has_min ? vf_f16((const uint16_t *)(at + w->at_super_min) + c * VW) : f->scale[c];
        for (int i = 0; has_min && i < SUPER_BLOCKS * halves / 2; i++) f->mins[i][c] = min_pair(at + w->at_min + 2 * i * TILE + c * VW);
    }
}

/* Adds a row's sums of a chain to its results; `mins`: last chain of the 256 inputs, so mins are added as well. */
INLINE void tiles_finish(const tiles_factors *f, const tiles_done *d, const int r, const int halves, const int has_min, const int mins)
{
    const xblock *meta = d->meta + r * SUPER_META(halves, has_min);
    float *part = d->part + r * TILE;
    UNROLL for (int c = 0; c < 2; c++) {
        const vi sum = (((vi_load(d->sums[c][r]) << 7) + vi_load(d->sums[2 + c][r])) << 7) + vi_load(d->sums[4 + c][r]);
        vf y = vf_fma(vf_cvt(sum), f->scale[c] * vf_set1(meta->scale), vf_load(part + c * VW));
        if (has_min && mins) {
            vi of_mins = vi_set1(0);
            UNROLL for (int i = 0; i < SUPER_BLOCKS * halves / 2; i++) of_mins = madd16(of_mins, f->mins[i][c], vi_set1(sum_pair(meta, i)));
            y = vf_fma(vf_cvt(of_mins), f->min[c] * vf_set1(meta->min_scale), y);
        }
        vf_store(part + c * VW, y);
    }
}

/* One of the 8 * steps products of a chain, interleaved with a share of the finishing of earlier chains. The first product of
 * each sum stores the previous chain's tile, whose last product is at least four products back: a store right after it would
 * stall, and everything after the store too (16 products and 4 stores: 240 cycles, 192 like this). */
#define TILES_DOT(AT, T, X, CODES)                                                                                  \
    if (s == 0 && AT < 6) {                                                                                         \
        _tile_stored(T, to[T], 64);                                                                                 \
        _tile_zero(T);                                                                                              \
    }                                                                                                               \
    if (has_min) _tile_dpbsud(T, X, CODES);                                                                         \
    else _tile_dpbssd(T, X, CODES);                                                                                 \
    UNROLL for (int r = AMX_ROWS * (8 * s + AT) / (8 * steps); r < AMX_ROWS * (8 * s + AT + 1) / (8 * steps); r++)  \
        tiles_finish(&f, before, r, halves, has_min, mins);

/* Pipeline: while tiles compute a chain of inputs, the previous chain's sums are stored to `to`, and the one before is finished. */
INLINE void tiles_chain(uint8_t (*codes)[SUPER / 4][PLANE], const uint8_t *x, const int first, const int steps, const int halves,
                        const int has_min, int32_t (*to)[AMX_ROWS][VW], const tiles_done *before)
{
    const int chains = TILE_STEPS / steps, mins = (first / steps + 2 * chains - 2) % chains == chains - 1;
    const tiles_factors f = *before->factors;
    UNROLL for (int s = 0; s < steps; s++) {
        const uint8_t *high = codes[0][16 * (first + s)], *low = codes[1][16 * (first + s)], *at = x + (first + s) * TILE_BYTES;
        _tile_loadd(6, at, 64);
        _tile_loadd(7, high, PLANE);
        TILES_DOT(0, 0, 6, 7)
        _tile_loadd(7, high + 64, PLANE);
        TILES_DOT(1, 1, 6, 7)
        _tile_loadd(7, low, PLANE);
        TILES_DOT(2, 2, 6, 7)
        _tile_loadd(7, low + 64, PLANE);
        TILES_DOT(3, 3, 6, 7)
        _tile_loadd(6, at + TILE_STEPS * TILE_BYTES, 64);
        TILES_DOT(4, 5, 6, 7)
        _tile_loadd(7, low, PLANE);
        TILES_DOT(5, 4, 6, 7)
        _tile_loadd(7, high, PLANE);
        TILES_DOT(6, 2, 6, 7)
        _tile_loadd(7, high + 64, PLANE);
        TILES_DOT(7, 3, 6, 7)
    }
}

/* parts [count][rows][32] = products of rows row.. of x with `count` tiles, which share loads of x from L3; also writes rows up
 * to a multiple of AMX_ROWS. */
INLINE void tiles_sums_as(const product *p, const int64_t *tiles, int count, int64_t row, int64_t rows, tile_part *parts, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const vlut table = lut_load(w->table);
    const int64_t bytes = w->section_bytes, meta_step = SUPER_META(halves, has_min);
    const int steps = chain_of(code) * BLOCK / 64;
    _Alignas(64) uint8_t codes[2][SUPER / 4][PLANE];
    _Alignas(64) tiles_sums sums[2];
    _Alignas(64) tiles_factors factors[3]; /* three, because with one chain per tile they are read while the tile after the next is computed */
    _Alignas(64) float nothing[AMX_ROWS * TILE]; /* dummy target of the pipeline before the first chain */
    const xblock no_meta[AMX_ROWS * SUPER_META(2, 1)] = {0};
    const uint8_t *x = p->a->planes + row * TILES_X_STRIDE;
    const xblock *meta = p->a->meta + row * p->a->meta_stride;
    tile_config full = {.palette = 1};
    for (int t = 0; t < 8; t++) full.rows[t] = AMX_ROWS, full.row_bytes[t] = 64;
    _tile_loadconfig(&full);
    for (int i = 0; i < count; i++) memset(parts[i], 0, (size_t)round_up(rows, AMX_ROWS) * TILE * 4);
    memset(nothing, 0, sizeof nothing);
    memset(sums, 0, sizeof sums);
    memset(factors, 0, sizeof factors);
    tiles_done before[2] = {{sums[0], factors, no_meta, nothing}, {sums[1], factors, no_meta, nothing}};
    int at_factors = 0;
    for (int64_t s = 0; s < w->supers; s++, x += p->a->x_step, meta += p->a->meta_step)
        for (int i = 0; i < count; i++) {
            const uint8_t *at = w->data + tiles[i] * w->tile_bytes + s * bytes, *ask = at + bytes, *end = ask + bytes;
            tiles_factors *f = &factors[at_factors = at_factors == 2 ? 0 : at_factors + 1];
            tiles_widen(at + w->at_codes, at, code, halves, table, has_min, (int32_t)w->zero_offset, codes);
            tiles_factors_of(w, at, halves, has_min, f);
            __asm__ volatile("" ::: "memory"); /* gcc does not know that tile loads read `codes` */
            for (int64_t r = 0; r < rows; r += AMX_ROWS) {
                if (s + 1 == w->supers) fetch_out(p, tiles[i], row + r, rows - r < AMX_ROWS ? rows - r : AMX_ROWS);
                for (const uint8_t *some = ask + bytes * AMX_ROWS / rows; ask < some && ask < end; ask += 64) __builtin_prefetch(ask, 0, 2);
                UNROLL for (int first = 0; first < TILE_STEPS; first += steps) {
                    tiles_chain(codes, x + r * TILES_X_STRIDE, first, steps, halves, has_min, before[1].sums, &before[0]);
                    const tiles_done now = {before[0].sums, f, meta + r * meta_step, parts[i] + r * TILE};
                    before[0] = before[1];
                    before[1] = now;
                }
            }
            for (; ask < end; ask += 64) __builtin_prefetch(ask, 0, 2);
        }
    _tile_stored(0, before[1].sums[0], 64);
    _tile_stored(1, before[1].sums[1], 64);
    _tile_stored(2, before[1].sums[2], 64);
    _tile_stored(3, before[1].sums[3], 64);
    _tile_stored(4, before[1].sums[4], 64);
    _tile_stored(5, before[1].sums[5], 64);
    _tile_release();
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < AMX_ROWS; r++) tiles_finish(before[i].factors, &before[i], r, halves, has_min, i || steps == TILE_STEPS);
}

#define TILES_SUMS(NAME, CODE, HALVES, HAS_MIN)                                                                                \
    static __attribute__((noinline)) void NAME(const product *p, const int64_t *tiles, int count, int64_t row, int64_t rows, tile_part *parts) \
    {                                                                                                                       \
        tiles_sums_as(p, tiles, count, row, rows, parts, CODE, HALVES, HAS_MIN);                                            \
    }
TILES_SUMS(tiles_2, CODE_2, 2, 1)
TILES_SUMS(tiles_3, CODE_3, 2, 0)
TILES_SUMS(tiles_4, CODE_4, 1, 1)
TILES_SUMS(tiles_4t, CODE_4T, 1, 0)
TILES_SUMS(tiles_5, CODE_5, 1, 1)
TILES_SUMS(tiles_6, CODE_6, 2, 0)
static void (*const tiles_of[])(const product *, const int64_t *, int, int64_t, int64_t, tile_part *) = {
    [CODE_2] = tiles_2, [CODE_3] = tiles_3, [CODE_4] = tiles_4, [CODE_5] = tiles_5, [CODE_4T] = tiles_4t, [CODE_6] = tiles_6};
#endif

#endif
