/* SGMV on the CPU: every weight is read once, in the order it lies in, straight from the stacks.
 *
 * Activations and weights are of one type, fp32 or bf16; what is between, v, and all sums are fp32. Where the processor
 * multiplies pairs of bf16 values, v is the sum of two of them in a group of few rows, and else rounded to one, as on a
 * GPU and by torch's products.
 *
 * For each group with slot s and rows r, and each projection p with columns c of the output:
 *     v = x[r] @ a[s, p*R : p*R + rank].T          (fp32)
 *     y[r, c] += v @ b[s, c, : rank].T             (fp32, one rounding into y)
 *
 * Only `rank` rows of A are read, and columns of B as far as the next multiple of 8, of which those past `rank` are not
 * used. What a row gets does not depend on the number of threads.
 */
#include "native_vectors.h"

enum { ROW_BYTES = 1 << 18 /* of x at a time */, ROUNDED_ROWS = 16 /* of a group whose v is rounded */ };
enum { LANES = 16, MAX_RANK = 256, TILE = 16 * MAX_RANK /* values of B that are turned at once: 16 KB */ };

typedef struct {
    int32_t slot, start, stop, rank;
} Group;

/* One call, as `kernels.sgmv_native` packs it: no padding between the fields. */
typedef struct {
    const void *x;         /* [T, width], rows x_stride values apart; or NULL, where scratch holds the low-rank rows */
    void *y;               /* [T, out], rows y_stride values apart */
    const void *a;         /* [N, projections * max_rank, width] */
    const void *b;         /* [N, out, max_rank] */
    const Group *groups;   /* [num_groups], none of rank 0, together all T rows */
    const int32_t *slices; /* [projections], adding up to out */
    float *scratch;        /* [T, projections * max_rank] */
    int64_t x_stride, y_stride;
    int32_t dtype, width, out, max_rank, projections, num_groups, num_threads, unused;
} Call;

/* What is read of x, a, b and y. The type is always a constant where these are called, and so chosen by the compiler. */
INLINE const void *at(const void *values, int dtype, int64_t index) {
    return dtype == FP32 ? (const void *)((const float *)values + index) : (const void *)((const uint16_t *)values + index);
}

INLINE float value(const void *values, int dtype, int64_t index) {
    return dtype == FP32 ? ((const float *)values)[index] : widened(((const uint16_t *)values)[index]);
}

INLINE f8 values8(const void *values, int dtype, int64_t index) {
    return dtype == FP32 ? *(const f8 *)((const float *)values + index) : widened8((const uint16_t *)values + index);
}

INLINE f4 values4(const void *values, int dtype, int64_t index) {
    return dtype == FP32 ? *(const f4 *)((const float *)values + index) : widened4((const uint16_t *)values + index);
}

/* A tile of products is 4 rows of x by WIDE of A: as many sums as the registers hold beside what they are made of. */
enum { WIDE = PART == 16 ? 4 : 3 };

