/* A layer's KV cache: pages of keys and values in one of the KV formats (kernels/kv_pages.py). */
#ifndef LL_KV_H
#define LL_KV_H

#include <math.h>

#include "vec.h"

#define DIM_MAX 512

enum { KV_F32, KV_BF16, KV_F16, KV_INT8, KV_FP8 };

typedef struct {
    uint8_t *k, *v;              /* [num_pages][kv_heads][page_size][dim] */
    float *k_scales, *v_scales;  /* [num_pages][kv_heads][page_size], or one number; NULL for formats without */
    int64_t num_kv_heads, page_size, dim, format, one_scale;
} kv_pages;

INLINE int64_t kv_bytes(const int64_t format) { return format == KV_F32 ? 4 : format == KV_BF16 || format == KV_F16 ? 2 : 1; }

/* Elements d.. of a stored vector as floats, without its scale. */
INLINE vf kv_vector(const uint8_t *row, int64_t d, const int64_t format)
{
    switch (format) {
    case KV_F32: return vf_load((const float *)row + d);
    case KV_BF16: return vf_bf16((const uint16_t *)row + d);
    case KV_F16: return vf_f16((const uint16_t *)row + d);
    case KV_INT8: return vf_cvt(vi_i8(row + d));
    default: {
        const vi code = vi_u8(row + d) & 0x7f;
        return vf_select(code == 0x7f, vf_set1(f32_bits(0x7fc00000)), vf_e4m3_256(row + d) * vf_set1(256.0f));
    }
    }
}
INLINE float kv_number(const uint8_t *row, int64_t d, const int64_t format)
{
    switch (format) {
    case KV_F32: return ((const float *)row)[d];
    case KV_BF16: return bf16_to_f32(((const uint16_t *)row)[d]);
    case KV_F16: return f16_to_f32(((const uint16_t *)row)[d]);
    case KV_INT8: return (float)(int8_t)row[d];
    default: return e4m3_to_f32(row[d]);
    }
}

/* x H in place: orthonormal Hadamard matrix on each block of n dimensions, n = largest power of two that divides dim. */
static void hadamard(float *x, int64_t dim)
{
    const int64_t size = dim & -dim;
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t i = 0; i < dim; i += 2 * half)
            for (int64_t j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    const float factor = (float)(1.0 / sqrt((double)size));
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

/* E4M3 codes: round to nearest even, saturate at +-448; NaN becomes 0x7f. */
INLINE vi e4m3_codes(vf x)
{
    const vi bits = (vi)x, sign = bits >> 24 & 0x80, whole = bits & 0x7fffffff;
    vi size = whole;
    size = (vi)vf_select(size > 0x43e00000, (vf)vi_set1(0x43e00000), (vf)size);
    const vi normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const vi small = (vi)((vf)size + vf_set1(16384.0f)) - 0x46800000; /* the float spacing at 2^14 is 2^-9 */
    const vi codes = (vi)vf_select(size >= 0x3c800000, (vf)normal, (vf)small);
    return (vi)vf_select(whole > 0x7f800000, (vf)vi_set1(0x7f), (vf)codes) | sign;
}

/* Encodes one vector in an 8-bit format, with the scale `given`, or its own (stored to `scale`) if that is NULL. */
static void kv_encode(const float *x, int64_t dim, int64_t format, const float *given, uint8_t *codes, float *scale)
{
    _Alignas(64) float padded[DIM_MAX + 16];
    _Alignas(64) int32_t numbers[DIM_MAX + 16];
    const float largest = format == KV_INT8 ? 127.0f : 448.0f;
    memcpy(padded, x, (size_t)dim * 4);
    memset(padded + dim, 0, 64);
    vf divisor = vf_set1(1.0f), factor = vf_set1(1.0f);
    if (given) {
        divisor = vf_set1(*given);
    } else {
        vf top = vf_set1(0.0f);
        vi bad = vi_set1(0);
        for (int64_t d = 0; d < dim; d += VW) {
            const vi size = (vi)vf_load(padded + d) & 0x7fffffff;
            top = vf_max((vf)size, top);
            bad |= size > 0x7f7fffff;
        }
        const float peak = vf_hmax(top);
        *scale = peak > 1e-30f ? peak / largest : 0.0f;
        factor = vf_set1(peak > 1e-30f ? largest / peak : 0.0f);
        if (vi_sum(bad)) { /* infinity or NaN: a NaN scale makes the decoded vector NaN */
            *scale = f32_bits(0x7fc00000);
            memset(codes, 0, (size_t)dim);
            return;
        }
    }
    for (int64_t d = 0; d < dim; d += VW) {
        vf y = vf_load(padded + d);
        y = given ? y / divisor : y * factor;
        if (format == KV_INT8) y = vf_max(vf_min(y, vf_set1(127.0f)), vf_set1(-127.0f));
        vi_store(numbers + d, format == KV_INT8 ? vi_round(y) : e4m3_codes(y));
    }
    for (int64_t d = 0; d < dim; d++) codes[d] = (uint8_t)numbers[d];
}

static void kv_store_row(uint8_t *pages, float *scales, const kv_pages *p, int64_t row, const float *x)
{
    uint8_t *to = pages + row * p->dim * kv_bytes(p->format);
    switch (p->format) {
    case KV_F32: memcpy(to, x, (size_t)p->dim * 4); return;
    case KV_BF16:
        for (int64_t d = 0; d < p->dim; d++) ((uint16_t *)to)[d] = f32_to_bf16(x[d]);
        return;
    case KV_F16:
        for (int64_t d = 0; d < p->dim; d++) ((uint16_t *)to)[d] = f32_to_f16(x[d]);
        return;
    default: kv_encode(x, p->dim, p->format, p->one_scale ? scales : NULL, to, p->one_scale ? NULL : scales + row);
    }
}

INLINE int64_t kv_row(const kv_pages *p, int64_t slot, int64_t head)
{
    return (slot / p->page_size * p->num_kv_heads + head) * p->page_size + slot % p->page_size;
}

static void kv_store_key(const kv_pages *p, int64_t slot, int64_t head, const float *x)
{
    float rotated[DIM_MAX];
    if (p->format == KV_INT8) {
        memcpy(rotated, x, (size_t)p->dim * 4);
        hadamard(rotated, p->dim);
        x = rotated;
    }
    kv_store_row(p->k, p->k_scales, p, kv_row(p, slot, head), x);
}

static void kv_store_value(const kv_pages *p, int64_t slot, int64_t head, const float *x)
{
    kv_store_row(p->v, p->v_scales, p, kv_row(p, slot, head), x);
}

#endif
