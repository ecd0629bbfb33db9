/* Activations of a product: per row and block of 32, 16-bit or 8-bit integers with one scale, or floats. */
#ifndef LL_ACTIVATIONS_H
#define LL_ACTIVATIONS_H

#include "pool.h"
#include "weight.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && VW == 16 && LL_VNNI
#define LL_AMX 1
static int amx_on; /* set after its self-test */
#else
#define LL_AMX 0
#endif
#define AMX_ROWS 16
#define SUPER_ROWS (VW == 16 ? 8 : 4) /* rows of x that share a load of codes multiplied by their scales */
/* Layouts of integers, as written by `plane_block`, `pair_block` and `digit_block`; X_BYTES: 8 bits, one signed byte each.
 * X_SUPER_*: one scale per 256 inputs, repeated in all their blocks; X_STRASSEN: see `strassen_rows`. X_TILES,
 * X_SUPER_TILES: bytes for AMX, with rows padded to whole tiles. */
enum { X_PLANES, X_PAIRS, X_DIGITS, X_TILES, X_BYTES, X_SUPER_PLANES, X_SUPER_PAIRS, X_STRASSEN, X_SUPER_TILES };
INLINE int x_is_super(int form) { return form >= X_SUPER_PLANES; }
INLINE int x_is_super_pairs(int form) { return form >= X_SUPER_PAIRS; }
INLINE int x_is_tiles(int form) { return form == X_DIGITS || form == X_TILES || form == X_SUPER_TILES; }
INLINE int64_t x_bytes(int form) { return form == X_DIGITS ? 2 * XBYTES : form == X_BYTES ? BLOCK : XBYTES; }

/* Activation precision of a product. */
enum { TAKE_INT16, TAKE_FLOATS, TAKE_INT8 };

#define X_MAX 32512.0f /* 127 * 256: the high byte fits in a signed byte after rounding */
#define X_MAX_SUPER 8191.0f /* 256 of them times code * scale (at most 945) fit in 32 bits: `chain_of` */
INLINE float x_max(int form) { return form == X_BYTES ? 127.0f : X_MAX; }
/* A block's metadata. With mins: sums[h] = float sum of half h; else start[h] = -zero_offset * sum. For X_SUPER_* with mins,
 * in the first of its blocks: start = pairs of 16-bit sums, of the halves of a block or of two blocks, in units of
 * `min_scale`: see `sum_pair`. */
typedef union {
    struct {
        float scale;
        union { int32_t start[2]; float sums[2]; };
        float min_scale;
    };
    int32_t ints[4];
} xblock;

typedef struct {
    const float *x;       /* [m, k] as given */
    int64_t m;
    int exact;            /* floats instead of integers */
    int form;             /* layout of integers, X_... */
    /* [m] rows of [blocks][x_bytes(form)], x_stride bytes apart; X_SUPER_PAIRS [k / 256][m][SUPER_BLOCKS]; X_STRASSEN
     * [k / 256][m / 16][7 sums][8 rows][128]; X_SUPER_TILES [k / 256][m / 16][high digits, low ones][4][16 rows][64] */
    const uint8_t *planes;
    const xblock *meta;   /* [m] rows of [blocks], meta_stride blocks apart; X_SUPER_* except planes: [k / 256][m][SUPER_META] */
    int64_t x_stride, meta_stride;
    int64_t x_step, meta_step; /* X_SUPER_*: from 256 inputs of a row to its next 256 */
    const float *floats;  /* [m][stride] */
    int64_t stride;
} activations;

