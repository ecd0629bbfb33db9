/* Products of many rows on AMX tiles: sixteen rows of x times sixteen rows of the weight per instruction.
 *
 * If a group's sums stay below 2^24, codes and the two parts of x (256 * hi and lo) are multiplied as bfloat16, which
 * represents all of them exactly: the float32 sums are exact, both parts share one sum, and it only has to be multiplied by
 * its scales. Other codes are multiplied as bytes by the two bytes of x. Either way the float steps are those of chunk_int, so
 * results are bit-identical; `ll_amx` verifies that before AMX is used (amx_check.h). */
#ifndef LL_MATMUL_AMX_H
#define LL_MATMUL_AMX_H

#include "product.h"

/* Format of x in tiles: two planes of bytes, hi and lo as bfloat16, or one plane of bytes. */
enum { AMX_PLANES, AMX_DIGITS, AMX_BYTES };

#if LL_AMX
#define TILES_TOGETHER 4 /* tiles of the weight that share loads of x from L3 */
typedef float tile_part[SLAB * TILE];
#define AMX_GROUPS 8              /* groups of inputs unpacked at a time: 16 KiB of bfloat16 */
#define AMX_GROUP (AMX_ROWS * PLANE) /* bytes per group: [pairs of inputs][32 lanes][2]; groups of 16 inputs are stored twice, for hi and lo */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* The values of all codes if there are fewer than 64; returns their number, otherwise 0. */
static int code_values(const ll_weight *w, int32_t values[64])
{
    const int bits = w->code == CODE_4 || w->code == CODE_4T ? 4 : w->code == CODE_6 ? 6 : w->code == CODE_2 ? 2 : w->code == CODE_3 ? 3 : 0;
    const int32_t zero = w->min_kind == NUM_NONE ? (int32_t)w->zero_offset : 0;
    if (!bits) return 0;
    for (int i = 0; i < 64; i++) values[i] = i >> bits ? 0 : (w->code == CODE_4T ? w->table[i] : i) - zero;
    return 1 << bits;
}

/* Whether every sum of a group is exact in float32. */
static int digits_are_exact(const ll_weight *w)
{
    int32_t values[64], most = 0;
    const int count = code_values(w, values);
    for (int i = 0; i < count; i++) most = values[i] > most ? values[i] : -values[i] > most ? -values[i] : most;
    return count && most <= 128 && (float)most * (X_MAX + 128.0f) * (float)(BLOCK / halves_of(w)) <= 0x1p24f;
}

INLINE void widen_digits_as(const uint8_t *codes, int64_t count, const int code, const int halves, const uint16_t digits[64], uint8_t *to)
{
    const __m512i few = _mm512_load_si512(digits), more = _mm512_load_si512(digits + 32);
    for (int64_t b = 0; b < count; b++) {
        vi q[8][COLS];
        block_quads(codes + b * block_bytes_of[code], code, (vlut){0}, q);
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 2; i++)
                for (int c = 0; c < COLS; c++) {
                    const __m512i pair = (__m512i)(i ? quad_odd(q[j][c]) : quad_even(q[j][c]));
                    const vi value = (vi)(code == CODE_6 ? _mm512_permutex2var_epi16(few, pair, more) : _mm512_permutexvar_epi16(pair, few));
                    uint8_t *at = to + (b * halves + (halves == 2 ? j / 4 : 0)) * AMX_GROUP + (2 * (halves == 2 ? j % 4 : j) + i) * PLANE + c * VW * 4;
                    vi_store(at, value);
                    if (halves == 2) vi_store(at + AMX_GROUP / 2, value);
                }
    }
}

static void widen_digits(const ll_weight *w, const uint8_t *codes, int64_t count, const uint16_t digits[64], uint8_t *to)
{
    const int halves = halves_of(w);
    switch (w->code) {
    case CODE_6: halves == 2 ? widen_digits_as(codes, count, CODE_6, 2, digits, to) : widen_digits_as(codes, count, CODE_6, 1, digits, to); break;
    case CODE_2: halves == 2 ? widen_digits_as(codes, count, CODE_2, 2, digits, to) : widen_digits_as(codes, count, CODE_2, 1, digits, to); break;
    case CODE_3: halves == 2 ? widen_digits_as(codes, count, CODE_3, 2, digits, to) : widen_digits_as(codes, count, CODE_3, 1, digits, to); break;
    default: halves == 2 ? widen_digits_as(codes, count, CODE_4, 2, digits, to) : widen_digits_as(codes, count, CODE_4, 1, digits, to);
    }
}

/* Tiles 0..3: sums; with two planes, high sums of both halves of the columns in 0 and 2, low sums in 1 and 3; otherwise sums of
 * one group in 0 and 1, of the next in 2 and 3. 4, 5: 16 rows of x. 6, 7: codes, [pairs or quads][16 lanes]. */
