/* Products with weights whose scales are small integers times a float per 256 inputs: K-quants and IQ4_XS.
 *
 * Activations are 14-bit integers with one scale for the same 256 inputs, so scales are multiplied as integers, exactly, and
 * floats are used once per 256 inputs. For many rows, codes are multiplied by their scales when they are widened to 16 bits:
 * a sum is then a pure chain of `vpdpwssd`. Mins are 16-bit pairs as well. */
#ifndef LL_MATMUL_SUPER_H
#define LL_MATMUL_SUPER_H

#include "product.h"

/* Whether scales are multiplied as integers; mins then have the same kind. */
INLINE int is_super(const ll_weight *w)
{
    return MANY_PAIRS && w->scale_kind == NUM_SUB8 && w->k % SUPER == 0 && !w->perm && !w->pre_scale;
}

/* Whether m rows of Q4_K use `super_halved`. */
#define HALVED_ROWS(code, m) (WINOGRAD && ll_amd && (code) == CODE_4 && ((m) == 7 || (m) == 8))

/* Up to this many rows of x, codes are not premultiplied by their scales. Billion multiply-adds per second without and with:
 * 256-bit vectors as with AVX-VNNI, 4 rows Q4_K 80 and 74, Q6_K 67 and 72; 6 rows 86 and 90, 63 and 85. One Zen 4 core, which
 * multiplies scales on the ports of dot products: 13 rows Q4_K 91 and 89, Q6_K 85 and 77; 14 rows 86 and 95, 80 and 81. */
#define SUPER_FEW (VW == 16 ? (ll_amd && LL_VNNI ? 13 : 2) : LL_VNNI ? 4 : 3)

/* The scales of a quad's codes: bytes next to zero bytes if the CPU has products of byte pairs, otherwise 16 bits. */
typedef struct { vi even, odd; } quad_scales;
INLINE quad_scales quad_scales_at(const uint8_t *at)
{
#if VW >= 8
    const vi one = vi_u8(at), even = one | one << 16;
    return (quad_scales){even, even << 8};
#else
    const vi one = vi_i8(at), twice = (one & 0xffff) | one << 16;
    return (quad_scales){twice, twice};
#endif
}

/* Codes 0 and 2 of a quad times their scales, and 1 and 3: pairs of 16 bits, at most 63 * 128 or 255 * 32. */
INLINE vi even_codes(vi quad, quad_scales by)
{
#if VW == 16
    return (vi)_mm512_maddubs_epi16((__m512i)quad, (__m512i)by.even);
#elif VW == 8
    return (vi)_mm256_maddubs_epi16((__m256i)quad, (__m256i)by.even);
#else
    return (vi)((vh)quad_even(quad) * (vh)by.even);
#endif
}
INLINE vi odd_codes(vi quad, quad_scales by)
{
#if VW == 16
    return (vi)_mm512_maddubs_epi16((__m512i)quad, (__m512i)by.odd);
#elif VW == 8
    return (vi)_mm256_maddubs_epi16((__m256i)quad, (__m256i)by.odd);
#else
    return (vi)((vh)quad_odd(quad) * (vh)by.odd);
#endif
}
/* The zero offset times the scales, to be subtracted from both. */
INLINE vh scaled_zero(const uint8_t *at, int32_t offset)
{
    const vi one = vi_i8(at) * offset;
    return (vh)((one & 0xffff) | one << 16);
}

/* Pairs of mins of two groups, to be multiplied by the sums of their inputs. */
INLINE vi min_pair(const uint8_t *at) { return vi_u8(at) | vi_u8(at + TILE) << 16; }

INLINE vf super_factor(const uint16_t *scale, float of_x) { return vf_f16(scale) * vf_set1(of_x); }

