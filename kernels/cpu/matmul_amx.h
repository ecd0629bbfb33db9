/* Products of many rows with AMX tiles: sixteen rows of x against sixteen rows of the weight in one instruction.
 *
 * Integer sums are exact and the float steps are those of chunk_int, so results are equal, bit for bit; `ll_amx` checks
 * that before they are used (amx_check.h). */
#ifndef LL_MATMUL_AMX_H
#define LL_MATMUL_AMX_H

#include "product.h"

#if LL_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Tiles 0..3: sums of the high and low bytes, for both halves of the columns. 4, 5: high and low bytes of 16 rows of x.
 * 6, 7: codes, [quads][16 lanes]. */
static void amx_configure(int quads)
{
    tile_config c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.rows[t] = (uint8_t)(t < 6 ? AMX_ROWS : quads);
        c.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? 4 * quads : 64);
    }
    _tile_loadconfig(&c);
}

static void chunk_amx(const chunk *k, int64_t row, int halves, int has_min)
{
    const int quads = 8 / halves;
    const int64_t stride = k->blocks * XBYTES;
    _Alignas(64) int32_t sums[4][AMX_ROWS][16];
    for (int64_t b = 0; b < k->count; b++)
        for (int h = 0; h < halves; h++) {
            const uint8_t *x = k->x + row * stride + b * XBYTES + 4 * quads * h, *codes = k->codes + b * WIDE_BLOCK + h * quads * PLANE;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(4, x, stride);
            _tile_loadd(5, x + BLOCK, stride);
            _tile_loadd(6, codes, PLANE);
            _tile_loadd(7, codes + 64, PLANE);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 5, 6);
            _tile_dpbsud(2, 4, 7);
            _tile_dpbsud(3, 5, 7);
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int r = 0; r < AMX_ROWS; r++) {
                const xblock *m = k->meta + (row + r) * k->blocks + b;
                for (int c = 0; c < 2; c++) {
                    const int64_t lane = (b * halves + h) * TILE + c * VW;
                    float *part = k->part + (row + r) * TILE + c * VW;
                    vdot sum = {vi_load(sums[2 * c][r]), vi_load(sums[2 * c + 1][r]) + vi_set1(has_min ? 0 : m->start[h])};
                    vf acc = vf_fma(dot_value(sum), vf_load(k->scale + lane) * vf_set1(m->scale), vf_load(part));
                    if (has_min) acc = vf_fma(vf_load(k->min + lane), vf_set1(m->sums[h]), acc);
                    vf_store(part, acc);
                }
            }
        }
}

/* The first rows, as many as whole tiles hold; returns how many. */
static int64_t chunk_amx_rows(const chunk *k, int64_t rows, int halves, int has_min)
{
    int64_t row = 0;
    if (!amx_on || rows < AMX_ROWS) return 0;
    amx_configure(8 / halves);
    for (; row + AMX_ROWS <= rows; row += AMX_ROWS) chunk_amx(k, row, halves, has_min);
    _tile_release();
    return row;
}
#else
static int64_t chunk_amx_rows(const chunk *k, int64_t rows, int halves, int has_min)
{
    (void)k, (void)rows, (void)halves, (void)has_min;
    return 0;
}
#endif

#endif
