/* Vectors of VW 32-bit lanes: the few operations that the kernels need, for AVX-512, AVX2, NEON and plain C.
 *
 * The integer dot product takes weight codes as unsigned bytes, four inputs of one row per lane, and 16-bit activations:
 * two planes of signed bytes (256 * hi + lo) if the CPU has byte dot products (VNNI, Arm dotprod), otherwise 16-bit pairs,
 * with codes widened to 16 bits. `plane_block` writes the layout that `dot_quad` reads. Integer sums are exact, so all
 * variants give the same result. */
#ifndef LL_VEC_H
#define LL_VEC_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define VW 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define VW 8
#else
#define VW 4
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#endif

int ll_amd; /* AMD CPU: best prefetch distances differ from Intel's (product.h), scale products compete for the ports of dot
             * products (matmul_super.h), and additions have their own ports (WINOGRAD). Not static: tests set it. */
/* Whether the assembler supports bfloat16 dot products, and whether this CPU issues as many `vdpbf16ps` as `vfmadd`, as
 * Zen 4 does (Intel not measured). Not static: tests set it. */
#if VW == 16 && (__GNUC__ >= 10 || defined(__clang__))
#define BF16_PAIRS 1
#else
#define BF16_PAIRS 0
#endif
int ll_bf16;
#if VW >= 8
#include <cpuid.h>
__attribute__((constructor)) static void find_vendor(void)
{
    unsigned int leaf, vendor[3] = {0, 0, 0}, more[4] = {0, 0, 0, 0};
    ll_amd = __get_cpuid(0, &leaf, &vendor[0], &vendor[2], &vendor[1]) && !memcmp(vendor, "AuthenticAMD", 12);
    ll_bf16 = BF16_PAIRS && ll_amd && __get_cpuid_count(7, 1, &more[0], &more[1], &more[2], &more[3]) && more[0] >> 5 & 1;
}
#endif

#define UNROLL _Pragma("GCC unroll 64") /* for loops whose counter must be a compile-time constant in each iteration */

#define TILE 32          /* weight rows per tile, one lane each */
#define NV (TILE / VW)   /* vectors per tile */
#define PLANE (TILE * 4) /* bytes of one quad of inputs of all rows */
#define BLOCK 32         /* inputs per activation scale */
#define XBYTES (2 * BLOCK)

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vh __attribute__((vector_size(4 * VW)));
typedef uint8_t vb __attribute__((vector_size(4 * VW)));

INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vi vi_load(const void *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE void vi_store(void *p, vi v) { memcpy(p, &v, sizeof v); }
INLINE vi vi_shl16(vi a, int n) { return (vi)((vh)a << n); }
INLINE vi vi_shr16(vi a, int n) { return (vi)((vh)a >> n); }

/* High nibbles of all bytes, and a | (b & mask), with a single instruction each if available. */
#if VW == 16 && defined(__GFNI__)
INLINE vi high_nibbles(vi a) { return (vi)_mm512_gf2p8affine_epi64_epi8((__m512i)a, _mm512_set1_epi64(0x1020408000000000), 0); }
#else
INLINE vi high_nibbles(vi a) { return vi_shr16(a, 4) & 0x0f0f0f0f; }
#endif
#if VW == 16
INLINE vi or_masked(vi a, vi b, int32_t mask) { return (vi)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi32(mask), 0xf8); }
#else
INLINE vi or_masked(vi a, vi b, int32_t mask) { return a | (b & mask); }
#endif

INLINE float f32_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t bits_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