/* One tile times `rows` rows of x. */
INLINE void super_few(const product *p, int64_t tile, int64_t row, const int rows, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *asked = at + w->at_codes + fetches(code);
    const int64_t bytes = block_bytes_of[code], x_stride = p->a->x_stride, meta_stride = p->a->meta_stride;
    const uint8_t *x = p->a->planes + row * x_stride;
    const xblock *meta = p->a->meta + row * meta_stride;
    const vlut table = lut_load(w->table);
    const int near = fetches_near(w, rows, code);
    vf acc[2][NV];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = vf_set1(0.0f);
    for (int64_t s = 0; s < w->supers; s++, at += w->section_bytes) {
        const uint8_t *codes = at + w->at_codes, *ahead = codes + fetches(code), *scale = at, *min = at + w->at_min;
        const uint16_t *super_scale = (const uint16_t *)(at + w->at_super_scale), *super_min = (const uint16_t *)(at + w->at_super_min);
        const xblock *of = meta;
        vi sums[2][NV], mins[2][NV];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < NV; v++) sums[r][v] = mins[r][v] = vi_set1(0);
        for (int b = 0; b < SUPER_BLOCKS; b++, x += XBYTES, meta++, codes += bytes, scale += halves * TILE) {
            if (!row) asked = fetch_to(asked, ahead + w->section_bytes * (b + 1) / SUPER_BLOCKS, near);
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
                        for (int r = 0; r < rows; r++) mins[r][v + c] = madd16(mins[r][v + c], pair, vi_set1(sum_pair(of + r * meta_stride, halves == 2 ? b : b / 2)));
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

#if VW == 16 && LL_VNNI
/* Adds the dot products of quads of codes (all eight, or four from `first` on) with a row's planes. Assembly, because gcc
 * loads the broadcasts into registers and then spills sums. */
#define DOT_QUAD(Q, AT) "vpdpbusd " #AT "+%c[first](%[x])%{1to16%}, %[q" #Q "], %[hi]\n\tvpdpbusd 32+" #AT "+%c[first](%[x])%{1to16%}, %[q" #Q "], %[lo]\n\t"
#define QUADS_FROM(I) [q0] "v"(q[I]), [q1] "v"(q[I + 1]), [q2] "v"(q[I + 2]), [q3] "v"(q[I + 3])
INLINE void dot_quads(vdot *d, const vi q[8], const uint8_t *x, const int halves, const int h)
{
    if (halves == 1)
        __asm__(DOT_QUAD(0, 0) DOT_QUAD(1, 4) DOT_QUAD(2, 8) DOT_QUAD(3, 12) DOT_QUAD(4, 16) DOT_QUAD(5, 20) DOT_QUAD(6, 24) DOT_QUAD(7, 28)
                : [hi] "+v"(d->hi), [lo] "+v"(d->lo)
                : QUADS_FROM(0), [q4] "v"(q[4]), [q5] "v"(q[5]), [q6] "v"(q[6]), [q7] "v"(q[7]), [x] "r"(x), [first] "i"(0), "m"(*(const uint8_t(*)[XBYTES])x));
    else
        __asm__(DOT_QUAD(0, 0) DOT_QUAD(1, 4) DOT_QUAD(2, 8) DOT_QUAD(3, 12)
                : [hi] "+v"(d->hi), [lo] "+v"(d->lo)
                : QUADS_FROM(4 * h), [x] "r"(x), [first] "i"(16 * h), "m"(*(const uint8_t(*)[XBYTES])x));
}

/* A tile times `count` <= 8 rows of x: one vector of the tile at a time, with all sums in registers; missing rows up to
 * `rows` repeat the last one. */
INLINE void super_several(const product *p, int64_t tile, int64_t row, int64_t count, const int rows, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *asked = at + w->at_codes + fetches(code);
    const int64_t bytes = block_bytes_of[code], meta_stride = p->a->meta_stride;
    const vlut table = lut_load(w->table);
    const uint8_t *x[8];
    const xblock *meta[8];
    _Alignas(64) float part[8 * TILE] = {0};
    for (int r = 0; r < rows; r++) {
        const int64_t of = row + (r < count ? r : count - 1);
        x[r] = p->a->planes + of * p->a->x_stride;
        meta[r] = p->a->meta + of * meta_stride;
    }
    for (int64_t s = 0; s < w->supers; s++, at += w->section_bytes) {
        const uint8_t *ahead = at + w->at_codes + fetches(code);
        for (int v = 0; v < NV; v++) {
            const uint8_t *codes = at + w->at_codes + v * VW * 4, *scale = at + v * VW, *min = at + w->at_min + v * VW;
            const vf super_scale = vf_f16((const uint16_t *)(at + w->at_super_scale) + v * VW);
            vi sums[8];
            for (int r = 0; r < rows; r++) sums[r] = vi_set1(0);
            for (int b = 0; b < SUPER_BLOCKS; b++, codes += bytes) {
                if (!row) asked = fetch_to(asked, ahead + w->section_bytes * (NV * b + v + 1) / (NV * SUPER_BLOCKS), 0);
                const int64_t at_block = s * SUPER_BLOCKS + b;
                UNROLL for (int h = 0; h < halves; h++, scale += TILE) {
                    const vi by = vi_i8(scale);
                    vi quad[8];
                    UNROLL for (int j = h * 8 / halves; j < (h + 1) * 8 / halves; j++) quad[j] = block_quad(codes, j, code, table);
                    UNROLL for (int r = 0; r < rows; r++) {
                        vdot d = dot_start(has_min ? 0 : meta[r][at_block].start[h]);
                        dot_quads(&d, quad, x[r] + at_block * XBYTES, halves, h);
                        sums[r] += dot_sum(d) * by;
                    }
                }
                if ((b + 1) % chain_of(code)) continue;
                UNROLL for (int r = 0; r < rows; r++) {
                    float *to = part + r * TILE + v * VW;
                    vf_store(to, vf_fma(vf_cvt(sums[r]), super_scale * vf_set1(meta[r][s * SUPER_BLOCKS].scale), vf_load(to)));
                    sums[r] = vi_set1(0);
                }
            }
            if (has_min) {
                const vf super_min = vf_f16((const uint16_t *)(at + w->at_super_min) + v * VW);
                vi pairs[SUPER_BLOCKS];
                for (int i = 0; i < SUPER_BLOCKS * halves / 2; i++) pairs[i] = min_pair(min + 2 * i * TILE);
                UNROLL for (int r = 0; r < rows; r++) {
                    const xblock *m = meta[r] + s * SUPER_BLOCKS;
                    float *to = part + r * TILE + v * VW;
                    vi mins = vi_set1(0);
                    for (int i = 0; i < SUPER_BLOCKS * halves / 2; i++) mins = madd16(mins, pairs[i], vi_set1(sum_pair(m, i)));
                    vf_store(to, vf_fma(vf_cvt(mins), super_min * vf_set1(m->min_scale), vf_load(to)));
                }
            }
        }
    }
    for (int r = 0; r < count; r++) store_tile(p, tile, row + r, part + r * TILE);
}
#endif

/* ---- many rows ---- */

typedef struct {
    _Alignas(64) uint8_t codes[SUPER_BLOCKS * WIDE_BLOCK(0)]; /* premultiplied by their scales: [pairs][32 lanes] */
    int32_t mins[SUPER_BLOCKS][TILE];            /* pairs */
    int32_t cross[SUPER_BLOCKS / 2][TILE];       /* per chain: -(w0 w1 + w2 w3 + ...) */
    float scale[TILE], min[TILE];                /* float scales of the 256 inputs */
    const uint8_t *x;   /* [rows] of 256 inputs, contiguous */
    const xblock *meta; /* [rows][SUPER_META] */
    float *part; /* [rows][32] partial sums */
} super_chunk;

INLINE void super_widen(const uint8_t *codes, const uint8_t *scale, const int code, const int halves, vlut table, const int has_min, int32_t offset, super_chunk *k)
{
    const int halved = WINOGRAD && ll_amd;
    uint8_t *to = k->codes;
    if (halved) memset(k->cross, 0, sizeof k->cross);
    for (int64_t b = 0; b < SUPER_BLOCKS; b++)
        for (int v = 0; v < NV; v += COLS) {
            vi q[8][COLS];
            block_quads(codes + b * block_bytes_of[code] + v * VW * 4, code, table, q);
            for (int h = 0; h < halves; h++)
                for (int c = 0; c < COLS; c++) {
                    const uint8_t *at = scale + (b * halves + h) * TILE + (v + c) * VW;
                    const quad_scales by = quad_scales_at(at);
                    const vh zero = has_min ? (vh)vi_set1(0) : scaled_zero(at, offset);
                    int32_t *cross = k->cross[b / chain_of(code)] + (v + c) * VW;
                    vi products = vi_set1(0);
                    for (int j = 8 / halves * h; j < 8 / halves * (h + 1); j++) {
                        uint8_t *pairs = to + b * WIDE_BLOCK(0) + (2 * j * TILE + (v + c) * VW) * 4;
                        const vi even = (vi)((vh)even_codes(q[j][c], by) - zero), odd = (vi)((vh)odd_codes(q[j][c], by) - zero);
                        vi_store(pairs, even);
                        vi_store(pairs + TILE * 4, odd);
                        if (halved) products = madd16(products, even, odd);
                    }
                    if (halved) vi_store(cross, vi_load(cross) - products);
                }
        }
}

/* sum[rows][COLS] = dot products of `pairs` (an even number) of widened codes with rows of x that are `stride` bytes apart. With
 * eight rows, prefetches a line at `next` every second pair, because the next rows come from L2 or L3 (one Cascade Lake core,
 * 256 rows, Q4_K: 2,048 x 2,048 109 -> 113 billion multiply-adds per second, 2,560 x 9,728 106 -> 114). */
#if VW == 16 && LL_VNNI
/* Assembly, because gcc 12 spills codes or sums here depending on the surrounding code (0.6 of the speed). */
#define ROW_OF_PAIRS(R, X) "vpbroadcastd " X ", %%zmm31\n\tvpdpwssd %%zmm31, %%zmm29, %[s" #R "0]\n\tvpdpwssd %%zmm31, %%zmm30, %[s" #R "1]\n\t"
#define PAIRS_OF_EIGHT(AT, X)                                                                                      \
    "vmovdqa64 " AT "(%[codes]), %%zmm29\n\tvmovdqa64 " AT "+64(%[codes]), %%zmm30\n\t"                                  \
    ROW_OF_PAIRS(0, X "(%[x])") ROW_OF_PAIRS(1, X "(%[x],%[stride])") ROW_OF_PAIRS(2, X "(%[x],%[stride],2)")      \
    ROW_OF_PAIRS(3, X "(%[y])") ROW_OF_PAIRS(4, X "(%[y],%[stride])") ROW_OF_PAIRS(5, X "(%[y],%[stride],2)")      \
    ROW_OF_PAIRS(6, X "(%[z])") ROW_OF_PAIRS(7, X "(%[z],%[stride])")
#define ZERO_ROW(R) "vpxord %[s" #R "0], %[s" #R "0], %[s" #R "0]\n\tvpxord %[s" #R "1], %[s" #R "1], %[s" #R "1]\n\t"
#define SUMS_OF(R) [s##R##0] "=&v"(sum[R][0]), [s##R##1] "=&v"(sum[R][1])
INLINE void pairs_of_eight(const uint8_t *codes, const uint8_t *x, int64_t stride, int64_t pairs, const uint8_t *next, vi sum[8][2])
{
    const uint8_t *y = x + 3 * stride, *z = x + 6 * stride;
    __asm__ volatile(ZERO_ROW(0) ZERO_ROW(1) ZERO_ROW(2) ZERO_ROW(3) ZERO_ROW(4) ZERO_ROW(5) ZERO_ROW(6) ZERO_ROW(7)
                     ".p2align 5\n1:\n\t" PAIRS_OF_EIGHT("0", "0") PAIRS_OF_EIGHT("128", "4")
                     "prefetcht0 (%[next])\n\tadd $64, %[next]\n\tadd $256, %[codes]\n\t"
                     "add $8, %[x]\n\tadd $8, %[y]\n\tadd $8, %[z]\n\tsub $2, %[pairs]\n\tjnz 1b"
                     : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7),
                       [codes] "+r"(codes), [x] "+r"(x), [y] "+r"(y), [z] "+r"(z), [pairs] "+r"(pairs), [next] "+r"(next)
                     : [stride] "r"(stride)
                     : "cc", "memory", "xmm29", "xmm30", "xmm31");
}

/* The same with half the multiplications in rows 1 to 3 and 5 to 7 (`WINOGRAD_STEP`). */
#define WINOGRAD_ROW(R, X) WINOGRAD_STEP(X, "%[s" #R "0]", "%[s" #R "1]")
#define PAIRS_ROW(R, X) PAIRS_STEP(X, "%[s" #R "0]", "%[s" #R "1]")
#define IS_HALVED(R) ((R) % 4 != 0)
#define START_ROW(R)                                                                                               \
    "vpaddd " #R "*%c[row](%[meta])%{1to16%}, %%zmm24, %[s" #R "0]\n\tvpaddd " #R "*%c[row](%[meta])%{1to16%}, %%zmm25, %[s" #R "1]\n\t"
INLINE void winograd_eight(const uint8_t *codes, const int32_t *cross, const int32_t *meta, const int row, const uint8_t *x, int64_t stride, int64_t quads, const uint8_t *next, vi sum[8][2])
{
    __asm__ volatile("lea (%[stride],%[stride],2), %%rdx\n\tlea (%[x],%%rdx), %%rax\n\tlea (%[x],%%rdx,2), %%rdx\n\t"
                     "vmovdqu64 (%[cross]), %%zmm24\n\tvmovdqu64 64(%[cross]), %%zmm25\n\t"
                     ZERO_ROW(0) START_ROW(1) START_ROW(2) START_ROW(3) ZERO_ROW(4) START_ROW(5) START_ROW(6) START_ROW(7)
                     ".p2align 5\n1:\n\t"
                     WINOGRAD_CODES PAIRS_ROW(0, "(%[x])") WINOGRAD_ROW(1, "(%[x],%[stride])") WINOGRAD_ROW(2, "(%[x],%[stride],2)")
                     WINOGRAD_ROW(3, "(%%rax)") PAIRS_ROW(4, "(%%rax,%[stride])") WINOGRAD_ROW(5, "(%%rax,%[stride],2)")
                     WINOGRAD_ROW(6, "(%%rdx)") WINOGRAD_ROW(7, "(%%rdx,%[stride])")
                     "prefetcht0 (%[next])\n\tadd $64, %[next]\n\t"
                     "add $8, %[x]\n\tadd $8, %%rax\n\tadd $8, %%rdx\n\tdec %[quads]\n\tjnz 1b"
                     : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7),
                       [codes] "+&r"(codes), [x] "+&r"(x), [quads] "+&r"(quads), [next] "+&r"(next)
                     : [stride] "r"(stride), [cross] "r"(cross), [meta] "r"(meta), [row] "i"(row)
                     : "cc", "memory", "rax", "rdx", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
}

/* sum = dot products of mins with sums of inputs, which are `row` bytes apart for consecutive rows of x. */
#define ROW_OF_MINS(R, X)                                                                                          \
    "vpdpwssd " #R "*%c[row]+" X "(%[meta])%{1to16%}, %%zmm29, %[s" #R "0]\n\t"                                     \
    "vpdpwssd " #R "*%c[row]+" X "(%[meta])%{1to16%}, %%zmm30, %[s" #R "1]\n\t"
#define PAIR_OF_MINS(AT, X)                                                                                        \
    "vmovdqa64 " AT "(%[mins]), %%zmm29\n\tvmovdqa64 " AT "+64(%[mins]), %%zmm30\n\t" ROW_OF_MINS(0, X) ROW_OF_MINS(1, X) \
    ROW_OF_MINS(2, X) ROW_OF_MINS(3, X) ROW_OF_MINS(4, X) ROW_OF_MINS(5, X) ROW_OF_MINS(6, X) ROW_OF_MINS(7, X)
#define MINS_OF_EIGHT(PAIRS)                                                                                       \
    __asm__ volatile(ZERO_ROW(0) ZERO_ROW(1) ZERO_ROW(2) ZERO_ROW(3) ZERO_ROW(4) ZERO_ROW(5) ZERO_ROW(6) ZERO_ROW(7) PAIRS  \
            : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)       \
            : [mins] "r"(mins), [meta] "r"(meta), [row] "i"(2 * halves * sizeof(xblock)) : "memory", "xmm29", "xmm30")
