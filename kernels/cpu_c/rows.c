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