INLINE float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff;
    if (body >= 0x7c00) return f32_bits(sign | 0x7f800000 | (body & 0x3ff) << 13);
    if (body >= 0x0400) return f32_bits(sign | ((body << 13) + (112u << 23)));
    float small = (float)body * 0x1p-24f;
    return f32_bits(bits_f32(small) | sign);
}
INLINE uint16_t f32_to_f16(float f) /* nearest, ties to even; overflow gives infinity */
{
    const uint32_t u = bits_f32(f), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (size >= 0x38800000) return (uint16_t)(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10)));
    return (uint16_t)(sign | (bits_f32(f32_bits(size) + 0.5f) - 0x3f000000)); /* the float spacing at 0.5 is 2^-24 */
}
INLINE float bf16_to_f32(uint16_t h) { return f32_bits((uint32_t)h << 16); }
INLINE uint16_t f32_to_bf16(float f)
{
    uint32_t u = bits_f32(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* An E4M3 byte as a float; 0x7F and 0xFF are NaN. */
INLINE float e4m3_to_f32(uint8_t b)
{
    if ((b & 0x7f) == 0x7f) return f32_bits(0x7fc00000);
    return f16_to_f32((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

/* ---- per instruction set ---- */

#if VW == 16
INLINE vf vf_set1(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vi vi_set1(int32_t x) { return (vi)_mm512_set1_epi32(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf vf_cvt(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
INLINE vi vi_round(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
INLINE vf vf_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE vi vi_u16(const uint16_t *p) { return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)); }
INLINE vi vi_u8(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE vi vi_max(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vi vi_i8(const uint8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE vf vf_e4m3_256(const uint8_t *p) /* value / 256; NaN codes must not occur */
{
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16((short)0xbfff)));
}
typedef __m512i vlut;
INLINE vlut lut_load(const uint8_t *t) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)t)); }
INLINE vi lut_get(vlut t, vi i) { return (vi)_mm512_shuffle_epi8(t, (__m512i)i); }
INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps((__m512)a); }
INLINE float vf_hmax(vf a) { return _mm512_reduce_max_ps((__m512)a); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32((__m512i)a); }

#elif VW == 8
INLINE vf vf_set1(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vi vi_set1(int32_t x) { return (vi)_mm256_set1_epi32(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vf vf_cvt(vi a) { return (vf)_mm256_cvtepi32_ps((__m256i)a); }
INLINE vi vi_round(vf a) { return (vi)_mm256_cvtps_epi32((__m256)a); }
INLINE vf vf_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE vi vi_u16(const uint16_t *p) { return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)); }
INLINE vi vi_u8(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE vi vi_max(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vi vi_i8(const uint8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE vf vf_e4m3_256(const uint8_t *p)
{
    __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(h, _mm_set1_epi16((short)0xbfff)));
}
typedef __m256i vlut;
INLINE vlut lut_load(const uint8_t *t) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)t)); }
INLINE vi lut_get(vlut t, vi i) { return (vi)_mm256_shuffle_epi8(t, (__m256i)i); }

#else
INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
INLINE vi vi_set1(int32_t x) { return (vi){x, x, x, x}; }
#if defined(__ARM_NEON)
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vi vi_round(vf a) { return (vi)vcvtnq_s32_f32((float32x4_t)a); }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vi vi_round(vf a) { vi r; for (int i = 0; i < VW; i++) r[i] = (int32_t)__builtin_rintf(a[i]); return r; }
#endif
INLINE vf vf_max(vf a, vf b) { vi m = a > b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
INLINE vf vf_min(vf a, vf b) { vi m = a < b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
INLINE vf vf_cvt(vi a) { return __builtin_convertvector(a, vf); }
#if defined(__ARM_NEON)
INLINE vf vf_f16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
INLINE vf vf_f16(const uint16_t *p)
{
    return (vf){f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
#endif
INLINE vi vi_u16(const uint16_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi vi_u8(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi vi_max(vi a, vi b) { const vi more = a > b; return (a & more) | (b & ~more); }
INLINE vi vi_i8(const uint8_t *p) { return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
INLINE vf vf_e4m3_256(const uint8_t *p)
{
    vf r;
    for (int i = 0; i < VW; i++) r[i] = f16_to_f32((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    return r;
}
#if defined(__ARM_NEON)
typedef uint8x16_t vlut;
INLINE vlut lut_load(const uint8_t *t) { return vld1q_u8(t); }
INLINE vi lut_get(vlut t, vi i) { return (vi)vqtbl1q_u8(t, (uint8x16_t)i); }
#else
typedef struct { uint8_t t[16]; } vlut;
INLINE vlut lut_load(const uint8_t *t) { vlut l; memcpy(l.t, t, 16); return l; }
INLINE vi lut_get(vlut t, vi i)
{
    vb b = (vb)i;
    for (int j = 0; j < 4 * VW; j++) b[j] = t.t[b[j] & 15];
    return (vi)b;
}
#endif
#endif

#if VW != 16
INLINE float vf_sum(vf a) { float s = 0; for (int i = 0; i < VW; i++) s += a[i]; return s; }
INLINE float vf_hmax(vf a) { float m = a[0]; for (int i = 1; i < VW; i++) m = a[i] > m ? a[i] : m; return m; }
INLINE int32_t vi_sum(vi a) { int32_t s = 0; for (int i = 0; i < VW; i++) s += a[i]; return s; }
#endif

/* Loads `count` <= VW floats, padded with zeros. */
INLINE vf load_some(const float *from, int count)
{
    vf x = vf_set1(0.0f);
    if (count == VW) return vf_load(from);
    memcpy(&x, from, (size_t)count * 4);
    return x;
}

/* sum += a.low * b.low + a.high * b.high in every lane, for bfloat16 pairs. This and the following are used only if `ll_bf16`.
 * Inline assembly, because the file is compiled for CPUs without these instructions. */
#if BF16_PAIRS
INLINE vf madd_bf16(vf sum, vf a, vf b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
INLINE void store_bf16(void *to, vf x)
{
    __m256i rounded;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
    memcpy(to, &rounded, 32);
}
/* Interleaves the 16-bit numbers of two vectors: the first 16 of each, and the rest. */
INLINE void by_turns(vi a, vi b, vf *first, vf *second)
{
    const __m512i low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008, 0x290009,
                                          0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
    *first = (vf)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b);
    *second = (vf)_mm512_permutex2var_epi16((__m512i)a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), (__m512i)b);
}
/* exp(x) for x <= 0, not NaN, with relative error 3e-6: least-squares polynomial of 2^f, |f| <= 1/2. */
INLINE vf short_exp(vf x)
{
    const __m512 power = _mm512_max_ps((__m512)(x * vf_set1(1.44269504f)), _mm512_set1_ps(-1000.0f));
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT);
    const vf f = (vf)_mm512_sub_ps(power, whole);
    vf p = vf_fma(vf_set1(9.56051e-3f), f, vf_set1(5.591704e-2f));
    p = vf_fma(p, f, vf_set1(2.4024981e-1f));
    p = vf_fma(p, f, vf_set1(6.9312197e-1f));
    p = vf_fma(p, f, vf_set1(9.9999919e-1f));
    return (vf)_mm512_scalef_ps((__m512)p, whole);
}
#else
INLINE vf short_exp(vf x) { return x; }
INLINE vf madd_bf16(vf sum, vf a, vf b) { (void)a, (void)b; return sum; }
INLINE void store_bf16(void *to, vf x) { (void)to, (void)x; }
INLINE void by_turns(vi a, vi b, vf *first, vf *second) { *first = (vf)a, *second = (vf)b; }
#endif

INLINE vf vf_bf16(const uint16_t *p) { return (vf)(vi_u16(p) << 16); }
INLINE vf vf_e8m0(const uint8_t *p) { return (vf)vi_max(vi_u8(p) << 23, vi_set1(0x400000)); } /* 2^(e - 127); 255 must not occur */
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* exp(x) for x <= 0 (used on x - max), relative error about 1e-7; 0 below -87.3, NaN stays NaN. */
INLINE vf vf_exp(vf x)
{
    const vf lowest = vf_set1(-87.33654f), highest = vf_set1(88.37626f);
    vi under = x < lowest, nan = x != x;
    vf y = vf_min(vf_max(x, lowest), highest);
    vi n = vi_round(y * vf_set1(1.44269504f));
    vf f = vf_cvt(n);
    vf r = vf_fma(f, vf_set1(-0.693359375f), y);
    r = vf_fma(f, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, r * r, r + vf_set1(1.0f));
    vf e = p * (vf)((n + 127) << 23);
    e = vf_select(under, vf_set1(0.0f), e);
    return vf_select(nan, x, e);
}

/* Transposes VW vectors: lane j of vector i becomes lane i of vector j. */
#if VW == 16
INLINE void transpose(vf given[VW])
{
    __m512 *r = (__m512 *)given;
    __m512 t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    }
}
#elif VW == 8
INLINE void transpose(vf given[VW])
{
    __m256 *r = (__m256 *)given, t[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
#else
INLINE void transpose(vf r[VW])
{
    vf t[VW];
    for (int i = 0; i < VW; i++)
        for (int j = 0; j < VW; j++) t[i][j] = r[j][i];
    for (int i = 0; i < VW; i++) r[i] = t[i];
}
#endif

/* Deinterleaves two vectors: lanes 0, 2, 4, ... of both to `a`, 1, 3, 5, ... to `b`; and the inverse. */
#if VW == 16
INLINE void pairs_apart(vf *a, vf *b)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 x = (__m512)*a, y = (__m512)*b;
    *a = (vf)_mm512_permutex2var_ps(x, even, y);
    *b = (vf)_mm512_permutex2var_ps(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y);
}
INLINE void pairs_together(vf *a, vf *b)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 x = (__m512)*a, y = (__m512)*b;
    *a = (vf)_mm512_permutex2var_ps(x, low, y);
    *b = (vf)_mm512_permutex2var_ps(x, _mm512_add_epi32(low, _mm512_set1_epi32(8)), y);
}
#else
INLINE void pairs_apart(vf *a, vf *b) { (void)a, (void)b; }
INLINE void pairs_together(vf *a, vf *b) { (void)a, (void)b; }
#endif

/* Four 32-bit numbers of each of VW rows, `stride` bytes apart, transposed: lane j of out[i] is number i of row j. Loads four
 * rows into one vector, which needs a quarter of the shuffles of `transpose`. */
#if VW == 16
INLINE void transpose_four(const uint8_t *from, int64_t stride, vf out[4])
{
    __m512 r[4], t[4];
    for (int i = 0; i < 4; i++) {
        __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(from + i * stride)));
        all = _mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + (4 + i) * stride)), 1);
        all = _mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + (8 + i) * stride)), 2);
        r[i] = (__m512)_mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + (12 + i) * stride)), 3);
    }
    for (int i = 0; i < 2; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        out[2 * i] = (vf)_mm512_shuffle_ps(t[i], t[2 + i], 0x44);
        out[2 * i + 1] = (vf)_mm512_shuffle_ps(t[i], t[2 + i], 0xee);
    }
}
#elif VW == 8
INLINE void transpose_four(const uint8_t *from, int64_t stride, vf out[4])
{
    __m256 r[4], t[4];
    for (int i = 0; i < 4; i++) {
        const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const void *)(from + i * stride)));
        r[i] = (__m256)_mm256_inserti128_si256(low, _mm_loadu_si128((const void *)(from + (4 + i) * stride)), 1);
    }
    for (int i = 0; i < 2; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        out[2 * i] = (vf)_mm256_shuffle_ps(t[i], t[2 + i], 0x44);
        out[2 * i + 1] = (vf)_mm256_shuffle_ps(t[i], t[2 + i], 0xee);
    }
}
#else
INLINE void transpose_four(const uint8_t *from, int64_t stride, vf out[4])
{
    for (int i = 0; i < 4; i++) out[i] = vf_load((const float *)(from + i * stride));
    transpose(out);
}
#endif

