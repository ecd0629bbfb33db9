/* Products of many rows with Q4_K in seven block multiplications instead of eight (V. Strassen, "Gaussian elimination is not
 * optimal", 1969): two tiles of 32 columns, 16 rows and 256 inputs form two by two blocks. All additions are on integers, so
 * results are bit-identical: codes times scales have 10 bits, activations 14, sums of two of either fit in 16 even when added
 * to each other (`WINOGRAD_STEP`), and sums of products may wrap around at 32. Requires weights whose 256 inputs form one sum
 * (`chain_of`): with 128 inputs per block product, the additions are cheap. */
#ifndef LL_MATMUL_STRASSEN_H
#define LL_MATMUL_STRASSEN_H

#include "matmul_super.h"

/* Used from this many rows on, if each thread gets several pairs of tiles (one Zen 4 core, 2,048 x 2,048, billion multiply-adds
 * per second with Strassen and without: 96 rows 130 and 131, 112 rows 132 and 131, 256 rows 135 and 128; since then both have
 * gained from multiplying every fourth row directly). */
#define STRASSEN_FROM 112
#define STRASSEN_PAIRS 4
static int strassen_pays(const ll_weight *w, int64_t m)
{
    return WINOGRAD && ll_amd && w->code == CODE_4 && w->group == BLOCK && w->min_kind != NUM_NONE && w->tiles % 2 == 0 &&
           m >= STRASSEN_FROM && (m + SLAB - 1) / SLAB * w->tiles / 2 >= STRASSEN_PAIRS * pool.wanted;
}

#if WINOGRAD
#define HALF_CODES (SUPER_BLOCKS / 2 * WIDE_BLOCK(0)) /* bytes of the widened codes of 128 inputs */

typedef struct {
    _Alignas(64) uint8_t codes[7][HALF_CODES]; /* premultiplied by scales and combined for the seven products */
    int32_t cross[2][2][TILE];                 /* their cross terms, for both groups of eight rows and both tiles */
    super_chunk tile[2];                       /* without codes */
} strassen_chunk;

/* Computes the seven code combinations and their cross terms from 256 inputs of two tiles of Q4_K. */
static void strassen_codes(const ll_weight *w, const uint8_t *const at[2], strassen_chunk *k)
{
    for (int c = 0; c < TILE; c += VW) {
        vi cross[7];
        for (int i = 0; i < 7; i++) cross[i] = vi_set1(0);
        for (int b = 0; b < SUPER_BLOCKS / 2; b++) {
            const uint8_t *codes[2][2];
            quad_scales by[2][2];
            for (int right = 0; right < 2; right++)
                for (int second = 0; second < 2; second++) {
                    const int block = b + second * SUPER_BLOCKS / 2;
                    codes[right][second] = at[right] + w->at_codes + block * block_bytes_of[CODE_4] + c * 4;
                    by[right][second] = quad_scales_at(at[right] + block * TILE + c);
                }
            UNROLL for (int p = 0; p < 8; p++) {
                const int j = p / 2 + p % 2 * 4; /* both halves of a plane */
                vi pairs[7][2];
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    vh one[2][2];
                    UNROLL for (int i = 0; i < 4; i++) {
                        const vi quad = block_quad(codes[i / 2][i % 2], j, CODE_4, (vlut){0});
                        one[i / 2][i % 2] = (vh)(odd ? odd_codes(quad, by[i / 2][i % 2]) : even_codes(quad, by[i / 2][i % 2]));
                    }
                    const vh sum[7] = {one[0][0] + one[1][1], one[0][1] + one[1][1], one[0][0] + one[1][0], one[0][0],
                                       one[1][0] - one[1][1], one[1][1], one[0][1] - one[0][0]};
                    UNROLL for (int i = 0; i < 7; i++) {
                        pairs[i][odd] = (vi)sum[i];
                        vi_store(k->codes[i] + b * WIDE_BLOCK(0) + ((2 * j + odd) * TILE + c) * 4, (vi)sum[i]);
                    }
                }
                UNROLL for (int i = 0; i < 7; i++) cross[i] = madd16(cross[i], pairs[i][0], pairs[i][1]);
            }
        }
        vi_store(&k->cross[0][0][c], cross[5] - cross[0] - cross[1] - cross[6]);
        vi_store(&k->cross[0][1][c], vi_set1(0) - cross[4] - cross[5]);
        vi_store(&k->cross[1][0][c], vi_set1(0) - cross[3] - cross[6]);
        vi_store(&k->cross[1][1][c], cross[3] - cross[0] - cross[4] - cross[2]);
    }
}