INLINE void mins_of_eight(const int32_t *mins, const xblock *meta, const int halves, vi sum[8][2])
{
    if (halves == 1) MINS_OF_EIGHT(PAIR_OF_MINS("0", "4") PAIR_OF_MINS("128", "8") PAIR_OF_MINS("256", "20") PAIR_OF_MINS("384", "24"));
    else MINS_OF_EIGHT(PAIR_OF_MINS("0", "4") PAIR_OF_MINS("128", "8") PAIR_OF_MINS("256", "20") PAIR_OF_MINS("384", "24")
                       PAIR_OF_MINS("512", "36") PAIR_OF_MINS("640", "40") PAIR_OF_MINS("768", "52") PAIR_OF_MINS("896", "56"));
}

/* to [8][32] += sum * factor * (scale of the row, `row` bytes apart). Hand-written with few instructions, because all of them
 * wait for the last sums (one Cascade Lake core, 256 rows, 2,560 x 2,560 Q6_K, which does this four times per 256 inputs: 106
 * billion multiply-adds per second as compiled by gcc, 114 like this). */
#define FOLD(R, C, TO)                                                                                             \
    "vcvtdq2ps %[s" #R #C "], %%zmm31\n\tvmulps " #R "*%c[row](%[by])%{1to16%}, %[f" #C "], %%zmm30\n\t"             \
    "vfmadd213ps " TO "(%[to]), %%zmm30, %%zmm31\n\tvmovups %%zmm31, " TO "(%[to])\n\t"
