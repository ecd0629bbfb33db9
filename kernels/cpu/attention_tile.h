/* One tile of attention: 32 keys, or their values, times the rows of a block. Many rows share a copy converted to floats; few
 * rows (decode) read the pages directly: the same numbers in the same order. */
#ifndef LL_ATTENTION_TILE_H
#define LL_ATTENTION_TILE_H

#include "activations.h"
#include "kv.h"

#define SUB 16   /* keys per sub-tile: the most that are transposed together */
#define KEYS 32  /* keys per tile */
#define SEGMENT 256 /* keys per softmax */
#define ROW_FLOATS 16384 /* floats of queries per block of query rows, which share the converted tiles; half of it except for latents */
#define TURNED_MAX 128   /* maximum RoPE dimensions of a latent key */
#define ROWS_MAX 64
#define FEW_QUERY_ROWS 8 /* up to this many rows read the pages directly */
#define MOST_ROWS (VW == 16 ? 8 : 4) /* rows that share each load */

typedef struct {
    kv_pages pages;
    const float *q;
    float *out;
    const int32_t *block_table; /* [num_seqs, max_pages] */
    const int32_t *cu_query_lens, *seq_lens;
    const float *sinks;         /* [num_heads], or NULL */
    int64_t num_seqs, max_pages, num_heads;
    int64_t window;             /* 0: none; negative: chunked attention with chunks of -window */
    float scale, softcap;       /* softcap 0: none */
    int64_t turned;             /* latent attention: RoPE dimensions per key, stored in `v`; `k` holds latents, which are also the values. 0: not latent */
    int64_t gated;              /* each query is followed by a gate of the same size; sigmoid(gate), or softplus(gate) where this is 2, multiplies the output */
} ll_attention_args;

typedef struct {
    /* (two): with `in_pairs`, each 32-bit element holds two bfloat16 */
    _Alignas(64) float keys[KEYS * (DIM_MAX + TURNED_MAX)]; /* transposed: [sub-tile][dim (two)][16 keys] */
    _Alignas(64) float values[KEYS * DIM_MAX];              /* [keys (two)][padded dim] */
    _Alignas(64) float q[ROW_FLOATS];                       /* [rows][padded dim (two)] */
    _Alignas(64) float weights[ROWS_MAX * SEGMENT]; /* scores, then softmax weights (two), of the segment's keys: [rows][256] */
    _Alignas(64) float acc[ROW_FLOATS];       /* output of the segment, [rows][padded dim] */
    _Alignas(64) float total[ROW_FLOATS];     /* output of the previous segments */
    _Alignas(64) uint8_t copied[2][KEYS * DIM_MAX * 4]; /* copies of rows that are not contiguous; RoPE parts of latent keys */
    float max[ROWS_MAX], sum[ROWS_MAX], total_max[ROWS_MAX], total_sum[ROWS_MAX];
    int64_t low[ROWS_MAX], high[ROWS_MAX];    /* visible keys [low, high] per row */
} attention_space;

/* A tile's keys or values: contiguous rows per sub-tile, in a page or copied; zeros outside the sequence. */
typedef struct {
    int64_t first, at; /* position of the first key, and its index in the segment */
    int subs;          /* sub-tiles in use */
    int64_t place[2];  /* row index (first KV head) of a sub-tile within one page; -1: it spans pages or is not fully visible */
    const uint8_t *rows[2], *turned[2]; /* turned: RoPE parts of latent keys */
    const uint8_t *next;                /* rows of the next tile, for prefetching */
    int64_t far;                        /* additional L2 prefetch distance in bytes, a few tiles; 0: none */
    _Alignas(64) float scale[KEYS], turned_scale[KEYS];
} tile_rows;

