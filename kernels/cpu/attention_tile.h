/* One tile of attention: 32 keys against the rows of a block. Keys and values come as floats from memory, where many
 * rows share them, or straight from the pages for few rows (decoding): the same numbers in the same order. */
#ifndef LL_ATTENTION_TILE_H
#define LL_ATTENTION_TILE_H

#include "activations.h"
#include "kv.h"

#define SUB 16   /* keys of a sub-tile: the most that are transposed together */
#define KEYS 32  /* keys per softmax step */
#define ROW_FLOATS 16384 /* of queries per block of query rows, which share what was made floats of; half of it but for latents */
#define TURNED_MAX 128   /* elements of a key behind a latent */
#define ROWS_MAX 64
#define FEW_QUERY_ROWS 8 /* so few rows read the pages themselves */

typedef struct {
    kv_pages pages;
    const float *q;
    float *out;
    const int32_t *block_table; /* [num_seqs, max_pages] */
    const int32_t *cu_query_lens, *seq_lens;
    const float *sinks;         /* [num_heads], or NULL */
    int64_t num_seqs, max_pages, num_heads;
    int64_t window;             /* 0: none */
    float scale, softcap;       /* softcap 0: none */
    int64_t turned;             /* 0: none. A key is what `k` holds and, behind it, so many elements in `v`; its value is the former */
    int64_t gated;              /* behind each query lies a gate of its size, whose sigmoid multiplies what it gives */
} ll_attention_args;

typedef struct {
    _Alignas(64) float keys[KEYS * (DIM_MAX + TURNED_MAX)]; /* transposed: [sub-tile][dim][16 keys] */
    _Alignas(64) float values[KEYS * DIM_MAX];
    _Alignas(64) float q[ROW_FLOATS];
    _Alignas(64) float acc[ROW_FLOATS];       /* the segment's sums, [rows][padded dim] */
    _Alignas(64) float total[ROW_FLOATS];     /* of the segments before */
    float max[ROWS_MAX], sum[ROWS_MAX], total_max[ROWS_MAX], total_sum[ROWS_MAX];
    int64_t low[ROWS_MAX], high[ROWS_MAX];    /* keys [low, high] of a row */
} attention_space;

/* A tile's keys in the pages; zeros where the sequence has none. */
typedef struct {
    int64_t first;
    int subs; /* sub-tiles in use */
    const uint8_t *k[KEYS], *v[KEYS];
    const uint8_t *next_k; /* of the next tile */
    _Alignas(64) float k_scale[KEYS], v_scale[KEYS];
} tile_keys;

typedef float tile_weights[4][KEYS]; /* scores, then weights, of four rows */

static const int32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Elements of a query and of a key, and as they lie in the space. */
INLINE int64_t key_width(const ll_attention_args *a) { return a->pages.dim + a->turned; }
INLINE int64_t key_padded(const ll_attention_args *a) { return round_up(key_width(a), 16); }
INLINE int64_t v_bytes(const ll_attention_args *a) { return (a->turned ? a->turned : a->pages.dim) * kv_bytes(a->pages.format); }

INLINE int kv_scaled(const int64_t format) { return format == KV_INT8 || format == KV_FP8; }

static void find_keys(const ll_attention_args *a, int64_t seq, int64_t head, int64_t low, int64_t high, tile_keys *keys)
{
    static const uint8_t zeros[DIM_MAX * 4];
    const kv_pages *p = &a->pages;
    const int64_t row_bytes = p->dim * kv_bytes(p->format), of_v = v_bytes(a);
    const int32_t *table = a->block_table + seq * a->max_pages;
    for (int u = 0; u < keys->subs; u++) {
        const int64_t first = keys->first + u * SUB;
        const uint8_t **k = keys->k + u * SUB, **v = keys->v + u * SUB;
        float *k_scale = keys->k_scale + u * SUB, *v_scale = keys->v_scale + u * SUB;
        if (p->page_size % SUB == 0 && first >= low && first + SUB <= high + 1) { /* all of them, in one page */
            const int64_t page = table[first / p->page_size], row = (page * p->num_kv_heads + head) * p->page_size + first % p->page_size;
            if (page >= 0) {
                for (int j = 0; j < SUB; j++) {
                    k[j] = p->k + (row + j) * row_bytes;
                    v[j] = p->v + (row + j) * of_v;
                }
                for (int j = 0; kv_scaled(p->format) && j < SUB; j++) {
                    k_scale[j] = p->k_scales[p->one_scale ? 0 : row + j];
                    v_scale[j] = p->v_scales[p->one_scale ? 0 : row + j];
                }
                continue;
            }
        }
        for (int j = 0; j < SUB; j++) {
            const int64_t key = first + j, page = key >= low && key <= high ? table[key / p->page_size] : -1;
            const int64_t row = (page * p->num_kv_heads + head) * p->page_size + key % p->page_size;
            k[j] = page >= 0 ? p->k + row * row_bytes : zeros;
            v[j] = page >= 0 ? p->v + row * of_v : zeros;
            if (!kv_scaled(p->format)) continue;
            k_scale[j] = page >= 0 ? p->k_scales[p->one_scale ? 0 : row] : 0.0f;
            v_scale[j] = page >= 0 ? p->v_scales[p->one_scale ? 0 : row] : 0.0f;
        }
    }
}