#define FOLD_ROW(R) FOLD(R, 0, #R "*128") FOLD(R, 1, #R "*128+64")
#define SUMS_IN(R) [s##R##0] "v"(sum[R][0]), [s##R##1] "v"(sum[R][1])
INLINE void fold_eight(vi sum[8][2], const float *factor, const float *by, const int row, float *to)
{
    __asm__ volatile(FOLD_ROW(0) FOLD_ROW(1) FOLD_ROW(2) FOLD_ROW(3) FOLD_ROW(4) FOLD_ROW(5) FOLD_ROW(6) FOLD_ROW(7)
                     :: SUMS_IN(0), SUMS_IN(1), SUMS_IN(2), SUMS_IN(3), SUMS_IN(4), SUMS_IN(5), SUMS_IN(6), SUMS_IN(7),
                        [f0] "v"(vf_load(factor)), [f1] "v"(vf_load(factor + VW)), [by] "r"(by), [to] "r"(to), [row] "i"(row)
                     : "memory", "xmm30", "xmm31");
}

INLINE void super_eight(const super_chunk *k, int64_t row, const int chain, const int halves, const int has_min)
{
    const uint8_t *x = k->x + row * SUPER_BLOCKS * XBYTES, *next = x + SUPER_ROWS * SUPER_BLOCKS * XBYTES;
    const xblock *meta = k->meta + row * SUPER_META(halves, has_min);
    float *part = k->part + row * TILE;
    vi sum[8][2];
    for (int b = 0; b < SUPER_BLOCKS; b += chain) {
        if (ll_amd)
            winograd_eight(k->codes + b * WIDE_BLOCK(0), k->cross[b / chain], meta->ints + cross_at(b / chain, has_min), SUPER_META(halves, has_min) * sizeof(xblock),
                           x + b * XBYTES, SUPER_BLOCKS * XBYTES, chain * BLOCK / 4, next + b * SUPER_ROWS * XBYTES, sum);
        else
            pairs_of_eight(k->codes + b * WIDE_BLOCK(0), x + b * XBYTES, SUPER_BLOCKS * XBYTES, chain * BLOCK / 2, next + b * SUPER_ROWS * XBYTES, sum);
        fold_eight(sum, k->scale, &meta->scale, SUPER_META(halves, has_min) * sizeof(xblock), part);
    }
    if (has_min) {
        mins_of_eight(k->mins[0], meta, halves, sum);
        fold_eight(sum, k->min, &meta->min_scale, SUPER_META(halves, has_min) * sizeof(xblock), part);
    }
}
#endif
/* Vectors of a tile that share broadcasts of x. AVX2 has enough registers for two rows of all vectors if codes are memory
 * operands (one Cascade Lake core, 256 rows, Q4_K: 48 billion multiply-adds per second; four rows of two vectors 42 to 46, of
 * one 34). AVX-VNNI needs no registers for intermediate products. */
