/* Shared by all products: arguments, chunk sizes, prefetching, and the epilogue of a tile. */
#ifndef LL_PRODUCT_H
#define LL_PRODUCT_H

#include "activate.h"
#include "activations.h"

#define CHUNK 16               /* blocks whose scales are expanded at a time */
/* Up to this many rows of x, codes are unpacked in registers (24 on Cascade Lake). Billion multiply-adds per second in
 * registers and otherwise: one Zen 4 core, 3,072 x 576 Q4_1: 16 rows 83 and 85, 24 rows 83 and 96; one Emerald Rapids core
 * with AMX, 16 rows: 97 and 108. */
#define FEW (!LL_VNNI ? 3 : LL_AMX || VW != 16 ? 12 : ll_amd ? 16 : 24)
/* The same for groups of 16 (one Zen 4 core, Q6_K 9,728 x 2,560: 4 rows 1.79 and 2.44 ms, 6 rows 2.95 and 3.07). */
#define FEW_HALF (!LL_VNNI ? 3 : 6)
#define FEW_FLOAT 4            /* the same for float activations */
#define CHUNK_W 8              /* blocks of codes widened to 16 bits: 16 KiB */
#define CHUNK_F 4              /* blocks of codes as floats: 16 KiB */
/* Rows of x that share one unpacking (one Cascade Lake core, Q4_K, 256 rows of x: 120 billion multiply-adds per second with
 * 128, 122 to 126 with 256; no difference with one scale per 32 inputs). */
#define SLAB 256

typedef struct {
    const ll_weight *w;
    const activations *a;
    const float *bias, *residual; /* residual has the layout of out, and may be the same memory */
    float *out;
    int64_t stride; /* floats between rows of out */
    int gelu;       /* for gated products */
} product;

/* Some blocks of a tile, unpacked once for many rows of x. */
#define QUADS(one) (MANY_PAIRS && !(one) ? 2 : 1) /* vectors per unpacked quad: 16-bit pairs with the zero offset subtracted, or bytes */
#define WIDE_BLOCK(one) (QUADS(one) * 8 * PLANE)  /* bytes of an unpacked block: [quads][32 lanes] */

typedef struct {
    const uint8_t *codes;        /* unpacked; bfloat16 for X_DIGITS */
    const float *scale, *min;
    int64_t count;               /* blocks in the chunk */
    const uint8_t *x;            /* the chunk's first block of the first row */
    const xblock *meta;
    int64_t x_stride, meta_stride; /* bytes and blocks between rows of x */
    float *part;                 /* [rows][32] partial sums */
} chunk;

/* out = sums * row_scale + bias + residual, for one row of x and one tile. */
INLINE void finish_tile(const product *p, int64_t tile, int64_t row, const float *sums, float *out)
{
    const ll_weight *w = p->w;
    const int64_t first = tile * TILE, count = w->n - first < TILE ? w->n - first : TILE;
    if (count == TILE) { /* same operations in the same order, in whole vectors */
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

/* Software prefetch distance in bytes, and target: 0 L2, 1 L1, 2 L1 plus data FAR bytes further to L2, 3 none. Measured:
 * AMD (one Zen 4 core), one row, narrow codes in sections (Q4_K): 7,680 bytes 25 GB/s, 5,120 24, 16,384 24; to L2 21; to
 * both 21. With all scales of a tile before its codes: to L2 22 to 28, to L1 20; table codes 24 and 19, also in sections.
 * Bytes (Q8_0) with scales before each 32 inputs: none 26, because the hardware prefetcher follows a strictly sequential
 * stream; to both 18; in sections of 256 inputs 18, and 11 with none. L2 is better with more rows. Intel (Q4_K, scales
 * stored separately): 3,072 bytes reach 0.80 to 0.85 of plain read bandwidth, 1,024 bytes 0.70. */
INLINE int64_t fetches(const int code) { return code_is_float(code) ? 1024 : ll_amd ? 7680 : 5120; }
INLINE int fetches_near(const ll_weight *w, const int rows, const int code)
{
    if (!ll_amd || rows > 1 || code_is_float(code)) return 0;
    if (code == CODE_8) return w->section == 1 ? 3 : 2;
    return code != CODE_4T && w->section < w->blocks;
}
#define FAR 16384

/* Prefetches lines from `at` up to `end`; returns the first address that was not prefetched. */
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

/* Prefetches the output lines of a tile for some rows, which are far apart (Zen 4, 256 x 640 x 4096: 2 %). */
INLINE void fetch_out(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < TILE; i += 16) __builtin_prefetch(p->out + (row + r) * p->stride + tile * TILE % p->stride + i, 1, 2);
}

#if VW == 16 && LL_VNNI
/* Inner products with half the multiplications (S. Winograd, "A new algorithm for inner product", 1968): for codes w and
 * inputs x, w0 x0 + w1 x1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1. The subtracted terms initialize the sums: -x0 x1 is computed
 * once for all tiles (`cross_sums`), -w0 w1 once for all rows. Sums may wrap around at 32 bits, as only the difference
 * matters; x + w fits in 16 bits. On AMD 16 multiplications take 16 cycles, 8 multiplications and 16 additions take 12; on
 * Intel, where both share ports, it would be 24. Half of AMD's vector ports multiply and all of them add, so with a quarter
 * of the rows multiplied directly (`PAIRS_STEP`) both are equally busy, and it takes 11 cycles (one Zen 4 core, data in L1:
 * 153 -> 167 billion multiply-adds per second; an eighth of the rows 160, three eighths 166).
 *
 * Adds to S0 and S1 the products of a row's two consecutive pairs at X with the quad's even pairs in zmm24 and 25 and its
 * odd pairs in zmm26 and 27. */
#define WINOGRAD_STEP(X, S0, S1)                                                                                   \
    "vpbroadcastd " X ", %%zmm28\n\tvpbroadcastd 4" X ", %%zmm29\n\t"                                              \
    "vpaddw %%zmm26, %%zmm28, %%zmm30\n\tvpaddw %%zmm24, %%zmm29, %%zmm31\n\tvpdpwssd %%zmm30, %%zmm31, " S0 "\n\t"  \
    "vpaddw %%zmm27, %%zmm28, %%zmm28\n\tvpaddw %%zmm25, %%zmm29, %%zmm29\n\tvpdpwssd %%zmm28, %%zmm29, " S1 "\n\t"
/* The same with direct multiplication. */
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
