/* One tile of attention: 32 keys, or their values, against the rows of a block. They come as floats from memory, where many
 * rows share them, or straight from the pages for few rows (decoding): the same numbers in the same order. */
#ifndef LL_ATTENTION_TILE_H
#define LL_ATTENTION_TILE_H

#include "activations.h"
#include "kv.h"

#define SUB 16   /* keys of a sub-tile: the most that are transposed together */
#define KEYS 32  /* keys of a tile */
#define SEGMENT 256 /* keys of a softmax */
#define ROW_FLOATS 16384 /* of queries per block of query rows, which share what was made floats of; half of it but for latents */
#define TURNED_MAX 128   /* elements of a key behind a latent */
#define ROWS_MAX 64
#define FEW_QUERY_ROWS 8 /* so few rows read the pages themselves */
#define MOST_ROWS (VW == 16 ? 8 : 4) /* rows that share what is read */

typedef struct {
    kv_pages pages;
    const float *q;
    float *out;
    const int32_t *block_table; /* [num_seqs, max_pages] */
    const int32_t *cu_query_lens, *seq_lens;
    const float *sinks;         /* [num_heads], or NULL */
    int64_t num_seqs, max_pages, num_heads;
    int64_t window;             /* 0: none; below 0: a chunk of so many, of which a query sees what is before it */
    float scale, softcap;       /* softcap 0: none */
    int64_t turned;             /* 0: none. A key is what `k` holds and, behind it, so many elements in `v`; its value is the former */
    int64_t gated;              /* behind each query lies a gate of its size, whose sigmoid (2: softplus) multiplies the output */
} ll_attention_args;

typedef struct {
    /* In brackets: where `in_pairs`, numbers of 32 bits are two of bfloat16. */
    _Alignas(64) float keys[KEYS * (DIM_MAX + TURNED_MAX)]; /* transposed: [sub-tile][dim (two)][16 keys] */
    _Alignas(64) float values[KEYS * DIM_MAX];              /* [keys (two)][padded dim] */
    _Alignas(64) float q[ROW_FLOATS];                       /* [rows][padded dim (two)] */
    _Alignas(64) float weights[ROWS_MAX * SEGMENT]; /* scores, then weights (of two), of the segment's keys: [rows][256] */
    _Alignas(64) float acc[ROW_FLOATS];       /* the segment's sums, [rows][padded dim] */
    _Alignas(64) float total[ROW_FLOATS];     /* of the segments before */
    _Alignas(64) uint8_t copied[2][KEYS * DIM_MAX * 4]; /* rows that do not lie end to end; and those behind latents */
    float max[ROWS_MAX], sum[ROWS_MAX], total_max[ROWS_MAX], total_sum[ROWS_MAX];
    int64_t low[ROWS_MAX], high[ROWS_MAX];    /* keys [low, high] of a row */
} attention_space;

/* A tile's keys, or its values: each sub-tile's rows end to end, in a page or copied; zeros where the sequence has none. */
typedef struct {
    int64_t first, at; /* the first one's position, and its place in the segment */
    int subs;          /* sub-tiles in use */
    int64_t place[2];  /* the first KV head's row of a sub-tile that lies in one page; -1: it does not, or not all of it is seen */
    const uint8_t *rows[2], *turned[2]; /* turned: what lies behind a latent */
    const uint8_t *next;                /* rows of the next tile, which are asked for */
    int64_t far;                        /* bytes from what is asked for to what comes a few tiles later; 0: leave that */
    _Alignas(64) float scale[KEYS], turned_scale[KEYS];
} tile_rows;