static inline float part_sum(Part v) {
    f4 p[PART / 4], sum;
    memcpy(p, &v, sizeof v);
    sum = PART == 16 ? (p[0] + p[1]) + (p[PART / 4 - 2] + p[PART / 4 - 1]) : p[0] + p[1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* v[n][m] = x[n] . a[m] for N rows and M rank rows; each is added up as if it were alone. `STEP` values make a VECTOR. */
#define DOTS(NAME, DTYPE, N, M, STEP, VECTOR, LOAD, ADD)                                                               \
    static inline void NAME(const void *x, int64_t x_stride, const void *a, int width, float *v, int64_t v_stride) {   \
        Part sums[N][M];                                                                                               \
        for (int n = 0; n < N; n++)                                                                                    \
            for (int m = 0; m < M; m++) sums[n][m] = (Part){0};                                                        \
        int k = 0;                                                                                                     \
        for (; k + STEP <= width; k += STEP) {                                                                         \
            VECTOR weights[M];                                                                                         \
            for (int m = 0; m < M; m++) weights[m] = LOAD(at(a, DTYPE, (int64_t)m * width + k));                       \
            for (int n = 0; n < N; n++) {                                                                              \
                VECTOR row = LOAD(at(x, DTYPE, n * x_stride + k));                                                     \
                for (int m = 0; m < M; m++) ADD(sums[n][m], row, weights[m]);                                          \
            }                                                                                                          \
        }                                                                                                              \
        for (int n = 0; n < N; n++)                                                                                    \
            for (int m = 0; m < M; m++) {                                                                              \
                float sum = part_sum(sums[n][m]);                                                                      \
                for (int rest = k; rest < width; rest++)                                                               \
                    sum += value(x, DTYPE, n * x_stride + rest) * value(a, DTYPE, (int64_t)m * width + rest);          \
                v[n * v_stride + m] = sum;                                                                             \
            }                                                                                                          \
    }
#define ALL_DOTS(NAME, DTYPE, STEP, VECTOR, LOAD, ADD)                                                                 \
    DOTS(NAME##_1x1, DTYPE, 1, 1, STEP, VECTOR, LOAD, ADD)                                                             \
    DOTS(NAME##_1xW, DTYPE, 1, WIDE, STEP, VECTOR, LOAD, ADD)                                                          \
    DOTS(NAME##_4x1, DTYPE, 4, 1, STEP, VECTOR, LOAD, ADD)                                                             \
    DOTS(NAME##_4xW, DTYPE, 4, WIDE, STEP, VECTOR, LOAD, ADD)

#define LOAD_FP32(from) (*(const Part *)(from))
ALL_DOTS(dots_fp32, FP32, PART, Part, LOAD_FP32, ADD_FP32)
#ifdef __AVX512BF16__
/* Products of pairs of bf16 values, added in fp32: twice the products of an fp32 instruction, and nothing to widen. */
#define LOAD_BF16(from) ((__m512bh)_mm512_loadu_si512(from))
#define ADD_BF16(sum, row, weights) (sum = (f16)_mm512_dpbf16_ps((__m512)(sum), row, weights))
ALL_DOTS(dots_bf16, BF16, 32, __m512bh, LOAD_BF16, ADD_BF16)
#else
#define LOAD_BF16(from) WIDENED_PART(from)
ALL_DOTS(dots_bf16, BF16, PART, Part, LOAD_BF16, ADD_FP32)
#endif

INLINE void add8(void *y, int dtype, int64_t index, f8 delta) {
    if (dtype == FP32)
        *(f8 *)((float *)y + index) += delta;
    else
        round8((uint16_t *)y + index, values8(y, BF16, index) + delta);
}

INLINE void add1(void *y, int dtype, int64_t index, float delta) {
    if (dtype == FP32)
        ((float *)y)[index] += delta;
    else
        ((uint16_t *)y)[index] = rounded(value(y, BF16, index) + delta);
}

typedef void Dots(const void *x, int64_t x_stride, const void *a, int width, float *v, int64_t v_stride);

/* One thread's share of a group's rank rows of all projections. */
static void shrink(const Call *call, Group group, float *low, int thread, int threads) {
    static Dots *const dots[2][4] = {{dots_fp32_1x1, dots_fp32_1xW, dots_fp32_4x1, dots_fp32_4xW},
                                     {dots_bf16_1x1, dots_bf16_1xW, dots_bf16_4x1, dots_bf16_4xW}};
    int num_rows = group.stop - group.start, width = call->width, live = call->projections * group.rank;
    int64_t stride = call->x_stride, low_stride = (int64_t)call->projections * call->max_rank;
    const void *rows = at(call->x, call->dtype, group.start * stride);
    const void *a = at(call->a, call->dtype, group.slot * low_stride * width);
    int index = live * thread / threads, last = live * (thread + 1) / threads;
    while (index < last) {
        int j = index % group.rank, left = group.rank - j < last - index ? group.rank - j : last - index;
        int is_wide = left >= WIDE, count = is_wide ? WIDE : 1;
        int64_t row = (int64_t)(index / group.rank) * call->max_rank + j;
        const void *weights = at(a, call->dtype, row * width);
        float *v = low + row;
        for (int n = 0; n < num_rows;) {
            int is_tall = n + 4 <= num_rows;
            Dots *function = dots[call->dtype][2 * is_tall + is_wide];
            function(at(rows, call->dtype, n * stride), stride, weights, width, v + n * low_stride, low_stride);
            n += is_tall ? 4 : 1;
        }
        index += count;
    }
}

/* b[i] . v for eight rows of B. */
INLINE f8 products8(const void *b, int dtype, int64_t stride, const float *v, int rank) {
    f8 result = {0};
    int j = 0;
    if (rank >= 8) {
        f8 p[8], low = *(const f8 *)v;
        for (int i = 0; i < 8; i++) p[i] = values8(b, dtype, i * stride) * low;
        for (j = 8; j + 8 <= rank; j += 8) {
            low = *(const f8 *)(v + j);
            for (int i = 0; i < 8; i++) p[i] += values8(b, dtype, i * stride + j) * low;
        }
        result = sums8(p);
    }
    if (j + 4 <= rank) {
        f4 p[8], low = *(const f4 *)(v + j);
        for (int i = 0; i < 8; i++) p[i] = values4(b, dtype, i * stride + j) * low;
        for (int i = 0; i < 8; i++) result[i] += (p[i][0] + p[i][1]) + (p[i][2] + p[i][3]);
        j += 4;
    }
    for (; j < rank; j++)
        for (int i = 0; i < 8; i++) result[i] += value(b, dtype, i * stride + j) * v[j];
    return result;
}

#ifdef __AVX512BF16__
/* The first `count` lanes, or all. */
INLINE __mmask16 first_lanes(int count) { return count >= LANES ? 0xffff : (__mmask16)((1 << count) - 1); }

/* What rounding to bf16 has left out of a value, itself rounded: both together have 16 bits of it. */
INLINE __m256bh left_out(__m512 value, __m256bh rounded) {
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16);
    return _mm512_cvtneps_pbh(value - (__m512)wide);
}

/* b[i] . v for eight rows of B, in pairs. What is past the rank is not read. */
INLINE f8 pair_products8(const uint16_t *b, int64_t stride, const float *v, int rank) {
    __m256 p[8];
    for (int i = 0; i < 8; i++) p[i] = _mm256_setzero_ps();
    for (int j = 0; j < rank; j += LANES) {
        __mmask16 live = first_lanes(rank - j);
        __m512 low = _mm512_maskz_loadu_ps(live, v + j);
        __m256bh high = _mm512_cvtneps_pbh(low), left = left_out(low, high);
        for (int i = 0; i < 8; i++) {
            __m256bh weights = (__m256bh)_mm256_maskz_loadu_epi16(live, b + i * stride + j);
            p[i] = _mm256_dpbf16_ps(_mm256_dpbf16_ps(p[i], weights, high), weights, left);
        }
    }
    f8 sums[8];
    memcpy(sums, p, sizeof sums);
    return sums8(sums);
}
#endif

/* Add 8 output columns to the few rows of a group, straight from B. */
INLINE void expand8(const Call *call, int dtype, Group group, const void *b, const float *v, int column) {
    int64_t stride = (int64_t)call->projections * call->max_rank;
    for (int64_t row = group.start; row < group.stop; row++, v += stride) {
#ifdef __AVX512BF16__
        if (dtype == BF16) {
            add8(call->y, BF16, row * call->y_stride + column, pair_products8(b, call->max_rank, v, group.rank));
            continue;
        }
#endif
        add8(call->y, dtype, row * call->y_stride + column, products8(b, dtype, call->max_rank, v, group.rank));
    }
}

/* turned[2 * j] = column j of 8 rows of B, for 8 columns. */
INLINE void turn8x8(const void *b, int dtype, int64_t stride, f8 *turned) {
    f8 r[8], t[8], u[8];
    for (int i = 0; i < 8; i++) r[i] = values8(b, dtype, i * stride);
    for (int i = 0; i < 8; i += 2) {
        t[i] = PICK(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = PICK(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = PICK(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 1] = PICK(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        u[i + 2] = PICK(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 3] = PICK(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        turned[2 * i] = PICK(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        turned[2 * (i + 4)] = PICK(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* turned[2 * j], turned[2 * j + 1] = column j of 16 rows of B, for `rank` columns and up to 7 more, which may be anything. */
INLINE void turn(const void *b, int dtype, int64_t stride, int rank, f8 *turned) {
    int j = 0;
    /* Columns past the rank are read where the row has them: they are turned, too, and not used. */
    for (; j < rank && j + 8 <= stride; j += 8) {
        turn8x8(at(b, dtype, j), dtype, stride, turned + 2 * j);
        turn8x8(at(b, dtype, 8 * stride + j), dtype, stride, turned + 2 * j + 1);
    }
    for (; j < rank; j++)
        for (int i = 0; i < LANES; i++) ((float *)turned)[j * LANES + i] = value(b, dtype, i * stride + j);
}

/* Add 16 output columns to `count` rows of y: 4 or 1. */
INLINE void add_rows(
    const Call *call, int dtype, const f8 *turned, int rank, const float *v, int64_t row, int column, int count
) {
    int64_t stride = (int64_t)call->projections * call->max_rank;
    f8 sums[4][2] = {0};
    for (int j = 0; j < rank; j++)
        for (int i = 0; i < count; i++) {
            sums[i][0] += turned[2 * j] * v[i * stride + j];
            sums[i][1] += turned[2 * j + 1] * v[i * stride + j];
        }
    for (int i = 0; i < count; i++) {
        int64_t index = (row + i) * call->y_stride + column;
        add8(call->y, dtype, index, sums[i][0]);
        add8(call->y, dtype, index + 8, sums[i][1]);
    }
}

/* Add `blocks` times 16 output columns to all rows of a group: as many as `TILE` holds of B. */
INLINE void expand_tile(
    const Call *call, int dtype, Group group, const void *b, const float *v, int column, int blocks
) {
    int64_t row = group.start, stride = (int64_t)call->projections * call->max_rank;
    int size = 2 * ((group.rank + 7) / 8 * 8);
    f8 turned[2 * TILE / LANES];
    for (int i = 0; i < blocks; i++)
        turn(at(b, dtype, (int64_t)i * LANES * call->max_rank), dtype, call->max_rank, group.rank, turned + i * size);
    for (; row + 4 <= group.stop; row += 4, v += 4 * stride)
        for (int i = 0; i < blocks; i++)
            add_rows(call, dtype, turned + i * size, group.rank, v, row, column + i * LANES, 4);
    for (; row < group.stop; row++, v += stride)
        for (int i = 0; i < blocks; i++)
            add_rows(call, dtype, turned + i * size, group.rank, v, row, column + i * LANES, 1);
}

#ifdef __AVX512BF16__
typedef uint32_t Pairs[4][MAX_RANK / 2];

/* v of `count` rows, rounded to bf16, and what that leaves out, rounded too; an odd rank gets a column of 0. */
INLINE void round_pairs(const float *v, int64_t stride, int rank, Pairs pairs, Pairs rest, int count) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < rank; j += LANES) {
            __m512 low = _mm512_maskz_loadu_ps(first_lanes(rank - j), v + i * stride + j);
            __m256bh high = _mm512_cvtneps_pbh(low), left = left_out(low, high);
            memcpy(pairs[i] + j / 2, &high, sizeof high);
            memcpy(rest[i] + j / 2, &left, sizeof left);
        }
}

/* turned[j] = columns 2 * j and 2 * j + 1 of 16 rows of B, an odd rank's last one beside 0. */
INLINE void turn_pairs(const uint16_t *b, int64_t max_rank, int rank, f16 *turned) {
    int pairs = (rank + 1) / 2;
    turn(b, FP32, max_rank / 2, pairs, (f8 *)turned);
    if (rank % 2) turned[pairs - 1] = (f16)((u16)turned[pairs - 1] & 0xffff);
}

/* Add 16 or 32 output columns, `blocks` of 16, to at most 4 rows of y. */
INLINE void add_pairs(
    const Call *call, const f16 *turned, int size, Pairs pairs, Pairs rest, int num_pairs, int64_t row, int column,
    int blocks, int count, int rounds
) {
    __m512 sums[4][2];
    for (int i = 0; i < 4; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int j = 0; j < num_pairs; j++)
        for (int i = 0; i < 4; i++) {
            __m512bh low = (__m512bh)_mm512_set1_epi32((int)pairs[i][j]);
            for (int k = 0; k < blocks; k++)
                sums[i][k] = _mm512_dpbf16_ps(sums[i][k], (__m512bh)turned[k * size + j], low);
            if (rounds) continue;
            low = (__m512bh)_mm512_set1_epi32((int)rest[i][j]);
            for (int k = 0; k < blocks; k++)
                sums[i][k] = _mm512_dpbf16_ps(sums[i][k], (__m512bh)turned[k * size + j], low);
        }
    for (int i = 0; i < count; i++)
        for (int k = 0; k < blocks; k++) {
            uint16_t *y = (uint16_t *)call->y + (row + i) * call->y_stride + column + k * LANES;
            __m256bh sum = _mm512_cvtneps_pbh((__m512)(widened16(y) + (f16)sums[i][k]));
            memcpy(y, &sum, sizeof sum);
        }
}

/* What `expand_tile` does, in pairs; max_rank is even. */
INLINE void expand_pairs(
    const Call *call, Group group, const uint16_t *b, const float *v, int column, int blocks, int rounds
) {
    int64_t stride = (int64_t)call->projections * call->max_rank;
    int num_pairs = (group.rank + 1) / 2, size = (num_pairs + 7) / 8 * 8;
    f16 turned[TILE / LANES];
    Pairs pairs = {0}, rest = {0};
    for (int i = 0; i < blocks; i++)
        turn_pairs(b + (int64_t)i * LANES * call->max_rank, call->max_rank, group.rank, turned + i * size);
    for (int64_t row = group.start; row < group.stop; row += 4, v += 4 * stride) {
        int count = row + 4 <= group.stop ? 4 : (int)(group.stop - row), i = 0;
        round_pairs(v, stride, group.rank, pairs, rest, count);
        for (; i + 2 <= blocks; i += 2)
            add_pairs(
                call, turned + i * size, size, pairs, rest, num_pairs, row, column + i * LANES, 2, count, rounds
            );
        if (i < blocks)
            add_pairs(
                call, turned + i * size, size, pairs, rest, num_pairs, row, column + i * LANES, 1, count, rounds
            );
    }
}
#endif

/* Whether B's columns are multiplied in pairs. */
INLINE int has_pairs(const Call *call, int dtype) {
#ifdef __AVX512BF16__
    return dtype == BF16 && call->max_rank % 2 == 0;
#else
    return 0;
#endif
}

/* Add as many blocks of 16 output columns as `TILE` holds of B, at most `blocks`, to all rows of a group; how many. */
INLINE int expand_blocks(
    const Call *call, int dtype, Group group, const void *b, const float *v, int column, int blocks
) {
    int most = TILE / LANES / ((group.rank + 7) / 8 * 8);
#ifdef __AVX512BF16__
    if (has_pairs(call, dtype)) {
        most = TILE / LANES / (((group.rank + 1) / 2 + 7) / 8 * 8);
        if (blocks > most) blocks = most;
        if (group.stop - group.start >= ROUNDED_ROWS)
            expand_pairs(call, group, b, v, column, blocks, 1);
        else
            expand_pairs(call, group, b, v, column, blocks, 0);
        return blocks;
    }
#endif
    if (blocks > most) blocks = most;
    expand_tile(call, dtype, group, b, v, column, blocks);
    return blocks;
}

/* A group's output columns [first, last), all of one projection. */
INLINE void expand_columns(
    const Call *call, int dtype, Group group, const float *low, int projection, int first, int last
) {
    int64_t stride = (int64_t)call->projections * call->max_rank, max_rank = call->max_rank;
    const void *b = at(call->b, dtype, (int64_t)group.slot * call->out * max_rank);
    const float *v = low + (int64_t)projection * max_rank;
    int column = first, few = has_pairs(call, dtype) ? 2 : 4;
    if (group.stop - group.start < few) {
        for (; column + 8 <= last; column += 8) expand8(call, dtype, group, at(b, dtype, column * max_rank), v, column);
    } else {
        for (int blocks; (blocks = (last - column) / LANES) > 0;) {
            const void *some = at(b, dtype, column * max_rank);
            column += LANES * expand_blocks(call, dtype, group, some, v, column, blocks);
        }
    }
    for (; column < last; column++)
        for (int n = 0; n < group.stop - group.start; n++) {
            float sum = 0;
            for (int j = 0; j < group.rank; j++) sum += value(b, dtype, column * max_rank + j) * v[n * stride + j];
            add1(call->y, dtype, (group.start + n) * call->y_stride + column, sum);
        }
}

/* One thread's share of a group's output columns. Shares begin at a multiple of LANES within a projection. */
static void expand(const Call *call, Group group, const float *low, int thread, int threads) {
    int offset = 0;
    for (int p = 0; p < call->projections; p++) {
        int width = call->slices[p], blocks = (width + LANES - 1) / LANES;
        int first = blocks * thread / threads * LANES, last = blocks * (thread + 1) / threads * LANES;
        if (last > width) last = width;
        first += offset, last += offset;
        if (first < last) {
            if (call->dtype == FP32)
                expand_columns(call, FP32, group, low, p, first, last);
            else
                expand_columns(call, BF16, group, low, p, first, last);
        }
        offset += width;
    }
}

int lora_fleet_sgmv(const Call *call) {
    int64_t low_stride = (int64_t)call->projections * call->max_rank;
    /* Rows of x at a time: each is read once for every four of A's, so they should stay in the core's own cache. */
    int most = ROW_BYTES / (call->width * (call->dtype == FP32 ? 4 : 2) + 1) / 4 * 4;
    if (most < 16) most = 16;
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        if (call->x) {
            for (int g = 0; g < call->num_groups; g++) {
                Group some = call->groups[g];
                for (; some.start < call->groups[g].stop; some.start = some.stop) {
                    some.stop = some.start + most < call->groups[g].stop ? some.start + most : call->groups[g].stop;
                    shrink(call, some, call->scratch + some.start * low_stride, thread, threads);
                }
            }
#pragma omp barrier
        }
        for (int g = 0; g < call->num_groups; g++)
            expand(call, call->groups[g], call->scratch + call->groups[g].start * low_stride, thread, threads);
    }
    return 0;
}
