#include "common.h"

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