static const int32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The first visible key of a query at `position`. */
INLINE int64_t oldest_key(const ll_attention_args *a, int64_t position)
{
    if (a->window < 0) return position - position % a->window; /* window < 0: C's % takes the sign of the position */
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Whether queries and softmax weights are rounded to bfloat16, like keys and values, and multiplied in pairs: half the
 * multiplications, and no conversion to float. */
INLINE int in_pairs(const ll_attention_args *a) { return BF16_PAIRS && ll_bf16 && a->pages.format == KV_BF16 && a->pages.dim % 16 == 0 && !a->turned; }

/* Elements of a query and of a key in attention_space, and the 32-bit words they take. */
INLINE int64_t key_width(const ll_attention_args *a) { return a->pages.dim + a->turned; }
INLINE int64_t key_padded(const ll_attention_args *a) { return round_up(key_width(a), 16); }
INLINE int64_t key_words(const ll_attention_args *a) { return key_padded(a) >> in_pairs(a); }
INLINE int64_t v_bytes(const ll_attention_args *a) { return (a->turned ? a->turned : a->pages.dim) * kv_bytes(a->pages.format); }

/* Prefetches a line to L1, and the one `far` bytes further to L2: AMD cores support too few outstanding L1 prefetches to cover
 * the memory latency (two Zen 4 cores, 8 heads of 128 in bfloat16, 8,192 tokens: 17 -> 24 GB/s with far = a sub-tile, 27 with
 * two to four, against 32 for plain reads; 20 with the same distance to L1). */
INLINE void ask_for(const uint8_t *line, int64_t far)
{
    __builtin_prefetch(line);
    if (far) __builtin_prefetch(line + far, 0, 2);
}

INLINE int kv_scaled(const int64_t format) { return format == KV_INT8 || format == KV_FP8; }

/* `place` of the sub-tile at `first`, computed once for all heads, because it takes divisions. */
INLINE int64_t find_place(const ll_attention_args *a, int64_t seq, int64_t first, int64_t low, int64_t high)
{
    const uint32_t size = (uint32_t)a->pages.page_size, key = (uint32_t)first; /* 64-bit division takes three times as long */
    if (size % SUB || first < low || first + SUB > high + 1) return -1;
    const int64_t page = a->block_table[seq * a->max_pages + key / size];
    return page < 0 ? -1 : page * a->pages.num_kv_heads * size + key % size;
}

/* Rows of a tile and their scales: keys, or values. */
INLINE void find_rows(const ll_attention_args *a, const uint8_t *from, const float *scales, int64_t row_bytes, int64_t seq, int64_t head,
                      int64_t low, int64_t high, const tile_rows *t, uint8_t *copied, const uint8_t **rows, float *scale)
{
    const kv_pages *p = &a->pages;
    for (int u = 0; u < t->subs; u++, scale += SUB, copied += SUB * row_bytes) {
        if (t->place[u] >= 0) {
            const int64_t row = t->place[u] + head * p->page_size;
            rows[u] = from + row * row_bytes;
            for (int j = 0; kv_scaled(p->format) && j < SUB; j++) scale[j] = scales[p->one_scale ? 0 : row + j];
            continue;
        }
        rows[u] = copied;
        for (int j = 0; j < SUB; j++) {
            const int64_t key = t->first + u * SUB + j, page = key >= low && key <= high ? a->block_table[seq * a->max_pages + key / p->page_size] : -1;
            const int64_t row = (page * p->num_kv_heads + head) * p->page_size + key % p->page_size;
            if (page >= 0) memcpy(copied + j * row_bytes, from + row * row_bytes, (size_t)row_bytes);
            else memset(copied + j * row_bytes, 0, (size_t)row_bytes);
            if (kv_scaled(p->format)) scale[j] = page < 0 ? 0.0f : scales[p->one_scale ? 0 : row];
        }
    }
}

/* Locates the keys or values of a tile. Latents serve as both; their RoPE parts are located with the keys. */
INLINE void find_tile(const ll_attention_args *a, int64_t seq, int64_t head, int64_t low, int64_t high, int values, tile_rows *t, attention_space *s)
{
    const kv_pages *p = &a->pages;
    const int latent = a->turned > 0;
    if (!values || latent) find_rows(a, p->k, p->k_scales, p->dim * kv_bytes(p->format), seq, head, low, high, t, s->copied[0], t->rows, t->scale);
    else find_rows(a, p->v, p->v_scales, v_bytes(a), seq, head, low, high, t, s->copied[0], t->rows, t->scale);
    if (!values && latent) find_rows(a, p->v, p->v_scales, v_bytes(a), seq, head, low, high, t, s->copied[1], t->turned, t->turned_scale);
}

/* Address of a head's rows at `place`, which are read next; the current rows if it is unknown. */
INLINE const uint8_t *find_next(const ll_attention_args *a, int64_t place, int64_t head, int values, const tile_rows *t)
{
    const kv_pages *p = &a->pages;
    const int64_t row = place + head * p->page_size;
    return place < 0 ? t->rows[0] : values && !a->turned ? p->v + row * v_bytes(a) : p->k + row * p->dim * kv_bytes(p->format);
}

/* Iterates over the dimensions of VW contiguous keys: BODY sees `int64_t d`, `const int odd` (d is odd) and `vf key`. 16 bytes of
 * each row are transposed together as 32-bit words. Dimensions after the last whole vector are skipped.
 *
 * Meanwhile the contiguous rows at NEXT are prefetched in order to L1, like values below. Each L1 fill occupies one of the
 * core's ten to twelve line fill buffers, and lines prefetched to L2 need one twice (two Cascade Lake cores, 8,192 tokens:
 * 16.7 GB/s to L2, 18.8 to L1). */
#define EACH_DIMENSION(FROM, DIM, FORMAT, NEXT, AFTER, BODY)                                                                    \
    const int64_t bytes_ = kv_bytes(FORMAT), each_ = 16 / bytes_, stride_ = (DIM) * bytes_;                                     \
    int64_t at_ = 0;                                                                                                            \
    for (; ((FORMAT) == KV_F32 || (FORMAT) == KV_BF16 || (FORMAT) == KV_INT8) && at_ + each_ <= (DIM); at_ += each_) {          \
        vf four_[4];                                                                                                            \
        transpose_four((FROM) + at_ * bytes_, stride_, four_);                                                                  \
        UNROLL for (int i = 0; (NEXT) && i < 16 * VW; i += 64) ask_for((NEXT) + at_ * bytes_ * VW + i, AFTER);                  \
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

/* Loads rows of VW keys transposed, times their scales if given; zeros up to `end`. */
INLINE void load_keys(const uint8_t *from, int64_t dim, int64_t end, const float *scales, float *keys, const int64_t format)
{
    const vf scale = scales ? vf_load(scales) : vf_set1(1.0f);
    EACH_DIMENSION(from, dim, format, (const uint8_t *)NULL, 0, { (void)odd; vf_store(keys + d * SUB, scales ? key * scale : key); })
    for (int64_t d = at_; d < end; d++)
        for (int j = 0; j < VW; j++) keys[d * SUB + j] = d < dim ? kv_number(from + j * dim * kv_bytes(format), d, format) * (scales ? scales[j] : 1.0f) : 0.0f;
}

/* Converts a tile's keys or values to floats in attention_space; latents include their scales, others do not. */
INLINE void load_as(const ll_attention_args *a, const tile_rows *t, attention_space *s, const int64_t format, int values)
{
    const int64_t dim = a->pages.dim, padded = round_up(dim, 16), wide = key_padded(a), whole = dim - dim % VW;
    const int latent = a->turned > 0, scaled = latent && kv_scaled(format);
    for (int at = 0; !values && at < t->subs * SUB; at += VW) {
        float *keys = s->keys + at / SUB * SUB * wide + at % SUB;
        load_keys(t->rows[at / SUB] + at % SUB * dim * kv_bytes(format), dim, latent ? dim : wide, scaled ? t->scale + at : NULL, keys, format);
        if (latent) load_keys(t->turned[at / SUB] + at % SUB * v_bytes(a), a->turned, wide - dim, scaled ? t->turned_scale + at : NULL, keys + dim * SUB, format);
    }
    for (int j = 0; values && j < t->subs * SUB; j++) {
        const uint8_t *from = t->rows[j / SUB] + j % SUB * dim * kv_bytes(format);
        const float scale = scaled ? t->scale[j] : 1.0f;
        float *value = s->values + j * padded;
        for (int64_t d = 0; d < whole; d += VW) vf_store(value + d, kv_vector(from, d, format) * vf_set1(scale));
        for (int64_t d = whole; d < padded; d++) value[d] = d < dim ? kv_number(from, d, format) * scale : 0.0f;
    }
}

/* Stores a tile's keys or values as bfloat16 pairs in attention_space. */
INLINE void load_pairs(const ll_attention_args *a, const tile_rows *t, attention_space *s, int values)
{
    const int64_t dim = a->pages.dim, words = dim / 2;
    for (int at = 0; !values && at < t->subs * SUB; at += VW)
        load_keys(t->rows[at / SUB], words, words, NULL, s->keys + at * words, KV_F32);
    for (int j = 0; values && j < t->subs * SUB; j += 2)
        for (int64_t d = 0; d < dim; d += VW) {
            const uint16_t *from = (const uint16_t *)t->rows[j / SUB] + j % SUB * dim + d;
            vi_store(s->values + j / 2 * dim + d, vi_u16(from) | vi_u16(from + dim) << 16);
        }
}

INLINE vf add_product(vf sum, vf a, vf b, const int pairs) { return pairs ? madd_bf16(sum, a, b) : vf_fma(a, b, sum); }

/* Scores of `rows` rows for keys in attention_space: two chains each, even and odd dimensions (or pairs). */
INLINE void scores_many(attention_space *s, int64_t at, int64_t row, int64_t words, const int rows, const int pairs)
{
    for (int v = 0; v < SUB; v += VW) { /* both sub-tiles share the broadcasts of q; results of an unused one are ignored */
        vf chain[4][2][2];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < 4; c++) chain[r][c / 2][c % 2] = vf_set1(0.0f);
        for (int64_t d = 0; d < words; d += 2)
            for (int t = 0; t < 2; t++) {
                vf first_keys = vf_load(s->keys + v + (d + t) * SUB), next_keys = vf_load(s->keys + v + (words + d + t) * SUB);
                for (int r = 0; r < rows; r++) {
                    vf q = vf_set1(s->q[(row + r) * words + d + t]);
                    chain[r][0][t] = add_product(chain[r][0][t], first_keys, q, pairs);
                    chain[r][1][t] = add_product(chain[r][1][t], next_keys, q, pairs);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < 2; u++) vf_store(s->weights + (row + r) * SEGMENT + at + u * SUB + v, chain[r][u][0] + chain[r][u][1]);
    }
}

/* The same for keys in the pages; bfloat16 pairs are handled like floats. */
INLINE void scores_few(const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, const int64_t dim, const int64_t format,
                       const int pairs)
{
    const int64_t row_bytes = dim * kv_bytes(format);
    for (int i = 0; i < t->subs * SUB; i += VW) {
        const uint8_t *from = t->rows[i / SUB] + i % SUB * row_bytes;
        const uint8_t *next = !is_first ? from : (i + SUB < t->subs * SUB ? t->rows[i / SUB + 1] : t->next) + i % SUB * row_bytes;
        vf chain[MOST_ROWS][2];
        for (int r = 0; r < rows; r++) chain[r][0] = chain[r][1] = vf_set1(0.0f);
        EACH_DIMENSION(from, dim, format, next, t->far, {
            for (int r = 0; r < rows; r++) chain[r][odd] = add_product(chain[r][odd], key, vf_set1(s->q[(row + r) * dim + d]), pairs);
        })
        for (int r = 0; r < rows; r++) vf_store(s->weights + (row + r) * SEGMENT + t->at + i, chain[r][0] + chain[r][1]);
    }
}

/* Multiplies scores by the keys' scales. */
INLINE void scale_scores(const tile_rows *t, attention_space *s, int64_t first, int64_t rows)
{
    for (int64_t r = first; r < first + rows; r++)
        for (int i = 0; i < t->subs * SUB; i += VW) {
            float *to = s->weights + r * SEGMENT + t->at + i;
            vf_store(to, vf_load(to) * vf_load(t->scale + i));
        }
}

/* Softmax: converts a row's scores for the segment's keys from `base` on to weights; scores exist for [begin, end). */
static void soften(const ll_attention_args *a, attention_space *s, int64_t row, int64_t base, int64_t begin, int64_t end)
{
    const vi lane = vi_load(lane_numbers), from = vi_set1((int32_t)(s->low[row] - base)), to = vi_set1((int32_t)(s->high[row] - base));
    float *weights = s->weights + row * SEGMENT;
    vf top = vf_set1(-INFINITY), sums[SUB / VW];
    vi bad = vi_set1(0);
    const int sees_all = s->low[row] <= base + begin && s->high[row] >= base + end - 1 && a->softcap == 0.0f;
    for (int64_t i = begin; i < end && sees_all; i += VW) {
        const vf score = vf_load(weights + i);
        bad |= (vi)(score != score);
        top = vf_max(score, top);
    }
    for (int64_t i = begin; i < end && !sees_all; i += VW) {
        const vi key = lane + vi_set1((int32_t)i), seen = (key >= from) & (key <= to);
        vf score = vf_load(weights + i);
        bad |= (vi)(score != score) & seen; /* the soft-cap and the maximum would drop NaN */
        if (a->softcap != 0.0f) {
            vf e = vf_exp(score * vf_set1(2.0f / a->softcap));
            score = vf_set1(a->softcap) - vf_set1(2.0f * a->softcap) / (e + vf_set1(1.0f));
        }
        score = vf_select(seen, score, vf_set1(-INFINITY));
        vf_store(weights + i, score);
        top = vf_max(score, top);
    }
    s->max[row] = vf_hmax(top);
    s->sum[row] = 0.0f;
    if (vi_sum(bad)) { /* NaN scores make all weights of the row NaN */
        s->max[row] = 0.0f;
        s->sum[row] = f32_bits(0x7fc00000);
    }
    if (s->sum[row] != 0.0f || s->max[row] == -INFINITY) { /* or no key is visible */
        const int64_t each = in_pairs(a) ? 2 : 4;
        memset((uint8_t *)weights + begin * each, 0, (size_t)((end - begin) * each));
        return;
    }
    for (int v = 0; v < SUB / VW; v++) sums[v] = vf_set1(0.0f);
    for (int64_t i = begin; i < end && in_pairs(a); i += SUB) {
        /* writes never overtake reads */
        store_bf16((uint16_t *)weights + i, short_exp(vf_load(weights + i) - vf_set1(s->max[row])));
        sums[0] = sums[0] + vf_bf16((uint16_t *)weights + i);
    }
    for (int64_t i = begin; i < end && !in_pairs(a); i += SUB) /* sum per lane first: skipped sub-tiles count as zeros */
        for (int v = 0; v < SUB / VW; v++) {
            const vf e = vf_exp(vf_load(weights + i + v * VW) - vf_set1(s->max[row]));
            vf_store(weights + i + v * VW, e);
            sums[v] = sums[v] + e;
        }
    for (int v = 1; v < SUB / VW; v++) sums[0] = sums[0] + sums[v];
    s->sum[row] = vf_sum(sums[0]);
}

/* Accumulates weighted values, `wide` vectors at a time from dimension *d on, while that many are left. */
INLINE void weigh_wide(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, const int few,
                       const int64_t format, const int wide, int64_t *d, const int pairs)
{
    const int paired = VW == 16 && few && format == KV_BF16 && wide % 2 == 0 && !pairs; /* even and odd dimensions separately: half the loads */
    const int64_t padded = round_up(a->pages.dim, 16), of_v = v_bytes(a);
    const int keys = t->subs * SUB, step = 1 + pairs; /* keys per step */
    const float *weights = s->weights + row * SEGMENT + t->at / step;
    for (; *d + wide * VW <= padded; *d += wide * VW) {
        vf acc[MOST_ROWS][8];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < wide; i++) acc[r][i] = vf_load(s->acc + (row + r) * padded + *d + i * VW);
        for (int r = 0; paired && r < rows; r++)
            for (int i = 0; i < wide; i += 2) pairs_apart(&acc[r][i], &acc[r][i + 1]);
        for (int j = 0; j < keys; j += step) {
            for (int k = j; few && is_first && k < j + step; k++) {
                const uint8_t *next = (k + SUB < keys ? t->rows[k / SUB + 1] : t->next) + k % SUB * of_v + *d * kv_bytes(format);
                UNROLL for (int i = 0; i < wide * VW * kv_bytes(format); i += 64) ask_for(next + i, t->far);
            }
            const uint8_t *from = t->rows[j / SUB] + j % SUB * of_v;
            vf value[8];
            for (int i = 0; few && pairs && i < wide; i += 2) {
                const uint8_t *at = from + 2 * (*d + i * VW);
                if (wide == 1) value[0] = (vf)(vi_u16((const uint16_t *)at) | vi_u16((const uint16_t *)(at + of_v)) << 16);
                else by_turns(vi_load(at), vi_load(at + of_v), &value[i], &value[i + 1]);
            }
            for (int i = 0; !(few && pairs) && i < wide; i++)
                if (paired) {
                    const vi pair = vi_load(from + 2 * (*d + i / 2 * 2 * VW));
                    value[i] = (vf)(i % 2 ? pair & (int32_t)0xffff0000 : pair << 16);
                } else value[i] = few ? kv_vector(from, *d + i * VW, format) : vf_load(s->values + j / step * padded + *d + i * VW);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < wide; i++) acc[r][i] = add_product(acc[r][i], value[i], vf_set1(weights[r * SEGMENT + j / step]), pairs);
        }
        for (int r = 0; paired && r < rows; r++)
            for (int i = 0; i < wide; i += 2) pairs_together(&acc[r][i], &acc[r][i + 1]);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < wide; i++) vf_store(s->acc + (row + r) * padded + *d + i * VW, acc[r][i]);
    }
}