#define SIDE (VW == 8 ? NV : COLS)
#if VW == 8
INLINE void pairs_of_two(const uint8_t *codes, const uint8_t *x, int64_t stride, int64_t pairs, const int rows, vi sum[2][SIDE])
{
    vi acc[2][SIDE]; /* local copy: gcc keeps it in registers, but not the argument */
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < SIDE; c++) acc[r][c] = vi_set1(0);
#pragma GCC unroll 2
    for (int64_t i = 0; i < pairs; i++) {
#if LL_VNNI
        vi pair[2];
        UNROLL for (int r = 0; r < rows; r++) pair[r] = vi_bcast(x + r * stride + 4 * i);
        UNROLL for (int c = 0; c < SIDE; c++) {
            const vi q = vi_load(codes + (i * TILE + c * VW) * 4);
            UNROLL for (int r = 0; r < rows; r++) acc[r][c] = madd16(acc[r][c], q, pair[r]);
        }
#else
        UNROLL for (int r = 0; r < rows; r++) {
            const vi pair = vi_bcast(x + r * stride + 4 * i);
            UNROLL for (int c = 0; c < SIDE; c++) {
                vi y;
                __asm__("vpmaddwd %2, %1, %0" : "=x"(y) : "x"(pair), "m"(*(const vi *)(codes + (i * TILE + c * VW) * 4)));
                acc[r][c] += y;
            }
        }
#endif
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < SIDE; c++) sum[r][c] = acc[r][c];
}
INLINE void pairs_of_rows(const uint8_t *codes, const uint8_t *x, int64_t stride, int64_t pairs, const int rows, vi sum[SUPER_ROWS][SIDE])
{
    UNROLL for (int r = 0; r < rows; r += 2) pairs_of_two(codes, x + r * stride, stride, pairs, rows - r < 2 ? 1 : 2, sum + r);
}
#else
INLINE void pairs_of_rows(const uint8_t *codes, const uint8_t *x, int64_t stride, int64_t pairs, const int rows, vi sum[SUPER_ROWS][SIDE])
{
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < SIDE; c++) sum[r][c] = vi_set1(0);
    for (int64_t i = 0; i < pairs; i++) {
        vi q[SIDE];
        for (int c = 0; c < SIDE; c++) q[c] = vi_load(codes + (i * TILE + c * VW) * 4);
        for (int r = 0; r < rows; r++) {
            const vi pair = vi_bcast(x + r * stride + 4 * i);
            for (int c = 0; c < SIDE; c++) sum[r][c] = madd16(sum[r][c], q[c], pair);
        }
    }
}
#endif

INLINE void super_rows(const super_chunk *k, int64_t row, const int rows, const int chain, const int halves, const int has_min)
{
#if VW == 16 && LL_VNNI
    if (rows == 8) {
        super_eight(k, row, chain, halves, has_min);
        return;
    }
#endif
    const uint8_t *x = k->x + row * SUPER_BLOCKS * XBYTES;
    const xblock *meta = k->meta + row * SUPER_META(halves, has_min);
    for (int v = 0; v < NV; v += SIDE) {
        float *part = k->part + row * TILE + v * VW;
        for (int b = 0; b < SUPER_BLOCKS; b += chain) {
            vi sum[SUPER_ROWS][SIDE];
            pairs_of_rows(k->codes + b * WIDE_BLOCK(0) + v * VW * 4, x + b * XBYTES, SUPER_BLOCKS * XBYTES, chain * BLOCK / 2, rows, sum);
            UNROLL for (int r = 0; r < rows; r++) {
                const xblock *m = meta + r * SUPER_META(halves, has_min);
                const int with_mins = has_min && b + chain == SUPER_BLOCKS;
                vi mins[SIDE];
                for (int c = 0; c < SIDE; c++) mins[c] = vi_set1(0);
                for (int i = 0; with_mins && i < SUPER_BLOCKS * halves / 2; i++)
                    for (int c = 0; c < SIDE; c++)
                        mins[c] = madd16(mins[c], vi_load(&k->mins[i][(v + c) * VW]), vi_set1(sum_pair(m, i)));
                for (int c = 0; c < SIDE; c++) {
                    float *to = part + r * TILE + c * VW;
                    vf y = vf_fma(vf_cvt(sum[r][c]), vf_load(k->scale + (v + c) * VW) * vf_set1(m->scale), vf_load(to));
                    if (with_mins) y = vf_fma(vf_cvt(mins[c]), vf_load(k->min + (v + c) * VW) * vf_set1(m->min_scale), y);
                    vf_store(to, y);
                }
            }
        }
    }
}

INLINE void super_factors(const ll_weight *w, const uint8_t *at, const int halves, const int has_min, super_chunk *k)
{
    for (int i = 0; has_min && i < SUPER_BLOCKS * halves / 2; i++)
        for (int v = 0; v < TILE; v += VW) vi_store(&k->mins[i][v], min_pair(at + w->at_min + 2 * i * TILE + v));
    for (int v = 0; v < TILE; v += VW) {
        vf_store(k->scale + v, vf_f16((const uint16_t *)(at + w->at_super_scale) + v));
        if (has_min) vf_store(k->min + v, vf_f16((const uint16_t *)(at + w->at_super_min) + v));
    }
}