/* sum = `from`, or zero, plus eight contiguous rows of 128 inputs times widened codes, as in `winograd_eight`. Prefetches the
 * lines after these rows, which the next product reads. */
#define STRASSEN_LOAD(R) "vmovdqa64 " #R "*128(%[from]), %[s" #R "0]\n\tvmovdqa64 " #R "*128+64(%[from]), %[s" #R "1]\n\t"
#define STRASSEN_EIGHT(NAME, START)                                                                                \
    INLINE void NAME(const uint8_t *codes, const int32_t *from, const uint8_t *x, vi sum[8][2])                     \
    {                                                                                                              \
        const uint8_t *next = x + STRASSEN_PART;                                                                   \
        int64_t quads = SUPER / 2 / 4;                                                                             \
        _Static_assert(SUPER == 256, "as in the assembly");                                                        \
        __asm__ volatile(START(0) START(1) START(2) START(3) START(4) START(5) START(6) START(7) ".p2align 5\n1:\n\t" WINOGRAD_CODES \
                         PAIRS_ROW(0, "(%[x])") WINOGRAD_ROW(1, "+256(%[x])") WINOGRAD_ROW(2, "+512(%[x])") WINOGRAD_ROW(3, "+768(%[x])") \
                         PAIRS_ROW(4, "+1024(%[x])") WINOGRAD_ROW(5, "+1280(%[x])") WINOGRAD_ROW(6, "+1536(%[x])") WINOGRAD_ROW(7, "+1792(%[x])") \
                         "prefetcht0 (%[next])\n\tadd $64, %[next]\n\tadd $8, %[x]\n\tdec %[quads]\n\tjnz 1b"       \
                         : SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7), \
                           [codes] "+&r"(codes), [x] "+&r"(x), [quads] "+&r"(quads), [next] "+&r"(next)            \
                         : [from] "r"(from)                                                                        \
                         : "cc", "memory", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31"); \
    }
STRASSEN_EIGHT(strassen_eight, ZERO_ROW)
STRASSEN_EIGHT(strassen_onto, STRASSEN_LOAD)

/* to (op)= sum, [8][32]; sum += from */
#define EACH_SUM(DO) UNROLL for (int r = 0; r < 8; r++) { DO(r, 0); DO(r, 1); }
#define PUT(R, C) vi_store(to + R * TILE + C * VW, sum[R][C])
#define ADD(R, C) vi_store(to + R * TILE + C * VW, vi_load(to + R * TILE + C * VW) + sum[R][C])
#define TAKE(R, C) vi_store(to + R * TILE + C * VW, vi_load(to + R * TILE + C * VW) - sum[R][C])
#define JOIN(R, C) sum[R][C] += vi_load(from + R * TILE + C * VW)
INLINE void strassen_put(int32_t *to, vi sum[8][2]) { EACH_SUM(PUT) }
INLINE void strassen_take(int32_t *to, vi sum[8][2]) { EACH_SUM(TAKE) }
INLINE void strassen_join(vi sum[8][2], const int32_t *from) { EACH_SUM(JOIN) }
INLINE void strassen_add(int32_t *to, vi sum[8][2]) { EACH_SUM(ADD) }
#undef PUT
#undef ADD
#undef TAKE
#undef JOIN

/* Finishes a block: first or second group of eight rows from `row` on, left or right tile. */
INLINE void strassen_fold(const strassen_chunk *k, int64_t row, const int second, const int right, vi sum[8][2])
{
    const super_chunk *tile = &k->tile[right];
    const int64_t first = row + second * SUPER_ROWS;
    const xblock *meta = tile->meta + first * 2;
    const vi low = vi_load(&k->cross[second][right][0]), high = vi_load(&k->cross[second][right][VW]);
    UNROLL for (int r = 0; r < 8; r++) {
        if (!IS_HALVED(r)) continue;
        const vi cross = vi_set1(STRASSEN_CROSS(meta + 2 * r, right));
        sum[r][0] += low + cross;
        sum[r][1] += high + cross;
    }
    fold_eight(sum, tile->scale, &meta->scale, 2 * sizeof *meta, tile->part + first * TILE);
    mins_of_eight(tile->mins[0], meta, 1, sum);
    fold_eight(sum, tile->min, &meta->min_scale, 2 * sizeof *meta, tile->part + first * TILE);
}

/* 16 rows of x with inputs a1, a2 and b1, b2 times both tiles: a1 left1 + a2 left2 and so on, four blocks from seven products.
 * The last term of each block is added in registers. */
INLINE void strassen_sixteen(const strassen_chunk *k, int64_t row)
{
    _Alignas(64) int32_t a_left[8 * TILE], a_right[8 * TILE], b_left[8 * TILE], b_right[8 * TILE];
    const uint8_t *x = k->tile[0].x + row * STRASSEN_X_STRIDE;
    vi sum[8][2];
    strassen_eight(k->codes[0], NULL, x, sum); /* (a1 + b2) (left1 + right2) */
    strassen_put(a_left, sum);
    strassen_put(b_right, sum);
    strassen_onto(k->codes[1], a_left, x += STRASSEN_PART, sum); /* (a2 - b2) (left2 + right2) */
    strassen_put(a_left, sum);
    strassen_onto(k->codes[2], b_right, x += STRASSEN_PART, sum); /* (b1 - a1) (left1 + right1) */
    strassen_put(b_right, sum);
    strassen_eight(k->codes[3], NULL, x += STRASSEN_PART, sum); /* (b1 + b2) left1 */
    strassen_put(b_left, sum);
    strassen_take(b_right, sum);
    strassen_eight(k->codes[4], NULL, x += STRASSEN_PART, sum); /* a1 (right1 - right2) */
    strassen_put(a_right, sum);
    strassen_join(sum, b_right);
    strassen_fold(k, row, 1, 1, sum);
    strassen_eight(k->codes[5], NULL, x += STRASSEN_PART, sum); /* (a1 + a2) right2 */
    strassen_take(a_left, sum);
    strassen_join(sum, a_right);
    strassen_fold(k, row, 0, 1, sum);
    strassen_eight(k->codes[6], NULL, x += STRASSEN_PART, sum); /* b2 (left2 - left1) */
    strassen_add(a_left, sum);
    strassen_join(sum, b_left);
    strassen_fold(k, row, 1, 0, sum);
    UNROLL for (int r = 0; r < 8; r++) UNROLL for (int c = 0; c < 2; c++) sum[r][c] = vi_load(a_left + r * TILE + c * VW);
    strassen_fold(k, row, 0, 0, sum);
}

/* parts [2][rows][32] = products of rows row.. of x with two tiles; also writes rows up to a multiple of STRASSEN_ROWS */
static void strassen_sums(const product *p, int64_t left, int64_t right, int64_t row, int64_t rows, float parts[2][SLAB * TILE])
{
    const ll_weight *w = p->w;
    const int64_t tiles[2] = {left, right}, bytes = w->section_bytes;
    const uint8_t *at[2];
    _Alignas(64) strassen_chunk k;
    for (int i = 0; i < 2; i++) {
        at[i] = w->data + tiles[i] * w->tile_bytes;
        k.tile[i].x = p->a->planes + row * p->a->x_stride;
        k.tile[i].meta = p->a->meta + row * p->a->meta_stride;
        k.tile[i].part = parts[i];
        memset(parts[i], 0, (size_t)round_up(rows, STRASSEN_ROWS) * TILE * 4);
    }
    for (int64_t s = 0; s < w->supers; s++) {
        strassen_codes(w, at, &k);
        for (int i = 0; i < 2; i++, at[i - 1] += bytes) super_factors(w, at[i], 1, 1, &k.tile[i]);
        int64_t asked = 0; /* bytes prefetched of the next section, for both tiles */
        for (int64_t r = 0; r < rows; r += STRASSEN_ROWS) {
            if (s + 1 == w->supers)
                for (int i = 0; i < 2; i++) fetch_out(p, tiles[i], row + r, rows - r < STRASSEN_ROWS ? rows - r : STRASSEN_ROWS);
            for (const int64_t some = asked + bytes * STRASSEN_ROWS / rows; asked < some && asked < bytes; asked += 64)
                for (int i = 0; i < 2; i++) __builtin_prefetch(at[i] + asked, 0, 2);
            strassen_sixteen(&k, r);
        }
        for (int i = 0; i < 2; i++) {
            k.tile[i].x += p->a->x_step;
            k.tile[i].meta += p->a->meta_step;
        }
    }
}
#else
static void strassen_sums(const product *p, int64_t left, int64_t right, int64_t row, int64_t rows, float parts[2][SLAB * TILE])
{
    (void)p, (void)left, (void)right, (void)row, (void)rows, (void)parts;
}
#endif

#endif
