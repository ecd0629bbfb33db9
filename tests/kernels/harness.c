/* Runs cases from standard input through the kernels and writes what comes out: for instruction sets of other machines,
 * under an emulator. See test_cpu_foreign.py for what a case looks like. */
#include <stdio.h>

#include "../../kernels/cpu/main.c"

static void *take(int64_t bytes)
{
    void *to = aligned_alloc(64, (size_t)round_up(bytes + 64, 64));
    if (!to || (int64_t)fread(to, 1, (size_t)bytes, stdin) != bytes) exit(2);
    return to;
}

static void give(const void *from, int64_t bytes)
{
    if ((int64_t)fwrite(from, 1, (size_t)bytes, stdout) != bytes) exit(3);
}

/* weight, [data bytes, m, exact, has row scales], data, (row scales), x -> out [m][n] */
static void linear_case(void)
{
    ll_weight *w = take(sizeof *w);
    const int64_t *n = take(32);
    w->data = take(n[0]);
    w->row_scale = n[3] ? take(4 * w->n) : NULL;
    const float *x = take(4 * n[1] * w->k);
    float *out = malloc((size_t)(4 * n[1] * w->n));
    if (ll_linear(w, x, n[1], NULL, out, n[2])) exit(4);
    give(out, 4 * n[1] * w->n);
}

/* [kv heads, page size, dim, format, pages, tokens, heads, queries, window], k, v [tokens][kv heads][dim], slots,
 * block table, q [queries][heads][dim] of one sequence -> k and v pages, their scales, out */
static void attention_case(void)
{
    const int64_t *n = take(72), rows = n[4] * n[0] * n[1], bytes = rows * n[2] * kv_bytes(n[3]);
    kv_target target = {{calloc(1, (size_t)bytes), calloc(1, (size_t)bytes), calloc((size_t)rows, 4), calloc((size_t)rows, 4), n[0], n[1], n[2], n[3], 0}, NULL};
    const float *k = take(4 * n[5] * n[0] * n[2]), *v = take(4 * n[5] * n[0] * n[2]);
    target.slots = take(8 * n[5]);
    const int32_t *table = take(4 * n[4]), starts[2] = {0, (int32_t)n[7]}, lens[1] = {(int32_t)n[5]};
    const float *q = take(4 * n[7] * n[6] * n[2]);
    float *out = malloc((size_t)(4 * n[7] * n[6] * n[2]));
    ll_kv_write(k, n[0] * n[2], v, n[0] * n[2], n[5], &target);
    const ll_attention_args args = {target.pages, q, out, table, starts, lens, NULL, 1, n[4], n[6], n[8], 0.125f, 0.0f};
    if (ll_attention(&args)) exit(5);
    give(target.pages.k, bytes);
    give(target.pages.v, bytes);
    give(target.pages.k_scales, 4 * rows);
    give(target.pages.v_scales, 4 * rows);
    give(out, 4 * n[7] * n[6] * n[2]);
}

int main(void)
{
    int64_t kind;
    ll_threads(2);
    while (fread(&kind, 8, 1, stdin) == 1) kind == 1 ? linear_case() : attention_case();
    return 0;
}