/* Where the keys at `first` lie, which come next; where those of now lie, if there are none. */
INLINE const uint8_t *find_next(const ll_attention_args *a, int64_t seq, int64_t head, int64_t first, int64_t high, const uint8_t *now)
{
    const kv_pages *p = &a->pages;
    const int64_t page = first <= high ? a->block_table[seq * a->max_pages + first / p->page_size] : -1;
    return page < 0 ? now : p->k + ((page * p->num_kv_heads + head) * p->page_size + first % p->page_size) * p->dim * kv_bytes(p->format);
}

/* The rows of VW keys end to end: as they lie, else a copy. */
INLINE const uint8_t *end_to_end(const uint8_t *const *rows, int64_t bytes, uint8_t *copy)
{
    int apart = 0;
    for (int j = 1; j < VW; j++) apart |= rows[j] != rows[0] + j * bytes;
    for (int j = 0; apart && j < VW; j++) memcpy(copy + j * bytes, rows[j], (size_t)bytes);
    return apart ? copy : rows[0];
}

/* Numbers of VW keys that lie end to end, dimension by dimension: BODY sees `int64_t d`, `const int odd` (of d) and `vf key`.
 * 16 bytes of each row are transposed together, as numbers of 32 bits. Dimensions after the last whole vector are left.
 * Rows at NEXT, end to end, are asked for meanwhile. */
#define EACH_DIMENSION(FROM, DIM, FORMAT, NEXT, BODY)                                                                           \
    const int64_t bytes_ = kv_bytes(FORMAT), each_ = 16 / bytes_, stride_ = (DIM) * bytes_;                                     \
    int64_t at_ = 0;                                                                                                            \
    for (; ((FORMAT) == KV_F32 || (FORMAT) == KV_BF16 || (FORMAT) == KV_INT8) && at_ + each_ <= (DIM); at_ += each_) {          \
        vf four_[4];                                                                                                            \
        transpose_four((FROM) + at_ * bytes_, stride_, four_);                                                                  \
        UNROLL for (int i = 0; (NEXT) && i < 16 * VW; i += 64) __builtin_prefetch((NEXT) + at_ * bytes_ * VW + i);             \
        UNROLL for (int j = 0; j < 16 / kv_bytes(FORMAT); j++) {                                                                \
            const int64_t d = at_ + j;                                                                                          \
            const int odd = j % 2;                                                                                              \
            const vi from_ = (vi)four_[j * kv_bytes(FORMAT) / 4];                                                               \
            const vf key = (FORMAT) == KV_F32    ? (vf)from_                                                                    \
                           : (FORMAT) == KV_BF16 ? (vf)(odd ? from_ & (int32_t)0xffff0000 : from_ << 16)                        \
                                                 : vf_cvt((from_ << (24 - 8 * (j % 4))) >> 24);                                 \
            BODY                                                                                                                \
        }                                                                                                                       \
    }                                                                                                                           \
    for (; at_ + VW <= (DIM); at_ += VW) {                                                                                      \
        vf one_[VW];                                                                                                            \
        for (int j = 0; j < VW; j++) one_[j] = kv_vector((FROM) + j * stride_, at_, FORMAT);                                    \
        transpose(one_);                                                                                                        \
        UNROLL for (int j = 0; j < VW; j++) {                                                                                   \
            const int64_t d = at_ + j;                                                                                          \
            const int odd = j % 2;                                                                                              \
            const vf key = one_[j];                                                                                             \
            BODY                                                                                                                \
        }                                                                                                                       \
    }

