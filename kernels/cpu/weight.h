/* A prepared weight: rows in tiles of 32, one vector lane per row, so that dot products need no horizontal sums.
 *
 * A tile is read from front to back, so one pointer prefetches all of it (Zen 4, one core, Q4_K: 25 GB/s; 19 with all scales
 * of a tile before its codes). It consists of sections of 256 inputs, or a single section, or sections of 32 inputs (Q8_0
 * with AVX-512 VNNI, which Zen 4's hardware prefetcher follows: 26 GB/s instead of 18): scales [groups][32], mins
 * [groups][32], super-scales, then codes [blocks of 32 inputs]. In a block, the codes of inputs 4j..4j+3 are "quad j": 32
 * lanes of 4 bytes. Narrow codes are stored in planes of that size:
 *   nibble planes  4: byte = quad i | quad i+4 << 4
 *   2-bit planes   2: quad j at bits 2(j%4) of plane j/4
 *   1-bit plane    1: quad j at bit j
 * Float codes (dense, E4M3) are stored as [32 inputs][32 rows].
 *
 * value = scale * (code - zero_offset) + min, or scale * (code - zero); then times row_scale. */
#ifndef LL_WEIGHT_H
#define LL_WEIGHT_H

#include "vec.h"

enum { CODE_8, CODE_4, CODE_4T, CODE_5, CODE_6, CODE_2, CODE_3, CODE_F32, CODE_F16, CODE_BF16, CODE_E4M3 };
enum { NUM_NONE, NUM_F32, NUM_F16, NUM_BF16, NUM_SUB8 /* 8-bit number * f16 per 256 inputs */, NUM_ZERO8 /* mins only */,
       NUM_E8M0, NUM_E8M0_HALF, NUM_E4M3_HALF /* _HALF: half the value */ };
#define SUPER 256
#define SUPER_BLOCKS (SUPER / BLOCK)

typedef struct {
    int64_t n, k, tiles, blocks;
    int64_t code, scale_kind, min_kind, zero_offset;
    int64_t group;        /* inputs per scale: 16, or a multiple of 32 */
    int64_t groups, supers;
    int64_t section;      /* blocks */
    int64_t tile_bytes, section_bytes, at_min, at_super_scale, at_super_min, at_codes, block_bytes;
    uint8_t *data;
    const float *row_scale;   /* [n] or NULL */
    const int32_t *perm;      /* [k] or NULL: column i multiplies x[perm[i]] */
    const float *pre_scale;   /* [k] or NULL */
    uint8_t table[16];        /* CODE_4T */
} ll_weight;

INLINE int code_is_float(int64_t code) { return code >= CODE_F32; }
INLINE int code_is_wide(int64_t code) { return code == CODE_8 || code == CODE_4T; } /* codes above 127 occur */
INLINE int64_t number_bytes(int64_t kind) { return kind == NUM_F32 ? 4 : kind == NUM_F16 || kind == NUM_BF16 ? 2 : kind == NUM_NONE ? 0 : 1; }
/* For K-quants: number of blocks whose products, each at most code * scale * X_MAX_SUPER, can be summed in 32 bits. */
INLINE int chain_of(const int code) { return code == CODE_6 || code == CODE_4T ? 2 : code == CODE_5 ? 4 : SUPER_BLOCKS; }
INLINE int halves_of(const ll_weight *w) { return w->group == 16 ? 2 : 1; }
INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

static const int16_t block_bytes_of[] = {8 * PLANE, 4 * PLANE, 4 * PLANE, 5 * PLANE, 6 * PLANE, 2 * PLANE, 3 * PLANE,
                                         32 * PLANE, 16 * PLANE, 16 * PLANE, 8 * PLANE};