/* part [rows][32] = products of rows row.. of x with a tile; also writes rows up to a multiple of SUPER_ROWS */
INLINE void super_sums_as(const product *p, int64_t tile, int64_t row, int64_t rows, float *part, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes;
    const vlut table = lut_load(w->table);
    const int64_t bytes = w->section_bytes;
    _Alignas(64) super_chunk k;
    k.x = p->a->planes + row * p->a->x_stride;
    k.meta = p->a->meta + row * p->a->meta_stride;
    k.part = part;
    memset(part, 0, (size_t)round_up(rows, SUPER_ROWS) * TILE * 4);
    for (int64_t s = 0; s < w->supers; s++, at += bytes) {
        super_widen(at + w->at_codes, at, code, halves, table, has_min, (int32_t)w->zero_offset, &k);
        super_factors(w, at, halves, has_min, &k);
        int64_t r = 0;
        const uint8_t *ask = at + bytes, *end = ask + bytes;
        for (; SUPER_ROWS > 4 && r + 4 < rows; r += SUPER_ROWS) {
            if (s + 1 == w->supers) fetch_out(p, tile, row + r, rows - r < SUPER_ROWS ? rows - r : SUPER_ROWS);
            /* spread the prefetch of the next chunk over the rows: all at once, it would stall on memory */
            for (const uint8_t *some = ask + bytes * SUPER_ROWS / rows; ask < some && ask < end; ask += 64) __builtin_prefetch(ask, 0, 2);
            super_rows(&k, r, SUPER_ROWS, chain_of(code), halves, has_min);
        }
        for (; ask < end; ask += 64) __builtin_prefetch(ask, 0, 2);
        for (; r + 2 < rows; r += 4) super_rows(&k, r, 4, chain_of(code), halves, has_min);
        if (r + 1 < rows) super_rows(&k, r, 2, chain_of(code), halves, has_min);
        else if (r < rows) super_rows(&k, r, 1, chain_of(code), halves, has_min);
        k.x += p->a->x_step;
        k.meta += p->a->meta_step;
    }
}

/* ---- medium numbers of rows: codes are multiplied by their scales in registers ---- */

#if WINOGRAD
/* A chain of Q4_K blocks times eight rows of X_SUPER_PAIRS, six of them with half the multiplications (`WINOGRAD_STEP`). Codes are
 * unpacked and multiplied by their scales in registers, a quad of all 32 columns at a time: zmm0 to 15 hold sums, zmm16 and 17
 * the cross terms of the codes, zmm18 to 21 their scales as in `quad_scales`. One Zen 4 core, 8 rows of 2,048 inputs: 115
 * billion multiply-adds per second; 106 with all rows halved, 98 with bytes (`super_several`), 79 with codes widened into
 * memory. Q6_K, which needs more instructions per code, reached 84 halved and 90 with bytes. */
#define EIGHT_ROWS(WHOLE, DO) WHOLE(0, 0, 1) DO(1, 2, 3) DO(2, 4, 5) DO(3, 6, 7) WHOLE(4, 8, 9) DO(5, 10, 11) DO(6, 12, 13) DO(7, 14, 15)
#define WHOLE_START(R, I, J) "vpxord %%zmm" #I ", %%zmm" #I ", %%zmm" #I "\n\tvpxord %%zmm" #J ", %%zmm" #J ", %%zmm" #J "\n\t"
#define HALVED_START(R, I, J) "vpbroadcastd " #R "*32(%[cross]), %%zmm" #I "\n\tvmovdqa64 %%zmm" #I ", %%zmm" #J "\n\t"
#define WHOLE_STEP(Q, R, I, J) PAIRS_STEP("+" #R "*512+" #Q "*8(%[x])", "%%zmm" #I, "%%zmm" #J)
#define HALVED_STEP(Q, R, I, J) WINOGRAD_STEP("+" #R "*512+" #Q "*8(%[x])", "%%zmm" #I, "%%zmm" #J)
#define HALVED_FOLD_ONE(R, I, FACTOR, TO)                                                                          \
    "vcvtdq2ps %%zmm" #I ", %%zmm" #I "\n\tvmulps " #R "*32(%[by])%{1to16%}, %%zmm" #FACTOR ", %%zmm30\n\t"           \
    "vfmadd213ps " TO "(%[to]), %%zmm30, %%zmm" #I "\n\tvmovups %%zmm" #I ", " TO "(%[to])\n\t"
#define WHOLE_FOLD(R, I, J) HALVED_FOLD_ONE(R, I, 18, #R "*128") HALVED_FOLD_ONE(R, J, 19, #R "*128+64")
#define HALVED_FOLD(R, I, J)                                                                                       \
    "vpsubd %%zmm16, %%zmm" #I ", %%zmm" #I "\n\tvpsubd %%zmm17, %%zmm" #J ", %%zmm" #J "\n\t" WHOLE_FOLD(R, I, J)
#define HALVED_SCALES                                                                                              \
    "vpmovzxbd (%[scale]), %%zmm18\n\tvpmovzxbd 16(%[scale]), %%zmm19\n\tadd $32, %[scale]\n\t"                      \
    "vpslld $16, %%zmm18, %%zmm20\n\tvpslld $16, %%zmm19, %%zmm21\n\tvpord %%zmm20, %%zmm18, %%zmm18\n\tvpord %%zmm21, %%zmm19, %%zmm19\n\t" \
    "vpslld $8, %%zmm18, %%zmm20\n\tvpslld $8, %%zmm19, %%zmm21\n\t"
#define LOW_NIBBLES(P) "vpandd " #P "*128(%[codes]), %%zmm22, %%zmm28\n\tvpandd " #P "*128+64(%[codes]), %%zmm22, %%zmm29\n\t"
#define HIGH_NIBBLES(P)                                                                                            \
    "vpsrlw $4, " #P "*128(%[codes]), %%zmm28\n\tvpsrlw $4, " #P "*128+64(%[codes]), %%zmm29\n\t"                    \
    "vpandd %%zmm22, %%zmm28, %%zmm28\n\tvpandd %%zmm22, %%zmm29, %%zmm29\n\t"
#define HALVED_QUAD(Q)                                                                                             \
    "vpmaddubsw %%zmm18, %%zmm28, %%zmm24\n\tvpmaddubsw %%zmm19, %%zmm29, %%zmm25\n\t"                               \
    "vpmaddubsw %%zmm20, %%zmm28, %%zmm26\n\tvpmaddubsw %%zmm21, %%zmm29, %%zmm27\n\t"                               \
    "vpdpwssd %%zmm24, %%zmm26, %%zmm16\n\tvpdpwssd %%zmm25, %%zmm27, %%zmm17\n\t"                                   \
    WHOLE_STEP(Q, 0, 0, 1) HALVED_STEP(Q, 1, 2, 3) HALVED_STEP(Q, 2, 4, 5) HALVED_STEP(Q, 3, 6, 7)                  \
    WHOLE_STEP(Q, 4, 8, 9) HALVED_STEP(Q, 5, 10, 11) HALVED_STEP(Q, 6, 12, 13) HALVED_STEP(Q, 7, 14, 15)            \
    "prefetcht1 " #Q "*64(%[next])\n\t"