/* X_SUPER_PAIRS: xblocks per 256 inputs of a row, so that they fit in one cache line (eight take two). */
#define SUPER_META(halves, has_min) ((has_min) ? 2 * (halves) : 2)
#define STRASSEN_ROWS (2 * SUPER_ROWS)                             /* rows that are combined */
#define STRASSEN_PART (SUPER_ROWS * SUPER / 2 * 2)                 /* bytes of one of their seven linear combinations */
#define STRASSEN_X_STRIDE (7 * STRASSEN_PART / STRASSEN_ROWS)      /* average bytes per row */
#define TILES_X_STRIDE (2 * SUPER)                                 /* the same of X_SUPER_TILES */
#define CROSS 3 /* X_PAIRS: index of the int that holds -(x0 x1 + x2 x3 + ...), for `winograd_six` */
/* X_SUPER_PAIRS: index of the int that holds -(x0 x1 + x2 x3 + ...) of chain i (`chain_of`), for `winograd_eight`. */
INLINE int cross_at(int i, int has_min) { return has_min ? 4 + 3 * i : i + 1 + i / 2 * 2; }
/* The same for a row of X_STRASSEN, for the left and the right tile. */
#define STRASSEN_CROSS(ROW, RIGHT) ((ROW)[1].ints[3 * (RIGHT)])
/* The sums of groups 2 i and 2 i + 1 of 256 inputs. */
INLINE int32_t sum_pair(const xblock *meta, int i) { return meta[i / 2].start[i % 2]; }

/* Memory kept between calls, by use: 0 activations, 1 attention, 2 and 3 segments. The caller holds pool.lock. NULL if out of memory. */
static uint8_t *scratch(int use, int64_t bytes)
{
    static struct { uint8_t *data; int64_t size; } kept[4];
    if (bytes > kept[use].size) {
        free(kept[use].data);
        bytes = round_up(bytes + bytes / 4, 4096);
        kept[use].data = aligned_alloc(4096, (size_t)bytes);
        kept[use].size = kept[use].data ? bytes : 0;
    }
    return kept[use].data;
}

/* Gathers 32 inputs of a row, with `perm`, `pre_scale` and zero padding applied. */
INLINE const float *gather_block(const ll_weight *w, const float *x, int64_t block, float buffer[BLOCK])
{
    int64_t first = block * BLOCK;
    if (!w->perm && !w->pre_scale && first + BLOCK <= w->k) return x + first;
    for (int i = 0; i < BLOCK; i++) {
        int64_t c = first + i;
        if (c >= w->k) { buffer[i] = 0.0f; continue; }
        int64_t from = w->perm ? w->perm[c] : c;
        buffer[i] = w->pre_scale ? x[from] * w->pre_scale[from] : x[from];
    }
    return buffer;
}

INLINE float half_sum(const float *x)
{
    vf s = vf_load(x);
    for (int i = VW; i < 16; i += VW) s = s + vf_load(x + i);
    return vf_sum(s);
}

/* Splits into 256 * hi + lo, both exact in bfloat16: [hi 32][lo 32] in the order of pairs; by halves, [hi 16][lo 16] twice. */
INLINE void digit_block(const int32_t *q, uint8_t *planes, int halves)
{
    uint16_t *to = (uint16_t *)planes;
    for (int i = 0; i < BLOCK; i++) {
        const int at = (i & ~3) | (i & 1) << 1 | (i & 2) >> 1, per = BLOCK / halves;
        const int32_t hi = (q[i] + 128) & ~255;
        to[at / per * 2 * per + at % per] = (uint16_t)(bits_f32((float)hi) >> 16);
        to[at / per * 2 * per + at % per + per] = (uint16_t)(bits_f32((float)(q[i] - hi)) >> 16);
    }
}

/* Splits 32 14-bit numbers into 128 * high + low, for rows of two tiles. */
INLINE void super_digits(const int32_t *q, uint8_t *to)
{
    for (int i = 0; i < BLOCK; i++) {
        const int32_t high = (q[i] + 64) >> 7, low = q[i] - high * 128;
        to[i] = (uint8_t)high;
        to[SUPER * AMX_ROWS + i] = (uint8_t)low;
    }
}
/* Offset of block b of 256 inputs from their first block in the row. */
INLINE int64_t super_at(int form, int b) { return form == X_SUPER_TILES ? b / 2 * (AMX_ROWS * 64) + b % 2 * BLOCK : b * XBYTES; }

#if VW == 16 && LL_VNNI
/* sum + (x0 x1 + x2 x3) of 8 quads of pairs, in lanes 0, 2, 4, ... */
INLINE vi cross_sums(vi sum, vi pairs) { return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_srli_epi64((__m512i)pairs, 32)); }
#endif

