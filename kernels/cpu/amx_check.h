/* Whether AMX tiles may be used here, and whether they compute what the other instructions do. */
#ifndef LL_AMX_CHECK_H
#define LL_AMX_CHECK_H

#include "matmul.h"
#include "pack.h"

#if LL_AMX
#include <sys/syscall.h>
#include <unistd.h>

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
static int amx_agrees(int64_t code, int64_t group, int64_t zero, int64_t takes)
{
    enum { N = 64, K = 160, M = 37 };
    ll_weight w = {.n = N, .k = K, .code = code, .scale_kind = NUM_F32, .min_kind = NUM_NONE, .zero_offset = zero, .group = group};
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
        same = linear_into(&w, x, M, NULL, out + on * M * N, takes) == 0;
    }
    amx_on = 0;
    same = same && !memcmp(out, out + M * N, sizeof(float) * M * N);
    free(data);
    free(x);
    free(out);
    return same;
}
#endif

/* Lets products of many rows use AMX tiles, after checking that they may and that they agree. Returns whether they do. */
int64_t ll_amx(void)
{
    int64_t on = 0;
#if LL_AMX
    pthread_mutex_lock(&pool.lock);
    on = amx_allowed();
    for (int64_t takes = TAKE_INT16; on && takes <= TAKE_INT8; takes += TAKE_INT8)
        on = amx_agrees(CODE_8, 32, 32, takes) && amx_agrees(CODE_5, 32, 16, takes) && amx_agrees(CODE_4, 32, 8, takes) && amx_agrees(CODE_6, 16, 32, takes);
    amx_on = on;
    pthread_mutex_unlock(&pool.lock);
#endif
    return on;
}

#endif