INLINE void halved_chain(const uint8_t *codes, const uint8_t *scale, const uint16_t *super_scale, const uint8_t *x, const xblock *meta, const uint8_t *next, int64_t bytes, float *to)
{
    const int32_t *cross = meta->ints + cross_at(0, 1);
    const float *by = &meta->scale;
    int64_t blocks = SUPER_BLOCKS;
    _Static_assert(SUPER_META(1, 1) * sizeof(xblock) == 32 && SUPER_BLOCKS * XBYTES == 512 && PLANE == 128 && TILE == 32, "as in the assembly");
    __asm__ volatile(EIGHT_ROWS(WHOLE_START, HALVED_START) "vpxord %%zmm16, %%zmm16, %%zmm16\n\tvpxord %%zmm17, %%zmm17, %%zmm17\n\t"
                     "vpbroadcastd %[nibble], %%zmm22\n\t.p2align 5\n1:\n\t" HALVED_SCALES
                     LOW_NIBBLES(0) HALVED_QUAD(0) LOW_NIBBLES(1) HALVED_QUAD(1) LOW_NIBBLES(2) HALVED_QUAD(2) LOW_NIBBLES(3) HALVED_QUAD(3)
                     HIGH_NIBBLES(0) HALVED_QUAD(4) HIGH_NIBBLES(1) HALVED_QUAD(5) HIGH_NIBBLES(2) HALVED_QUAD(6) HIGH_NIBBLES(3) HALVED_QUAD(7)
                     "prefetcht1 512(%[next])\n\tprefetcht1 576(%[next])\n\t"
                     "add %[bytes], %[next]\n\tadd $512, %[codes]\n\tadd $64, %[x]\n\tdec %[blocks]\n\tjnz 1b\n\t"
                     "vcvtph2ps (%[super]), %%zmm18\n\tvcvtph2ps 32(%[super]), %%zmm19\n\t" EIGHT_ROWS(WHOLE_FOLD, HALVED_FOLD)
                     : [codes] "+&r"(codes), [scale] "+&r"(scale), [x] "+&r"(x), [next] "+&r"(next), [blocks] "+&r"(blocks)
                     : [cross] "r"(cross), [by] "r"(by), [to] "r"(to), [super] "r"(super_scale), [bytes] "r"(bytes), [nibble] "r"(0x0f0f0f0f)
                     : "cc", "memory", ZMM_ALL);
}

/* part [8][32] = products of rows row.. of x, eight including padding, with a tile of Q4_K. */
static void super_halved(const product *p, int64_t tile, int64_t row, float *part)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *x = p->a->planes + row * p->a->x_stride;
    const xblock *meta = p->a->meta + row * p->a->meta_stride;
    memset(part, 0, 8 * TILE * 4);
    for (int64_t s = 0; s < w->supers; s++, at += w->section_bytes, x += p->a->x_step, meta += p->a->meta_step) {
        const uint8_t *codes = at + w->at_codes;
        halved_chain(codes, at, (const uint16_t *)(at + w->at_super_scale), x, meta, codes + fetches(CODE_4), w->section_bytes / SUPER_BLOCKS, part);
        _Alignas(64) int32_t mins[SUPER_BLOCKS / 2][TILE];
        _Alignas(64) float super_min[TILE];
        vi sum[8][2];
        for (int v = 0; v < TILE; v += VW) {
            for (int i = 0; i < SUPER_BLOCKS / 2; i++) vi_store(&mins[i][v], min_pair(at + w->at_min + 2 * i * TILE + v));
            vf_store(super_min + v, vf_f16((const uint16_t *)(at + w->at_super_min) + v));
        }
        mins_of_eight(mins[0], meta, 1, sum);
        fold_eight(sum, super_min, &meta->min_scale, SUPER_META(1, 1) * sizeof(xblock), part);
    }
}
#else
static void super_halved(const product *p, int64_t tile, int64_t row, float *part) { (void)p, (void)tile, (void)row, (void)part; }
#endif


/* Up to this many rows. Two Cascade Lake cores, 2,048 x 2,048, Q4_K: 8 rows 0.21 ms, 0.32 without premultiplied codes; 16 rows
 * 0.50 and 0.71; 24 rows 0.61, and 0.58 with codes widened into memory. Q6_K: 8 rows 0.27, 0.31 with widened codes; 16 rows
 * 0.51 and 0.49. One Zen 4 core, 16 rows of Q4_K: 94 billion multiply-adds per second, against 107 halved (WINOGRAD). */
#define SUPER_SOME(halves) (VW != 16 || (WINOGRAD && ll_amd) ? 0 : (halves) == 1 ? 16 : 8)

