/* fp32 products on bf16 tiles (Intel AMX): each number is cut into three bf16 parts, a = a1 + a2 + a3, exactly, and of
 * the nine products of parts the six that matter in fp32 are summed in fp32 (Henry, Tang and Heinecke, "Leveraging the
 * bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019). What is left out is below
 * 2^-23 of the product. The small products are summed first, so that the large ones are rounded as in a plain fp32 sum.
 *
 * A tile has 16 rows of 64 bytes: of the left operand 16 rows x 32 k, of the right 16 pairs of k x 16 columns.
 */
#ifndef KVQ_AMX_H
#define KVQ_AMX_H
#include "common.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BW__) && defined(__linux__)
#define HAVE_AMX 1

#define TILE_ROWS 16
#define TILE_K 32
#define TILE_WORDS (TILE_ROWS * TILE_K) /* bf16 numbers in a tile */
#define PARTS 3

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* GCC 12's tile instructions do not tell the compiler that they touch memory. */
static inline void memory_fence(void) { __asm__ volatile("" ::: "memory"); }

/* All tiles at full size; once per thread and parallel region, undone by _tile_release. */
static inline void use_tiles(void) {
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.row_bytes[t] = 64, shapes.rows[t] = TILE_ROWS;
    memory_fence();
    _tile_loadconfig(&shapes);
}

/* The first bf16 part of 16 numbers (their upper halves) is taken off. */
static inline __m512 rest_of(__m512 x) {
    return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536))));
}

/* Upper halves of low and high, in pairs: low[0], high[0], low[1], high[1], ... */
static inline __m512i paired(__m512 low, __m512 high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

/* Upper halves of 32 numbers, in order. */
static inline __m512i in_order(__m512 first, __m512 second) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), odd, _mm512_castps_si512(second));
}

/* 32 numbers of a row -> its place in the three tiles of the left operand (part p lies p tiles further on). */
static inline void cut_row(const __m512 first, const __m512 second, uint16_t *tile_row) {
    __m512 a = first, b = second;
    for (int part = 0; part < PARTS; part++) {
        _mm512_storeu_si512(tile_row + part * TILE_WORDS, in_order(a, b));
        if (part + 1 < PARTS) a = rest_of(a), b = rest_of(b);
    }
}

/* Two neighbouring k of 16 columns -> their row in the three tiles of the right operand. */
static inline void cut_pair(const __m512 even, const __m512 odd, uint16_t *tile_row) {
    __m512 a = even, b = odd;
    for (int part = 0; part < PARTS; part++) {
        _mm512_storeu_si512(tile_row + part * TILE_WORDS, paired(a, b));
        if (part + 1 < PARTS) a = rest_of(a), b = rest_of(b);
    }
}
#endif
#endif