/* Stored rows of VW keys, transposed, times their scales where there are some; zeros up to `end`. */
INLINE void load_keys(const uint8_t *const *rows, int64_t dim, int64_t end, const float *scales, float *keys, const int64_t format)
{
    const vf scale = scales ? vf_load(scales) : vf_set1(1.0f);
    _Alignas(64) uint8_t copy[VW * DIM_MAX * 4];
    const uint8_t *from = end_to_end(rows, dim * kv_bytes(format), copy);
    EACH_DIMENSION(from, dim, format, (const uint8_t *)NULL, { (void)odd; vf_store(keys + d * SUB, key * scale); })
    for (int64_t d = dim - dim % VW; d < end; d++)
        for (int j = 0; j < VW; j++) keys[d * SUB + j] = d < dim ? kv_number(rows[j], d, format) * (scales ? scales[j] : 1.0f) : 0.0f;
}

/* A tile's keys and values as floats into the space: those of latents with their scales, others without. */
INLINE void load_as(const ll_attention_args *a, const tile_keys *t, attention_space *s, const int64_t format)
{
    const int64_t dim = a->pages.dim, padded = round_up(dim, 16), wide = key_padded(a), whole = dim - dim % VW;
    const int latent = a->turned > 0, scaled = latent && kv_scaled(format);
    for (int u = 0; u < t->subs; u++)
        for (int v = 0; v < SUB; v += VW) {
            const int at = u * SUB + v;
            float *keys = s->keys + u * SUB * wide + v;
            load_keys(t->k + at, dim, latent ? dim : wide, scaled ? t->k_scale + at : NULL, keys, format);
            if (latent) load_keys(t->v + at, a->turned, wide - dim, scaled ? t->v_scale + at : NULL, keys + dim * SUB, format);
        }
    for (int j = 0; j < t->subs * SUB; j++) {
        const uint8_t *from = latent ? t->k[j] : t->v[j];
        const float scale = scaled ? t->k_scale[j] : 1.0f;
        float *value = s->values + j * padded;
        for (int64_t d = 0; d < whole; d += VW) vf_store(value + d, kv_vector(from, d, format) * vf_set1(scale));
        for (int64_t d = whole; d < padded; d++) value[d] = d < dim ? kv_number(from, d, format) * scale : 0.0f;
    }
}

/* Scores of `rows` rows against keys in the space: two chains each, even and odd dimensions. */
INLINE void scores_many(const attention_space *s, int64_t row, int64_t padded, tile_weights p, const int rows)
{
    for (int v = 0; v < SUB; v += VW) { /* both sub-tiles share the broadcasts of q; what lies in an unused one is not read */
        vf chain[4][2][2];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < 4; c++) chain[r][c / 2][c % 2] = vf_set1(0.0f);
        for (int64_t d = 0; d < padded; d += 2)
            for (int t = 0; t < 2; t++) {
                vf first_keys = vf_load(s->keys + v + (d + t) * SUB), next_keys = vf_load(s->keys + v + (padded + d + t) * SUB);
                for (int r = 0; r < rows; r++) {
                    vf q = vf_set1(s->q[(row + r) * padded + d + t]);
                    chain[r][0][t] = vf_fma(first_keys, q, chain[r][0][t]);
                    chain[r][1][t] = vf_fma(next_keys, q, chain[r][1][t]);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < 2; u++) vf_store(p[r] + u * SUB + v, chain[r][u][0] + chain[r][u][1]);
    }
}

/* The same against keys in the pages. */
INLINE void scores_few(const tile_keys *t, const attention_space *s, int64_t row, int is_first, tile_weights p, const int rows,
                       const int64_t dim, const int64_t format)
{
    const int64_t padded = round_up(dim, 16), of_k = dim * kv_bytes(format);
    for (int i = 0; i < t->subs * SUB; i += VW) {
        _Alignas(64) uint8_t copy[VW * DIM_MAX * 2];
        const uint8_t *from = end_to_end(t->k + i, of_k, copy), *next = !is_first ? from : i + SUB < t->subs * SUB ? t->k[i + SUB] : t->v[i % SUB];
        vf chain[4][2];
        for (int r = 0; r < rows; r++) chain[r][0] = chain[r][1] = vf_set1(0.0f);
        EACH_DIMENSION(from, dim, format, next, {
            for (int r = 0; r < rows; r++) chain[r][odd] = vf_fma(key, vf_set1(s->q[(row + r) * padded + d]), chain[r][odd]);
        })
        for (int r = 0; r < rows; r++) vf_store(p[r] + i, chain[r][0] + chain[r][1]);
    }
}

