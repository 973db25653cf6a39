#include "common.h"

/* ---- attention: online softmax over key blocks (FlashAttention, arXiv 2205.14135, algorithm 1) ------------------ */

/* Keys are taken PARTS times KEYS at a time, from places that position alone decides; a part never crosses a block. */
#if BLOCK_SIZE >= LANES
#define KEYS LANES
#define PARTS 2
#else
#define KEYS BLOCK_SIZE
#define PARTS 1
#endif
#define UNIT (PARTS * KEYS)

/* Blocks are taken so many at a time that they hold whole units. */
#define SPAN_BLOCKS (UNIT > BLOCK_SIZE ? UNIT / BLOCK_SIZE : 1)
#define SPAN (SPAN_BLOCKS * BLOCK_SIZE)

/* One query head of one token on its way through the keys. */
typedef struct {
    float q[HEAD_DIM];       /* scaled */
    float acc[VALUE_DIM];
    float sums[KEYS];        /* of the probabilities, by place in the vector; added up at the end */
    const int32_t *blocks;   /* block table of its sequence */
    float *out;              /* [VALUE_DIM] */
    long first, last;        /* positions of the keys it sees: first .. last - 1 */
    float max;
} Row;

typedef struct {
    float softcap; /* 0: none */
} Options;

/* Where the keys and values of a unit's parts lie. */
typedef struct {
    const float *k[PARTS], *v[PARTS];
} Unit;

/* Scores of a unit's first `parts` parts for `rows` neighbouring rows, summed over d in order. */
static inline __attribute__((always_inline)) void scores(const int rows, const int parts, const Row *row,
                                                         const Unit *unit, float s[][UNIT]) {
#if BLOCK_SIZE >= LANES
    vec sums[ATT_ROWS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) sums[r][p] = splat(0.0f);
    for (long d = 0; d < HEAD_DIM; d++) {
        vec k[PARTS];
        for (int p = 0; p < parts; p++) k[p] = load(unit->k[p] + d * BLOCK_SIZE);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vec q = splat(row[r].q[d]);
            for (int p = 0; p < parts; p++) sums[r][p] += q * k[p];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) store(s[r] + p * KEYS, sums[r][p]);
#else
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < KEYS; j++) s[r][j] = 0.0f;
        for (long d = 0; d < HEAD_DIM; d++)
            for (int j = 0; j < KEYS; j++) s[r][j] = fmaf(row[r].q[d], unit->k[0][d * BLOCK_SIZE + j], s[r][j]);
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
static inline __attribute__((always_inline)) void softmax_update(const int parts, Row *row, float *s, long position,
                                                                 const Options *options) {
    const int keys = parts * KEYS;
    if (options->softcap != 0.0f)
        for (int j = 0; j < keys; j++) s[j] = options->softcap * tanhf(s[j] / options->softcap);
    if (position < row->first || position + keys > row->last)
        for (int j = 0; j < keys; j++)
            if (position + j < row->first || position + j >= row->last) s[j] = -INFINITY;
    int above = 0;
    for (int p = 0; p < parts; p++) above |= any_above(s + p * KEYS, row->max);
    if (above) {
        float max = row->max;
        for (int p = 0; p < parts; p++) {
            float of_part = largest(s + p * KEYS);
            max = of_part > max ? of_part : max;
        }
        float scale = row->max == -INFINITY ? 0.0f : expf(row->max - max);
        for (int j = 0; j < KEYS; j++) row->sums[j] *= scale;
        for (long d = 0; d < VALUE_DIM; d++) row->acc[d] *= scale;
        row->max = max;
    } else if (row->max == -INFINITY) { /* it sees none of these keys and none before */
        for (int j = 0; j < keys; j++) s[j] = 0.0f;
        return;
    }
#if BLOCK_SIZE >= LANES
    vec total = load(row->sums);
    for (int p = 0; p < parts; p++) {
        vec e = exp_vec(load(s + p * KEYS) - splat(row->max));
        store(s + p * KEYS, e);
        total += e;
    }
    store(row->sums, total);
#else
    for (int j = 0; j < KEYS; j++) {
        s[j] = s[j] == -INFINITY ? 0.0f : expf(s[j] - row->max);
        row->sums[j] += s[j];
    }
#endif
}

