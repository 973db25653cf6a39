#include "common.h"

/* ---- linear: y[M, N] = x[M, K] W^T (+ bias) (+ y), or gated: y[M, N / 2] ---------------------------------------- */

/* W [N, K] row-major -> panels of GEMM_COLS columns: packed[panel][k][GEMM_COLS], the last one padded with zeros. */
void kvq_pack_linear(const float *w, long n, long k, float *packed) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++)
        for (long i = 0; i < k; i++)
            for (long j = 0; j < GEMM_COLS; j++) {
                long col = p * GEMM_COLS + j;
                packed[(p * k + i) * GEMM_COLS + j] = col < n ? w[col * k + i] : 0.0f;
            }
}

long kvq_panel_cols(void) { return GEMM_COLS; }

/* Floats of the panel between what is used and what is fetched. */
#define FETCH_AHEAD 512

/* One tile: `rows` (compile-time after inlining) rows of x against one panel. */
static inline __attribute__((always_inline)) void gemm_tile(const int rows, const float *x, long ldx, long k,
                                                            const float *panel, float *y, long ldy,
                                                            const Finish *finish) {
    vec acc[GEMM_ROWS][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = splat(0.0f);
    for (long i = 0; i < k; i++) {
        __builtin_prefetch(panel + i * GEMM_COLS + FETCH_AHEAD);
        if (GEMM_COLS > 16) __builtin_prefetch(panel + i * GEMM_COLS + FETCH_AHEAD + 16);
        vec b0 = *(const vec *)(panel + i * GEMM_COLS);
        vec b1 = *(const vec *)(panel + i * GEMM_COLS + LANES);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            vec a = splat(x[r * ldx + i]);
            acc[r][0] += a * b0;
            acc[r][1] += a * b1;
        }
    }
    for (int r = 0; r < rows; r++) store_row(y + r * ldy, acc[r], finish);
}

static void gemm_rows(int rows, const float *x, long ldx, long k, const float *panel, float *y, long ldy,
                      const Finish *finish) {
#define CASE(R) \
    case R: gemm_tile(R, x, ldx, k, panel, y, ldy, finish); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if GEMM_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
#undef CASE
}

/* Rows per pass: their x stays in the second-level cache while all panels go by. */
#define PASS_BYTES (384 << 10)

void kvq_linear(const float *x, long m, long k, long ldx, const float *packed, long n, const float *bias, float *y,
                long ldy, int accumulate, int gated) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS;
    long pass = PASS_BYTES / (k * 4) / GEMM_ROWS * GEMM_ROWS;
    if (pass < GEMM_ROWS) pass = GEMM_ROWS;
    for (long m0 = 0; m0 < m; m0 += pass) {
        long m1 = m0 + pass < m ? m0 + pass : m;
        long tiles = (m1 - m0 + GEMM_ROWS - 1) / GEMM_ROWS;
#pragma omp parallel for schedule(static)
        for (long p = 0; p < panels; p++) {
            Finish finish = finish_of(p, n, bias, accumulate, gated);
            for (long t = 0; t < tiles; t++) {
                /* even tiles: 15 rows run as 8 + 7, not 14 + 1 */
                long r0 = m0 + (m1 - m0) * t / tiles, r1 = m0 + (m1 - m0) * (t + 1) / tiles;
                gemm_rows((int)(r1 - r0), x + r0 * ldx, ldx, k, packed + p * k * GEMM_COLS,
                          y + r0 * ldy + p * result_cols(gated), ldy, &finish);
            }
        }
    }
}
