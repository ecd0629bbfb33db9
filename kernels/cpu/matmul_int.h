/* Products of integer codes with 16-bit or 8-bit activations. */
#ifndef LL_MATMUL_INT_H
#define LL_MATMUL_INT_H

#include "matmul_strassen.h"
#include "matmul_super_amx.h"

/* ---- integer codes, integer activations, few rows of x ---- */

typedef float chunk_floats[CHUNK * 2 * TILE];
typedef struct {
    chunk_floats scale, min;
    int32_t cross[CHUNK_W * TILE]; /* -(w0 w1 + w2 w3 + ...) per block */
} chunk_numbers;

/* One tile times `rows` rows of x. `half`: scales and mins are float16, one per block, and read in place; `one`: 8-bit x. */
INLINE void tile_few(const product *p, int64_t tile, int64_t row, const int rows, const int code, const int halves, const int has_min,
                     const int half, const int one)
{
    const ll_weight *w = p->w;
    const uint8_t *at = w->data + tile * w->tile_bytes, *ahead = at + w->at_codes + fetches(code), *asked = ahead;
    const int64_t blocks = w->blocks, chunk = chunk_of(w, CHUNK), bytes = code == CODE_8 ? codes_step(w) : block_bytes_of[code];
    const int64_t step = code == CODE_8 ? scales_step(w) : TILE * 2;
    const int64_t x_stride = p->a->x_stride, meta_stride = p->a->meta_stride;
    const uint8_t *x = p->a->planes + row * x_stride;
    const xblock *meta = p->a->meta + row * meta_stride;
    const vlut table = lut_load(w->table);
    const int near = fetches_near(w, rows, code);
    const int64_t each = w->tile_bytes / blocks;
    _Alignas(64) chunk_floats scale, min;
    vf acc[4][NV];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = vf_set1(0.0f);
    for (int64_t first = 0; first < blocks; first += chunk) {
        const int64_t count = blocks - first < chunk ? blocks - first : chunk;
        const uint8_t *codes = at + codes_at(w, first), *half_scale = at + section_at(w, first) + first % w->section * TILE * 2;
        if (!half) expand_scales(w, at, first, count, scale, min);
        for (int64_t b = 0; b < count; b++, x += one ? BLOCK : XBYTES, meta++, codes += bytes) {
            if (!row) asked = fetch_to(asked, ahead + (first + b + 1) * each, near); /* for later rows the tile is in the cache */
            for (int v = 0; v < NV; v += COLS) {
                vi q[8][COLS];
                block_quads(codes + v * VW * 4, code, table, q);
                for (int j = 0; code_is_wide(code) && j < 8; j++)
                    for (int c = 0; c < COLS; c++) q[j][c] = code_byte(q[j][c]);
                for (int h = 0; h < halves; h++) {
                    for (int r = 0; r < rows; r++) {
                        const xblock *m = meta + r * meta_stride;
                        vdot d[COLS];
                        for (int c = 0; c < COLS; c++) d[c] = dot_start(has_min ? 0 : m->start[h]);
                        for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++)
                            for (int c = 0; c < COLS; c++) (one ? dot_bytes : dot_quad)(&d[c], q[j][c], x + r * x_stride, j);
                        for (int c = 0; c < COLS; c++) {
                            const int64_t lane = (b * halves + h) * TILE + (v + c) * VW;
                            const uint8_t *half_at = half_scale + b * step + (v + c) * VW * 2;
                            vf to = acc[r][v + c];
                            to = vf_fma(one ? dot_value_of_bytes(d[c]) : dot_value(d[c]), (half ? vf_f16((const uint16_t *)half_at) : vf_load(scale + lane)) * vf_set1(m->scale), to);
                            if (has_min) to = vf_fma(half ? vf_f16((const uint16_t *)(half_at + w->at_min)) : vf_load(min + lane), vf_set1(m->sums[h]), to);
                            acc[r][v + c] = to;
                        }
                    }
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float sums[TILE];
        for (int v = 0; v < NV; v++) vf_store(sums + v * VW, acc[r][v]);
        store_tile(p, tile, row + r, sums);
    }
}

/* ---- many rows: codes unpacked once, shared by ROWS rows ---- */

#define ROWS (VW == 8 ? 4 : 6)

#if VW == 8 && MANY_PAIRS
INLINE void chunk_pairs(const chunk *k, int64_t row, const int rows, const int halves, const int has_min)
{
    const int64_t pairs = BLOCK / 2 / halves;
    for (int64_t b = 0; b < k->count; b++)
        for (int h = 0; h < halves; h++)
            for (int first = 0; first < rows; first += 2) {
                const int some = rows - first < 2 ? 1 : 2;
                const xblock *meta = k->meta + (row + first) * k->meta_stride + b;
                vi sum[2][SIDE];
                pairs_of_two(k->codes + b * WIDE_BLOCK(0) + h * pairs * TILE * 4,
                             k->x + (row + first) * k->x_stride + b * XBYTES + h * pairs * 4, k->x_stride, pairs, some, sum);
                UNROLL for (int r = 0; r < some; r++)
                    UNROLL for (int c = 0; c < SIDE; c++) {
                        const int64_t lane = (b * halves + h) * TILE + c * VW;
                        const xblock *m = meta + r * k->meta_stride;
                        float *to = k->part + (row + first + r) * TILE + c * VW;
                        vf y = vf_fma(vf_cvt(sum[r][c]), vf_load(k->scale + lane) * vf_set1(m->scale), vf_load(to));
                        if (has_min) y = vf_fma(vf_load(k->min + lane), vf_set1(m->sums[h]), y);
                        vf_store(to, y);
                    }
            }
}
#else
INLINE void chunk_pairs(const chunk *k, int64_t row, const int rows, const int halves, const int has_min) { (void)k, (void)row, (void)rows, (void)halves, (void)has_min; }
#endif

INLINE void chunk_int(const chunk *k, int64_t row, const int rows, const int halves, const int has_min, const int one)
{
    if (VW == 8 && MANY_PAIRS && !one) {
        chunk_pairs(k, row, rows, halves, has_min);
        return;
    }
    const uint8_t *x = k->x + row * k->x_stride;
    const xblock *meta = k->meta + row * k->meta_stride;
    for (int v = 0; v < NV; v += COLS) {
        float *part = k->part + row * TILE + v * VW;
        vf acc[ROWS][COLS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLS; c++) acc[r][c] = vf_load(part + r * TILE + c * VW);
        for (int64_t b = 0; b < k->count; b++) {
            for (int h = 0; h < halves; h++) {
                wide_dot sum[ROWS][COLS];
                vdot bytes[ROWS][COLS];
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < COLS; c++) {
                        const int32_t start = has_min ? 0 : meta[r * k->meta_stride + b].start[h];
                        if (one) bytes[r][c] = dot_start(start);
                        else sum[r][c] = wide_start(MANY_PAIRS ? 0 : start);
                    }
                for (int j = h * 4; j < (halves == 1 ? 8 : h * 4 + 4); j++) {
                    const uint8_t *quad = k->codes + b * WIDE_BLOCK(one) + (j * QUADS(one) * TILE + v * VW) * 4;
                    for (int i = 0; i < QUADS(one); i++) {
                        vi q[COLS];
                        for (int c = 0; c < COLS; c++) q[c] = vi_load(quad + (i * TILE + c * VW) * 4);
                        for (int r = 0; r < rows; r++) {
                            if (one) dot_unpacked_bytes(bytes[r], q, x + r * k->x_stride + b * BLOCK, j);
                            else dot_unpacked(sum[r], q, x + r * k->x_stride + b * XBYTES, j, i);
                        }
                    }
                }
                for (int c = 0; c < COLS; c++) {
                    const int64_t lane = (b * halves + h) * TILE + (v + c) * VW;
                    vf scale = vf_load(k->scale + lane), min = has_min ? vf_load(k->min + lane) : scale;
                    for (int r = 0; r < rows; r++) {
                        const xblock *m = meta + r * k->meta_stride + b;
                        acc[r][c] = vf_fma(one ? dot_value_of_bytes(bytes[r][c]) : wide_value(sum[r][c]), scale * vf_set1(m->scale), acc[r][c]);
                        if (has_min) acc[r][c] = vf_fma(min, vf_set1(m->sums[h]), acc[r][c]);
                    }
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLS; c++) vf_store(part + r * TILE + c * VW, acc[r][c]);
    }
}

#if WINOGRAD
/* `chunk_int` for six rows, four of them with half the multiplications (`WINOGRAD_STEP`). All sums stay in registers: floats in
 * zmm0 to 11, integers in zmm12 to 23; scales, mins and `cross` of a block have the layout of chunk_numbers. A row's cross
 * term is at byte 12 of its xblock (`CROSS`), its sum at byte 4. */
#define SIX_ROWS_BUT(WHOLE, DO) WHOLE(0, 1, 12, 13, "(%[x])", "(%[meta])") DO(2, 3, 14, 15, "(%[x],%[s])", "(%[meta],%[m])") \
    DO(4, 5, 16, 17, "(%[x],%[s],2)", "(%[meta],%[m],2)") WHOLE(6, 7, 18, 19, "(%%rax)", "(%%rdx)") \
    DO(8, 9, 20, 21, "(%%rax,%[s])", "(%%rdx,%[m])") DO(10, 11, 22, 23, "(%%rax,%[s],2)", "(%%rdx,%[m],2)")
#define SIX_ROWS(DO) SIX_ROWS_BUT(DO, DO)
#define SIX_LOAD(F, G, I, J, X, M) "vmovups " #F "*64(%[part]), %%zmm" #F "\n\tvmovups " #G "*64(%[part]), %%zmm" #G "\n\t"
#define SIX_STORE(F, G, I, J, X, M) "vmovups %%zmm" #F ", " #F "*64(%[part])\n\tvmovups %%zmm" #G ", " #G "*64(%[part])\n\t"
#define SIX_START(F, G, I, J, X, M) "vpaddd 12" M "%{1to16%}, %%zmm24, %%zmm" #I "\n\tvpaddd 12" M "%{1to16%}, %%zmm25, %%zmm" #J "\n\t"
#define SIX_ZERO(F, G, I, J, X, M) "vpxord %%zmm" #I ", %%zmm" #I ", %%zmm" #I "\n\tvpxord %%zmm" #J ", %%zmm" #J ", %%zmm" #J "\n\t"
#define SIX_PAIRS(F, G, I, J, X, M) PAIRS_STEP(X, "%%zmm" #I, "%%zmm" #J)
#define SIX_DOT(F, G, I, J, X, M) WINOGRAD_STEP(X, "%%zmm" #I, "%%zmm" #J)
#define SIX_FOLD(F, G, I, J, X, M)                                                                                 \
    "vcvtdq2ps %%zmm" #I ", %%zmm" #I "\n\tvmulps " M "%{1to16%}, %%zmm24, %%zmm30\n\tvfmadd231ps %%zmm30, %%zmm" #I ", %%zmm" #F "\n\t" \
    "vcvtdq2ps %%zmm" #J ", %%zmm" #J "\n\tvmulps " M "%{1to16%}, %%zmm25, %%zmm31\n\tvfmadd231ps %%zmm31, %%zmm" #J ", %%zmm" #G "\n\t"
#define SIX_MIN(F, G, I, J, X, M) "vfmadd231ps 4" M "%{1to16%}, %%zmm26, %%zmm" #F "\n\tvfmadd231ps 4" M "%{1to16%}, %%zmm27, %%zmm" #G "\n\t"
#define WINOGRAD_SIX(MIN)                                                                                          \
    __asm__ volatile("lea (%[s],%[s],2), %%rax\n\tadd %[x], %%rax\n\tlea (%[m],%[m],2), %%rdx\n\tadd %[meta], %%rdx\n\t" SIX_ROWS(SIX_LOAD) \
                     ".p2align 4\n1:\n\tvmovups %c[cross](%[of]), %%zmm24\n\tvmovups %c[cross]+64(%[of]), %%zmm25\n\t" SIX_ROWS_BUT(SIX_ZERO, SIX_START) \
                     "mov $8, %%ecx\n\t.p2align 5\n2:\n\t" WINOGRAD_CODES SIX_ROWS_BUT(SIX_PAIRS, SIX_DOT)                                \
                     "add $8, %[x]\n\tadd $8, %%rax\n\tdec %%ecx\n\tjnz 2b\n\t"                    \
                     "vmovups (%[of]), %%zmm24\n\tvmovups 64(%[of]), %%zmm25\n\t" SIX_ROWS(SIX_FOLD) MIN                  \
                     "add $128, %[of]\n\tadd $16, %[meta]\n\tadd $16, %%rdx\n\tdec %[count]\n\tjnz 1b\n\t" SIX_ROWS(SIX_STORE) \
                     : [codes] "+&r"(codes), [x] "+&r"(x), [meta] "+&r"(meta), [of] "+&r"(of), [count] "+&r"(count)                         \
                     : [s] "r"(k->x_stride), [m] "r"(k->meta_stride * (int64_t)sizeof(xblock)), [part] "r"(k->part + row * TILE),      \
                       [cross] "i"(offsetof(chunk_numbers, cross)), [min] "i"(offsetof(chunk_numbers, min))                            \
                     : "cc", "memory", "rax", "rcx", "rdx", ZMM_ALL)
INLINE void winograd_six(const chunk *k, int64_t row, const int has_min)
{
    const uint8_t *codes = k->codes, *x = k->x + row * k->x_stride;
    const xblock *meta = k->meta + row * k->meta_stride;
    const float *of = k->scale;
    int64_t count = k->count;
    if (has_min) WINOGRAD_SIX("vmovups %c[min](%[of]), %%zmm26\n\tvmovups %c[min]+64(%[of]), %%zmm27\n\t" SIX_ROWS(SIX_MIN));
    else WINOGRAD_SIX("");
}
#else
INLINE void winograd_six(const chunk *k, int64_t row, const int has_min) { (void)k, (void)row, (void)has_min; }
#endif

/* Rows of the next step: splits the remaining rows evenly instead of into a long and a short step. */
INLINE int step_of(int64_t left)
{
    if (left >= 2 * ROWS || left == ROWS) return ROWS;
    if (left > ROWS) return left - ROWS >= 3 || ROWS == 4 ? ROWS : 4;
    return (int)left;
}

#define CHUNK_INT(NAME, HALVES, HAS_MIN, ONE)                                                \
    static __attribute__((noinline)) void NAME(const chunk *k, int64_t r, int64_t rows)      \
    {                                                                                        \
        for (int64_t step; r < rows; r += step) {                                            \
            switch (step = step_of(rows - r)) {                                              \
            case 6:                                                                          \
                if (WINOGRAD && HALVES == 1 && !(ONE) && ll_amd) winograd_six(k, r, HAS_MIN);             \
                else chunk_int(k, r, ROWS == 6 ? 6 : 1, HALVES, HAS_MIN, ONE);                    \
                break;                                                                        \
            case 5: chunk_int(k, r, 3, HALVES, HAS_MIN, ONE); step = 3; break;                    \
            case 4: chunk_int(k, r, 4, HALVES, HAS_MIN, ONE); break;                              \
            case 3: chunk_int(k, r, 3, HALVES, HAS_MIN, ONE); break;                              \
            case 2: chunk_int(k, r, 2, HALVES, HAS_MIN, ONE); break;                              \
            default: chunk_int(k, r, 1, HALVES, HAS_MIN, ONE); break;                             \
            }                                                                                \
        }                                                                                    \
    }
CHUNK_INT(chunk_int_zero, 1, 0, 0)
CHUNK_INT(chunk_int_min, 1, 1, 0)
CHUNK_INT(chunk_int_half_zero, 2, 0, 0)
CHUNK_INT(chunk_int_half_min, 2, 1, 0)
#if LL_VNNI
CHUNK_INT(chunk_bytes_zero, 1, 0, 1)
CHUNK_INT(chunk_bytes_min, 1, 1, 1)
CHUNK_INT(chunk_bytes_half_zero, 2, 0, 1)
CHUNK_INT(chunk_bytes_half_min, 2, 1, 1)
#else /* 8-bit activations are never used */
#define chunk_bytes_zero chunk_int_zero
#define chunk_bytes_min chunk_int_min
#define chunk_bytes_half_zero chunk_int_half_zero
#define chunk_bytes_half_min chunk_int_half_min
#endif
static void (*const chunk_rows[2][2][2])(const chunk *, int64_t, int64_t) = { /* [one][halves - 1][has_min] */
    {{chunk_int_zero, chunk_int_min}, {chunk_int_half_zero, chunk_int_half_min}},
    {{chunk_bytes_zero, chunk_bytes_min}, {chunk_bytes_half_zero, chunk_bytes_half_min}},
};

INLINE void widen_as(const uint8_t *codes, int64_t step, int64_t count, const int code, vlut table, int32_t offset, const int one, uint8_t *to, int32_t *cross)
{
    const vh zero = (vh)vi_set1(offset * 0x10001);
    const int halved = WINOGRAD && !one && ll_amd;
    for (int64_t b = 0; b < count; b++)
        for (int v = 0; v < NV; v += COLS) {
            vi q[8][COLS];
            block_quads(codes + b * step + v * VW * 4, code, table, q);
            for (int c = 0; c < COLS; c++) {
                vi products = vi_set1(0);
                for (int j = 0; j < 8; j++) {
                    uint8_t *at = to + b * WIDE_BLOCK(one) + (j * QUADS(one) * TILE + (v + c) * VW) * 4;
                    if (QUADS(one) == 1) {
                        vi_store(at, code_is_wide(code) ? code_byte(q[j][c]) : q[j][c]);
                        continue;
                    }
                    const vi even = (vi)((vh)quad_even(q[j][c]) - zero), odd = (vi)((vh)quad_odd(q[j][c]) - zero);
                    vi_store(at, even);
                    vi_store(at + TILE * 4, odd);
                    if (halved) products = madd16(products, even, odd);
                }
                if (halved) vi_store(cross + b * TILE + (v + c) * VW, -products);
            }
        }
}

INLINE void widen_chunk_as(const ll_weight *w, const uint8_t *codes, int64_t count, const int one, uint8_t *to, int32_t *cross)
{
    const vlut table = lut_load(w->table);
    const int32_t zero = w->min_kind == NUM_NONE ? (int32_t)w->zero_offset : 0;
    const int64_t step = codes_step(w);
    switch (w->code) {
    case CODE_4: widen_as(codes, step, count, CODE_4, table, zero, one, to, cross); break;
    case CODE_4T: widen_as(codes, step, count, CODE_4T, table, zero, one, to, cross); break;
    case CODE_5: widen_as(codes, step, count, CODE_5, table, zero, one, to, cross); break;
    case CODE_6: widen_as(codes, step, count, CODE_6, table, zero, one, to, cross); break;
    case CODE_2: widen_as(codes, step, count, CODE_2, table, zero, one, to, cross); break;
    case CODE_3: widen_as(codes, step, count, CODE_3, table, zero, one, to, cross); break;
    default: widen_as(codes, step, count, CODE_8, table, zero, one, to, cross); break;
    }
}

static void widen_chunk(const ll_weight *w, const uint8_t *codes, int64_t count, int one, uint8_t *to, int32_t *cross)
{
    if (MANY_PAIRS && one) widen_chunk_as(w, codes, count, 1, to, cross);
    else widen_chunk_as(w, codes, count, 0, to, cross);
}

/* part [rows][32] = products of rows row.. of x with a tile */
static void tile_sums(const product *p, int64_t tile, int64_t row, int64_t rows, float *part)
{
#if MANY_PAIRS
    if (p->a->form == X_SUPER_PAIRS) {
        super_of[p->w->code].sums(p, tile, row, rows, part);
        return;
    }
#endif
    fetch_out(p, tile, row, rows);
    const ll_weight *w = p->w;
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE, one = p->a->form == X_BYTES;
    const uint8_t *at = w->data + tile * w->tile_bytes;
    _Alignas(64) uint8_t codes[CHUNK_W * WIDE_BLOCK(0)];
    _Alignas(64) chunk_numbers of;
    memset(part, 0, (size_t)rows * TILE * 4);
    for (int64_t first = 0; first < w->blocks; first += CHUNK_W) {
        int64_t count = w->blocks - first < CHUNK_W ? w->blocks - first : CHUNK_W;
        widen_chunk(w, at + codes_at(w, first), count, one, codes, of.cross);
        expand_scales(w, at, first, count, of.scale, of.min);
        chunk k = {codes, of.scale, of.min, count, p->a->planes + row * p->a->x_stride + first * x_bytes(p->a->form),
                   p->a->meta + row * p->a->meta_stride + first, p->a->x_stride, p->a->meta_stride, part};
        const int64_t done = one ? chunk_amx_rows(&k, rows, AMX_BYTES, halves, has_min) : 0;
        if (done < rows) chunk_rows[one][halves - 1][has_min](&k, done, rows);
        /* prefetch the next chunk while the rows are computed */
        const uint8_t *next = at + codes_at(w, first) + count * w->block_bytes;
        for (int64_t i = 0; i < CHUNK_W * w->tile_bytes / w->blocks; i += 64) __builtin_prefetch(next + i, 0, 2);
    }
}

static void tile_many(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    _Alignas(64) float part[SLAB * TILE];
    tile_sums(p, tile, row, rows, part);
    for (int64_t r = 0; r < rows; r++) store_tile(p, tile, row + r, part + r * TILE);
}

#if LL_AMX
/* parts [count][rows][32] = products of rows row.. of x with `count` tiles; also writes rows up to a multiple of AMX_ROWS. */
static __attribute__((noinline)) void amx_tiles(const product *p, const int64_t *tiles, int count, int64_t row, int64_t rows, tile_part *parts)
{
    const ll_weight *w = p->w;
    if (p->a->form == X_SUPER_TILES) {
        tiles_of[w->code](p, tiles, count, row, rows, parts);
        return;
    }
    const int halves = halves_of(w), has_min = w->min_kind != NUM_NONE, of_digits = p->a->form == X_DIGITS;
    const int64_t step = of_digits ? AMX_GROUPS / halves : CHUNK_W;
    _Alignas(64) uint8_t codes[AMX_GROUPS * AMX_GROUP];
    _Alignas(64) chunk_numbers of;
    _Alignas(64) uint16_t digits[64];
    int32_t values[64];
    if (of_digits) code_values(w, values);
    for (int i = 0; of_digits && i < 64; i++) digits[i] = (uint16_t)(bits_f32((float)values[i]) >> 16);
    for (int i = 0; i < count; i++) memset(parts[i], 0, (size_t)round_up(rows, AMX_ROWS) * TILE * 4);
    for (int64_t first = 0; first < w->blocks; first += step)
        for (int i = 0; i < count; i++) {
            const uint8_t *at = w->data + tiles[i] * w->tile_bytes, *of_chunk = at + codes_at(w, first);
            const int64_t blocks = w->blocks - first < step ? w->blocks - first : step;
            if (of_digits) widen_digits(w, of_chunk, blocks, digits, codes);
            else widen_chunk(w, of_chunk, blocks, 1, codes, of.cross);
            expand_scales(w, at, first, blocks, of.scale, of.min);
            const chunk k = {codes, of.scale, of.min, blocks, p->a->planes + row * p->a->x_stride + first * x_bytes(p->a->form),
                             p->a->meta + row * p->a->meta_stride + first, p->a->x_stride, p->a->meta_stride, parts[i]};
            if (first + step >= w->blocks) fetch_out(p, tiles[i], row, rows);
            chunk_amx_rows(&k, rows, of_digits ? AMX_DIGITS : AMX_PLANES, halves, has_min);
            const uint8_t *next = of_chunk + blocks * w->block_bytes;
            for (int64_t j = 0; j < step * w->tile_bytes / w->blocks; j += 64) __builtin_prefetch(next + j, 0, 2);
        }
}

static __attribute__((noinline)) void store_amx_tiles(const product *p, int64_t tile, int count, int64_t row, int64_t rows)
{
    _Alignas(64) tile_part parts[TILES_TOGETHER];
    int64_t tiles[TILES_TOGETHER];
    for (int i = 0; i < count; i++) tiles[i] = tile + i;
    amx_tiles(p, tiles, count, row, rows, parts);
    for (int i = 0; i < count; i++)
        for (int64_t r = 0; r < rows; r++) store_tile(p, tile + i, row + r, parts[i] + r * TILE);
}
#endif

static void tiles_strassen(const product *p, int64_t tile, int64_t row, int64_t rows)
{
    _Alignas(64) float parts[2][SLAB * TILE];
    strassen_sums(p, tile, tile + 1, row, rows, parts);
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) store_tile(p, tile + i, row + r, parts[i] + r * TILE);
}

/* act(gate) * up of many rows for a weight of gate stacked on up: intermediate results stay in the cache. */
static void store_gated(const product *p, int64_t tile, int64_t row, int64_t rows, float *gates, float *ups)
{
    for (int64_t r = 0; r < rows; r++) {
        float *gate = gates + r * TILE, *up = ups + r * TILE, *out = p->out + (row + r) * p->stride + tile * TILE;
        finish_tile(p, tile, row + r, gate, gate);
        finish_tile(p, tile + p->w->tiles / 2, row + r, up, up);
        for (int l = 0; l < TILE; l += VW) vf_store(out + l, activate(vf_load(gate + l), p->gelu) * vf_load(up + l));
    }
}

static void gated_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    const int64_t half = p->w->tiles / 2;
    _Alignas(64) float parts[LL_AMX ? 4 : 2][SLAB * TILE];
    for (int64_t i = begin; i < end; i++) {
        const int64_t tile = i % half, row = i / half * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB;
#if LL_AMX
        if (x_is_tiles(p->a->form)) {
            const int both = i + 1 < end && tile + 1 < half;
            amx_tiles(p, (int64_t[]){tile, tile + half, tile + 1, tile + 1 + half}, both ? 4 : 2, row, rows, parts);
            store_gated(p, tile, row, rows, parts[0], parts[1]);
            if (both) store_gated(p, tile + 1, row, rows, parts[2], parts[3]);
            i += both;
            continue;
        }
#endif
        if (p->a->form == X_STRASSEN) strassen_sums(p, tile, tile + half, row, rows, parts);
        else for (int up = 0; up < 2; up++) tile_sums(p, tile + up * half, row, rows, parts[up]);
        store_gated(p, tile, row, rows, parts[0], parts[1]);
    }
}

#define TILES_FEW_AS(NAME, CODE, HALVES, HAS_MIN, HALF, ONE)                                                     \
    static void NAME(const product *p, int64_t begin, int64_t end)                                               \
    {                                                                                                            \
        for (int64_t t = begin; t < end; t++) {                                                                  \
            int64_t r = 0;                                                                                       \
            for (; r + 4 <= p->a->m; r += 4) tile_few(p, t, r, 4, CODE, HALVES, HAS_MIN, HALF, ONE);             \
            for (; r + 2 <= p->a->m; r += 2) tile_few(p, t, r, 2, CODE, HALVES, HAS_MIN, HALF, ONE);             \
            for (; r < p->a->m; r++) tile_few(p, t, r, 1, CODE, HALVES, HAS_MIN, HALF, ONE);                     \
        }                                                                                                        \
    }
/* NAME[one]: for 16-bit and for 8-bit activations */
typedef void (*few_tiles)(const product *, int64_t, int64_t);
#if LL_VNNI
#define TILES_FEW(NAME, CODE, HALVES, HAS_MIN, HALF)                   \
    TILES_FEW_AS(NAME##_16, CODE, HALVES, HAS_MIN, HALF, 0)            \
    TILES_FEW_AS(NAME##_8, CODE, HALVES, HAS_MIN, HALF, 1)             \
    static const few_tiles NAME[2] = {NAME##_16, NAME##_8};
#else
#define TILES_FEW(NAME, CODE, HALVES, HAS_MIN, HALF)                   \
    TILES_FEW_AS(NAME##_16, CODE, HALVES, HAS_MIN, HALF, 0)            \
    static const few_tiles NAME[2] = {NAME##_16, NAME##_16};
#endif
TILES_FEW(few_8_zero, CODE_8, 1, 0, 0)
TILES_FEW(few_8_zero_f16, CODE_8, 1, 0, 1)
TILES_FEW(few_4_zero_f16, CODE_4, 1, 0, 1)
TILES_FEW(few_4_min_f16, CODE_4, 1, 1, 1)
TILES_FEW(few_5_zero_f16, CODE_5, 1, 0, 1)
TILES_FEW(few_4_zero, CODE_4, 1, 0, 0)
TILES_FEW(few_4_min, CODE_4, 1, 1, 0)
TILES_FEW(few_4t_zero, CODE_4T, 1, 0, 0)
TILES_FEW(few_4t_half, CODE_4T, 2, 0, 0)
TILES_FEW(few_5_zero, CODE_5, 1, 0, 0)
TILES_FEW(few_5_min, CODE_5, 1, 1, 0)
TILES_FEW(few_6_half, CODE_6, 2, 0, 0)
TILES_FEW(few_2_half, CODE_2, 2, 1, 0)
TILES_FEW(few_3_half, CODE_3, 2, 0, 0)

/* The function for m rows (`one`: 8-bit) and a range of tiles; NULL for many rows and for combinations that no format has.
 * 8-bit activations have no variant with codes premultiplied by scales (two Zen 4 cores, Q4_K, 8 rows: 241 billion
 * multiply-adds per second here, 130 with the functions for many rows). */
static const few_tiles *few_rows(const ll_weight *w, int64_t m, int one)
{
    const int half = w->group == 16, min = w->min_kind != NUM_NONE;
    const int in_place = w->scale_kind == NUM_F16 && w->group == BLOCK && (!min || w->min_kind == NUM_F16);
    const int super = is_super(w) && !one;
    if (m > (super ? SUPER_FEW : half ? FEW_HALF : FEW) || (super && HALVED_ROWS(w->code, m))) return NULL;
    switch (w->code) {
    case CODE_8: return half || min ? NULL : in_place ? few_8_zero_f16 : few_8_zero;
    case CODE_4: return half ? NULL : min ? in_place ? few_4_min_f16 : few_4_min : in_place ? few_4_zero_f16 : few_4_zero;
    case CODE_4T: return min ? NULL : half ? few_4t_half : few_4t_zero;
    case CODE_5: return half ? NULL : min ? few_5_min : in_place ? few_5_zero_f16 : few_5_zero;
    case CODE_6: return half && !min ? few_6_half : NULL;
    case CODE_2: return half && min ? few_2_half : NULL;
    case CODE_3: return half && !min ? few_3_half : NULL;
    default: return NULL;
    }
}

#if LL_AMX
/* From this many rows on AMX tiles are used (one Emerald Rapids core, 2,048 x 2,048, billion multiply-adds per second with
 * and without tiles: Q4_K 12 rows 181 and 145, 16 rows 234 and 149; Q5_K 12 rows 134 and 120; Q6_K, which has short chains,
 * 24 rows 116 and 127, 32 rows 147 and 132; Q4_1 24 rows 94 and 110, 32 rows 118 and 111). */
INLINE int64_t amx_from(const ll_weight *w) { return is_super(w) && chain_of((int)w->code) > 2 ? 12 : 32; }
#endif

/* Activation layout of an integer product with m rows; `takes`: TAKE_INT8, otherwise 16 bits. */
static int x_form(const ll_weight *w, int64_t m, int64_t takes)
{
    if (LL_VNNI && takes == TAKE_INT8) return X_BYTES;
#if LL_AMX
    if (amx_on && m >= amx_from(w) && !few_rows(w, m, 0)) return is_super(w) ? X_SUPER_TILES : digits_are_exact(w) ? X_DIGITS : X_TILES;
#endif
    if (is_super(w)) return few_rows(w, m, 0) ? X_SUPER_PLANES : takes == TAKE_INT16 && strassen_pays(w, m) ? X_STRASSEN : X_SUPER_PAIRS;
    if (few_rows(w, m, 0)) return X_PLANES;
    return MANY_PAIRS ? X_PAIRS : X_PLANES;
}

static void int_tiles(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const product *p = arg;
    const few_tiles *few = few_rows(p->w, p->a->m, p->a->form == X_BYTES);
#if MANY_PAIRS
    if (p->a->form == X_SUPER_PLANES) {
        super_of[p->w->code].few(p, begin, end);
        return;
    }
#endif
    if (few) {
        few[p->a->form == X_BYTES](p, begin, end);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / p->w->tiles * SLAB, rows = p->a->m - row < SLAB ? p->a->m - row : SLAB, tile = i % p->w->tiles;
#if LL_AMX
        if (x_is_tiles(p->a->form)) {
            const int64_t left = end - i < p->w->tiles - tile ? end - i : p->w->tiles - tile, count = left < TILES_TOGETHER ? left : TILES_TOGETHER;
            store_amx_tiles(p, tile, (int)count, row, rows);
            i += count - 1;
            continue;
        }
#endif
        if (p->a->form != X_STRASSEN) tile_many(p, tile, row, rows);
        else if (tile % 2 == 0) tiles_strassen(p, tile, row, rows); /* together with the next tile */
    }
}

#endif