/* acc[r] += p[r][key] * v[key], keys in order; keys no row sees are not read (they may hold anything). */
static inline __attribute__((always_inline)) void weighted_values(const int rows, const int vectors, Row *row,
                                                                  float p[][UNIT], const Unit *unit, long keys) {
    long d = 0;
    for (; d + vectors * LANES <= VALUE_DIM; d += vectors * LANES) {
        vec acc[ATT_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) acc[r][c] = load(row[r].acc + d + c * LANES);
        for (int part = 0; part < PARTS; part++) {
            long last = keys < (part + 1) * KEYS ? keys : (part + 1) * KEYS;
            const float *v = unit->v[part] + d;
            for (long j = part * KEYS; j < last; j++, v += VALUE_DIM) {
                vec vj[4];
                for (int c = 0; c < vectors; c++) vj[c] = load(v + c * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    vec w = splat(p[r][j]);
#pragma GCC unroll 4
                    for (int c = 0; c < vectors; c++) acc[r][c] += w * vj[c];
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) store(row[r].acc + d + c * LANES, acc[r][c]);
    }
    for (; d < VALUE_DIM; d++)
        for (int r = 0; r < rows; r++) {
            float acc = row[r].acc[d];
            for (long j = 0; j < keys; j++)
                acc = fmaf(p[r][j], unit->v[j / KEYS][j % KEYS * VALUE_DIM + d], acc);
            row[r].acc[d] = acc;
        }
}

static inline __attribute__((always_inline)) void attend_unit(const int rows, const int parts, Row *row,
                                                              const Unit *unit, long keys, long position,
                                                              const Options *options) {
    float s[ATT_ROWS][UNIT];
    scores(rows, parts, row, unit, s);
    for (int r = 0; r < rows; r++) softmax_update(parts, &row[r], s[r], position, options);
    weighted_values(rows, rows > ATT_ROWS / 2 ? 2 : 4, row, s, unit, keys);
}

/* `k` and `v`: the span's blocks; those beyond the last key that a row sees are not looked at. */
static inline __attribute__((always_inline)) void attend(const int rows, Row *row, const float *const *k,
                                                         const float *const *v, long position, const Options *options) {
    long last = 0;
    for (int r = 0; r < rows; r++) last = row[r].last > last ? row[r].last : last;
    for (long offset = 0; offset < SPAN && position + offset < last; offset += UNIT) {
        long keys = last - position - offset < UNIT ? last - position - offset : UNIT;
        Unit unit;
        for (int p = 0; p < PARTS; p++) {
            long at = offset + p * KEYS; /* of SPAN */
            unit.k[p] = k[at / BLOCK_SIZE] + at % BLOCK_SIZE;
            unit.v[p] = v[at / BLOCK_SIZE] + at % BLOCK_SIZE * VALUE_DIM;
        }
        if (keys > (PARTS - 1) * KEYS)
            attend_unit(rows, PARTS, row, &unit, keys, position + offset, options);
        else
            attend_unit(rows, 1, row, &unit, keys, position + offset, options);
    }
}

static void attend_rows(long rows, Row *row, const float *const *k, const float *const *v, long position,
                        const Options *options) {
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
    return row->last > position && row->first < position + SPAN;
}

/* Whether a row may go with one that sees as far as any of its group: the keys up to there are its own as well.
 * (What is no key of a row counts for nothing in its sums, unless it is not a number; so it must be its own sequence's.) */
static inline int same_keys(const Row *row, const Row *widest, long span) {
    if (row->blocks == widest->blocks) return 1;
    for (long b = span * SPAN_BLOCKS; b < (span + 1) * SPAN_BLOCKS; b++) {
        int seen = row->last > b * BLOCK_SIZE;
        if (seen != (widest->last > b * BLOCK_SIZE)) return 0;
        if (seen && row->blocks[b] != widest->blocks[b]) return 0;
    }
    return 1;
}

/* One kv head of some tokens (order[]: token indices; tokens that share blocks are neighbours). */
static void attend_task(const float *query, long query_stride, long num_tokens, const int32_t *order,
                        const int32_t *seq_of_token, const int32_t *positions, const int32_t *block_tables,
                        long max_blocks, long kv_heads, long group, long kv_head, const float *key_cache,
                        const float *value_cache, float scale, long window, const float *sinks, const Options *options,
                        float *out) {
    Row rows[TASK_ROWS];
    long heads = kv_heads * group, num_rows = 0, num_spans = 0;
    for (long i = 0; i < num_tokens; i++) {
        long token = order[i];
        for (long g = 0; g < group; g++) {
            long head = kv_head * group + g;
            Row *row = &rows[num_rows];
            const float *q = query + token * query_stride + head * HEAD_DIM;
            for (long d = 0; d < HEAD_DIM; d++) row->q[d] = q[d] * scale;
            row->blocks = block_tables + (long)seq_of_token[token] * max_blocks;
            row->out = out + (token * heads + head) * VALUE_DIM;
            row->last = positions[token] + 1;
            row->first = window > 0 && row->last > window ? row->last - window : 0;
            row->max = sinks ? sinks[head] : -INFINITY;
            memset(row->sums, 0, sizeof(row->sums));
            row->sums[0] = sinks ? 1.0f : 0.0f;
            memset(row->acc, 0, sizeof(row->acc));
            long spans = (row->last + SPAN - 1) / SPAN;
            num_spans = spans > num_spans ? spans : num_spans;
            num_rows++;
        }
    }
    for (long span = 0; span < num_spans; span++) {
        long position = span * SPAN;
        for (long start = 0; start < num_rows;) {
            if (!sees(&rows[start], position)) {
                start++;
                continue;
            }
            const Row *widest = &rows[start];
            long end = start + 1;
            for (; end < num_rows && sees(&rows[end], position) && same_keys(&rows[end], widest, span); end++)
                if (rows[end].last > widest->last) widest = &rows[end];
            const float *k[SPAN_BLOCKS], *v[SPAN_BLOCKS];
            for (int b = 0; b < SPAN_BLOCKS; b++) {
                int seen = widest->last > position + b * BLOCK_SIZE;
                long block = widest->blocks[span * SPAN_BLOCKS + (seen ? b : 0)];
                k[b] = key_cache + (block * kv_heads + kv_head) * KEY_FLOATS;
                v[b] = value_cache + (block * kv_heads + kv_head) * VALUE_FLOATS;
            }
            attend_rows(end - start, &rows[start], k, v, position, options);
            start = end;
        }
    }
    for (long r = 0; r < num_rows; r++) {
        float sum = 0.0f;
        for (int j = 0; j < KEYS; j++) sum += rows[r].sums[j];
        float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        for (long d = 0; d < VALUE_DIM; d++) rows[r].out[d] = rows[r].acc[d] * inverse;
    }
}

/* query [tokens, kv_heads * group, HEAD_DIM] with row stride query_stride -> out, contiguous, VALUE_DIM wide.
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
