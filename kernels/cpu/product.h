/* What all products share: their arguments, how much is unpacked at a time, and the end of a tile. */
#ifndef LL_PRODUCT_H
#define LL_PRODUCT_H

#include "activate.h"
#include "activations.h"

#define CHUNK 16               /* blocks whose scales are expanded at a time */
/* Up to so many rows of x unpack codes in registers (Cascade Lake 24. One Zen 4 core, 3,072 x 576 of Q4_1, billion
 * multiply-adds a second: 16 rows 83 and 85 otherwise, 24 rows 83 and 96. One Emerald Rapids core with AMX, 16 rows: 97 and 108). */
#define FEW (!LL_VNNI ? 3 : LL_AMX || VW != 16 ? 12 : ll_amd ? 16 : 24)
/* The same for groups of 16 (one Zen 4 core, Q6_K 9,728 x 2,560: 1.79 ms for 4 rows, else 2.44; 2.95 and 3.07 for 6). */
#define FEW_HALF (!LL_VNNI ? 3 : 6)
#define FEW_FLOAT 4            /* the same for float activations */
#define CHUNK_W 8              /* blocks of codes widened to 16 bits: 16 KiB */
#define CHUNK_F 4              /* blocks of codes as floats: 16 KiB */
/* Rows of x that share one unpacking (one Cascade Lake core, 256 rows, Q4_K: 128 rows 120 billion multiply-adds a second,
 * 256 rows 122 to 126; with scales for 32 inputs it does not matter). */
#define SLAB 256

typedef struct {
    const ll_weight *w;
    const activations *a;
    const float *bias, *residual; /* residual is laid out like out, and may be it */
    float *out;
    int64_t stride; /* floats between rows of out */
    int gelu;       /* of a gated product */
} product;

/* Some blocks of a tile, unpacked once for many rows of x. */
#define QUADS(one) (MANY_PAIRS && !(one) ? 2 : 1) /* vectors that an unpacked quad takes: 16-bit pairs without the offset, or bytes */
#define WIDE_BLOCK(one) (QUADS(one) * 8 * PLANE)  /* bytes of an unpacked block: [quads][32 lanes] */

typedef struct {
    const uint8_t *codes;        /* unpacked; for digits as bfloat16 */
    const float *scale, *min;
    int64_t count;               /* blocks in the chunk */
    const uint8_t *x;            /* the first row's first block of the chunk */
    const xblock *meta;
    int64_t x_stride, meta_stride; /* bytes and blocks between rows of x */
    float *part;                 /* [rows][32] sums so far */
} chunk;

/* A row's sums of a tile times row_scale, plus bias and residual. */
INLINE void finish_tile(const product *p, int64_t tile, int64_t row, const float *sums, float *out)
{
    const ll_weight *w = p->w;
    const int64_t first = tile * TILE, count = w->n - first < TILE ? w->n - first : TILE;
    if (count == TILE) { /* the same sums in the same order, in whole vectors */
        for (int i = 0; i < TILE; i += VW) {
            vf y = vf_load(sums + i);
            if (w->row_scale) y = y * vf_load(w->row_scale + first + i);
            if (p->bias) y = y + vf_load(p->bias + first + i);
            if (p->residual) y = y + vf_load(p->residual + row * p->stride + first + i);
            vf_store(out + i, y);
        }
        return;
    }
    float r[TILE];
    memcpy(r, sums, sizeof r);
    if (w->row_scale)
        for (int i = 0; i < count; i++) r[i] *= w->row_scale[first + i];
    if (p->bias)
        for (int i = 0; i < count; i++) r[i] += p->bias[first + i];
    if (p->residual)
        for (int i = 0; i < count; i++) r[i] += p->residual[row * p->stride + first + i];
    memcpy(out, r, (size_t)count * 4);
}

/* Bytes from what is used of a tile to what is asked for, and where that goes: 0 into the second cache, 1 into the first, 2 into
 * the first and what lies FAR bytes behind it into the second, 3 nowhere. AMD, a single row of narrow codes in sections (one
 * Zen 4 core, Q4_K): 7,680 bytes 25 GB/s, 5,120 24, 16,384 24; into the second cache 21; into both 21. Where all scales of a
 * tile lie before its codes: into the second 22 to 28, into the first 20; table codes 24 and 19 in sections, too. Bytes (Q8_0)
 * with scales before each 32 inputs: nowhere 26, since a core fetches by itself what is read strictly from front to back; into
 * both 18; in sections of 256 inputs 18 and, nowhere, 11. More rows are better into the second. Intel (Q4_K, when scales lay
 * apart): 3,072 bytes 0.80 to 0.85 of what plain reading gives, 1,024 0.70. */
