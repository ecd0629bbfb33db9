/* Products of many rows with AMX tiles: sixteen rows of x against sixteen rows of the weight in one instruction.
 *
 * Integer sums are exact and the float steps are those of chunk_int, so results are equal, bit for bit; `ll_amx` checks
 * that before they are used. */
#ifndef LL_MATMUL_AMX_H
#define LL_MATMUL_AMX_H

#include "matmul_int.h"

#if LL_AMX
#include <sys/syscall.h>
#include <unistd.h>

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

/* As many rows as whole tiles hold; returns how many. */
static int64_t chunk_amx_rows(const chunk *k, int64_t rows, int halves, int has_min)
{
    int64_t row = 0;
    if (!amx_on || rows < AMX_ROWS) return 0;
    amx_configure(8 / halves);
    for (; row + AMX_ROWS <= rows; row += AMX_ROWS) chunk_amx(k, row, halves, has_min);
    _tile_release();
    return row;
}

/* Linux gives tiles to a process that asks; not when it is the tests' emulation that computes. */
static int amx_allowed(void)
{
#if defined(LL_AMX_EMULATED)
    return 1;
#endif
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* A product of random numbers, with tiles and without. */
static int amx_agrees(int64_t code, int64_t group)
{
    enum { N = 64, K = 160, M = 37 };
    ll_weight w = {.n = N, .k = K, .code = code, .scale_kind = NUM_F32, .min_kind = NUM_NONE, .zero_offset = 32, .group = group};
    const int64_t bytes = ll_layout(&w);
    uint8_t *data = aligned_alloc(64, (size_t)round_up(bytes, 64));
    float *x = malloc(sizeof(float) * M * K), *out = malloc(sizeof(float) * 2 * M * N);
    int same = data && x && out;
    uint32_t seed = 1;
    for (int64_t i = 0; same && i < bytes; i++) data[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
    for (int64_t t = 0; same && t < w.tiles; t++)
        for (int64_t i = 0; i < w.groups * TILE; i++) ((float *)(data + t * w.tile_bytes))[i] = (float)((seed = seed * 1664525 + 1013904223) >> 20) * 0x1p-16f;
    for (int64_t i = 0; same && i < M * K; i++) x[i] = (float)(int32_t)(seed = seed * 1664525 + 1013904223) * 0x1p-28f;
    w.data = data;
    for (int on = 0; same && on < 2; on++) {
        amx_on = on;
        same = linear_into(&w, x, M, NULL, out + on * M * N, 0) == 0;
    }
    amx_on = 0;
    same = same && !memcmp(out, out + M * N, sizeof(float) * M * N);
    free(data);
    free(x);
    free(out);
    return same;
}
#endif

#endif
