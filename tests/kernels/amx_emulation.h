/* AMX tiles in plain C, for machines without them: included before the kernels, in the place of the instructions. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbssd
#undef _tile_dpbf16ps

static _Thread_local struct {
    uint8_t config[64];
    uint8_t tile[8][16][64];
} emulated;

static inline int emulated_rows(int t) { return emulated.config[48 + t]; }
static inline int emulated_bytes(int t) { return emulated.config[16 + 2 * t] | emulated.config[17 + 2 * t] << 8; }
static inline void _tile_loadconfig(const void *config) { memcpy(emulated.config, config, 64); memset(emulated.tile, 0xee, sizeof emulated.tile); }
static inline void _tile_release(void) { memset(&emulated, 0, sizeof emulated); }
static inline void _tile_zero(int t) { memset(emulated.tile[t], 0, sizeof emulated.tile[t]); }
static inline void _tile_loadd(int t, const void *from, int64_t stride)
{
    memset(emulated.tile[t], 0, sizeof emulated.tile[t]);
    for (int r = 0; r < emulated_rows(t); r++) memcpy(emulated.tile[t][r], (const uint8_t *)from + r * stride, (size_t)emulated_bytes(t));
}
static inline void _tile_stored(int t, void *to, int64_t stride)
{
    for (int r = 0; r < emulated_rows(t); r++) memcpy((uint8_t *)to + r * stride, emulated.tile[t][r], (size_t)emulated_bytes(t));
}
static inline void emulated_bytes_product(int c, int a, int b, int is_signed)
{
    for (int m = 0; m < emulated_rows(c); m++)
        for (int n = 0; n < emulated_bytes(c) / 4; n++) {
            int32_t sum;
            memcpy(&sum, emulated.tile[c][m] + 4 * n, 4);
            for (int k = 0; k < emulated_rows(b); k++)
                for (int i = 0; i < 4; i++) {
                    const int of_b = emulated.tile[b][k][4 * n + i];
                    sum += (int8_t)emulated.tile[a][m][4 * k + i] * (is_signed ? (int8_t)of_b : of_b);
                }
            memcpy(emulated.tile[c][m] + 4 * n, &sum, 4);
        }
}
static inline void _tile_dpbsud(int c, int a, int b) { emulated_bytes_product(c, a, b, 0); }
static inline void _tile_dpbssd(int c, int a, int b) { emulated_bytes_product(c, a, b, 1); }
static inline void _tile_dpbf16ps(int c, int a, int b)
{
    for (int m = 0; m < emulated_rows(c); m++)
        for (int n = 0; n < emulated_bytes(c) / 4; n++) {
            float sum;
            memcpy(&sum, emulated.tile[c][m] + 4 * n, 4);
            for (int k = 0; k < emulated_rows(b); k++)
                for (int i = 0; i < 2; i++) {
                    uint32_t left = 0, right = 0;
                    float x, y;
                    memcpy((uint8_t *)&left + 2, emulated.tile[a][m] + 4 * k + 2 * i, 2);
                    memcpy((uint8_t *)&right + 2, emulated.tile[b][k] + 4 * n + 2 * i, 2);
                    memcpy(&x, &left, 4);
                    memcpy(&y, &right, 4);
                    sum += x * y;
                }
            memcpy(emulated.tile[c][m] + 4 * n, &sum, 4);
        }
}
