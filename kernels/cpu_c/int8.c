#include "common.h"

/* ---- int8 linear: weights int8 per output column, activations int8 per row, both symmetric ---------------------- */

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define INT8_KIND 2
#elif defined(__AVX2__)
#define INT8_KIND 1
#else
#define INT8_KIND 0
#endif

/* 2: four products an instruction and lane (VNNI); 1: by 16-bit pairs (AVX2); 0: not offered. */
long kvq_int8_kind(void) { return INT8_KIND; }

#if INT8_KIND
/* VNNI multiplies unsigned by signed bytes: the weights are kept offset by 128, and 128 times the sum of the row's
 * activations is taken off at the end. The activations can then be broadcast from memory as they are. */
#define WEIGHT_OFFSET (INT8_KIND == 2 ? 128 : 0)

/* W [N, K] -> packed[panel][k / 4][GEMM_COLS][4] with K padded to fours; scales by column. */
void kvq_pack_int8(const float *w, long n, long k, uint8_t *packed, float *scales) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, quads = (k + 3) / 4;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++)
        for (long j = 0; j < GEMM_COLS; j++) {
            long col = p * GEMM_COLS + j;
            float largest = 0.0f;
            for (long i = 0; i < k && col < n; i++) {
                float a = fabsf(w[col * k + i]);
                largest = a > largest ? a : largest;
            }
            float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
            for (long i = 0; i < quads * 4; i++) {
                long q = col < n && i < k ? lrintf(w[col * k + i] * inverse) : 0;
                packed[((p * quads + i / 4) * GEMM_COLS + j) * 4 + i % 4] = (uint8_t)(q + WEIGHT_OFFSET);
            }
            scales[col] = scale;
        }
}

/* x [m, k] -> q [m, quads * 4], and of each row the scale and the sum of q. */
void kvq_quantize_rows(const float *x, long m, long k, long ldx, int8_t *q, float *scales, int32_t *sums) {
    long padded = (k + 3) / 4 * 4;
#pragma omp parallel for schedule(static) if (m > 4)
    for (long r = 0; r < m; r++) {
        const float *in = x + r * ldx;
        vec largest = splat(0.0f);
        long i = 0;
        float rest = 0.0f;
        for (; i + LANES <= k; i += LANES) {
            vec a = (vec)((ivec)load(in + i) & 0x7fffffff);
            largest = choose(a > largest, a, largest);
        }
        for (; i < k; i++) rest = fabsf(in[i]) > rest ? fabsf(in[i]) : rest;
        for (int j = 0; j < LANES; j++) rest = largest[j] > rest ? largest[j] : rest;
        float inverse = rest > 0.0f ? 127.0f / rest : 0.0f;
        const float magic = 12582912.0f; /* adding it rounds to an integer in the low bits */
        int32_t sum = 0;
        i = 0;
#if INT8_KIND == 2
        __m512i total = _mm512_setzero_si512();
        for (; i + LANES <= k; i += LANES) {
            __m512i v = _mm512_cvtps_epi32((__m512)(load(in + i) * splat(inverse)));
            total = _mm512_add_epi32(total, v);
            _mm_storeu_si128((__m128i *)(q + r * padded + i), _mm512_cvtepi32_epi8(v));
        }
        sum = _mm512_reduce_add_epi32(total);
#endif
        for (; i < k; i++) {
            union { float f; int32_t i; } u = {in[i] * inverse + magic};
            q[r * padded + i] = (int8_t)u.i;
            sum += (int8_t)u.i;
        }
        for (; i < padded; i++) q[r * padded + i] = 0;
        scales[r] = rest / 127.0f;
        sums[r] = sum;
    }
}

static inline __attribute__((always_inline)) ivec dot4(ivec acc, int32_t a, ivec b) {
#if INT8_KIND == 2
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)b, _mm512_set1_epi32(a));
#else
    __m256i va = _mm256_set1_epi32(a);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(va), _mm256_sign_epi8((__m256i)b, va));
    return acc + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

static inline __attribute__((always_inline)) void int8_tile(const int rows, const int8_t *q, const float *row_scales,
                                                            const int32_t *row_sums, long quads, const uint8_t *panel,
                                                            const float *scales, float *y, long ldy,
                                                            const Finish *finish) {
    /* Indexed by constants alone, or GCC keeps it in memory through the whole loop. */
    ivec acc[GEMM_ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = (ivec){0};
    for (long i = 0; i < quads; i++) {
        __builtin_prefetch(panel + i * GEMM_COLS * 4 + FETCH_AHEAD * 4);
        if (GEMM_COLS > 16) __builtin_prefetch(panel + i * GEMM_COLS * 4 + FETCH_AHEAD * 4 + 64);
        ivec b0 = *(const ivec *)(panel + i * GEMM_COLS * 4); /* panels are aligned */
        ivec b1 = *(const ivec *)(panel + i * GEMM_COLS * 4 + LANES * 4);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            int32_t a;
            memcpy(&a, q + (r * quads + i) * 4, 4);
            acc[r][0] = dot4(acc[r][0], a, b0);
            acc[r][1] = dot4(acc[r][1], a, b1);
        }
    }
    ivec sums[GEMM_ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
    for (int r = 0; r < rows; r++) {
        vec v[2];
        for (int h = 0; h < 2; h++) {
            ivec exact = sums[r][h] - WEIGHT_OFFSET * row_sums[r];
            v[h] = __builtin_convertvector(exact, vec) * (splat(row_scales[r]) * load(scales + h * LANES));
        }
        store_row(y + r * ldy, v, finish);
    }
}

static void int8_rows(int rows, const int8_t *q, const float *row_scales, const int32_t *row_sums, long quads,
                      const uint8_t *panel, const float *scales, float *y, long ldy, const Finish *finish) {
#define CASE(R) \
    case R: int8_tile(R, q, row_scales, row_sums, quads, panel, scales, y, ldy, finish); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if GEMM_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
#undef CASE
}

void kvq_linear_int8(const int8_t *q, const float *row_scales, const int32_t *row_sums, long m, long k,
                     const uint8_t *packed, const float *scales, long n, const float *bias, float *y, long ldy,
                     int accumulate, int gated) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, quads = (k + 3) / 4, threads = omp_get_max_threads();
    long tiles = (m + GEMM_ROWS - 1) / GEMM_ROWS, pieces = threads * PIECES_A_SHARE;
    Share taken[threads];
    memset(taken, 0, sizeof taken);
#pragma omp parallel
    {
        Taker taker = new_taker(taken, threads);
        for (long piece; (piece = take_piece(&taker)) >= 0;)
            for (long p = share_start(panels, pieces, piece); p < share_start(panels, pieces, piece + 1); p++) {
                Finish finish = finish_of(p, n, bias, accumulate, gated);
                for (long t = 0; t < tiles; t++) {
                    long r0 = m * t / tiles, r1 = m * (t + 1) / tiles;
                    int8_rows((int)(r1 - r0), q + r0 * quads * 4, row_scales + r0, row_sums + r0, quads,
                              packed + p * quads * GEMM_COLS * 4, scales + p * GEMM_COLS,
                              y + r0 * ldy + p * result_cols(gated), ldy, &finish);
                }
            }
    }
}
#endif
