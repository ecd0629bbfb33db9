/* Checks that AMX tiles are available to this process, and that they give the same results as the other instructions. */
#ifndef LL_AMX_CHECK_H
#define LL_AMX_CHECK_H

#include "matmul.h"
#include "pack.h"

#if LL_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Requests permission for tiles from Linux; not needed for the emulation in the tests. */
static int amx_allowed(void)
{
#if defined(LL_AMX_EMULATED)
    return 1;
#endif
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Compares a random product with and without tiles. `super`: scales with a float per 256 inputs, and mins if codes have no zero
 * offset; otherwise float scales. */
static int amx_agrees(int64_t code, int64_t group, int64_t zero, int super, int64_t takes)
{
    enum { N = 224, M = 37 }; /* more tiles than are computed together, and rows that do not fill their tiles */
    const int64_t k = super ? 2 * SUPER : 160;
    const int64_t scales = super ? NUM_SUB8 : NUM_F32, mins = super && !zero ? NUM_SUB8 : NUM_NONE;
    ll_weight w = {.n = N, .k = k, .code = code, .scale_kind = scales, .min_kind = mins, .zero_offset = zero, .group = group};
    for (int i = 0; i < 16; i++) w.table[i] = (uint8_t)(i * 17);
    const int64_t bytes = ll_layout(&w);
    uint8_t *data = aligned_alloc(64, (size_t)round_up(bytes, 64));
    float *x = malloc(sizeof(float) * (size_t)(M * k)), *out = malloc(sizeof(float) * 2 * M * N);
    int same = data && x && out;
    uint32_t seed = 1;
    for (int64_t i = 0; same && i < bytes; i++) data[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
    for (int64_t i = 0; same && i < w.tiles * (w.blocks / w.section); i++) {
        uint8_t *at = data + i * w.section_bytes;
        for (int64_t j = 0; !super && j < w.groups / (w.blocks / w.section) * TILE; j++) ((float *)at)[j] = (float)((seed = seed * 1664525 + 1013904223) >> 20) * 0x1p-16f;
        for (int64_t j = 0; super && code != CODE_6 && j < w.at_super_scale; j++) at[j] = (uint8_t)((at[j] & 63) - (mins == NUM_NONE ? 32 : 0)); /* as in the formats */
        for (int64_t j = w.at_super_scale; super && j < w.at_codes; j += 2) at[j + 1] = 0x1c; /* 0.004 to 0.005 */
    }
    for (int64_t i = 0; same && i < M * k; i++) x[i] = (float)(int32_t)(seed = seed * 1664525 + 1013904223) * 0x1p-28f;
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

/* Enables AMX tiles for products of many rows if they are available and give the same results. Returns whether it did. */
int64_t ll_amx(void)
{
    int64_t on = 0;
#if LL_AMX
    pthread_mutex_lock(&pool.lock);
    on = amx_allowed();
    for (int64_t takes = TAKE_INT16; on && takes <= TAKE_INT8; takes += TAKE_INT8)
        on = amx_agrees(CODE_8, 32, 32, 0, takes) && amx_agrees(CODE_5, 32, 16, 0, takes) && amx_agrees(CODE_4, 32, 8, 0, takes) && amx_agrees(CODE_6, 16, 32, 0, takes);
    on = on && amx_agrees(CODE_4, 32, 0, 1, TAKE_INT16) && amx_agrees(CODE_5, 32, 0, 1, TAKE_INT16) && amx_agrees(CODE_6, 16, 32, 1, TAKE_INT16);
    on = on && amx_agrees(CODE_2, 16, 0, 1, TAKE_INT16) && amx_agrees(CODE_3, 16, 4, 1, TAKE_INT16) && amx_agrees(CODE_4T, 32, 128, 1, TAKE_INT16);
    amx_on = on;
    pthread_mutex_unlock(&pool.lock);
#endif
    return on;
}

#endif
