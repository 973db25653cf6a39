/* The compiled CPU path: fp32 kernels over packed weights and paged KV. What all of its files share.
 *
 * Built at first use by kvq.kernels.cpu_build with -DBLOCK_SIZE=.., -DHEAD_DIM=.. (of queries and keys) and -DVALUE_DIM=..
 * and called through ctypes (which frees the interpreter lock). Plain C with GCC/Clang vector extensions; OpenMP only through `parallel` and
 * `parallel for`.
 *
 * Every output element is a function of its own row alone: sums run over k (or over key blocks) in one fixed order
 * whatever the number of rows, the tile a row falls into or the number of threads. So a token's logits are the same
 * to the last bit in any batch, any chunking and after any prefix hit.
 */
#ifndef KVQ_COMMON_H
#define KVQ_COMMON_H
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
/* Of a panel of weights: so many words of four bytes lie between what is used and what is fetched. */
#define FETCH_AHEAD 512

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

/* silu(gate) * up. */
static inline vec silu_mul(vec gate, vec up) {
    ivec negative = gate < splat(0.0f);
    vec e = exp_vec(-(vec)((ivec)gate & 0x7fffffff)); /* exp(-|gate|), never overflows */
    return gate * choose(negative, e, splat(1.0f)) / (splat(1.0f) + e) * up;
}

/* What happens to the sums of a product of rows of x and a panel. */
typedef struct {
    const float *bias; /* [GEMM_COLS], or none */
    long cols;         /* columns that the panel has */
    int accumulate;    /* add to what is there */
    int gated;         /* the panel is LANES columns of gates and LANES of what they gate: store silu_mul of them */
} Finish;

/* The end of a product: one row's sums of a panel go to `out`. */
static inline __attribute__((always_inline)) void store_row(float *out, const vec *v, const Finish *finish) {
    const float *bias = finish->bias;
    if (finish->gated) {
        store(out, bias ? silu_mul(v[0] + load(bias), v[1] + load(bias + LANES)) : silu_mul(v[0], v[1]));
    } else if (finish->cols == GEMM_COLS) {
        for (int h = 0; h < 2; h++) {
            vec sum = v[h];
            if (bias) sum += load(bias + h * LANES);
            if (finish->accumulate) sum += load(out + h * LANES);
            store(out + h * LANES, sum);
        }
    } else {
        float tail[GEMM_COLS];
        store(tail, v[0]);
        store(tail + LANES, v[1]);
        for (long j = 0; j < finish->cols; j++)
            out[j] = tail[j] + (bias ? bias[j] : 0.0f) + (finish->accumulate ? out[j] : 0.0f);
    }
}

/* The Finish of panel p, whose results start at column p * result_cols(gated) of y. */
static inline Finish finish_of(long p, long n, const float *bias, int accumulate, int gated) {
    long cols = n - p * GEMM_COLS < GEMM_COLS ? n - p * GEMM_COLS : GEMM_COLS;
    return (Finish){bias ? bias + p * GEMM_COLS : 0, cols, accumulate, gated};
}

static inline long result_cols(int gated) { return gated ? LANES : GEMM_COLS; }

/* Many rows are shared out between the threads row by row, in the same way by every pass, so that a thread finds in its
 * own cache what it wrote itself; few rows column by column, so that each weight is read once. */
#define ROWS_A_SHARE 28

#ifdef _OPENMP
int omp_get_max_threads(void);
int omp_get_thread_num(void);
#else
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
#endif

/* Into how many shares m rows are cut for a product; 1: cut its columns. */
static inline long row_shares(long m) {
    long threads = omp_get_max_threads();
    return m >= threads * ROWS_A_SHARE ? threads : 1;
}

/* As schedule(static) cuts them. */
static inline long share_start(long m, long shares, long s) {
    long rest = m % shares;
    return m / shares * s + (s < rest ? s : rest);
}

/* Work is cut into as many shares as there are threads, and each share into pieces. A thread takes the pieces of its own
 * share, then of those who are behind: kept from their processor by other work, or still asleep. */
#define PIECES_A_SHARE 8

typedef struct {
    long num_taken;
    char apart[56]; /* a cache line each */
} Share;

typedef struct {
    Share *shares;
    long num_shares, share, num_left;
} Taker;

static inline Taker new_taker(Share *shares, long num_shares) {
    return (Taker){shares, num_shares, omp_get_thread_num() % num_shares, num_shares};
}

/* The next piece, 0 .. num_shares * PIECES_A_SHARE - 1 in order of shares; -1: all are taken. */
static inline long take_piece(Taker *t) {
    while (t->num_left) {
        long piece = __atomic_fetch_add(&t->shares[t->share].num_taken, 1, __ATOMIC_RELAXED);
        if (piece < PIECES_A_SHARE) return t->share * PIECES_A_SHARE + piece;
        t->share = (t->share + 1) % t->num_shares;
        t->num_left--;
    }
    return -1;
}

/* Paged KV: of a block and kv head, K lies as [HEAD_DIM][BLOCK_SIZE] (so that one vector holds one dimension of many
 * keys) and V as [BLOCK_SIZE][VALUE_DIM]. */

#define KEY_FLOATS (BLOCK_SIZE * HEAD_DIM)
#define VALUE_FLOATS (BLOCK_SIZE * VALUE_DIM)

#endif