/* Computes the sizes from n, k, code, kinds and group; returns the size of `data` in bytes. */
int64_t ll_layout(ll_weight *w)
{
    w->tiles = (w->n + TILE - 1) / TILE;
    w->blocks = (w->k + BLOCK - 1) / BLOCK;
    w->groups = w->scale_kind == NUM_NONE ? 0 : (w->blocks * BLOCK + w->group - 1) / w->group;
    int sub = w->scale_kind == NUM_SUB8 || w->min_kind == NUM_SUB8;
    w->supers = sub ? (w->blocks * BLOCK + SUPER - 1) / SUPER : 0;
    w->section = w->groups && w->blocks % SUPER_BLOCKS == 0 && SUPER % w->group == 0 ? SUPER_BLOCKS : w->blocks;
    /* not measured for narrower vectors */
    if (VW == 16 && LL_VNNI && MANY_PAIRS && w->code == CODE_8 && w->group == BLOCK && w->min_kind == NUM_NONE) w->section = 1;
    const int64_t sections = w->blocks / w->section, groups = w->groups / sections, supers = w->supers / sections;
    w->at_min = round_up(groups * TILE * number_bytes(w->scale_kind), 64);
    w->at_super_scale = w->at_min + round_up(groups * TILE * number_bytes(w->min_kind), 64);
    w->at_super_min = w->at_super_scale + round_up(supers * TILE * 2, 64);
    w->at_codes = w->at_super_min + (w->min_kind == NUM_SUB8 ? round_up(supers * TILE * 2, 64) : 0);
    w->block_bytes = block_bytes_of[w->code];
    w->section_bytes = w->at_codes + w->section * w->block_bytes;
    w->tile_bytes = sections * w->section_bytes;
    return w->tiles * w->tile_bytes;
}

/* Byte offset in a tile of a block's section, and of the block's codes. */
INLINE int64_t section_at(const ll_weight *w, int64_t block) { return block / w->section * w->section_bytes; }
INLINE int64_t codes_at(const ll_weight *w, int64_t block)
{
    return section_at(w, block) + w->at_codes + block % w->section * w->block_bytes;
}

/* Blocks processed together (at most `most`), and the stride in bytes of their codes and of their float16 scales. */
INLINE int64_t chunk_of(const ll_weight *w, int64_t most) { return w->section == 1 || w->section > most ? most : w->section; }
INLINE int64_t codes_step(const ll_weight *w) { return w->section == 1 ? w->section_bytes : w->block_bytes; }
INLINE int64_t scales_step(const ll_weight *w) { return w->section == 1 ? w->section_bytes : TILE * 2; }

INLINE vf load_number(const uint8_t *at, int64_t index, const int64_t kind)
{
    switch (kind) {
    case NUM_F32: return vf_load((const float *)at + index);
    case NUM_F16: return vf_f16((const uint16_t *)at + index);
    case NUM_BF16: return vf_bf16((const uint16_t *)at + index);
    case NUM_SUB8: return vf_cvt(vi_i8(at + index));
    case NUM_E8M0: return vf_e8m0(at + index);
    case NUM_E8M0_HALF: return vf_e8m0(at + index) * vf_set1(0.5f);
    case NUM_E4M3_HALF: return vf_e4m3_256(at + index) * vf_set1(128.0f);
    default: return vf_cvt(vi_u8(at + index)); /* NUM_ZERO8 */
    }
}

/* to[i][32] = number of group(first + i); `per` consecutive i share a group. */
INLINE void expand_as(const uint8_t *at, int64_t first, int64_t count, int64_t per, float *to, const int64_t kind)
{
    if (per == 1) {
        for (int64_t i = 0; i < count * TILE; i += VW) vf_store(to + i, load_number(at, first * TILE + i, kind));
        return;
    }
    int64_t group = first / per, left = per - first % per;
    for (int64_t i = 0; i < count; i++, to += TILE) {
        for (int v = 0; v < TILE; v += VW) vf_store(to + v, load_number(at, group * TILE + v, kind));
        if (--left == 0) left = per, group++;
    }
}