/* The scale of `count` inputs whose largest code is `most`, and its inverse. */
typedef struct { float scale, inverse; } input_scale;
INLINE input_scale scale_of(const float *x, int count, float most)
{
    vf top = vf_set1(0.0f);
    vi bad = vi_set1(0);
    for (int i = 0; i < count; i += VW) {
        vi a = (vi)vf_load(x + i) & 0x7fffffff;
        top = vf_max((vf)a, top);
        bad |= a > 0x7f7fffff; /* infinity or NaN */
    }
    const float peak = vf_hmax(top);
    input_scale by = {peak / most, most / peak};
    if (!(peak > 1e-30f)) by = (input_scale){0.0f, 0.0f};
    if (vi_sum(bad)) by = (input_scale){f32_bits(0x7fc00000), 0.0f}; /* make all results NaN */
    return by;
}

/* Codes of a block, and the sums of its halves. */
INLINE void round_block(const float *x, float inverse, int32_t *q, int32_t *sums)
{
    const vi some = vi_set1(inverse == 0.0f ? 0 : -1);
    for (int h = 0; h < 2; h++) {
        vi total = vi_set1(0);
        for (int i = 16 * h; i < 16 * h + 16; i += VW) {
            const vi n = vi_round(vf_select(some, vf_load(x + i), vf_set1(0.0f)) * vf_set1(inverse));
            vi_store(q + i, n);
            total += n;
        }
        sums[h] = vi_sum(total);
    }
}

INLINE void quantize_block(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero)
{
    const input_scale by = scale_of(x, BLOCK, x_max(form));
    int32_t q[BLOCK], sums[2];
    round_block(x, by.inverse, q, sums);
    if (form == X_BYTES)
        for (int i = 0; i < BLOCK; i++) planes[i] = (uint8_t)q[i];
    else if (form == X_DIGITS) digit_block(q, planes, halves);
    else if (form == X_PAIRS) pair_block(q, planes);
    else plane_block(q, planes);
    if (halves == 1) sums[0] += sums[1];
    meta->scale = by.scale;
    for (int h = 0; h < 2; h++)
        if (has_min) meta->sums[h] = by.scale * (float)sums[h];
        else meta->start[h] = -zero * sums[h];
#if WINOGRAD
    if (ll_amd && form == X_PAIRS) meta->ints[CROSS] = -vi_sum(cross_sums(vi_set1(0), vi_load(planes)));
#endif
}

/* Writes the xblocks of 256 inputs with a known scale; `sums`: sums of all their halves. */
INLINE void tell_super(float scale, int32_t sums[SUPER / 16], xblock *meta, int form, int halves, int has_min, int32_t zero)
{
    if (halves == 1)
        for (int b = 0; b < SUPER_BLOCKS; b++) sums[b] = sums[2 * b] + sums[2 * b + 1];
    int32_t most = 0;
    for (int i = 0; has_min && i < SUPER_BLOCKS * halves; i++) most = abs(sums[i]) > most ? abs(sums[i]) : most;
    int shift = 0; /* at most 3; signs usually cancel, so that one bit is enough */
    while (most + (1 << shift) / 2 >= 32768 << shift) shift++;
    for (int i = 0; has_min && i < SUPER_BLOCKS * halves; i++) sums[i] = (sums[i] + (1 << shift) / 2) >> shift;
    for (int b = 0; b < (x_is_super_pairs(form) ? SUPER_META(halves, has_min) : SUPER_BLOCKS); b++) {
        meta[b].scale = scale;
        meta[b].min_scale = -scale * (float)(1 << shift);
        for (int h = 0; h < 2; h++) {
            const int at = (2 * b + h) * 2; /* index of a pair */
            if (!has_min) meta[b].start[h] = h < halves ? -zero * sums[b * halves + h] : 0;
            else if (b < 2 * halves) meta[b].start[h] = (sums[at] & 0xffff) | sums[at + 1] << 16;
        }
    }
}

/* `quantize_block` for 256 inputs that share a scale; any vector width, handles infinity and NaN. */
static void quantize_super_any(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero)
{
    const input_scale by = scale_of(x, SUPER, X_MAX_SUPER);
    int32_t sums[SUPER / 16];
    for (int b = 0; b < SUPER_BLOCKS; b++, x += BLOCK) {
        int32_t q[BLOCK];
        round_block(x, by.inverse, q, sums + 2 * b);
        (form == X_SUPER_TILES ? super_digits : x_is_super_pairs(form) ? pair_block : plane_block)(q, planes + super_at(form, b));
    }
    tell_super(by.scale, sums, meta, form, halves, has_min, zero);
}

