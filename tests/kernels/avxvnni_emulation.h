/* AVX-VNNI's products with AVX2, for machines without them: included before the kernels, in the place of the instructions. */
#include <immintrin.h>

static inline __m256i emulated_dpwssd(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
static inline __m256i emulated_dpbusd(__m256i sum, __m256i u, __m256i s)
{
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