static const int32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The first key that a query at `position` sees. */
INLINE int64_t oldest_key(const ll_attention_args *a, int64_t position)
{
    if (a->window < 0) return position - position % a->window; /* C's remainder has the sign of the position */
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Whether queries and weights are rounded to bfloat16, as keys and values were, and meet them in pairs: half of the
 * multiplications, and nothing is made a float. */
INLINE int in_pairs(const ll_attention_args *a) { return BF16_PAIRS && ll_bf16 && a->pages.format == KV_BF16 && a->pages.dim % 16 == 0 && !a->turned; }

/* Elements of a query and of a key, as they lie in the space, and the numbers of 32 bits these take. */
INLINE int64_t key_width(const ll_attention_args *a) { return a->pages.dim + a->turned; }
INLINE int64_t key_padded(const ll_attention_args *a) { return round_up(key_width(a), 16); }
INLINE int64_t key_words(const ll_attention_args *a) { return key_padded(a) >> in_pairs(a); }
INLINE int64_t v_bytes(const ll_attention_args *a) { return (a->turned ? a->turned : a->pages.dim) * kv_bytes(a->pages.format); }

/* Asks for a line, and for what lies `far` bytes on into the second cache: AMD's cores wait for fewer lines asked for into the
 * first at a time than memory takes to bring them (two Zen 4 cores, 8 heads of 128 in bfloat16, 8,192 tokens: 17 -> 24 GB/s
 * with a sub-tile's bytes, 27 with two to four, where plain reading gives 32; as far into the first cache 20). */
INLINE void ask_for(const uint8_t *line, int64_t far)
{
    __builtin_prefetch(line);
    if (far) __builtin_prefetch(line + far, 0, 2);
}

INLINE int kv_scaled(const int64_t format) { return format == KV_INT8 || format == KV_FP8; }

/* `place` of the sub-tile at `first`, once for all heads: these are divisions. */
INLINE int64_t find_place(const ll_attention_args *a, int64_t seq, int64_t first, int64_t low, int64_t high)
{
    const uint32_t size = (uint32_t)a->pages.page_size, key = (uint32_t)first; /* 64 bits take three times as long */
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

/* The keys of a tile, or its values; those of a latent are one, and what lies behind it comes with its keys. */
INLINE void find_tile(const ll_attention_args *a, int64_t seq, int64_t head, int64_t low, int64_t high, int values, tile_rows *t, attention_space *s)
{
    const kv_pages *p = &a->pages;
    const int latent = a->turned > 0;
    if (!values || latent) find_rows(a, p->k, p->k_scales, p->dim * kv_bytes(p->format), seq, head, low, high, t, s->copied[0], t->rows, t->scale);
    else find_rows(a, p->v, p->v_scales, v_bytes(a), seq, head, low, high, t, s->copied[0], t->rows, t->scale);
    if (!values && latent) find_rows(a, p->v, p->v_scales, v_bytes(a), seq, head, low, high, t, s->copied[1], t->turned, t->turned_scale);
}

/* Where a head's rows at `place` lie, which come next; where those of now lie, if it is not known. */
INLINE const uint8_t *find_next(const ll_attention_args *a, int64_t place, int64_t head, int values, const tile_rows *t)
{
    const kv_pages *p = &a->pages;
    const int64_t row = place + head * p->page_size;
    return place < 0 ? t->rows[0] : values && !a->turned ? p->v + row * v_bytes(a) : p->k + row * p->dim * kv_bytes(p->format);
}

/* Numbers of VW keys that lie end to end, dimension by dimension: BODY sees `int64_t d`, `const int odd` (of d) and `vf key`.
 * 16 bytes of each row are transposed together, as numbers of 32 bits. Dimensions after the last whole vector are left.
 *
 * Rows at NEXT, end to end, are asked for meanwhile, in order and into the first cache, as values are below. What is asked
 * for waits in one of a core's ten to twelve buffers for lines, and so does every line on its way from the second cache to
 * the first: lines asked for into the second take two turns (two Cascade Lake cores, 8,192 tokens: 16.7 GB/s, 18.8 so). */
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

/* Stored rows of VW keys, transposed, times their scales where there are some; zeros up to `end`. */
INLINE void load_keys(const uint8_t *from, int64_t dim, int64_t end, const float *scales, float *keys, const int64_t format)
{
    const vf scale = scales ? vf_load(scales) : vf_set1(1.0f);
    EACH_DIMENSION(from, dim, format, (const uint8_t *)NULL, 0, { (void)odd; vf_store(keys + d * SUB, scales ? key * scale : key); })
    for (int64_t d = at_; d < end; d++)
        for (int j = 0; j < VW; j++) keys[d * SUB + j] = d < dim ? kv_number(from + j * dim * kv_bytes(format), d, format) * (scales ? scales[j] : 1.0f) : 0.0f;
}

/* A tile's keys, or its values, as floats into the space: those of latents with their scales, others without. */
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

/* A tile's keys, or its values, as pairs into the space. */
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

/* Scores of `rows` rows against keys in the space: two chains each, even and odd dimensions, or pairs of these. */
INLINE void scores_many(attention_space *s, int64_t at, int64_t row, int64_t words, const int rows, const int pairs)
{
    for (int v = 0; v < SUB; v += VW) { /* both sub-tiles share the broadcasts of q; what lies in an unused one is not read */
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

/* The same against keys in the pages, in pairs as if they were floats. */
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

/* Keys' scores times their scales. */
INLINE void scale_scores(const tile_rows *t, attention_space *s, int64_t first, int64_t rows)
{
    for (int64_t r = first; r < first + rows; r++)
        for (int i = 0; i < t->subs * SUB; i += VW) {
            float *to = s->weights + r * SEGMENT + t->at + i;
            vf_store(to, vf_load(to) * vf_load(t->scale + i));
        }
}

/* Scores of a row against the segment's keys from `base` on, [begin, end) of which were met, to weights. */
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
        bad |= (vi)(score != score) & seen; /* what follows, the soft cap and the maximum, loses NaN */
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
    if (vi_sum(bad)) { /* a softmax of NaN is NaN for all that the row sees */
        s->max[row] = 0.0f;
        s->sum[row] = f32_bits(0x7fc00000);
    }
    if (s->sum[row] != 0.0f || s->max[row] == -INFINITY) { /* or it sees nothing */
        const int64_t each = in_pairs(a) ? 2 : 4;
        memset((uint8_t *)weights + begin * each, 0, (size_t)((end - begin) * each));
        return;
    }
    for (int v = 0; v < SUB / VW; v++) sums[v] = vf_set1(0.0f);
    for (int64_t i = begin; i < end && in_pairs(a); i += SUB) {
        /* never behind what is yet to be read */
        store_bf16((uint16_t *)weights + i, short_exp(vf_load(weights + i) - vf_set1(s->max[row])));
        sums[0] = sums[0] + vf_bf16((uint16_t *)weights + i);
    }
    for (int64_t i = begin; i < end && !in_pairs(a); i += SUB) /* sums of the same lanes first: sub-tiles left out count as zeros */
        for (int v = 0; v < SUB / VW; v++) {
            const vf e = vf_exp(vf_load(weights + i + v * VW) - vf_set1(s->max[row]));
            vf_store(weights + i + v * VW, e);
            sums[v] = sums[v] + e;
        }
    for (int v = 1; v < SUB / VW; v++) sums[0] = sums[0] + sums[v];
    s->sum[row] = vf_sum(sums[0]);
}

/* Adds the weighted values of `wide` vectors from dimension *d on, as long as there are so many. */
INLINE void weigh_wide(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, const int few,
                       const int64_t format, const int wide, int64_t *d, const int pairs)
{
    const int paired = VW == 16 && few && format == KV_BF16 && wide % 2 == 0 && !pairs; /* even and odd dimensions apart: half of the loads */
    const int64_t padded = round_up(a->pages.dim, 16), of_v = v_bytes(a);
    const int keys = t->subs * SUB, step = 1 + pairs; /* keys that are added together */
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

/* Adds the weighted values, from the space or the pages: 16 sums together where there are so many registers. */
INLINE void weigh(const ll_attention_args *a, const tile_rows *t, attention_space *s, int64_t row, int is_first, const int rows, const int few, const int64_t format,
                  const int pairs)
{
    int64_t d = 0;
    if (VW == 16 && rows <= 2) weigh_wide(a, t, s, row, is_first, rows, few, format, 8, &d, pairs);
    weigh_wide(a, t, s, row, is_first, rows, few, format, VW == 16 && rows <= 4 ? 4 : 2, &d, pairs);
    weigh_wide(a, t, s, row, is_first, rows, few, format, 1, &d, pairs);
}

/* Of rows in order, whether none sees a key of the tile. */
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

/* Whether so few rows meet keys and values as they lie in the pages. */
INLINE int reads_pages(const ll_attention_args *a, int64_t rows)
{
    return rows <= FEW_QUERY_ROWS && a->pages.dim % 16 == 0 && !a->turned && (a->pages.format == KV_BF16 || a->pages.format == KV_INT8);
}

/* Scores of rows first.. of the block against the tile's keys; or what its values add to them. */
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