#define MANY_BLOCKS 16 /* blocks whose maxima and sums are computed together */
#if VW == 16 && LL_VNNI
/* Horizontal maxima or sums of several vectors, one per lane: merges two vectors into one; a loop would go through memory. */
#define MEET(OP, SHUFFLED, WITH, A, B) (vi) OP(SHUFFLED##lo_##WITH((__m512i)(A), (__m512i)(B)), SHUFFLED##hi_##WITH((__m512i)(A), (__m512i)(B)))
#define MEET_FAR(OP, A, B) \
    (vi) OP(_mm512_shuffle_i32x4((__m512i)(A), (__m512i)(B), 0x88), _mm512_shuffle_i32x4((__m512i)(A), (__m512i)(B), 0xdd))
#define LANES(NAME, OP)                                                                            \
    INLINE vi NAME(const vi v[16])                                                                 \
    {                                                                                              \
        vi four[4];                                                                                \
        UNROLL for (int i = 0; i < 4; i++)                                                         \
        {                                                                                          \
            const vi low = MEET(OP, _mm512_unpack, epi32, v[4 * i], v[4 * i + 1]);                 \
            const vi high = MEET(OP, _mm512_unpack, epi32, v[4 * i + 2], v[4 * i + 3]);            \
            four[i] = MEET(OP, _mm512_unpack, epi64, low, high);                                   \
        }                                                                                          \
        return MEET_FAR(OP, MEET_FAR(OP, four[0], four[1]), MEET_FAR(OP, four[2], four[3]));       \
    }
LANES(largest_lanes, _mm512_max_epi32)
LANES(lane_sums, _mm512_add_epi32)

/* `digit_block` of both halves of a block. */
INLINE void digit_blocks(vi first, vi second, uint8_t *to, int halves)
{
    const vi hi[2] = {(first + vi_set1(128)) & ~255, (second + vi_set1(128)) & ~255}, lo[2] = {first - hi[0], second - hi[1]};
    __m256i words[4]; /* hi and lo of the first half, then of the second */
    for (int h = 0; h < 2; h++) {
        words[2 * h] = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)vf_cvt(hi[h]), 16));
        words[2 * h + 1] = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)vf_cvt(lo[h]), 16));
    }
    const int middle = halves == 2 ? 1 : 2; /* stored after the first half's high parts */
    const __m512i a = _mm512_inserti64x4(_mm512_castsi256_si512(words[0]), words[middle], 1);
    const __m512i b = _mm512_inserti64x4(_mm512_castsi256_si512(words[3 - middle]), words[3], 1);
    _mm512_storeu_si512(to, _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(a, 0xd8), 0xd8));
    _mm512_storeu_si512(to + 64, _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(b, 0xd8), 0xd8));
}

/* `super_digits`, `pair_block` or `plane_block` of 32 16-bit numbers; returns the pairs. */
INLINE vi words_block(__m512i words, uint8_t *to, int form)
{
    if (form == X_SUPER_TILES) {
        const __m512i raised = _mm512_add_epi16(words, _mm512_set1_epi16(64));
        const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(raised, 7));
        const __m256i low = _mm512_cvtepi16_epi8(_mm512_sub_epi16(_mm512_and_si512(raised, _mm512_set1_epi16(127)), _mm512_set1_epi16(64)));
        _mm256_storeu_si256((void *)to, high);
        _mm256_storeu_si256((void *)(to + SUPER * AMX_ROWS), low);
        return (vi)words;
    }
    if (form == X_PAIRS || x_is_super_pairs(form)) {
        words = _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(words, 0xd8), 0xd8);
        _mm512_storeu_si512(to, words);
        return (vi)words;
    }
    const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
    _mm256_storeu_si256((void *)to, _mm512_cvtepi16_epi8(high));
    _mm256_storeu_si256((void *)(to + BLOCK), _mm512_cvtepi16_epi8(words));
    return (vi)words;
}
INLINE __m512i words_of(vi first, vi second)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)first)), _mm512_cvtepi32_epi16((__m512i)second), 1);
}