static void expand_numbers(const uint8_t *at, int64_t first, int64_t count, int64_t per, float *to, int64_t kind)
{
    switch (kind) {
    case NUM_F32: expand_as(at, first, count, per, to, NUM_F32); break;
    case NUM_F16: expand_as(at, first, count, per, to, NUM_F16); break;
    case NUM_BF16: expand_as(at, first, count, per, to, NUM_BF16); break;
    case NUM_ZERO8: expand_as(at, first, count, per, to, NUM_ZERO8); break;
    case NUM_E8M0: expand_as(at, first, count, per, to, NUM_E8M0); break;
    case NUM_E8M0_HALF: expand_as(at, first, count, per, to, NUM_E8M0_HALF); break;
    case NUM_E4M3_HALF: expand_as(at, first, count, per, to, NUM_E4M3_HALF); break;
    default: for (int64_t i = 0; i < count * TILE; i++) to[i] = 1.0f;
    }
}

/* to[i][32] = sign * number(first + i) * its super-scale, which 1 << shift consecutive numbers share. */
static void expand_sub(const uint8_t *at, const uint8_t *super_at, int64_t first, int64_t count, int shift, float sign, float *to)
{
    const int64_t end = first + count;
    for (int64_t i = first; i < end;) {
        const int64_t super = i >> shift, stop = (super + 1) << shift < end ? (super + 1) << shift : end;
        vf times[NV];
        for (int v = 0; v < NV; v++) times[v] = vf_f16((const uint16_t *)super_at + super * TILE + v * VW) * vf_set1(sign);
        for (; i < stop; i++, to += TILE)
            for (int v = 0; v < NV; v++) vf_store(to + v * VW, load_number(at, i * TILE + v * VW, NUM_SUB8) * times[v]);
    }
}

/* Scales and mins of blocks [first, first + count) as floats, [count][halves][32] each; the blocks share a section or have one each. */
static void expand_scales(const ll_weight *w, const uint8_t *tile, int64_t first, int64_t count, float *scale, float *min)
{
    for (; w->section == 1 && count > 1; count--, first++, scale += TILE) expand_scales(w, tile, first, 1, scale, min);
    tile += section_at(w, first);
    first %= w->section;
    const int halves = halves_of(w);
    const int64_t per = halves == 2 || w->group == BLOCK ? 1 : w->group / BLOCK;
    const int shift = halves == 2 ? 4 : 3; /* 256 inputs */
    first *= halves;
    count *= halves;
    if (w->scale_kind == NUM_SUB8) expand_sub(tile, tile + w->at_super_scale, first, count, shift, 1.0f, scale);
    else expand_numbers(tile, first, count, per, scale, w->scale_kind);
    if (w->min_kind == NUM_SUB8) expand_sub(tile + w->at_min, tile + w->at_super_min, first, count, shift, -1.0f, min);
    else if (w->min_kind != NUM_NONE) expand_numbers(tile + w->at_min, first, count, per, min, w->min_kind);
    if (w->min_kind == NUM_ZERO8)
        for (int64_t i = 0; i < count * TILE; i++) min[i] = -(min[i] * scale[i]);
    if (w->code == CODE_E4M3) /* its codes are decoded divided by 256 */
        for (int64_t i = 0; i < count * TILE; i++) scale[i] *= 256.0f;
}

#define COLS (VW == 8 ? 1 : 2) /* vectors of a tile processed together: whole planes, and shared broadcasts of x */

#if MANY_PAIRS
typedef struct { vi sum; } wide_dot;
INLINE wide_dot wide_start(int32_t z) { return (wide_dot){vi_set1(z)}; }
INLINE vf wide_value(wide_dot d) { return vf_cvt(d.sum); }
#else
typedef vdot wide_dot;
INLINE wide_dot wide_start(int32_t z) { return dot_start(z); }
INLINE vf wide_value(wide_dot d) { return dot_value(d); }
#endif

