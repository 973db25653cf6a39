#include "common.h"

/* ---- drawing tokens: Gumbel-max over what top-k, top-p and min-p leave --------------------------------------------- */

static inline uint64_t mix(uint64_t x) { /* SplitMix64's finaliser */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline double uniform(uint64_t key, uint64_t token) { /* between 0 and 1 */
    return ((double)(mix(token ^ key) >> 11) + 0.5) / 9007199254740992.0;
}

static inline double gumbel(double uniform) { return -log(-log(uniform)); }

typedef struct {
    float p; /* not normalised: 1 for the largest logit */
    int32_t token;
} Candidate;

static int by_probability(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->p != y->p) return x->p < y->p ? 1 : -1;
    return x->token - y->token;
}

/* NaNs count for nothing. */
static float max_of(const float *x, long n) {
    vec found = splat(-INFINITY);
    float max = -INFINITY;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v = load(x + i);
        found = choose(v > found, v, found);
    }
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int j = 0; j < LANES; j++) max = found[j] > max ? found[j] : max;
    return max;
}

/* Whether none of LANES numbers is as large as `bound`. */
static inline int none_reaches(vec v, float bound) {
    ivec reach = v >= splat(bound);
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)reach, (__m512i)reach) == 0;
#elif defined(__AVX__)
    return _mm256_testz_si256((__m256i)reach, (__m256i)reach);
#else
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= reach[j];
    return !any;
#endif
}

/* Value of the k-th largest p: a heap of the k largest seen, the smallest of them on top. */
static float kth_largest(const float *p, long n, long k) {
    float *heap = malloc((size_t)k * sizeof(float));
    long size = 0;
    for (long i = 0; i < n; i++) {
        while (size == k && i + LANES <= n && none_reaches(load(p + i), heap[0])) i += LANES;
        if (i == n) break;
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

/* By the first bits of a p in [0, 1], so that a class spans an eighth of its values. */
#define CLASS_SHIFT 20
#define CLASSES ((0x3f800000 >> CLASS_SHIFT) + 1)

static inline int32_t class_of(float p) {
    union { float f; int32_t i; } u = {p};
    return u.i >> CLASS_SHIFT;
}

/* Drop from n candidates, in any order, what is surely not among the first that hold `mass`: few are left to sort. */
static long drop_tail(Candidate *c, long n, double mass) {
    double masses[CLASSES] = {0}, held = 0.0;
    for (long i = 0; i < n; i++) masses[class_of(c[i].p)] += c[i].p;
    int32_t last = CLASSES - 1;
    while (last > 0 && (held += masses[last]) < mass * (1.0 + 1e-9)) last--;
    long kept = 0;
    for (long i = 0; i < n; i++)
        if (class_of(c[i].p) >= last) c[kept++] = c[i];
    return kept;
}

static long candidates_of(const float *logits, long vocab, float inverse, long top_k, float top_p, float min_p,
                          Candidate *out) {
    float max = max_of(logits, vocab);
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
    for (i = 0; i < vocab; i++) {
        while (i + LANES <= vocab && none_reaches(load(p + i), least)) i += LANES;
        if (i < vocab && p[i] >= least) out[n++] = (Candidate){p[i], (int32_t)i};
    }
    free(p);
    if (top_k >= vocab) n = drop_tail(out, n, top_p * total);
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

typedef uint64_t longs __attribute__((vector_size(LANES * 4)));
typedef int32_t half_ints __attribute__((vector_size(LANES * 2)));
typedef float half_floats __attribute__((vector_size(LANES * 2)));

/* Lower bounds of 1 - uniform(key, first), 1 - uniform(key, first + 1), ... */
static inline void least_complements(uint64_t key, uint64_t first, float *out) {
    longs token;
    for (int j = 0; j < LANES / 2; j++) token[j] = first + (uint64_t)j;
    for (int h = 0; h < 2; h++, token += LANES / 2) {
        longs x = (token ^ key) + 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        x = (x ^ (x >> 31)) >> 40;
        half_ints below = 0xFFFFFF - __builtin_convertvector(x, half_ints);
        half_floats bound = __builtin_convertvector(below, half_floats) * (1.0f / 16777216.0f);
        memcpy(out + h * (LANES / 2), &bound, sizeof(bound));
    }
}

/* -log(u) is no less than 1 - u, so a token's noise lifts it over `best` only where 1 - u < exp(scaled - best): few
 * logarithms are taken. */
static int64_t draw_from_all(const float *logits, long vocab, double inverse, uint64_t key) {
    const float margin = 1e-4f; /* over the errors of single precision */
    long token = 0;
    float max = max_of(logits, vocab);
    while (token < vocab - 1 && logits[token] != max) token++;
    double top = logits[token] * inverse, best = top + gumbel(uniform(key, (uint64_t)token));
    for (long i = 0; i < vocab; i += LANES) {
        float chance[LANES], complements[LANES];
        float factor = expf((float)(top - best) + margin); /* exp(scaled - best) = exp(scaled - top) exp(top - best) */
        long lanes = vocab - i < LANES ? vocab - i : LANES;
        if (lanes == LANES) {
            vec likely = exp_vec((load(logits + i) - splat(max)) * splat((float)inverse)) * splat(factor);
            least_complements(key, (uint64_t)i, complements);
            if (none_reaches(likely - load(complements), 0.0f)) continue;
            store(chance, likely);
        } else
            for (long j = 0; j < lanes; j++) chance[j] = expf((logits[i + j] - max) * (float)inverse) * factor;
        for (long j = 0; j < lanes; j++) {
            double u = uniform(key, (uint64_t)(i + j));
            if (1.0 - u > chance[j]) continue;
            double scaled = logits[i + j] * inverse + gumbel(u);
            if (scaled > best) best = scaled, token = i + j;
        }
    }
    return token;
}

static int64_t draw(const float *logits, long vocab, float temperature, long top_k, float top_p, float min_p,
                    uint64_t key) {
    double inverse = 1.0 / temperature, best = -INFINITY;
    int64_t token = 0;
    if (top_k >= vocab && top_p >= 1.0f && min_p == 0.0f) return draw_from_all(logits, vocab, inverse, key);
    Candidate *kept = malloc((size_t)vocab * sizeof(Candidate));
    long n = candidates_of(logits, vocab, (float)inverse, top_k, top_p, min_p, kept);
    for (long i = 0; i < n; i++) {
        double scaled = logits[kept[i].token] * inverse + gumbel(uniform(key, (uint64_t)kept[i].token));
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