static void amx_configure(int held, int halves)
{
    const int rows = held == AMX_DIGITS ? AMX_ROWS : 8 / halves;
    tile_config c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.rows[t] = (uint8_t)(t < 6 ? AMX_ROWS : rows);
        c.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? 4 * rows : 64);
    }
    _tile_loadconfig(&c);
}

typedef uint32_t amx_sums[4][AMX_ROWS][16];

/* Sums of a group of AMX_ROWS rows that still have to be finished; row < 0: none. */
typedef struct {
    amx_sums *sums;
    int64_t row, group;
} amx_done;

/* Adds a group's sums times its scales to the results of `count` rows from `at` on. */
INLINE void amx_finish(const chunk *k, const amx_done *d, const int at, const int count, const int held, const int halves, const int has_min)
{
    if (d->row < 0) return;
    const int64_t h = d->group % halves, row = d->row + at;
    const xblock *meta = k->meta + row * k->meta_stride + d->group / halves;
    float *part = k->part + row * TILE;
    vf scale[2], min[2];
    for (int c = 0; c < 2; c++) {
        scale[c] = vf_load(k->scale + d->group * TILE + c * VW);
        min[c] = has_min ? vf_load(k->min + d->group * TILE + c * VW) : scale[c];
    }
    UNROLL for (int r = 0; r < count; r++, meta += k->meta_stride, part += TILE)
        UNROLL for (int c = 0; c < 2; c++) {
            vf sum, acc = vf_load(part + c * VW);
            if (held == AMX_DIGITS) {
                sum = vf_load((const float *)(*d->sums)[c][at + r]);
            } else if (held == AMX_BYTES) {
                const vi dot = vi_load((*d->sums)[c][at + r]);
                sum = vf_cvt(has_min ? dot : dot + vi_set1(meta->start[h]));
            } else {
                vdot dot = {vi_load((*d->sums)[2 * c][at + r]), vi_load((*d->sums)[2 * c + 1][at + r])};
                if (!has_min) dot.lo = dot.lo + vi_set1(meta->start[h]);
                sum = dot_value(dot);
            }
            acc = vf_fma(sum, scale[c] * vf_set1(meta->scale), acc);
            if (has_min) acc = vf_fma(min[c], vf_set1(meta->sums[h]), acc);
            vf_store(part + c * VW, acc);
        }
}

/* Product AT of COUNT of a group, interleaved with a share of the finishing of earlier groups. FIRST: first product with this
 * tile, which stores the tile's previous contents, some products after they were computed (`TILES_DOT`). */
#define AMX_DOT(OP, AT, COUNT, FIRST, T, TO, X, CODES)                                                              \
    if (FIRST) {                                                                                                    \
        _tile_stored(T, (*to)[TO], 64);                                                                             \
        _tile_zero(T);                                                                                              \
    }                                                                                                               \
    OP(T, X, CODES);                                                                                                \
    amx_finish(k, before, AMX_ROWS / COUNT * (AT), AMX_ROWS / COUNT, held, halves, has_min);
#define AMX_DIGITS_OF_GROUP(T0, T1)                                                                                 \
    AMX_DOT(_tile_dpbf16ps, 0, (halves == 1 ? 4 : 2), 1, T0, 0, 4, 6)                                               \
    _tile_loadd(7, codes + 64, PLANE);                                                                              \
    AMX_DOT(_tile_dpbf16ps, 1, (halves == 1 ? 4 : 2), 1, T1, 1, 4, 7)                                               \
    if (halves == 1) {                                                                                              \
        _tile_loadd(5, x + 64, k->x_stride);                                                                        \
        AMX_DOT(_tile_dpbf16ps, 2, 4, 0, T0, 0, 5, 6)                                                               \
        AMX_DOT(_tile_dpbf16ps, 3, 4, 0, T1, 1, 5, 7)                                                               \
    }
#define AMX_BYTES_OF_GROUP(T0, T1)                                                                                  \
    AMX_DOT(_tile_dpbsud, 0, 2, 1, T0, 0, 4, 6)                                                                     \
    _tile_loadd(7, codes + 64, PLANE);                                                                              \
    AMX_DOT(_tile_dpbsud, 1, 2, 1, T1, 1, 4, 7)

