/* What layers that keep states share: where these lie, whose tokens come, and the short causal convolution. */
#ifndef LL_STATES_H
#define LL_STATES_H

#include "layer.h"

#define CONV_WIDTH_MAX 8
#define STATE_RUN 64   /* tokens convolved at a time: they stay in the second cache until what reads them is through */
#define CONV_BLOCK 128 /* channels of a task that only convolves */

/* What a layer keeps of sequences. */
typedef struct {
    float *conv, *state; /* [slots][channels][width - 1], [slots][...]; state NULL where there is only a convolution */
    int64_t conv_stride, state_stride; /* floats between slots */
} ll_state_slots;

/* Whose the step's tokens are. */
typedef struct {
    const int64_t *slots;  /* [num_seqs] */
    const int32_t *starts; /* [num_seqs + 1] */
    int64_t num_seqs;
} ll_sequences;

typedef struct {
    const float *weight, *bias; /* [width][channels]; [channels], or NULL */
    int64_t channels, width;
} ll_conv;

/* Which of the rows [first, first + m) of a step are a sequence's, counted from `first`. */
INLINE void rows_of(const ll_sequences *s, int64_t sequence, int64_t first, int64_t m, int64_t *begin, int64_t *end)
{
    *begin = s->starts[sequence] > first ? s->starts[sequence] - first : 0;
    *end = s->starts[sequence + 1] - first < m ? s->starts[sequence + 1] - first : m;
}

INLINE void convolve_as(const ll_conv *w, int64_t channel, int64_t count, float *kept, const float *x, int64_t stride, int64_t tokens,
                        float *before, float *y, int64_t y_stride, int silu, const int64_t width)
{
    const int64_t past = width - 1, channels = w->channels;
    const float *weight = w->weight + channel, *bias = w->bias ? w->bias + channel : NULL;
    for (int64_t j = 0; j < past; j++)
        for (int64_t c = 0; c < count; c++) before[j * count + c] = kept[c * past + j];
    for (int64_t t = 0; t < tokens; t++) {
        const float *seen[CONV_WIDTH_MAX];
        for (int64_t j = 0; j < width; j++) seen[j] = t + j < past ? before + (t + j) * count : x + (t + j - past) * stride;
        for (int64_t c = 0; c < count; c += VW) {
            const int some = count - c < VW ? (int)(count - c) : VW;
            vf sum = load_some(seen[0] + c, some) * load_some(weight + c, some);
            for (int64_t j = 1; j < width; j++) sum = sum + load_some(seen[j] + c, some) * load_some(weight + j * channels + c, some);
            if (bias) sum = sum + load_some(bias + c, some);
            if (silu) sum = activate(sum, 0);
            memcpy(y + t * y_stride + c, &sum, (size_t)some * 4);
        }
    }
    for (int64_t j = 0; j < past; j++) {
        const int64_t t = tokens + j;
        const float *from = t < past ? before + t * count : x + (t - past) * stride;
        for (int64_t c = 0; c < count; c++) kept[c * past + j] = from[c];
    }
}

/* Channels [channel, channel + count) of `tokens` tokens through the convolution. `kept` are the last inputs of the slot
 * before, and then those of now; `before` has room for width - 1 inputs. */
static void convolve(const ll_conv *w, int64_t channel, int64_t count, float *kept, const float *x, int64_t stride, int64_t tokens,
                     float *before, float *y, int64_t y_stride, int silu)
{
    kept += channel * (w->width - 1);
    switch (w->width) {
    case 4: convolve_as(w, channel, count, kept, x, stride, tokens, before, y, y_stride, silu, 4); break;
    case 3: convolve_as(w, channel, count, kept, x, stride, tokens, before, y, y_stride, silu, 3); break;
    default: convolve_as(w, channel, count, kept, x, stride, tokens, before, y, y_stride, silu, w->width);
    }
}

#endif