/* Scores to weights; the sums so far shrink where a row meets a larger score. Returns 0 when no row sees a key. */
static __attribute__((noinline)) int soften(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t row, tile_weights p, int rows)
{
    const int64_t padded = round_up(a->pages.dim, 16);
    const vi lane = vi_load(lane_numbers);
    const int scaled = kv_scaled(a->pages.format) && !a->turned, end_key = t->subs * SUB;
    int live = 0;
    for (int r = 0; r < rows; r++) {
        const vi begin = vi_set1((int32_t)(s->low[row + r] - t->first)), end = vi_set1((int32_t)(s->high[row + r] - t->first));
        vf top = vf_set1(-INFINITY);
        vi bad = vi_set1(0);
        for (int i = 0; i < end_key; i += VW) {
            const vi key = lane + vi_set1(i), seen = (key >= begin) & (key <= end);
            vf score = vf_load(p[r] + i);
            if (scaled) score = score * vf_load(t->k_scale + i);
            bad |= (vi)(score != score) & seen; /* what follows, the soft cap and the maximum, loses NaN */
            if (a->softcap != 0.0f) {
                vf e = vf_exp(score * vf_set1(2.0f / a->softcap));
                score = vf_set1(a->softcap) - vf_set1(2.0f * a->softcap) / (e + vf_set1(1.0f));
            }
            score = vf_select(seen, score, vf_set1(-INFINITY));
            vf_store(p[r] + i, score);
            top = vf_max(score, top);
        }
        if (vi_sum(bad)) { /* a softmax of NaN is NaN for all that the row sees */
            memset(p[r], 0, sizeof p[r]);
            if (s->max[row + r] == -INFINITY) s->max[row + r] = 0.0f;
            s->sum[row + r] = f32_bits(0x7fc00000);
            continue;
        }
        const float before = s->max[row + r], high = vf_hmax(top), now = before > high ? before : high;
        if (now == -INFINITY) {
            memset(p[r], 0, sizeof p[r]);
            continue;
        }
        live = 1;
        vf sum = vf_set1(0.0f);
        for (int v = 0; v < SUB; v += VW) { /* sums of the same lanes first: sub-tiles left out count as zeros */
            vf of_lane = vf_set1(0.0f);
            for (int i = v; i < end_key; i += SUB) {
                vf e = vf_exp(vf_load(p[r] + i) - vf_set1(now));
                vf_store(p[r] + i, scaled ? e * vf_load(t->v_scale + i) : e);
                of_lane = of_lane + e;
            }
            sum = sum + of_lane;
        }
        if (before != now) {
            float shrink;
            vf all = vf_exp(vf_set1(before - now));
            memcpy(&shrink, &all, 4);
            s->max[row + r] = now;
            s->sum[row + r] *= shrink;
            float *to = s->acc + (row + r) * padded;
            for (int64_t d = 0; d < padded; d += VW) vf_store(to + d, vf_load(to + d) * vf_set1(shrink));
        }
        s->sum[row + r] += vf_sum(sum);
    }
    return live;
}

/* Adds the weighted values of `wide` vectors from dimension *d on, as long as there are so many. */
INLINE void weigh_wide(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t row, int is_first, tile_weights p,
                       const int rows, const int few, const int64_t format, const int wide, int64_t *d)
{
    enum { MOST = 8 };
    const int paired = VW == 16 && few && format == KV_BF16 && wide % 2 == 0; /* even and odd dimensions apart: half of the loads */
    const int64_t padded = round_up(a->pages.dim, 16), of_v = v_bytes(a);
    const int keys = t->subs * SUB;
    for (; *d + wide * VW <= padded; *d += wide * VW) {
        vf acc[4][MOST];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < wide; i++) acc[r][i] = vf_load(s->acc + (row + r) * padded + *d + i * VW);
        for (int r = 0; paired && r < rows; r++)
            for (int i = 0; i < wide; i += 2) pairs_apart(&acc[r][i], &acc[r][i + 1]);
        for (int j = 0; j < keys; j++) {
            if (few && is_first) {
                const uint8_t *next = (j + SUB < keys ? t->v[j + SUB] : t->next_k + j % SUB * of_v) + *d * kv_bytes(format);
                UNROLL for (int i = 0; i < wide * VW * kv_bytes(format); i += 64) __builtin_prefetch(next + i);
            }
            vf value[MOST];
            for (int i = 0; i < wide; i++)
                if (paired) {
                    const vi pair = vi_load(t->v[j] + 2 * (*d + i / 2 * 2 * VW));
                    value[i] = (vf)(i % 2 ? pair & (int32_t)0xffff0000 : pair << 16);
                } else value[i] = few ? kv_vector(t->v[j], *d + i * VW, format) : vf_load(s->values + j * padded + *d + i * VW);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < wide; i++) acc[r][i] = vf_fma(value[i], vf_set1(p[r][j]), acc[r][i]);
        }
        for (int r = 0; paired && r < rows; r++)
            for (int i = 0; i < wide; i += 2) pairs_together(&acc[r][i], &acc[r][i + 1]);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < wide; i++) vf_store(s->acc + (row + r) * padded + *d + i * VW, acc[r][i]);
    }
}