/* `quantize_super_any` with all sums computed together. */
static void quantize_super(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero, int chain)
{
    __m512i top = _mm512_setzero_si512();
    for (int i = 0; i < SUPER; i += 16) __builtin_prefetch(x + SUPER + i); /* this row's next inputs, used after those of other rows */
    for (int i = 0; i < SUPER; i += 16) top = _mm512_max_epi32(top, (__m512i)((vi)vf_load(x + i) & 0x7fffffff));
    const float peak = f32_bits((uint32_t)_mm512_reduce_max_epi32(top));
    if (!(peak > 1e-30f && peak < __builtin_inff())) {
        quantize_super_any(x, planes, meta, form, halves, has_min, zero);
        return;
    }
    const vf inverse = vf_set1(X_MAX_SUPER / peak);
    const int halved = WINOGRAD && ll_amd && form == X_SUPER_PAIRS;
    vi totals[SUPER / 16], cross = vi_set1(0);
    int32_t sums[SUPER / 16], crosses[SUPER_BLOCKS];
    for (int b = 0; b < SUPER_BLOCKS; b++, x += BLOCK) {
        totals[2 * b] = vi_round(vf_load(x) * inverse);
        totals[2 * b + 1] = vi_round(vf_load(x + 16) * inverse);
        const vi pairs = words_block(words_of(totals[2 * b], totals[2 * b + 1]), planes + super_at(form, b), form);
        if (!halved) continue;
        cross = cross_sums(cross, pairs);
        if ((b + 1) % chain) continue;
        crosses[b / chain] = -vi_sum(cross);
        cross = vi_set1(0);
    }
    vi_store(sums, lane_sums(totals));
    tell_super(peak / X_MAX_SUPER, sums, meta, form, halves, has_min, zero);
    for (int i = 0; halved && i < SUPER_BLOCKS / chain; i++) meta[cross_at(i, has_min) / 4].ints[cross_at(i, has_min) % 4] = crosses[i];
}

#if WINOGRAD
/* Computes from 256 inputs of 16 rows (pairs; a1 and a2 of the first eight rows, b1 and b2 of the others, 128 inputs each) the
 * seven linear combinations that `strassen_sixteen` multiplies, in its order, and their cross terms. */
static void strassen_rows(uint8_t pairs[STRASSEN_ROWS][SUPER * 2], uint8_t *to, xblock *meta)
{
    for (int r = 0; r < SUPER_ROWS; r++, to += SUPER / 2 * 2) {
        vi cross[7];
        for (int i = 0; i < 7; i++) cross[i] = vi_set1(0);
        for (int v = 0; v < SUPER; v += 64) {
            const vh a1 = (vh)vi_load(pairs[r] + v), a2 = (vh)vi_load(pairs[r] + SUPER + v);
            const vh b1 = (vh)vi_load(pairs[r + SUPER_ROWS] + v), b2 = (vh)vi_load(pairs[r + SUPER_ROWS] + SUPER + v);
            const vh sum[7] = {a1 + b2, a2 - b2, b1 - a1, b1 + b2, a1, a1 + a2, b2};
            UNROLL for (int i = 0; i < 7; i++) {
                vi_store(to + i * STRASSEN_PART + v, (vi)sum[i]);
                cross[i] = cross_sums(cross[i], (vi)sum[i]);
            }
        }
        xblock *a = meta + 2 * r, *b = meta + 2 * (r + SUPER_ROWS); /* SUPER_META(1, 1) */
        STRASSEN_CROSS(a, 0) = -vi_sum(cross[0] + cross[1] - cross[5] + cross[6]);
        STRASSEN_CROSS(a, 1) = -vi_sum(cross[4] + cross[5]);
        STRASSEN_CROSS(b, 0) = -vi_sum(cross[3] + cross[6]);
        STRASSEN_CROSS(b, 1) = -vi_sum(cross[0] - cross[3] + cross[4] + cross[2]);
    }
}
#endif