/* `dot_unpacked` for 8-bit activations, which have a single plane. */
INLINE void dot_unpacked_bytes(vdot sum[COLS], const vi q[COLS], const uint8_t *x, int j)
{
    for (int c = 0; c < COLS; c++) dot_bytes(&sum[c], q[c], x, j);
}

/* Adds quad j's part `i` of a row's activations to the sums of COLS vectors of unpacked codes. */
INLINE void dot_unpacked(wide_dot sum[COLS], const vi q[COLS], const uint8_t *x, int j, int i)
{
#if !MANY_PAIRS
    (void)i;
    const vi hi = vi_bcast(x + 4 * j), lo = vi_bcast(x + BLOCK + 4 * j);
    for (int c = 0; c < COLS; c++) {
        sum[c].hi = DPBUSD(sum[c].hi, q[c], hi);
        sum[c].lo = DPBUSD(sum[c].lo, q[c], lo);
    }
#else
    const vi pair = vi_bcast(x + 8 * j + 4 * i);
    for (int c = 0; c < COLS; c++) sum[c].sum = madd16(sum[c].sum, q[c], pair);
#endif
}

/* Quad j of a block as bytes, for the VW rows whose lanes start at `at`. */
INLINE vi block_quad(const uint8_t *at, const int j, const int code, vlut table)
{
    if (code == CODE_8) return vi_load(at + PLANE * j);
    if (code == CODE_2 || code == CODE_3) {
        const vi quad = vi_shr16(vi_load(at + PLANE * (j / 4)), 2 * (j % 4)) & 0x03030303;
        if (code == CODE_2) return quad;
        const vi high = vi_load(at + 2 * PLANE);
        return or_masked(quad, j < 2 ? vi_shl16(high, 2 - j) : vi_shr16(high, j - 2), 0x04040404);
    }
    const vi both = vi_load(at + PLANE * (j % 4)), quad = j < 4 ? both & 0x0f0f0f0f : high_nibbles(both);
    if (code == CODE_4T) return lut_get(table, quad);
    if (code == CODE_5) {
        const vi high = vi_load(at + 4 * PLANE);
        return or_masked(quad, j < 4 ? vi_shl16(high, 4 - j) : vi_shr16(high, j - 4), 0x10101010);
    }
    if (code == CODE_6) {
        const vi high = vi_load(at + (4 + j / 4) * PLANE);
        return or_masked(quad, j % 4 < 2 ? vi_shl16(high, 4 - 2 * (j % 4)) : vi_shr16(high, 2 * (j % 4) - 4), 0x30303030);
    }
    return quad;
}

/* All eight quads, for the COLS * VW rows at `at`. Loads go from front to back. */
INLINE void block_quads(const uint8_t *at, const int code, vlut table, vi q[8][COLS])
{
    UNROLL
    for (int i = 0; i < 8; i++)
        UNROLL
        for (int c = 0; c < COLS; c++) {
            const int j = code == CODE_8 || code == CODE_2 || code == CODE_3 ? i : i / 2 + i % 2 * 4; /* both halves of a plane */
            q[j][c] = block_quad(at + c * VW * 4, j, code, table);
        }
}

/* Codes below 2^16 as floats minus the zero offset (`quad_zero`), exact. */
INLINE vf code_float(vi code, vf zero) { return (vf)(code | 0x4b000000) - zero; /* 2^23 + code */ }
INLINE vf quad_zero(const ll_weight *w) { return vf_set1(8388608.0f + (float)w->zero_offset); }

/* Row vector of input i of a block of float codes; E4M3 is divided by 256. */
INLINE vf float_code(const uint8_t *block, int i, int v, const int64_t code)
{
    const int at = i * TILE + v * VW;
    switch (code) {
    case CODE_F32: return vf_load((const float *)block + at);
    case CODE_F16: return vf_f16((const uint16_t *)block + at);
    case CODE_BF16: return vf_bf16((const uint16_t *)block + at);
    default: return vf_e4m3_256(block + at);
    }
}

#endif