/* ---- integer dot products ---- */

/* 16-bit pairs: sum += a.low * b.low + a.high * b.high in every lane. */
INLINE vi madd16(vi sum, vi a, vi b)
{
#if VW == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VW == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VW == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif VW == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return sum + (vi)vpaddq_s32(low, high);
#elif defined(__SSE2__)
    typedef short v8hi __attribute__((vector_size(16)));
    return sum + (vi)__builtin_ia32_pmaddwd128((v8hi)a, (v8hi)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
/* A quad of byte codes as two vectors of 16-bit pairs: inputs (0, 2) and (1, 3). */
INLINE vi quad_even(vi q) { return q & 0x00ff00ff; }
INLINE vi quad_odd(vi q) { return vi_shr16(q, 8); }
/* The activations for them, 8 bytes per quad. */
#if VW == 16
INLINE void pair_block(const int32_t *q, uint8_t *x)
{
    __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_loadu_si512(q))),
                                     _mm512_cvtepi32_epi16(_mm512_loadu_si512(q + 16)), 1);
    _mm512_storeu_si512(x, _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(all, 0xd8), 0xd8));
}
#else
INLINE void pair_block(const int32_t *q, uint8_t *x)
{
    for (int j = 0; j < BLOCK / 4; j++) {
        int16_t quad[4] = {(int16_t)q[4 * j], (int16_t)q[4 * j + 2], (int16_t)q[4 * j + 1], (int16_t)q[4 * j + 3]};
        memcpy(x + 8 * j, quad, 8);
    }
}
#endif
INLINE vi vi_bcast(const uint8_t *p) { int32_t x; memcpy(&x, p, 4); return vi_set1(x); }