/* Adds the weighted values, from the space or the pages: 16 sums together where there are so many registers. */
INLINE void weigh(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t row, int is_first, tile_weights p,
                  const int rows, const int few, const int64_t format)
{
    int64_t d = 0;
    if (VW == 16 && rows <= 2) weigh_wide(a, t, s, row, is_first, p, rows, few, format, 8, &d);
    weigh_wide(a, t, s, row, is_first, p, rows, few, format, VW == 16 ? 4 : 2, &d);
    weigh_wide(a, t, s, row, is_first, p, rows, few, format, 1, &d);
}

INLINE void block_many(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t row, const int rows)
{
    _Alignas(64) tile_weights p;
    if (s->high[row + rows - 1] < t->first || s->low[row] >= t->first + KEYS) return; /* of rows in order, none sees a key */
    scores_many(s, row, key_padded(a), p, rows);
    if (soften(a, t, s, row, p, rows)) weigh(a, t, s, row, 0, p, rows, 0, KV_F32);
}

INLINE void block_few(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t row, int is_first, const int rows,
                      const int64_t format)
{
    _Alignas(64) tile_weights p;
    if (a->pages.dim == 128) scores_few(t, s, row, is_first, p, rows, 128, format);
    else scores_few(t, s, row, is_first, p, rows, a->pages.dim, format);
    if (soften(a, t, s, row, p, rows)) weigh(a, t, s, row, is_first, p, rows, 1, format);
}

#define TILE_ROWS(NAME, CALL)                                                                                                              \
    static __attribute__((noinline)) void NAME(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t first, int64_t rows) \
    {                                                                                                                                      \
        int64_t row = first;                                                                                                               \
        const int64_t end = first + rows;                                                                                                  \
        for (; row + 4 <= end; row += 4) CALL(4);                                                                                          \
        if (end - row == 3) CALL(3);                                                                                                       \
        else if (end - row == 2) CALL(2);                                                                                                  \
        else if (end - row == 1) CALL(1);                                                                                                  \
    }
#define MANY(ROWS) block_many(a, t, s, row, ROWS)
TILE_ROWS(tile_many_rows, MANY)
#define FEW_BF16(ROWS) block_few(a, t, s, row, row == first, ROWS, KV_BF16)
TILE_ROWS(tile_bf16, FEW_BF16)
#define FEW_INT8(ROWS) block_few(a, t, s, row, row == first, ROWS, KV_INT8)
TILE_ROWS(tile_int8, FEW_INT8)

/* Rows first.. of the block against the tile. */
static void attention_tile(const ll_attention_args *a, const tile_keys *t, attention_space *s, int64_t first, int64_t rows)
{
    if (rows <= FEW_QUERY_ROWS && a->pages.dim % 16 == 0 && !a->turned) {
        if (a->pages.format == KV_BF16) {
            tile_bf16(a, t, s, first, rows);
            return;
        }
        if (a->pages.format == KV_INT8) {
            tile_int8(a, t, s, first, rows);
            return;
        }
    }
    switch (a->pages.format) {
    case KV_F32: load_as(a, t, s, KV_F32); break;
    case KV_BF16: load_as(a, t, s, KV_BF16); break;
    case KV_F16: load_as(a, t, s, KV_F16); break;
    case KV_INT8: load_as(a, t, s, KV_INT8); break;
    default: load_as(a, t, s, KV_FP8);
    }
    tile_many_rows(a, t, s, first, rows);
}

#endif
