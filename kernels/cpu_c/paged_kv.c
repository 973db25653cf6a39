#include "common.h"

void kvq_write_kv(const float *key, long key_stride, const float *value, long value_stride, long tokens, long kv_heads,
                  const int64_t *slots, float *key_cache, float *value_cache) {
#pragma omp parallel for schedule(static) if (tokens > 16)
    for (long t = 0; t < tokens; t++) {
        long block = slots[t] / BLOCK_SIZE, offset = slots[t] % BLOCK_SIZE;
        for (long h = 0; h < kv_heads; h++) {
            const float *k = key + t * key_stride + h * HEAD_DIM, *v = value + t * value_stride + h * VALUE_DIM;
            float *kd = key_cache + (block * kv_heads + h) * KEY_FLOATS;
            float *vd = value_cache + (block * kv_heads + h) * VALUE_FLOATS + offset * VALUE_DIM;
            for (long d = 0; d < HEAD_DIM; d++) kd[d * BLOCK_SIZE + offset] = k[d];
            memcpy(vd, v, VALUE_DIM * sizeof(float));
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
            float *ks = key_cache + (src * kv_heads + h) * KEY_FLOATS, *kd = key_cache + (dst * kv_heads + h) * KEY_FLOATS;
            for (long d = 0; d < HEAD_DIM; d++)
                memcpy(kd + d * BLOCK_SIZE, ks + d * BLOCK_SIZE, tokens * sizeof(float));
            memcpy(value_cache + (dst * kv_heads + h) * VALUE_FLOATS, value_cache + (src * kv_heads + h) * VALUE_FLOATS,
                   tokens * VALUE_DIM * sizeof(float));
        }
}
