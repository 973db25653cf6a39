#include "common.h"

/* ---- row-wise ------------------------------------------------------------------------------------------------- */

void kvq_rms_norm(const float *x, long m, long d, const float *weight, float eps, float *y) {
#pragma omp parallel for schedule(static) if (m > 8)
    for (long r = 0; r < m; r++) {
        const float *in = x + r * d;
        float sums[8] = {0};
        long i = 0;
        for (; i + 8 <= d; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += in[i + j] * in[i + j];
        float sum = 0.0f;
        for (int j = 0; j < 8; j++) sum += sums[j];
        for (; i < d; i++) sum += in[i] * in[i];
        float scale = 1.0f / sqrtf(sum / (float)d + eps);
        for (i = 0; i < d; i++) y[r * d + i] = in[i] * scale * weight[i];
    }
}

/* gate_up [m, 2 d] -> y [m, d] = silu(gate) * up */
void kvq_silu_mul(const float *gate_up, long m, long d, float *y) {
#pragma omp parallel for schedule(static) if (m > 4)
    for (long r = 0; r < m; r++) {
        const float *gate = gate_up + r * 2 * d, *up = gate + d;
        float *out = y + r * d;
        long i = 0;
        for (; i + LANES <= d; i += LANES) store(out + i, silu_mul(load(gate + i), load(up + i)));
        for (; i < d; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* y = x * sigmoid(v(x)): SiLU, GELU by its tanh form (1 + tanh(u) = 2 sigmoid(2 u)), GELU by a plain sigmoid; or the
 * sigmoid itself. */
static inline vec gate_vec(vec x, int kind) {
    vec v = x;
    if (kind == 1) v = splat(1.5957691216057308f) * (x + splat(0.044715f) * x * x * x);
    if (kind == 2) v = splat(1.702f) * x;
    ivec negative = v < splat(0.0f);
    vec e = exp_vec(-(vec)((ivec)v & 0x7fffffff));
    return (kind == 3 ? splat(1.0f) : x) * choose(negative, e, splat(1.0f)) / (splat(1.0f) + e);
}

/* Elements that are left over at the end are computed as a vector too: no element's bits depend on where it lies. */
void kvq_gate(const float *x, long n, int kind, float *y) {
#pragma omp parallel for schedule(static) if (n > 16384)
    for (long i = 0; i < n / LANES; i++) store(y + i * LANES, gate_vec(load(x + i * LANES), kind));
    long done = n / LANES * LANES;
    float tail[LANES] = {0};
    for (long i = done; i < n; i++) tail[i - done] = x[i];
    store(tail, gate_vec(load(tail), kind));
    for (long i = done; i < n; i++) y[i] = tail[i - done];
}

/* y [m, d]: of each row the sum, in order, of k rows of x, each times its weight; rows and weights are [m, k]. */
void kvq_weighted_rows(const float *x, long d, const int64_t *rows, const float *weights, long m, long k, float *y) {
#pragma omp parallel for schedule(static) if (m > 8)
    for (long r = 0; r < m; r++) {
        float *out = y + r * d;
        memset(out, 0, d * sizeof(float));
        for (long j = 0; j < k; j++) {
            const float *in = x + rows[r * k + j] * d, weight = weights[r * k + j];
            for (long i = 0; i < d; i++) out[i] += weight * in[i];
        }
    }
}