/* Accumulates weighted values from attention_space or the pages; up to 16 sums at a time, as registers allow. */
INLINE void weigh(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, const int few, const int64_t format,
                  const int pairs)
{
    int64_t d = 0;
    if (VW == 16 && rows <= 2) weigh_wide(a, t, s, row, is_first, rows, few, format, 8, &d, pairs);
    weigh_wide(a, t, s, row, is_first, rows, few, format, VW == 16 && rows <= 4 ? 4 : 2, &d, pairs);
    weigh_wide(a, t, s, row, is_first, rows, few, format, 1, &d, pairs);
}

/* Whether none of `rows` consecutive rows sees a key of the tile. */
INLINE int sees_none(const tile_rows *t, const attention_space *s, int64_t row, const int rows)
{
    return s->high[row + rows - 1] < t->first || s->low[row] >= t->first + KEYS;
}

INLINE void block_many(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, const int rows, int values, const int pairs)
{
    if (sees_none(t, s, row, rows)) return;
    if (values) weigh(a, t, s, row, 0, rows, 0, KV_F32, pairs);
    else scores_many(s, t->at, row, key_words(a), rows, pairs);
}

INLINE void block_few(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, int values, const int64_t format,
                      const int pairs)
{
    if (values) weigh(a, t, s, row, is_first, rows, 1, format, pairs);
    else if (a->pages.dim == 128) scores_few(t, s, row, is_first, rows, 128 >> pairs, pairs ? KV_F32 : format, pairs);
    else scores_few(t, s, row, is_first, rows, a->pages.dim >> pairs, pairs ? KV_F32 : format, pairs);
}

