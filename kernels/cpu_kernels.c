/* The compiled CPU path: fp32 kernels over packed weights and paged KV.
 *
 * Built at first use by kvq.kernels.cpu_build with -DBLOCK_SIZE=.. -DHEAD_DIM=.. and called through ctypes (which
 * frees the interpreter lock). Plain C with GCC/Clang vector extensions; OpenMP only through `parallel for`.
 *
 * Every output element is a function of its own row alone: sums run over k (or over key blocks) in one fixed order
 * whatever the number of rows, the tile a row falls into or the number of threads. So a token's logits are the same
 * to the last bit in any batch, any chunking and after any prefix hit.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define GEMM_ROWS 14 /* 14 x 2 accumulators of 32 registers */
#define ATT_ROWS 12 /* 12 x 2 accumulators */
#else
#define LANES 8
#define GEMM_ROWS 6 /* 6 x 2 accumulators of 16 registers */
#define ATT_ROWS 6 /* 6 x 2 accumulators */
#endif
#define GEMM_COLS (2 * LANES)

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float uvec __attribute__((vector_size(LANES * 4), aligned(4)));

static inline vec load(const float *p) { return *(const uvec *)p; }
static inline void store(float *p, vec v) { *(uvec *)p = v; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* exp, |relative error| < 2e-7 on [-87, 0]; below -87 it gives 0.
 * Range reduction by ln 2 in two parts and a degree-6 polynomial (Cephes' expf coefficients). */
static inline vec exp_vec(vec x) {
    const vec low = splat(-87.3f);
    ivec under = x < low;
    x = choose(under, low, x);
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * splat(1.44269504088896341f) + magic;
    vec n = shifted - magic;
    vec r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    ivec scale = ((ivec)shifted - (ivec)magic + 127) << 23;
    vec result = p * (vec)scale;
    return (vec)((ivec)result & ~under);
}

/* ---- linear: y[M, N] = x[M, K] W^T (+ bias) (+ y) ------------------------------------------------------------ */

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

/* The end of a product: one row's columns of a panel, with what is added to them. */
static inline __attribute__((always_inline)) void store_row(float *out, const vec *v, long cols, const float *bias,
                                                            int accumulate) {
    if (cols == GEMM_COLS) {
        for (int h = 0; h < 2; h++) {
            vec sum = v[h];
            if (bias) sum += load(bias + h * LANES);
            if (accumulate) sum += load(out + h * LANES);
            store(out + h * LANES, sum);
        }
    } else {
        float tail[GEMM_COLS];
        store(tail, v[0]);
        store(tail + LANES, v[1]);
        for (long j = 0; j < cols; j++)
            out[j] = tail[j] + (bias ? bias[j] : 0.0f) + (accumulate ? out[j] : 0.0f);
    }
}

/* One tile: `rows` (compile-time after inlining) rows of x against one panel. */
static inline __attribute__((always_inline)) void gemm_tile(const int rows, const float *x, long ldx, long k,
                                                            const float *panel, float *y, long ldy, long cols,
                                                            const float *bias, int accumulate) {
    vec acc[GEMM_ROWS][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = splat(0.0f);
    for (long i = 0; i < k; i++) {
        vec b0 = *(const vec *)(panel + i * GEMM_COLS);
        vec b1 = *(const vec *)(panel + i * GEMM_COLS + LANES);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            vec a = splat(x[r * ldx + i]);
            acc[r][0] += a * b0;
            acc[r][1] += a * b1;
        }
    }
    for (int r = 0; r < rows; r++) {
        store_row(y + r * ldy, acc[r], cols, bias, accumulate);
    }
}

static void gemm_rows(int rows, const float *x, long ldx, long k, const float *panel, float *y, long ldy, long cols,
                      const float *bias, int accumulate) {
#define CASE(R) \
    case R: gemm_tile(R, x, ldx, k, panel, y, ldy, cols, bias, accumulate); break;
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
                long ldy, int accumulate) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS;
    long pass = PASS_BYTES / (k * 4) / GEMM_ROWS * GEMM_ROWS;
    if (pass < GEMM_ROWS) pass = GEMM_ROWS;
    for (long m0 = 0; m0 < m; m0 += pass) {
        long m1 = m0 + pass < m ? m0 + pass : m;
        long tiles = (m1 - m0 + GEMM_ROWS - 1) / GEMM_ROWS;
#pragma omp parallel for schedule(static)
        for (long p = 0; p < panels; p++) {
            long cols = n - p * GEMM_COLS < GEMM_COLS ? n - p * GEMM_COLS : GEMM_COLS;
            for (long t = 0; t < tiles; t++) {
                /* even tiles: 15 rows run as 8 + 7, not 14 + 1 */
                long r0 = m0 + (m1 - m0) * t / tiles, r1 = m0 + (m1 - m0) * (t + 1) / tiles;
                gemm_rows((int)(r1 - r0), x + r0 * ldx, ldx, k, packed + p * k * GEMM_COLS,
                          y + r0 * ldy + p * GEMM_COLS, ldy, cols, bias ? bias + p * GEMM_COLS : 0, accumulate);
            }
        }
    }
}

/* ---- int8 linear: weights int8 per output column, activations int8 per row, both symmetric ---------------------- */

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define INT8_KIND 2
typedef __m512i bytes;
#elif defined(__AVX2__)
#define INT8_KIND 1
typedef __m256i bytes;
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

static inline __attribute__((always_inline)) bytes dot4(bytes acc, int32_t a, bytes b) {
#if INT8_KIND == 2
    return _mm512_dpbusd_epi32(acc, b, _mm512_set1_epi32(a));
#else
    __m256i va = _mm256_set1_epi32(a);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(va), _mm256_sign_epi8(b, va));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

static inline __attribute__((always_inline)) void int8_tile(const int rows, const int8_t *q, const float *row_scales,
                                                            const int32_t *row_sums, long quads, const uint8_t *panel,
                                                            const float *scales, float *y, long ldy, long cols,
                                                            const float *bias, int accumulate) {
    bytes acc[GEMM_ROWS][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = (bytes){0};
    for (long i = 0; i < quads; i++) {
        bytes b0 = *(const bytes *)(panel + i * GEMM_COLS * 4); /* panels are aligned */
        bytes b1 = *(const bytes *)(panel + i * GEMM_COLS * 4 + LANES * 4);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            int32_t a;
            memcpy(&a, q + (r * quads + i) * 4, 4);
            acc[r][0] = dot4(acc[r][0], a, b0);
            acc[r][1] = dot4(acc[r][1], a, b1);
        }
    }
    for (int r = 0; r < rows; r++) {
        float *out = y + r * ldy;
        vec v[2];
        for (int h = 0; h < 2; h++) {
            ivec exact = (ivec)acc[r][h] - WEIGHT_OFFSET * row_sums[r];
            v[h] = __builtin_convertvector(exact, vec) * (splat(row_scales[r]) * load(scales + h * LANES));
        }
        store_row(out, v, cols, bias, accumulate);
    }
}

static void int8_rows(int rows, const int8_t *q, const float *row_scales, const int32_t *row_sums, long quads,
                      const uint8_t *panel, const float *scales, float *y, long ldy, long cols, const float *bias,
                      int accumulate) {
#define CASE(R) \
    case R: int8_tile(R, q, row_scales, row_sums, quads, panel, scales, y, ldy, cols, bias, accumulate); break;
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
                     int accumulate) {
    long panels = (n + GEMM_COLS - 1) / GEMM_COLS, quads = (k + 3) / 4;
    long tiles = (m + GEMM_ROWS - 1) / GEMM_ROWS;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) {
        long cols = n - p * GEMM_COLS < GEMM_COLS ? n - p * GEMM_COLS : GEMM_COLS;
        for (long t = 0; t < tiles; t++) {
            long r0 = m * t / tiles, r1 = m * (t + 1) / tiles;
            int8_rows((int)(r1 - r0), q + r0 * quads * 4, row_scales + r0, row_sums + r0, quads,
                      packed + p * quads * GEMM_COLS * 4, scales + p * GEMM_COLS, y + r0 * ldy + p * GEMM_COLS, ldy,
                      cols, bias ? bias + p * GEMM_COLS : 0, accumulate);
        }
    }
}
#endif

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
        for (; i + LANES <= d; i += LANES) {
            vec g = load(gate + i);
            ivec negative = g < splat(0.0f);
            vec magnitude = (vec)((ivec)g & 0x7fffffff);
            vec e = exp_vec(-magnitude); /* exp(-|g|), never overflows */
            store(out + i, g * choose(negative, e, splat(1.0f)) / (splat(1.0f) + e) * load(up + i));
        }
        for (; i < d; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* ---- drawing tokens: Gumbel-max over what top-k, top-p and min-p leave --------------------------------------------- */

static inline uint64_t mix(uint64_t x) { /* SplitMix64's finaliser */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline double gumbel(uint64_t key, uint64_t token) {
    double uniform = ((double)(mix(token ^ key) >> 11) + 0.5) / 9007199254740992.0;
    return -log(-log(uniform));
}

#define GUMBEL_MAX 37.5 /* of 53 bits: no noise is larger */

typedef struct {
    float p; /* not normalised: 1 for the largest logit */
    int32_t token;
} Candidate;

static int by_probability(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->p != y->p) return x->p < y->p ? 1 : -1;
    return x->token - y->token;
}

/* Value of the k-th largest p: a heap of the k largest seen, the smallest of them on top. */
static float kth_largest(const float *p, long n, long k) {
    float *heap = malloc((size_t)k * sizeof(float));
    long size = 0;
    for (long i = 0; i < n; i++) {
        long at;
        if (size < k) {
            for (at = size++; at > 0 && heap[(at - 1) / 2] > p[i]; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
        } else {
            if (p[i] <= heap[0]) continue;
            for (at = 0; 2 * at + 1 < k;) {
                long child = 2 * at + 1;
                if (child + 1 < k && heap[child + 1] < heap[child]) child++;
                if (heap[child] >= p[i]) break;
                heap[at] = heap[child];
                at = child;
            }
        }
        heap[at] = p[i];
    }
    float result = heap[0];
    free(heap);
    return result;
}

static long candidates_of(const float *logits, long vocab, float inverse, long top_k, float top_p, float min_p,
                          Candidate *out) {
    float max = -INFINITY;
    for (long i = 0; i < vocab; i++) max = logits[i] > max ? logits[i] : max;
    float *p = malloc((size_t)vocab * sizeof(float));
    vec sums = splat(0.0f);
    double total = 0.0;
    long i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        vec e = exp_vec((load(logits + i) - splat(max)) * splat(inverse));
        store(p + i, e);
        sums += e;
    }
    for (; i < vocab; i++) total += p[i] = expf((logits[i] - max) * inverse);
    for (int j = 0; j < LANES; j++) total += sums[j];
    /* The tokens below (1 - top_p) / vocab of the total weigh less than 1 - top_p together: none is in the nucleus. */
    float least = (float)((1.0 - top_p) * total / (double)vocab);
    if (top_k < vocab) least = kth_largest(p, vocab, top_k);
    if (min_p > least) least = min_p;
    long n = 0;
    for (i = 0; i < vocab; i++)
        if (p[i] >= least) out[n++] = (Candidate){p[i], (int32_t)i};
    free(p);
    qsort(out, (size_t)n, sizeof(Candidate), by_probability);
    if (n > top_k) n = top_k;
    if (top_k < vocab) {
        total = 0.0;
        for (i = 0; i < n; i++) total += out[i].p;
    }
    double before = 0.0;
    for (i = 0; i < n && (i == 0 || before < top_p * total); i++) before += out[i].p;
    return i;
}

static int64_t draw(const float *logits, long vocab, float temperature, long top_k, float top_p, float min_p,
                    uint64_t key) {
    double inverse = 1.0 / temperature, best = -INFINITY;
    int64_t token = 0;
    if (top_k >= vocab && top_p >= 1.0f && min_p == 0.0f) {
        for (long i = 0; i < vocab; i++) {
            double scaled = logits[i] * inverse;
            if (scaled + GUMBEL_MAX <= best) continue;
            scaled += gumbel(key, (uint64_t)i);
            if (scaled > best) best = scaled, token = i;
        }
        return token;
    }
    Candidate *kept = malloc((size_t)vocab * sizeof(Candidate));
    long n = candidates_of(logits, vocab, (float)inverse, top_k, top_p, min_p, kept);
    for (long i = 0; i < n; i++) {
        double scaled = logits[kept[i].token] * inverse + gumbel(key, (uint64_t)kept[i].token);
        if (scaled > best) best = scaled, token = kept[i].token;
    }
    free(kept);
    return token;
}

/* One token a draw, from logits[rows[i]]; top_k is vocab where all may be drawn. */
void kvq_draw(const float *logits, long vocab, long draws, const int64_t *rows, const float *temperature,
              const int64_t *top_k, const float *top_p, const float *min_p, const uint64_t *keys, int64_t *tokens) {
#pragma omp parallel for schedule(dynamic, 1)
    for (long i = 0; i < draws; i++)
        tokens[i] = draw(logits + rows[i] * vocab, vocab, temperature[i], top_k[i], top_p[i], min_p[i], keys[i]);
}

/* ---- paged KV -------------------------------------------------------------------------------------------------
 * Of a block and kv head, K lies as [HEAD_DIM][BLOCK_SIZE] (so that one vector holds one dimension of many keys) and
 * V as [BLOCK_SIZE][HEAD_DIM]. */

#define BLOCK_FLOATS (BLOCK_SIZE * HEAD_DIM)

void kvq_write_kv(const float *key, long key_stride, const float *value, long value_stride, long tokens, long kv_heads,
                  const int64_t *slots, float *key_cache, float *value_cache) {
#pragma omp parallel for schedule(static) if (tokens > 16)
    for (long t = 0; t < tokens; t++) {
        long block = slots[t] / BLOCK_SIZE, offset = slots[t] % BLOCK_SIZE;
        for (long h = 0; h < kv_heads; h++) {
            const float *k = key + t * key_stride + h * HEAD_DIM, *v = value + t * value_stride + h * HEAD_DIM;
            float *kd = key_cache + (block * kv_heads + h) * BLOCK_FLOATS;
            float *vd = value_cache + (block * kv_heads + h) * BLOCK_FLOATS + offset * HEAD_DIM;
            for (long d = 0; d < HEAD_DIM; d++) kd[d * BLOCK_SIZE + offset] = k[d];
            memcpy(vd, v, HEAD_DIM * sizeof(float));
        }
    }
}

/* Rotate q and k in place (GPT-NeoX halves: cos and sin are [tokens, HEAD_DIM]). */
void kvq_rotary(float *x, long stride, long tokens, long heads, const float *cosines, const float *sines) {
    const long half = HEAD_DIM / 2;
#pragma omp parallel for schedule(static) if (tokens > 16)
    for (long t = 0; t < tokens; t++) {
        const float *c = cosines + t * HEAD_DIM, *s = sines + t * HEAD_DIM;
        for (long h = 0; h < heads; h++) {
            float *v = x + t * stride + h * HEAD_DIM;
            for (long d = 0; d < half; d++) {
                float a = v[d], b = v[d + half];
                v[d] = a * c[d] - b * s[d];
                v[d + half] = b * c[d + half] + a * s[d + half];
            }
        }
    }
}

/* copies: n x (src block, dst block, tokens), done in order. */
void kvq_copy_blocks(const int32_t *copies, long n, long kv_heads, float *key_cache, float *value_cache) {
#pragma omp parallel for schedule(static) if (n > 4)
    for (long h = 0; h < kv_heads; h++)
        for (long i = 0; i < n; i++) {
            long src = copies[3 * i], dst = copies[3 * i + 1], tokens = copies[3 * i + 2];
            float *ks = key_cache + (src * kv_heads + h) * BLOCK_FLOATS, *kd = key_cache + (dst * kv_heads + h) * BLOCK_FLOATS;
            for (long d = 0; d < HEAD_DIM; d++)
                memcpy(kd + d * BLOCK_SIZE, ks + d * BLOCK_SIZE, tokens * sizeof(float));
            memcpy(value_cache + (dst * kv_heads + h) * BLOCK_FLOATS, value_cache + (src * kv_heads + h) * BLOCK_FLOATS,
                   tokens * HEAD_DIM * sizeof(float));
        }
}

/* ---- attention: online softmax over key blocks (FlashAttention, arXiv 2205.14135, algorithm 1) ------------------ */

/* Keys are taken KEYS at a time, never across a block. */
#if BLOCK_SIZE >= LANES
#define KEYS LANES
#else
#define KEYS BLOCK_SIZE
#endif

/* One query head of one token on its way through the keys. */
typedef struct {
    float q[HEAD_DIM];       /* scaled */
    float acc[HEAD_DIM];
    float sums[KEYS];        /* of the probabilities, by place in the vector; added up at the end */
    const int32_t *blocks;   /* block table of its sequence */
    float *out;              /* [HEAD_DIM] */
    long first, last;        /* positions of the keys it sees: first .. last - 1 */
    float max;
} Row;

typedef struct {
    float softcap; /* 0: none */
} Options;

/* Scores of KEYS keys for `rows` neighbouring rows: s[r][key] = sum over even d, plus sum over odd d. */
static inline __attribute__((always_inline)) void scores(const int rows, const Row *row, const float *k,
                                                         float s[][KEYS]) {
#if BLOCK_SIZE >= LANES
    vec even[ATT_ROWS], odd[ATT_ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = splat(0.0f);
    for (long d = 0; d < HEAD_DIM; d += 2) {
        vec k0 = load(k + d * BLOCK_SIZE), k1 = load(k + (d + 1) * BLOCK_SIZE);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            even[r] += splat(row[r].q[d]) * k0;
            odd[r] += splat(row[r].q[d + 1]) * k1;
        }
    }
    for (int r = 0; r < rows; r++) store(s[r], even[r] + odd[r]);
#else
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < KEYS; j++) s[r][j] = 0.0f;
        for (long d = 0; d < HEAD_DIM; d++)
            for (int j = 0; j < KEYS; j++) s[r][j] = fmaf(row[r].q[d], k[d * BLOCK_SIZE + j], s[r][j]);
    }