INLINE int64_t fetches(const int code) { return code_is_float(code) ? 1024 : ll_amd ? 7680 : 5120; }
INLINE int fetches_near(const ll_weight *w, const int rows, const int code)
{
    if (!ll_amd || rows > 1 || code_is_float(code)) return 0;
    if (code == CODE_8) return w->section == 1 ? 3 : 2;
    return code != CODE_4T && w->section < w->blocks;
}
#define FAR 16384

/* Asks for lines from `at` on up to `end`; returns the first that was not asked for. */
INLINE const uint8_t *fetch_to(const uint8_t *at, const uint8_t *end, const int near)
{
    if (near == 3) return end;
    if (!near)
        for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    for (; at < end; at += 64) {
        __builtin_prefetch(at);
        if (near == 2) __builtin_prefetch(at + FAR, 0, 2);
    }
    return at;
}

/* Where a tile's results of some rows go, which every row has elsewhere (Zen 4, 256 x 640 x 4096: 2 %). */
INLINE void fetch_out(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < TILE; i += 16) __builtin_prefetch(p->out + (row + r) * p->stride + tile * TILE % p->stride + i, 1, 2);
}

#if VW == 16 && LL_VNNI
/* Products with half of the multiplications, after S. Winograd ("A new algorithm for inner product", 1968): of codes w and
 * inputs x, w0 x0 + w1 x1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1. What is taken off starts the sums: it is found once for all
 * tiles (`cross_sums`), and once for all rows. Sums wrap around at 32 bits, which takes nothing from their difference; x + w
 * stays within 16. On AMD's CPUs 16 multiplications take 16 cycles, 8 with 16 additions 12; on Intel's both share the ports, and
 * it would be 24. Half of AMD's ports multiply, all of them add: where a quarter of the rows is multiplied as it is
 * (`PAIRS_STEP`), both kinds are as busy, and it is 11 (one Zen 4 core, from the first cache: 153 -> 167 billion multiply-adds a
 * second; an eighth of the rows 160, three eighths 166).
 *
 * Adds to S0 and S1 what a row's two pairs at X, one behind the other, give with the quad's even pairs in zmm24 and 25, its odd
 * ones in zmm26 and 27. */
#define WINOGRAD_STEP(X, S0, S1)                                                                                   \
    "vpbroadcastd " X ", %%zmm28\n\tvpbroadcastd 4" X ", %%zmm29\n\t"                                              \
    "vpaddw %%zmm26, %%zmm28, %%zmm30\n\tvpaddw %%zmm24, %%zmm29, %%zmm31\n\tvpdpwssd %%zmm30, %%zmm31, " S0 "\n\t"  \
    "vpaddw %%zmm27, %%zmm28, %%zmm28\n\tvpaddw %%zmm25, %%zmm29, %%zmm29\n\tvpdpwssd %%zmm28, %%zmm29, " S1 "\n\t"
/* The same with all multiplications. */
#define PAIRS_STEP(X, S0, S1)                                                                                      \
    "vpbroadcastd " X ", %%zmm28\n\tvpdpwssd %%zmm28, %%zmm24, " S0 "\n\tvpdpwssd %%zmm28, %%zmm25, " S1 "\n\t"  \
    "vpbroadcastd 4" X ", %%zmm29\n\tvpdpwssd %%zmm29, %%zmm26, " S0 "\n\tvpdpwssd %%zmm29, %%zmm27, " S1 "\n\t"
#define ZMM_ALL "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", \
    "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31"
#define WINOGRAD_CODES                                                                                             \
    "vmovdqa64 (%[codes]), %%zmm24\n\tvmovdqa64 64(%[codes]), %%zmm25\n\t"                                         \
    "vmovdqa64 128(%[codes]), %%zmm26\n\tvmovdqa64 192(%[codes]), %%zmm27\n\tadd $256, %[codes]\n\t"
#endif

static void store_tile(const product *p, int64_t tile, int64_t row, const float *sums)
{
    finish_tile(p, tile, row, sums, p->out + row * p->stride + tile * TILE);
}

#endif