#define TILE_ROWS(NAME, EIGHT, CALL)                                                                                                       \
    static __attribute__((noinline)) void NAME(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t first, int64_t rows, int values) \
    {                                                                                                                                      \
        int64_t row = first;                                                                                                               \
        const int64_t end = first + rows;                                                                                                  \
        for (; EIGHT && row + 8 <= end; row += 8) CALL(EIGHT ? 8 : 1);                                                                     \
        for (; row + 4 <= end; row += 4) CALL(4);                                                                                          \
        if (end - row == 3) CALL(3);                                                                                                       \
        else if (end - row == 2) CALL(2);                                                                                                  \
        else if (end - row == 1) CALL(1);                                                                                                  \
    }
#define MANY(ROWS) block_many(a, t, s, row, ROWS, values, 0)
TILE_ROWS(tile_many_rows, 0, MANY)
#define MANY_IN_PAIRS(ROWS) block_many(a, t, s, row, ROWS, values, 1)
TILE_ROWS(tile_many_pairs, 0, MANY_IN_PAIRS)
#define FEW_BF16(ROWS) block_few(a, t, s, row, row == first, ROWS, values, KV_BF16, 0)
TILE_ROWS(tile_bf16, MOST_ROWS == 8, FEW_BF16)
#define FEW_IN_PAIRS(ROWS) block_few(a, t, s, row, row == first, ROWS, values, KV_BF16, 1)
TILE_ROWS(tile_pairs, MOST_ROWS == 8, FEW_IN_PAIRS)
#define FEW_INT8(ROWS) block_few(a, t, s, row, row == first, ROWS, values, KV_INT8, 0)
TILE_ROWS(tile_int8, MOST_ROWS == 8, FEW_INT8)