/* Computes a group of AMX_ROWS rows in tiles, stores the sums of an earlier group to `to`, and finishes the one before that. */
INLINE void amx_group(const chunk *k, int64_t row, int64_t group, const int odd, const int held, const int halves, const int has_min, amx_sums *to, const amx_done *before)
{
    const int quads = 8 / halves;
    const uint8_t *codes = k->codes + group * (held == AMX_DIGITS ? AMX_GROUP : quads * PLANE), *x = k->x + row * k->x_stride;
    if (held == AMX_DIGITS) x += group * (2 * XBYTES / halves);
    else x += group / halves * (held == AMX_BYTES ? BLOCK : XBYTES) + group % halves * 4 * quads;
    _tile_loadd(4, x, k->x_stride);
    _tile_loadd(6, codes, PLANE);
    if (held == AMX_DIGITS) {
        if (odd) { AMX_DIGITS_OF_GROUP(2, 3) }
        else { AMX_DIGITS_OF_GROUP(0, 1) }
    } else if (held == AMX_BYTES) {
        if (odd) { AMX_BYTES_OF_GROUP(2, 3) }
        else { AMX_BYTES_OF_GROUP(0, 1) }
    } else {
        AMX_DOT(_tile_dpbsud, 0, 4, 1, 0, 0, 4, 6)
        _tile_loadd(7, codes + 64, PLANE);
        AMX_DOT(_tile_dpbsud, 1, 4, 1, 2, 2, 4, 7)
        _tile_loadd(5, x + BLOCK, k->x_stride);
        AMX_DOT(_tile_dpbsud, 2, 4, 1, 1, 1, 5, 6)
        AMX_DOT(_tile_dpbsud, 3, 4, 1, 3, 3, 5, 7)
    }
}

INLINE void chunk_amx(const chunk *k, int64_t rows, const int held, const int halves, const int has_min)
{
    _Alignas(64) amx_sums sums[2];
    const int behind = held == AMX_PLANES ? 1 : 2; /* groups held in tiles */
    const int64_t groups = k->count * halves;
    amx_done done[4] = {{NULL, -1, 0}, {NULL, -1, 0}, {NULL, -1, 0}, {NULL, -1, 0}}; /* the latest last */
    int64_t row = 0, group = 0;
    for (int64_t step = 0, steps = rows / AMX_ROWS * groups; step < steps; step++) {
        const amx_done *before = &done[3 - behind];
        if (step & 1) amx_group(k, row, group, 1, held, halves, has_min, &sums[1], before);
        else amx_group(k, row, group, 0, held, halves, has_min, &sums[0], before);
        for (int i = 0; i < 3; i++) done[i] = done[i + 1];
        done[3 - behind].sums = &sums[step & 1];
        done[3] = (amx_done){NULL, row, group};
        if (++group == groups) group = 0, row += AMX_ROWS;
    }
    amx_finish(k, &done[3 - behind], 0, AMX_ROWS, held, halves, has_min);
    for (int i = 4 - behind; i < 4; i++) {
        if (done[i].row < 0) continue;
        const int64_t step = done[i].row / AMX_ROWS * groups + done[i].group;
        if (held == AMX_PLANES || step % 2 == 0) {
            _tile_stored(0, sums[0][0], 64);
            _tile_stored(1, sums[0][1], 64);
        } else {
            _tile_stored(2, sums[0][0], 64);
            _tile_stored(3, sums[0][1], 64);
        }
        if (held == AMX_PLANES) {
            _tile_stored(2, sums[0][2], 64);
            _tile_stored(3, sums[0][3], 64);
        }
        done[i].sums = &sums[0];
        amx_finish(k, &done[i], 0, AMX_ROWS, held, halves, has_min);
    }
}

/* Computes the leading rows that fill whole tiles; returns their number. With 16-bit x the last tile is padded, and rows past the end of part are written. */
static int64_t chunk_amx_rows(const chunk *k, int64_t rows, int held, int halves, int has_min)
{
    rows = held == AMX_BYTES ? rows - rows % AMX_ROWS : round_up(rows, AMX_ROWS);
    if (!amx_on || !rows) return 0;
    amx_configure(held, halves);
    __asm__ volatile("" ::: "memory"); /* gcc does not know that tile loads read `codes` */
    switch (held * 4 + (halves == 2) * 2 + !!has_min) {
    case 0: chunk_amx(k, rows, 0, 1, 0); break;
    case 1: chunk_amx(k, rows, 0, 1, 1); break;
    case 2: chunk_amx(k, rows, 0, 2, 0); break;
    case 3: chunk_amx(k, rows, 0, 2, 1); break;
    case 4: chunk_amx(k, rows, 1, 1, 0); break;
    case 5: chunk_amx(k, rows, 1, 1, 1); break;
    case 6: chunk_amx(k, rows, 1, 2, 0); break;
    case 7: chunk_amx(k, rows, 1, 2, 1); break;
    case 8: chunk_amx(k, rows, 2, 1, 0); break;
    case 9: chunk_amx(k, rows, 2, 1, 1); break;
    case 10: chunk_amx(k, rows, 2, 2, 0); break;
    default: chunk_amx(k, rows, 2, 2, 1); break;
    }
    _tile_release();
    return rows;
}

#else
static int digits_are_exact(const ll_weight *w) { return (void)w, 0; }
static int64_t chunk_amx_rows(const chunk *k, int64_t rows, int held, int halves, int has_min)
{
    (void)k, (void)rows, (void)held, (void)halves, (void)has_min;
    return 0;
}
#endif

#endif
