/* The activations of gated layers. */
#ifndef LL_ACTIVATE_H
#define LL_ACTIVATE_H

#include <math.h>

#include "vec.h"

#define OAI_SLOPE 1.702f

/* silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3) */
INLINE vf activate(vf g, int gelu)
{
    vf u = gelu ? g * vf_fma(g * g, vf_set1(2.0f * 0.7978845608028654f * 0.044715f), vf_set1(2.0f * 0.7978845608028654f)) : g;
    return g / (vf_set1(1.0f) + vf_exp(-u));
}

enum { ACT_SILU, ACT_GELU, ACT_OAI, ACT_CLAMPED };

/* act(gate) * up; a limit other than 0 clamps up on both sides and gate from above: with ACT_OAI and ACT_CLAMPED (silu) before
 * the activation, else after it. NaN propagates. */
INLINE vf gated(vf gate, vf up, int act, float limit)
{
    const vf most = vf_set1(limit);
    if (limit != 0.0f) up = vf_max(-most, vf_min(most, up));
    if (act >= ACT_OAI && limit != 0.0f) gate = vf_min(most, gate);
    if (act == ACT_CLAMPED) return activate(gate, 0) * up;
    if (act == ACT_OAI) {
        return gate / (vf_set1(1.0f) + vf_exp(gate * vf_set1(-OAI_SLOPE))) * (up + vf_set1(1.0f));
    }
    gate = activate(gate, act == ACT_GELU);
    return (limit != 0.0f ? vf_min(most, gate) : gate) * up;
}

INLINE vf sigmoid(vf x) { return vf_set1(1.0f) / (vf_set1(1.0f) + vf_exp(-x)); }

/* log(1 + exp(x)) */
INLINE float softplus_of(float x) { return logf(1.0f + expf(-fabsf(x))) + (x > 0.0f ? x : 0.0f); }

/* The same: y = exp(-|x|) <= 1, and log(1 + y) = 2 artanh(s) with s = y / (2 + y) <= 1/3, as a series. */
INLINE vf softplus(vf x)
{
    const vf y = vf_exp(-vf_max(-x, x)), s = y / (y + vf_set1(2.0f)), square = s * s;
    vf sum = vf_set1(1.0f / 15.0f);
    for (int i = 13; i > 0; i -= 2) sum = vf_fma(sum, square, vf_set1(1.0f / (float)i));
    return vf_fma(s + s, sum, vf_max(vf_set1(0.0f), x));
}

#endif