#endif
}

static inline float largest(const float *s) {
#if BLOCK_SIZE >= LANES
    vec v = load(s), w;
#if LANES == 16
    w = __builtin_shuffle(v, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v = choose(v > w, v, w);
    w = __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v = choose(v > w, v, w);
#else
    w = __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3});
    v = choose(v > w, v, w);
#endif
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
#else
    float max = s[0];
    for (int j = 1; j < KEYS; j++) max = s[j] > max ? s[j] : max;
    return max;
#endif
}

static inline int any_above(const float *s, float bound) {
#if BLOCK_SIZE >= LANES && defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)load(s), (__m512)splat(bound), _CMP_GT_OQ) != 0;
#elif BLOCK_SIZE >= LANES && defined(__AVX__)
    return _mm256_movemask_ps((__m256)(load(s) > splat(bound))) != 0;
#else
    return largest(s) > bound;
#endif
}

/* Fold the scores of one row into its running maximum and sums; s becomes probabilities. */
static inline void softmax_update(Row *row, float *s, long position, const Options *options) {
    if (options->softcap != 0.0f)
        for (int j = 0; j < KEYS; j++) s[j] = options->softcap * tanhf(s[j] / options->softcap);
    if (position < row->first || position + KEYS > row->last)
        for (int j = 0; j < KEYS; j++)
            if (position + j < row->first || position + j >= row->last) s[j] = -INFINITY;
    if (any_above(s, row->max)) {
        float max = largest(s);
        float scale = row->max == -INFINITY ? 0.0f : expf(row->max - max);
        for (int j = 0; j < KEYS; j++) row->sums[j] *= scale;
        for (long d = 0; d < HEAD_DIM; d++) row->acc[d] *= scale;
        row->max = max;
    } else if (row->max == -INFINITY) { /* it sees none of these keys and none before */
        for (int j = 0; j < KEYS; j++) s[j] = 0.0f;
        return;
    }
#if BLOCK_SIZE >= LANES
    vec p = exp_vec(load(s) - splat(row->max));
    store(s, p);
    store(row->sums, load(row->sums) + p);
#else
    for (int j = 0; j < KEYS; j++) {
        s[j] = s[j] == -INFINITY ? 0.0f : expf(s[j] - row->max);
        row->sums[j] += s[j];
    }
#endif
}