/* madd16 with a pair broadcast from memory, in one instruction; gcc would load it separately to reuse it. */
INLINE vi madd16_at(vi sum, vi a, const uint8_t *pair)
{
#if VW == 16 && defined(__AVX512VNNI__)
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*(const int32_t *)pair));
    return sum;
#else
    return madd16(sum, a, vi_bcast(pair));
#endif
}

/* Byte dot products, if available: sum += four codes times four signed bytes, in every lane. Arm's SDOT takes signed codes:
 * codes that may be 128 or more have their top bit flipped (`code_byte`), which the start of the sum corrects
 * (`DOT_BIAS`). */
#if VW == 16 && defined(__AVX512VNNI__)
#define LL_VNNI 1
#define DPBUSD(acc, u, s) ((vi)_mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(u), (__m512i)(s)))
#elif VW == 8 && defined(__AVXVNNI__)
#define LL_VNNI 1
#define DPBUSD(acc, u, s) ((vi)_mm256_dpbusd_avx_epi32((__m256i)(acc), (__m256i)(u), (__m256i)(s)))
#elif VW == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
#define LL_VNNI 1
#define DPBUSD(acc, u, s) ((vi)vusdotq_s32((int32x4_t)(acc), (uint8x16_t)(u), (int8x16_t)(s)))
#elif VW == 4 && defined(__ARM_FEATURE_DOTPROD)
#define LL_VNNI 1
#define DOT_SIGNED 1
#define DPBUSD(acc, u, s) ((vi)vdotq_s32((int32x4_t)(acc), (int8x16_t)(u), (int8x16_t)(s)))
#else
#define LL_VNNI 0
#endif
/* With many rows of x, codes are widened once. 16-bit pairs need as many dot products as two byte planes, but only one sum
 * without further steps (Zen 4, prefill of 512 tokens: 2 to 3 % faster). Scales of K-quants can then be multiplied into the
 * codes (256 rows, 256-bit vectors as with AVX-VNNI: Q4_K 129 -> 160 billion multiply-adds per second, Q6_K 93 -> 148). */