/* `quantize_block` for MANY_BLOCKS contiguous blocks, which hides the latency of their maxima. */
static void quantize_blocks(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero)
{
    const int halved = WINOGRAD && ll_amd && form == X_PAIRS;
    vi bits[MANY_BLOCKS], sums[2][MANY_BLOCKS], crosses[MANY_BLOCKS];
    for (int b = 0; b < MANY_BLOCKS; b++) {
        const vi first = (vi)vf_load(x + b * BLOCK) & 0x7fffffff, second = (vi)vf_load(x + b * BLOCK + 16) & 0x7fffffff;
        bits[b] = (vi)_mm512_max_epi32((__m512i)first, (__m512i)second); /* bit patterns of nonnegative floats have the same order */
    }
    const vi largest = largest_lanes(bits);
    if (vi_sum(largest > 0x7f7fffff)) { /* an infinity or NaN */
        for (int b = 0; b < MANY_BLOCKS; b++) quantize_block(x + b * BLOCK, planes + b * x_bytes(form), meta + b, form, halves, has_min, zero);
        return;
    }
    const vi some = (vf)largest > vf_set1(1e-30f);
    const vf scale = vf_select(some, (vf)largest / vf_set1(x_max(form)), vf_set1(0.0f));
    _Alignas(64) float inverses[16], scales[16];
    _Alignas(64) int32_t told[3][16];
    vf_store(inverses, vf_select(some, vf_set1(x_max(form)) / (vf)largest, vf_set1(0.0f)));
    vf_store(scales, scale);
    for (int b = 0; b < MANY_BLOCKS; b++) {
        const vf inverse = vf_set1(inverses[b]);
        const vi first = vi_round(vf_load(x + b * BLOCK) * inverse), second = vi_round(vf_load(x + b * BLOCK + 16) * inverse);
        sums[0][b] = halves == 1 ? first + second : first;
        sums[1][b] = second;
        if (form == X_DIGITS) {
            digit_blocks(first, second, planes + b * x_bytes(form), halves);
            continue;
        }
        const __m512i words = words_of(first, second);
        if (form == X_BYTES) _mm256_storeu_si256((void *)(planes + b * BLOCK), _mm512_cvtepi16_epi8(words));
        else {
            const vi pairs = words_block(words, planes + b * x_bytes(form), form);
            if (halved) crosses[b] = cross_sums(vi_set1(0), pairs);
        }
    }
    for (int h = 0; h < halves; h++) {
        const vi total = lane_sums(sums[h]);
        vi_store(told[h], has_min ? (vi)(scale * vf_cvt(total)) : total * -zero);
    }
    if (halved) vi_store(told[2], -lane_sums(crosses));
    for (int b = 0; b < MANY_BLOCKS; b++) {
        meta[b].scale = scales[b];
        for (int h = 0; h < halves; h++) meta[b].start[h] = told[h][b];
        if (halved) meta[b].ints[CROSS] = told[2][b];
    }
}
#else
static void quantize_super(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero, int chain)
{
    (void)chain;
    quantize_super_any(x, planes, meta, form, halves, has_min, zero);
}
static void quantize_blocks(const float *x, uint8_t *planes, xblock *meta, int form, int halves, int has_min, int32_t zero)
{
    for (int b = 0; b < MANY_BLOCKS; b++) quantize_block(x + b * BLOCK, planes + b * x_bytes(form), meta + b, form, halves, has_min, zero);
}
#endif

/* The zero offset that integer products subtract from every code. */
INLINE int32_t dot_zero(const ll_weight *w) { return (int32_t)w->zero_offset - (code_is_wide(w->code) ? DOT_BIAS : 0); }

typedef struct {
    const ll_weight *w;
    activations *a;
    uint8_t *planes;
    xblock *meta;
    float *floats;
} prepare_job;

/* Byte offset of a row from the first row. */
INLINE int64_t row_at(const activations *a, int64_t row)
{
    return a->form == X_SUPER_TILES ? (row - row % AMX_ROWS) * a->x_stride + row % AMX_ROWS * 64 : row * a->x_stride;
}

#define TOGETHER 8 /* rows quantized in turns, 256 inputs each (256 x 9,728: 2.2 ms; row by row 3.2) */