/* acc[r] += p[r][key] * v[key], keys in order; keys no row sees are not read (they may hold anything). */
static inline __attribute__((always_inline)) void weighted_values(const int rows, const int vectors, Row *row,
                                                                  float p[][KEYS], const float *v, long keys) {
    long d = 0;
    for (; d + vectors * LANES <= HEAD_DIM; d += vectors * LANES) {
        vec acc[ATT_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) acc[r][c] = load(row[r].acc + d + c * LANES);
        for (long j = 0; j < keys; j++) {
            vec vj[4];
            for (int c = 0; c < vectors; c++) vj[c] = load(v + j * HEAD_DIM + d + c * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vec w = splat(p[r][j]);
#pragma GCC unroll 4
                for (int c = 0; c < vectors; c++) acc[r][c] += w * vj[c];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) store(row[r].acc + d + c * LANES, acc[r][c]);
    }
    for (; d < HEAD_DIM; d++)
        for (int r = 0; r < rows; r++) {
            float acc = row[r].acc[d];
            for (long j = 0; j < keys; j++) acc = fmaf(p[r][j], v[j * HEAD_DIM + d], acc);
            row[r].acc[d] = acc;
        }
}

static inline __attribute__((always_inline)) void attend(const int rows, Row *row, const float *k, const float *v,
                                                         long position, const Options *options) {
    for (long offset = 0; offset < BLOCK_SIZE; offset += KEYS) {
        long keys = 0, at = position + offset;
        for (int r = 0; r < rows; r++) keys = row[r].last - at > keys ? row[r].last - at : keys;
        if (keys <= 0) return;
        if (keys > KEYS) keys = KEYS;
        float s[ATT_ROWS][KEYS];
        scores(rows, row, k + offset, s);
        for (int r = 0; r < rows; r++) softmax_update(&row[r], s[r], at, options);
        weighted_values(rows, rows > ATT_ROWS / 2 ? 2 : 4, row, s, v + offset * HEAD_DIM, keys);
    }
}

static void attend_rows(long rows, Row *row, const float *k, const float *v, long position, const Options *options) {
    while (rows > 0) {
        int now = rows < ATT_ROWS ? (int)rows : ATT_ROWS;
#define CASE(R) \
    case R: attend(R, row, k, v, position, options); break;
        switch (now) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ATT_ROWS > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
#undef CASE
        row += now;
        rows -= now;
    }
}

/* Rows per task: enough to share each key block, few enough that their state stays in the first-level cache. */
#define TASK_ROWS 64

static inline int sees(const Row *row, long position) {
    return row->last > position && row->first < position + BLOCK_SIZE;
}

/* One kv head of some tokens (order[]: token indices; tokens that share blocks are neighbours). */
static void attend_task(const float *query, long query_stride, long num_tokens, const int32_t *order,
                        const int32_t *seq_of_token, const int32_t *positions, const int32_t *block_tables,
                        long max_blocks, long kv_heads, long group, long kv_head, const float *key_cache,
                        const float *value_cache, float scale, long window, const float *sinks, const Options *options,
                        float *out) {
    Row rows[TASK_ROWS];
    long heads = kv_heads * group, num_rows = 0, num_blocks = 0;
    for (long i = 0; i < num_tokens; i++) {
        long token = order[i];
        for (long g = 0; g < group; g++) {
            long head = kv_head * group + g;
            Row *row = &rows[num_rows];
            const float *q = query + token * query_stride + head * HEAD_DIM;
            for (long d = 0; d < HEAD_DIM; d++) row->q[d] = q[d] * scale;
            row->blocks = block_tables + (long)seq_of_token[token] * max_blocks;
            row->out = out + (token * heads + head) * HEAD_DIM;
            row->last = positions[token] + 1;
            row->first = window > 0 && row->last > window ? row->last - window : 0;
            row->max = sinks ? sinks[head] : -INFINITY;
            memset(row->sums, 0, sizeof(row->sums));
            row->sums[0] = sinks ? 1.0f : 0.0f;
            memset(row->acc, 0, sizeof(row->acc));
            long blocks = (row->last + BLOCK_SIZE - 1) / BLOCK_SIZE;
            num_blocks = blocks > num_blocks ? blocks : num_blocks;
            num_rows++;
        }
    }
    for (long b = 0; b < num_blocks; b++) {
        long position = b * BLOCK_SIZE;
        for (long start = 0; start < num_rows;) {
            if (!sees(&rows[start], position)) {
                start++;
                continue;
            }
            int32_t block = rows[start].blocks[b];
            long end = start + 1;
            while (end < num_rows && sees(&rows[end], position) && rows[end].blocks[b] == block) end++;
            long at = ((long)block * kv_heads + kv_head) * BLOCK_FLOATS;
            attend_rows(end - start, &rows[start], key_cache + at, value_cache + at, position, options);
            start = end;
        }
    }
    for (long r = 0; r < num_rows; r++) {
        float sum = 0.0f;
        for (int j = 0; j < KEYS; j++) sum += rows[r].sums[j];
        float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        for (long d = 0; d < HEAD_DIM; d++) rows[r].out[d] = rows[r].acc[d] * inverse;
    }
}

/* query [tokens, kv_heads * group, HEAD_DIM] with row stride query_stride -> out, contiguous.
 * Tasks go kv head by kv head, so that blocks shared by neighbours stay in the second-level cache. */
void kvq_attention(const float *query, long query_stride, long tokens, const int32_t *order,
                   const int32_t *seq_of_token, const int32_t *positions, const int32_t *block_tables, long max_blocks,
                   long kv_heads, long group, const float *key_cache, const float *value_cache, float scale,
                   long window, float softcap, const float *sinks, float *out) {
    Options options = {softcap};
    long per_task = TASK_ROWS / group; /* the caller keeps group <= TASK_ROWS */
    long tasks = (tokens + per_task - 1) / per_task;
#pragma omp parallel for schedule(dynamic, 1)
    for (long task = 0; task < tasks * kv_heads; task++) {
        long first = task % tasks * per_task;
        long n = tokens - first < per_task ? tokens - first : per_task;
        attend_task(query, query_stride, n, order + first, seq_of_token, positions, block_tables, max_blocks, kv_heads,
                    group, task / tasks, key_cache, value_cache, scale, window, sinks, &options, out);
    }
}
