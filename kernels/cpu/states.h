/* Shared by recurrent layers: state slots, sequences of a step, and the short causal convolution. */
#ifndef LL_STATES_H
#define LL_STATES_H

#include "layer.h"

#define CONV_WIDTH_MAX 8
#define STATE_RUN 64   /* tokens convolved at a time: they stay in L2 until they have been read */
#define CONV_BLOCK 128 /* channels per task that only convolves */

/* A layer's states of all sequences. */
typedef struct {
    float *conv, *state; /* [slots][channels][width - 1], [slots][...]; state NULL if there is only a convolution */
    int64_t conv_stride, state_stride; /* floats between slots */
} ll_state_slots;

/* The sequences of a step. */
typedef struct {
    const int64_t *slots;  /* [num_seqs] */
    const int32_t *starts; /* [num_seqs + 1] */
    int64_t num_seqs;
} ll_sequences;

typedef struct {
    const float *weight, *bias; /* [width][channels]; [channels], or NULL */
    int64_t channels, width;
} ll_conv;

/* The rows of a sequence among the step's rows [first, first + m), relative to `first`. */
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

/* Convolves channels [channel, channel + count) of `tokens` tokens. `kept`: the slot's last inputs, which are updated;
 * `before`: scratch for width - 1 inputs. */
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