#if WINOGRAD
static void prepare_strassen(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    prepare_job *j = arg;
    const activations *a = j->a;
    _Alignas(64) uint8_t pairs[STRASSEN_ROWS][SUPER * 2];
    xblock left_over[2 * STRASSEN_ROWS];
    for (int64_t row = begin * STRASSEN_ROWS; row < end * STRASSEN_ROWS; row += STRASSEN_ROWS)
        for (int64_t s = 0; s < j->w->supers; s++) {
            const int64_t rows = a->m - row < STRASSEN_ROWS ? a->m - row : STRASSEN_ROWS;
            xblock *meta = j->meta + s * a->meta_step + row * a->meta_stride, *to = rows == STRASSEN_ROWS ? meta : left_over;
            for (int r = 0; r < rows; r++)
                quantize_super(a->x + (row + r) * j->w->k + s * SUPER, pairs[r], to + r * a->meta_stride, X_STRASSEN, 1, 1, 0, SUPER_BLOCKS);
            if (rows < STRASSEN_ROWS) memset(pairs[rows], 0, (size_t)(STRASSEN_ROWS - rows) * sizeof *pairs);
            strassen_rows(pairs, j->planes + s * a->x_step + row * a->x_stride, to);
            if (to != meta) memcpy(meta, to, (size_t)(rows * a->meta_stride) * sizeof *meta);
        }
}
#endif

static void prepare_rows(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    prepare_job *j = arg;
    const ll_weight *w = j->w;
    const int form = j->a->form, halves = halves_of(w), has_min = w->min_kind != NUM_NONE;
    const int32_t zero = dot_zero(w);
    float buffer[BLOCK];
    const int64_t x_stride = j->a->x_stride, meta_stride = j->a->meta_stride;
    if (!j->a->exact && x_is_super(form)) {
        for (int64_t first = begin; first < end; first += TOGETHER)
            for (int64_t s = 0; s < w->supers; s++)
                for (int64_t row = first; row < first + TOGETHER && row < end; row++)
                    quantize_super(j->a->x + row * w->k + s * SUPER, j->planes + row_at(j->a, row) + s * j->a->x_step,
                                   j->meta + row * meta_stride + s * j->a->meta_step, form, halves, has_min, zero, chain_of((int)w->code));
        return;
    }
    if (!j->a->exact && !w->perm && !w->pre_scale && w->k % (BLOCK * MANY_BLOCKS) == 0) {
        for (int64_t row = begin; row < end; row++)
            for (int64_t b = 0; b < w->blocks; b += MANY_BLOCKS)
                quantize_blocks(j->a->x + row * w->k + b * BLOCK, j->planes + row * x_stride + b * x_bytes(form), j->meta + row * meta_stride + b, form, halves, has_min, zero);
        return;
    }
    if (!j->a->exact && !w->perm && !w->pre_scale && w->k % BLOCK == 0) { /* blocks of all rows are contiguous, as such rows have no padding */
        int64_t b = begin * w->blocks;
        for (; b + MANY_BLOCKS <= end * w->blocks; b += MANY_BLOCKS)
            quantize_blocks(j->a->x + b * BLOCK, j->planes + b * x_bytes(form), j->meta + b, form, halves, has_min, zero);
        for (; b < end * w->blocks; b++) quantize_block(j->a->x + b * BLOCK, j->planes + b * x_bytes(form), j->meta + b, form, halves, has_min, zero);
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        const float *x = j->a->x + row * w->k;
        for (int64_t b = 0; b < w->blocks; b++) {
            const float *xb = gather_block(w, x, b, buffer);
            xblock *meta = j->meta + row * meta_stride + b;
            if (!j->a->exact) {
                quantize_block(xb, j->planes + row * x_stride + b * x_bytes(form), meta, form, halves, has_min, zero);
                continue;
            }
            if (has_min) {
                float low = half_sum(xb), high = half_sum(xb + 16);
                meta->sums[0] = halves == 1 ? low + high : low;
                meta->sums[1] = high;
            }
            if (j->floats) memcpy(j->floats + row * j->a->stride + b * BLOCK, xb, sizeof buffer);
        }
    }
}

/* Whether float products need a copy of x: permuted, scaled, or padded to whole blocks. */
INLINE int copies_floats(const ll_weight *w, const activations *a) { return a->exact && (w->perm || w->pre_scale || w->k % BLOCK); }