/* Whether this few rows read keys and values directly from the pages. */
INLINE int reads_pages(const ll_attention_args *a, int64_t rows)
{
    return rows <= FEW_QUERY_ROWS && a->pages.dim % 16 == 0 && !a->turned && (a->pages.format == KV_BF16 || a->pages.format == KV_INT8);
}

/* Computes scores of rows first.. of the block for the tile's keys, or accumulates the tile's values. */
static void attention_tile(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t first, int64_t rows, int values)
{
    const int scaled = kv_scaled(a->pages.format) && !a->turned;
    if (values && scaled) scale_scores(t, s, first, rows);
    if (reads_pages(a, rows)) {
        (in_pairs(a) ? tile_pairs : a->pages.format == KV_BF16 ? tile_bf16 : tile_int8)(a, t, s, first, rows, values);
    } else if (in_pairs(a)) {
        load_pairs(a, t, s, values);
        tile_many_pairs(a, t, s, first, rows, values);
    } else {
        switch (a->pages.format) {
        case KV_F32: load_as(a, t, s, KV_F32, values); break;
        case KV_BF16: load_as(a, t, s, KV_BF16, values); break;
        case KV_F16: load_as(a, t, s, KV_F16, values); break;
        case KV_INT8: load_as(a, t, s, KV_INT8, values); break;
        default: load_as(a, t, s, KV_FP8, values);
        }
        tile_many_rows(a, t, s, first, rows, values);
    }
    if (!values && scaled) scale_scores(t, s, first, rows);
}

#endif