#if LL_VNNI && VW == 4
#define MANY_PAIRS 0
#else
#define MANY_PAIRS 1
#endif
/* Whether products with half the multiplications are compiled, for CPUs with separate ports for additions (`ll_amd`). */
#define WINOGRAD (VW == 16 && LL_VNNI && MANY_PAIRS)
#if defined(DOT_SIGNED)
#define DOT_BIAS 128
INLINE vi code_byte(vi codes) { return codes ^ (int32_t)0x80808080; }
#else
#define DOT_BIAS 0
INLINE vi code_byte(vi codes) { return codes; }
#endif

#if LL_VNNI
typedef struct { vi hi, lo; } vdot;
INLINE vdot dot_start(int32_t z) { return (vdot){vi_set1(0), vi_set1(z)}; }
INLINE void dot_quad(vdot *d, vi codes, const uint8_t *x, int j)
{
    d->hi = DPBUSD(d->hi, codes, vi_bcast(x + 4 * j));
    d->lo = DPBUSD(d->lo, codes, vi_bcast(x + BLOCK + 4 * j));
}
INLINE void dot_bytes(vdot *d, vi codes, const uint8_t *x, int j) { d->lo = DPBUSD(d->lo, codes, vi_bcast(x + 4 * j)); }
INLINE vi dot_sum(vdot d) { return (d.hi << 8) + d.lo; }
INLINE vf dot_value_of_bytes(vdot d) { return vf_cvt(d.lo); }
INLINE void plane_block(const int32_t *q, uint8_t *x)
{
#if VW == 16
    for (int i = 0; i < BLOCK; i += 16) {
        __m512i v = _mm512_loadu_si512(q + i), high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((void *)(x + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((void *)(x + BLOCK + i), _mm512_cvtepi32_epi8(v));
    }
#else
    for (int i = 0; i < BLOCK; i++) {
        x[i] = (uint8_t)((q[i] + 128) >> 8);
        x[BLOCK + i] = (uint8_t)q[i];
    }
#endif
}
#else
typedef struct { vi sum; } vdot;
INLINE vdot dot_start(int32_t z) { return (vdot){vi_set1(z)}; }
INLINE void dot_quad(vdot *d, vi codes, const uint8_t *x, int j)
{
    d->sum = madd16(d->sum, quad_even(codes), vi_bcast(x + 8 * j));
    d->sum = madd16(d->sum, quad_odd(codes), vi_bcast(x + 8 * j + 4));
}
INLINE vi dot_sum(vdot d) { return d.sum; }
INLINE void dot_bytes(vdot *d, vi codes, const uint8_t *x, int j) { (void)d, (void)codes, (void)x, (void)j; } /* never called without VNNI */
INLINE vf dot_value_of_bytes(vdot d) { return vf_cvt(d.sum); }
INLINE void plane_block(const int32_t *q, uint8_t *x) { pair_block(q, x); }
#endif
INLINE vf dot_value(vdot d) { return vf_cvt(dot_sum(d)); }

#endif