/* Pads rows that are a multiple of 1 KiB by a line: otherwise sixteen rows of a tile would map to the same L1 set. */
INLINE int64_t between_rows(const ll_weight *w) { return w->blocks % MANY_BLOCKS ? 0 : 64; }
INLINE int64_t x_stride_of(const ll_weight *w, const activations *a)
{
    if (a->form == X_STRASSEN || a->form == X_SUPER_TILES) return w->supers * (a->form == X_STRASSEN ? STRASSEN_X_STRIDE : TILES_X_STRIDE);
    return w->blocks * x_bytes(a->form) + between_rows(w);
}
INLINE int64_t meta_stride_of(const ll_weight *w) { return w->blocks + between_rows(w) / (int64_t)sizeof(xblock); }
/* Rows that products read: the last group of rows is read in full, and results of rows past the end are discarded. */
INLINE int64_t rows_read(const activations *a)
{
    switch (a->form) {
    case X_DIGITS: case X_TILES: case X_SUPER_TILES: return round_up(a->m, AMX_ROWS);
    case X_SUPER_PAIRS: return round_up(a->m, SUPER_ROWS);
    case X_STRASSEN: return round_up(a->m, STRASSEN_ROWS);
    default: return a->m;
    }
}
INLINE int64_t meta_bytes_of(const ll_weight *w, const activations *a) { return round_up(rows_read(a) * meta_stride_of(w) * (int64_t)sizeof(xblock), 64); }

/* Size in bytes of the memory for `prepare_activations`. */
static int64_t activation_bytes(const ll_weight *w, const activations *a)
{
    const int64_t each = !a->exact ? x_stride_of(w, a) : copies_floats(w, a) ? w->blocks * BLOCK * 4 : 0;
    return meta_bytes_of(w, a) + round_up(rows_read(a) * each, 64) + 64;
}

/* Whether activations prepared for one product can be used for the other. */
static int prepares_alike(const ll_weight *w, const activations *a, const ll_weight *other, const activations *b)
{
    if (w->perm || w->pre_scale || other->perm || other->pre_scale) return 0;
    return a->exact == b->exact && a->form == b->form && w->k == other->k && halves_of(w) == halves_of(other) &&
           (w->min_kind != NUM_NONE) == (other->min_kind != NUM_NONE) && dot_zero(w) == dot_zero(other) && chain_of((int)w->code) == chain_of((int)other->code);
}

/* Prepares `a` for products with w, in `memory`. */
static void prepare_activations(const ll_weight *w, activations *a, uint8_t *memory)
{
    const int has_min = w->min_kind != NUM_NONE, copy = copies_floats(w, a);
    uint8_t *rest = memory + meta_bytes_of(w, a);
    prepare_job job = {w, a, rest, (xblock *)memory, copy ? (float *)rest : NULL};
    a->meta = job.meta;
    a->planes = job.planes;
    a->x_stride = x_stride_of(w, a);
    a->meta_stride = meta_stride_of(w);
    a->x_step = SUPER_BLOCKS * XBYTES;
    a->meta_step = SUPER_BLOCKS;
    if (!a->exact && x_is_super_pairs(a->form)) { /* the same 256 inputs of all rows are contiguous, as products read many rows */
        if (a->form == X_SUPER_PAIRS) a->x_stride = a->x_step, a->x_step *= a->m;
        else a->x_stride = a->form == X_STRASSEN ? STRASSEN_X_STRIDE : TILES_X_STRIDE, a->x_step = a->x_stride * rows_read(a);
        a->meta_stride = SUPER_META(halves_of(w), has_min), a->meta_step = a->meta_stride * a->m;
        /* rows past the end read the next 256 inputs, or these zeros: stray subnormals would take a hundred cycles each */
        memset(job.meta + w->supers * a->meta_step, 0, (size_t)((rows_read(a) - a->m) * a->meta_stride) * sizeof(xblock));
    }
    else if (x_is_tiles(a->form)) memset(job.meta + a->m * a->meta_stride, 0, (size_t)((rows_read(a) - a->m) * a->meta_stride) * sizeof(xblock));
    a->floats = copy ? job.floats : a->x;
    a->stride = copy ? w->blocks * BLOCK : w->k;
    if (a->exact && !copy && !has_min) return;
#if WINOGRAD
    if (a->form == X_STRASSEN) {
        pool_run(prepare_strassen, &job, rows_read(a) / STRASSEN_ROWS);
        return;
    }
#endif
    if (a->m < 2 || a->m * w->blocks < 128) prepare_rows(&job, 0, a->m, 0);
    else pool_run(prepare_rows, &job, a->m);
}

#endif
