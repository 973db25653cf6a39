#include "amx.h"

/* ---- linear on bf16 tiles: the same product as kvq_linear, over the same packed weights ------------------------ */

#ifdef HAVE_AMX
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Ask the kernel for the tile registers; 1 when this process may use them. */
long kvq_amx_enable(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#define COL_TILES 2 /* a panel is two tiles wide */
#define CHUNK 4     /* steps of TILE_K whose right-hand tiles stay in the first-level cache */

/* `steps` steps of a panel in tiles: [step][column tile][part]; what lies beyond k is zero. */
static void cut_panel(const float *panel, long k, long steps, uint16_t *tiles) {
    for (long step = 0; step < steps; step++)
        for (int c = 0; c < COL_TILES; c++) {
            uint16_t *tile = tiles + (step * COL_TILES + c) * PARTS * TILE_WORDS;
            for (long pair = 0; pair < TILE_ROWS; pair++) {
                long i = step * TILE_K + 2 * pair;
                const float *at = panel + i * GEMM_COLS + c * LANES;
                __m512 even = i < k ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
                __m512 odd = i + 1 < k ? _mm512_loadu_ps(at + GEMM_COLS) : _mm512_setzero_ps();
                cut_pair(even, odd, tile + pair * TILE_K);
            }
        }
}

/* Sixteen rows of x (or fewer) in tiles: [k / 32][part]; rows that are not there are zero. */
static void cut_rows(const float *x, long ldx, long rows, long k, uint16_t *tiles) {
    for (long step = 0; step * TILE_K < k; step++) {
        long left = k - step * TILE_K;
        __mmask16 first = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
        __mmask16 second = left >= 32 ? 0xffff : left <= 16 ? 0 : (__mmask16)((1u << (left - 16)) - 1);
        for (long r = 0; r < TILE_ROWS; r++) {
            const float *at = x + r * ldx + step * TILE_K;
            __m512 a = r < rows ? _mm512_maskz_loadu_ps(first, at) : _mm512_setzero_ps();
            __m512 b = r < rows ? _mm512_maskz_loadu_ps(second, at + 16) : _mm512_setzero_ps();
            cut_row(a, b, tiles + step * PARTS * TILE_WORDS + r * TILE_K);
        }
    }
}

#define LEFT(part) (a + (step * PARTS + (part)) * TILE_WORDS)
#define LEFT_BELOW(part) (below + (step * PARTS + (part)) * TILE_WORDS)
#define RIGHT(col, part) (b + ((step * COL_TILES + (col)) * PARTS + (part)) * TILE_WORDS)
#define LOAD_LEFT(part)                    \
    _tile_loadd(4, LEFT(part), 64);        \
    if (two) _tile_loadd(5, LEFT_BELOW(part), 64)
#define LOAD_RIGHT(part)                   \
    _tile_loadd(6, RIGHT(0, part), 64);    \
    _tile_loadd(7, RIGHT(1, part), 64)
#define MULTIPLY                           \
    _tile_dpbf16ps(0, 4, 6);               \
    _tile_dpbf16ps(1, 4, 7);               \
    if (two) {                             \
        _tile_dpbf16ps(2, 5, 6);           \
        _tile_dpbf16ps(3, 5, 7);           \
    }

#define FOR_SUMS(WHAT)                                                    \
    WHAT(0, sums, GEMM_COLS * 4);                                         \
    WHAT(1, sums + LANES, GEMM_COLS * 4);                                 \
    if (two) {                                                            \
        WHAT(2, sums + TILE_ROWS * GEMM_COLS, GEMM_COLS * 4);             \
        WHAT(3, sums + TILE_ROWS * GEMM_COLS + LANES, GEMM_COLS * 4);     \
    }

/* Two tiles of rows (or one) against some steps of a panel, added to sums[32][GEMM_COLS]; the large product last.
 * Meanwhile `lines` cache lines a step are fetched from `ahead`. */
static inline __attribute__((always_inline)) void tile_block(const int two, const uint16_t *a, const uint16_t *below,
                                                             const uint16_t *b, long steps, float *sums,
                                                             const char *ahead, long lines) {
    memory_fence();
    FOR_SUMS(_tile_loadd)
    for (long step = 0; step < steps; step++) {
        for (long line = 0; line < lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        LOAD_LEFT(2); LOAD_RIGHT(0); MULTIPLY; /* a3 b1 */
        LOAD_LEFT(1); MULTIPLY;                /* a2 b1 */
        LOAD_RIGHT(1); MULTIPLY;               /* a2 b2 */
        LOAD_LEFT(0); MULTIPLY;                /* a1 b2 */
        LOAD_RIGHT(2); MULTIPLY;               /* a1 b3 */
        LOAD_RIGHT(0); MULTIPLY;               /* a1 b1 */
    }
    FOR_SUMS(_tile_stored)
    memory_fence();
}

/* Rows per pass: their tiles stay in the second-level cache. */
#define TILE_PASS_BYTES (3 << 19)

static long rows_per_pass(long m, long row_words) {
    long most = TILE_PASS_BYTES / (row_words * 2) + 1, pairs = (m + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    long passes = (pairs * 2 + most - 1) / most;
    return (pairs + passes - 1) / passes * 2; /* even ones */
}

/* One panel against the rows of a pass. */
static void panel_against(const uint16_t *tiles, long row_tiles, long row_words, const float *panel, long k, int last,
                          uint16_t *right, float *sums) {
    long steps = (k + TILE_K - 1) / TILE_K, blocks = (row_tiles + 1) / 2;
    memset(sums, 0, (size_t)blocks * 2 * TILE_ROWS * GEMM_COLS * 4);
    for (long first = 0; first < steps; first += CHUNK) {
        long now = steps - first < CHUNK ? steps - first : CHUNK;
        cut_panel(panel + first * TILE_K * GEMM_COLS, k - first * TILE_K, now, right);
        /* The blocks fetch what comes next, each its share. */
        long lines = last && first + now == steps ? 0 : (2 * TILE_K + blocks - 1) / blocks;
        const char *ahead = (const char *)(panel + (first + now) * TILE_K * GEMM_COLS);
        for (long t = 0; t < row_tiles; t += 2, ahead += now * lines * 64) {
            const uint16_t *a = tiles + t * row_words + first * PARTS * TILE_WORDS;
            float *at = sums + t * TILE_ROWS * GEMM_COLS;
            if (t + 1 < row_tiles)
                tile_block(1, a, a + row_words, right, now, at, ahead, lines);
            else
                tile_block(0, a, a, right, now, at, ahead, lines);
        }
    }
}

#define CHUNK_WORDS (CHUNK * COL_TILES * PARTS * TILE_WORDS)

/* Bytes of scratch that kvq_linear_amx wants, 64-byte aligned. */
long kvq_amx_scratch(long m, long k) {
    if (m == 0) return 0;
    long row_words = (k + TILE_K - 1) / TILE_K * PARTS * TILE_WORDS, all = (m + TILE_ROWS - 1) / TILE_ROWS;
    long sums = (rows_per_pass(m, row_words) + 1) * TILE_ROWS * GEMM_COLS * 4;
    return all * row_words * 2 + omp_get_max_threads() * (CHUNK_WORDS * 2 + sums);
}

/* As kvq_linear. */
void kvq_linear_amx(const float *x, long m, long k, long ldx, const float *packed, long n, const float *bias, float *y,
                    long ldy, int accumulate, uint16_t *tiles) {
    if (m == 0) return;
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, all = (m + TILE_ROWS - 1) / TILE_ROWS;
    long row_words = (k + TILE_K - 1) / TILE_K * PARTS * TILE_WORDS, pass = rows_per_pass(m, row_words);
    long sum_floats = (pass + 1) * TILE_ROWS * GEMM_COLS;
    char *scratch = (char *)(tiles + all * row_words);
#pragma omp parallel
    {
        use_tiles();
#pragma omp for schedule(static)
        for (long t = 0; t < all; t++)
            cut_rows(x + t * TILE_ROWS * ldx, ldx, m - t * TILE_ROWS, k, tiles + t * row_words);
        float *sums = (float *)(scratch + omp_get_thread_num() * (CHUNK_WORDS * 2 + sum_floats * 4));
        uint16_t *right = (uint16_t *)(sums + sum_floats);
        for (long t = 0; t < all; t += pass) {
            long row_tiles = all - t < pass ? all - t : pass, first = t * TILE_ROWS;
            long rows = m - first < row_tiles * TILE_ROWS ? m - first : row_tiles * TILE_ROWS;
#pragma omp for schedule(static) nowait
            for (long p = 0; p < panels; p++) {
                long cols = n - p * GEMM_COLS < GEMM_COLS ? n - p * GEMM_COLS : GEMM_COLS;
                panel_against(tiles + t * row_words, row_tiles, row_words, packed + p * k * GEMM_COLS, k,
                              p + 1 == panels, right, sums);
                for (long r = 0; r < rows; r++) {
                    vec v[2] = {load(sums + r * GEMM_COLS), load(sums + r * GEMM_COLS + LANES)};
                    store_row(y + (first + r) * ldy + p * GEMM_COLS, v, cols, bias ? bias + p * GEMM_COLS : 0,
                              accumulate);
                }
            }
        }
        _tile_release();
    }
}
#else
long kvq_amx_enable(void) { return 0; }
#endif
