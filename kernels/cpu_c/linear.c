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

static inline long pass_rows(long k) {
    long pass = PASS_BYTES / (k * 4) / GEMM_ROWS * GEMM_ROWS;
    return pass < GEMM_ROWS ? GEMM_ROWS : pass;
}

/* Rows m0 .. m1 - 1 against panel p. */
static void panel_rows(long m0, long m1, const float *x, long ldx, long k, const float *packed, long p, float *y,
                       long ldy, const Finish *finish) {
    long tiles = (m1 - m0 + GEMM_ROWS - 1) / GEMM_ROWS;
    for (long t = 0; t < tiles; t++) {
        /* even tiles: 15 rows run as 8 + 7, not 14 + 1 */
        long r0 = m0 + (m1 - m0) * t / tiles, r1 = m0 + (m1 - m0) * (t + 1) / tiles;
        gemm_rows((int)(r1 - r0), x + r0 * ldx, ldx, k, packed + p * k * GEMM_COLS,
                  y + r0 * ldy + p * result_cols(finish->gated), ldy, finish);
    }
}

/* Rows m0 .. m1 - 1 against panels p0 .. p1 - 1. */
static void panels_rows(long m0, long m1, long p0, long p1, const float *x, long ldx, long k, const float *packed,
                        long n, const float *bias, float *y, long ldy, int accumulate, int gated) {
    for (long p = p0; p < p1; p++) {
        Finish finish = finish_of(p, n, bias, accumulate, gated);
        panel_rows(m0, m1, x, ldx, k, packed, p, y, ldy, &finish);
    }
}

/* As many rows at a time as stay in the cache. */
static void passes_rows(long first, long end, long p0, long p1, const float *x, long ldx, long k, const float *packed,
                        long n, const float *bias, float *y, long ldy, int accumulate, int gated) {
    long pass = pass_rows(k), passes = (end - first + pass - 1) / pass;
    for (long i = 0; i < passes; i++)
        panels_rows(first + (end - first) * i / passes, first + (end - first) * (i + 1) / passes, p0, p1, x, ldx, k,
                    packed, n, bias, y, ldy, accumulate, gated);
}

void kvq_linear(const float *x, long m, long k, long ldx, const float *packed, long n, const float *bias, float *y,
                long ldy, int accumulate, int gated) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, threads = omp_get_max_threads(), shares = row_shares(m);
    long pieces = threads * PIECES_A_SHARE, pass = pass_rows(k);
    if (shares > 1) {
        Share taken[shares];
        memset(taken, 0, sizeof taken);
#pragma omp parallel
        {
            Taker taker = new_taker(taken, shares);
            for (long piece; (piece = take_piece(&taker)) >= 0;) {
                long share = piece / PIECES_A_SHARE, part = piece % PIECES_A_SHARE;
                long first = share_start(m, shares, share), end = share_start(m, shares, share + 1);
                passes_rows(first, end, share_start(panels, PIECES_A_SHARE, part),
                            share_start(panels, PIECES_A_SHARE, part + 1), x, ldx, k, packed, n, bias, y, ldy,
                            accumulate, gated);
            }
        }
        return;
    }
    for (long m0 = 0; m0 < m; m0 += pass) {
        long m1 = m0 + pass < m ? m0 + pass : m;
        Share taken[threads];
        memset(taken, 0, sizeof taken);
#pragma omp parallel
        {
            Taker taker = new_taker(taken, threads);
            for (long piece; (piece = take_piece(&taker)) >= 0;)
                panels_rows(m0, m1, share_start(panels, pieces, piece), share_start(panels, pieces, piece + 1), x, ldx,
                            k, packed, n, bias, y, ldy, accumulate, gated);
        }
    }
}

/* Layers of one shape: rows starts[g] .. starts[g + 1] - 1 of x by layer g, cut into several pieces a thread. */
void kvq_grouped_linear(const float *x, long k, long ldx, const int64_t *starts, long groups,
                        const float *const *packed, long n, const float *const *biases, float *y, long ldy, int gated) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, used[groups], num_used = 0;
    for (long g = 0; g < groups; g++)
        if (starts[g + 1] > starts[g]) used[num_used++] = g;
    long pieces = num_used ? 1 + 4 * PIECES_A_SHARE * omp_get_max_threads() / num_used : 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (long i = 0; i < num_used * pieces; i++) {
        long g = used[i / pieces], piece = i % pieces;
        passes_rows(starts[g], starts[g + 1], share_start(panels, pieces, piece), share_start(panels, pieces, piece + 1),
                    x, ldx, k, packed[g], n, biases[g], y, ldy, 0, gated);
    }
}