/* part [rows][32] = products of `count` rows of x from row on with a tile; missing rows up to `rows` repeat the last one. */
INLINE void super_some(const product *p, int64_t tile, int64_t row, int64_t count, const int rows, float *part, const int code, const int halves, const int has_min)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *asked = at + w->at_codes + fetches(code);
    const int64_t bytes = block_bytes_of[code], x_stride = p->a->x_stride, meta_stride = p->a->meta_stride;
    const xblock *meta = p->a->meta + row * meta_stride;
    const vlut table = lut_load(w->table);
    const int32_t zero = has_min ? 0 : (int32_t)w->zero_offset;
    const uint8_t *x[SUPER_ROWS];
    for (int r = 0; r < rows; r++) x[r] = p->a->planes + (row + (r < count ? r : count - 1)) * x_stride;
    memset(part, 0, (size_t)count * TILE * 4);
    for (int64_t s = 0; s < w->supers; s++, meta += p->a->meta_step, at += w->section_bytes) {
        const uint8_t *codes = at + w->at_codes, *ahead = codes + fetches(code), *scale = at, *min = at + w->at_min;
        const uint16_t *super_scale = (const uint16_t *)(at + w->at_super_scale), *super_min = (const uint16_t *)(at + w->at_super_min);
        for (int first = 0; first < SUPER_BLOCKS; first += chain_of(code)) {
            vi sum[SUPER_ROWS][NV];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < NV; v++) sum[r][v] = vi_set1(0);
            for (int b = 0; b < chain_of(code); b++, codes += bytes) {
                asked = fetch_to(asked, ahead + w->section_bytes * (first + b + 1) / SUPER_BLOCKS, 0);
                UNROLL for (int h = 0; h < halves; h++, scale += TILE) {
                    quad_scales by[NV];
                    vh off[NV];
                    for (int v = 0; v < NV; v++) {
                        by[v] = quad_scales_at(scale + v * VW);
                        off[v] = scaled_zero(scale + v * VW, zero);
                    }
                    UNROLL for (int i = 0; i < 8 / halves; i++) {
                        const int j = halves == 2 ? 4 * h + i : i / 2 + i % 2 * 4; /* both halves of a plane */
                        vi quad[NV];
                        UNROLL for (int v = 0; v < NV; v++) quad[v] = block_quad(codes + v * VW * 4, j, code, table);
                        UNROLL for (int odd = 0; odd < 2; odd++) {
                            vi pairs[NV];
                            UNROLL for (int v = 0; v < NV; v++) {
                                pairs[v] = odd ? odd_codes(quad[v], by[v]) : even_codes(quad[v], by[v]);
                                if (!has_min) pairs[v] = (vi)((vh)pairs[v] - off[v]);
                            }
                            UNROLL for (int r = 0; r < rows; r++)
                                UNROLL for (int v = 0; v < NV; v++) sum[r][v] = madd16_at(sum[r][v], pairs[v], x[r] + 8 * j + 4 * odd);
                        }
                    }
                }
                for (int r = 0; r < rows; r++) x[r] += XBYTES;
            }
            for (int v = 0; v < NV; v++)
                for (int r = 0; r < rows && r < count; r++) {
                    float *to = part + r * TILE + v * VW;
                    vf_store(to, vf_fma(vf_cvt(sum[r][v]), super_factor(super_scale + v * VW, meta[r * meta_stride].scale), vf_load(to)));
                }
        }
        for (int v = 0; has_min && v < NV; v++) {
            vi pairs[SUPER_BLOCKS];
            for (int i = 0; i < SUPER_BLOCKS * halves / 2; i++) pairs[i] = min_pair(min + 2 * i * TILE + v * VW);
            for (int r = 0; r < count; r++) {
                const xblock *m = meta + r * meta_stride;
                float *to = part + r * TILE + v * VW;
                vi mins = vi_set1(0);
                for (int i = 0; i < SUPER_BLOCKS * halves / 2; i++) mins = madd16(mins, pairs[i], vi_set1(sum_pair(m, i)));
                vf_store(to, vf_fma(vf_cvt(mins), super_factor(super_min + v * VW, m->min_scale), vf_load(to)));
            }
        }
        for (int r = 0; r < rows; r++) x[r] += p->a->x_step - SUPER_BLOCKS * XBYTES;
    }
}

INLINE void super_some_rows(const product *p, int64_t tile, int64_t row, int64_t rows, float *part, const int code, const int halves, const int has_min)
{
    const int64_t groups = (rows + SUPER_ROWS - 1) / SUPER_ROWS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t r = rows * g / groups, count = rows * (g + 1) / groups - r;
        if (count > 6) super_some(p, tile, row + r, count, 8, part + r * TILE, code, halves, has_min);
        else if (count > 4) super_some(p, tile, row + r, count, 6, part + r * TILE, code, halves, has_min);
        else super_some(p, tile, row + r, count, 4, part + r * TILE, code, halves, has_min);
    }
}

#if VW == 16 && LL_VNNI
/* Splits more than two rows evenly into groups of at most 8. */
#define SEVERAL(CODE, HALVES, HAS_MIN)                                                                      \
    for (int64_t left = p->a->m - r; left > 2; left = p->a->m - r) {                                        \
        const int64_t count = left / ((left + 7) / 8);                                                      \
        if (count > 6) super_several(p, t, r, count, 8, CODE, HALVES, HAS_MIN);                             \
        else if (count > 4) super_several(p, t, r, count, 6, CODE, HALVES, HAS_MIN);                        \
        else super_several(p, t, r, count, 4, CODE, HALVES, HAS_MIN);                                       \
        r += count;                                                                                         \
    }
#else
#define SEVERAL(CODE, HALVES, HAS_MIN)
#endif

#define SUPER_PRODUCT(NAME, CODE, HALVES, HAS_MIN)                                                          \
    static void NAME##_few(const product *p, int64_t begin, int64_t end)                                    \
    {                                                                                                       \
        for (int64_t t = begin; t < end; t++) {                                                             \
            int64_t r = 0;                                                                                  \
            SEVERAL(CODE, HALVES, HAS_MIN);                                                                 \
            for (; r + 2 <= p->a->m; r += 2) super_few(p, t, r, 2, CODE, HALVES, HAS_MIN);                  \
            for (; r < p->a->m; r++) super_few(p, t, r, 1, CODE, HALVES, HAS_MIN);                          \
        }                                                                                                   \
    }                                                                                                       \
    static __attribute__((noinline)) void NAME##_some(const product *p, int64_t tile, int64_t row, int64_t rows, float *part) \
    {                                                                                                       \
        super_some_rows(p, tile, row, rows, part, CODE, HALVES, HAS_MIN);                                   \
    }                                                                                                       \
    static __attribute__((noinline)) void NAME##_many(const product *p, int64_t tile, int64_t row, int64_t rows, float *part) \
    {                                                                                                       \
        super_sums_as(p, tile, row, rows, part, CODE, HALVES, HAS_MIN);                                     \
    }                                                                                                       \
    static void NAME##_sums(const product *p, int64_t tile, int64_t row, int64_t rows, float *part)         \
    {                                                                                                       \
        if (HALVED_ROWS(CODE, rows)) super_halved(p, tile, row, part);                                      \
        else (rows <= SUPER_SOME(HALVES) ? NAME##_some : NAME##_many)(p, tile, row, rows, part);            \
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
