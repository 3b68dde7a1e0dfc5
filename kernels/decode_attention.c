/* Attention of decoding sequences on the CPU: keys and values are read once, where they lie in their pages.
 *
 * For sequence i, whose one new token is in row r and has `length` tokens up to itself, and query head h:
 *     s[t] = cap(scale * q[r, h] . K[t, h // g])        for t in [max(0, length - window), length)
 *     out[r, h] = softmax(s) @ V[:, h // g]             (fp32, one rounding)
 *
 * A unit of work is a sequence and a KV head, with its g query heads. What a row gets does not depend on the other rows,
 * nor on the number of threads. Compiled by `kernels.native`.
 */
#include "native_vectors.h"

#include <math.h>

/* One call, as `kernels.decode_attention` packs it: no padding between the fields. */
typedef struct {
    const void *queries;    /* [T, heads, dim], rows query_stride values apart */
    const void *cache;      /* [2, pages, kv_heads, block_size, dim], keys first, `plane` values each */
    void *out;              /* [T, heads, dim], rows out_stride values apart */
    const int32_t *rows;    /* [count] */
    const int32_t *lengths; /* [count] */
    const int32_t *tables;  /* [count, table_width], pages */
    float *scratch;         /* [num_threads, scratch_size] */
    int64_t query_stride, out_stride, plane, scratch_size;
    int32_t dtype, count, heads, kv_heads, dim, block_size, table_width, window, num_threads, next;
    float scale, softcap;
} Call;

/* Lane i of the result is the sum of the lanes of p[i]. */
static inline f4 sums4(const f8 *p) {
    f8 t0 = PICK(p[0], p[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(p[0], p[1], 1, 9, 3, 11, 5, 13, 7, 15);
    f8 t1 = PICK(p[2], p[3], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(p[2], p[3], 1, 9, 3, 11, 5, 13, 7, 15);
    f8 u = PICK(t0, t1, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(t0, t1, 2, 3, 10, 11, 6, 7, 14, 15);
    f4 half[2];
    memcpy(half, &u, 32);
    return half[0] + half[1];
}

static inline float sum8(f8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* Eight numbers of the cache in fp32. */
INLINE f8 read8(const void *cache, int dtype, int64_t at) {
    return dtype == FP32 ? *(const f8 *)((const float *)cache + at) : widened8((const uint16_t *)cache + at);
}

/* scores[h][t] = q[h] . keys[t] for H query heads: keys are read, and widened, once for all of them. */
#define SCORE(NAME, H)                                                                                                \
    INLINE void NAME(const float *q, const void *keys, int dtype, int64_t at,                                         \
                         int count, int dim, float *scores, int padded) {                                             \
        int t = 0;                                                                                                    \
        for (; t + 4 <= count; t += 4) {                                                                              \
            f8 p[H][4];                                                                                               \
            for (int h = 0; h < H; h++)                                                                               \
                for (int i = 0; i < 4; i++) p[h][i] = (f8){0};                                                        \
            for (int d = 0; d < dim; d += 8)                                                                          \
                for (int i = 0; i < 4; i++) {                                                                         \
                    f8 key = read8(keys, dtype, at + (int64_t)(t + i) * dim + d);                                     \
                    for (int h = 0; h < H; h++) p[h][i] += key * *(const f8 *)(q + h * dim + d);                      \
                }                                                                                                     \
            for (int h = 0; h < H; h++) *(f4 *)(scores + h * padded + t) = sums4(p[h]);                               \
        }                                                                                                             \
        for (; t < count; t++)                                                                                        \
            for (int h = 0; h < H; h++) {                                                                             \
                f8 p = {0};                                                                                           \
                for (int d = 0; d < dim; d += 8)                                                                      \
                    p += read8(keys, dtype, at + (int64_t)t * dim + d) * *(const f8 *)(q + h * dim + d);              \
                scores[h * padded + t] = sum8(p);                                                                     \
            }                                                                                                         \
    }

/* out[h] += weights[h] @ values for H query heads, 32 or 8 columns at a time. */
#define WEIGH(NAME, H)                                                                                                \
    INLINE void NAME(const float *weights, int padded, const void *values,                                            \
                      int dtype, int64_t at, int count, int dim, float *out) {                                        \
        int d = 0;                                                                                                    \
        for (; d + 32 <= dim; d += 32) {                                                                              \
            f8 sums[H][4];                                                                                            \
            for (int h = 0; h < H; h++)                                                                               \
                for (int n = 0; n < 4; n++) sums[h][n] = *(const f8 *)(out + h * dim + d + 8 * n);                    \
            for (int t = 0; t < count; t++)                                                                           \
                for (int n = 0; n < 4; n++) {                                                                         \
                    f8 value = read8(values, dtype, at + (int64_t)t * dim + d + 8 * n);                               \
                    for (int h = 0; h < H; h++) sums[h][n] += value * weights[h * padded + t];                        \
                }                                                                                                     \
            for (int h = 0; h < H; h++)                                                                               \
                for (int n = 0; n < 4; n++) *(f8 *)(out + h * dim + d + 8 * n) = sums[h][n];                          \
        }                                                                                                             \
        for (; d < dim; d += 8)                                                                                       \
            for (int h = 0; h < H; h++) {                                                                             \
                f8 sum = *(const f8 *)(out + h * dim + d);                                                            \
                for (int t = 0; t < count; t++)                                                                       \
                    sum += read8(values, dtype, at + (int64_t)t * dim + d) * weights[h * padded + t];                 \
                *(f8 *)(out + h * dim + d) = sum;                                                                     \
            }                                                                                                         \
    }

SCORE(score1, 1)
SCORE(score2, 2)
SCORE(score3, 3)
SCORE(score4, 4)
WEIGH(weigh1, 1)
WEIGH(weigh2, 2)
WEIGH(weigh3, 3)
WEIGH(weigh4, 4)

/* Scores (`weigh` 0) or the output (`weigh` 1) of a page's tokens, for all query heads of a KV head: four at a time. */
INLINE void take(const Call *call, int dtype, int weigh, const float *q, float *out,
                                                       float *scores, int padded, int64_t at, int count) {
    int dim = call->dim, group = call->heads / call->kv_heads;
    for (int h = 0; h < group;) {
        int some = group - h < 4 ? group - h : 4;
        const float *heads = q + h * dim;
        float *to = out + h * dim, *row = scores + h * padded;
#define CASE(N)                                                                       \
    case N:                                                                           \
        if (weigh)                                                                    \
            weigh##N(row, padded, call->cache, dtype, call->plane + at, count, dim, to); \
        else                                                                          \
            score##N(heads, call->cache, dtype, at, count, dim, row, padded);         \
        break;
        switch (some) {
            CASE(1)
            CASE(2)
            CASE(3)
            CASE(4)
        }
#undef CASE
        h += some;
    }
}

/* Scores to weights, not yet divided by their sum, which is returned. */
static inline float soften(const Call *call, float *scores, int count) {
    float most = -INFINITY, sum = 0;
    if (call->softcap > 0)
        for (int t = 0; t < count; t++) scores[t] = call->softcap * tanhf(scores[t] / call->softcap);
    int t = 0;
    f8 sums = {0}, largest = sums - INFINITY;
    for (; t + 8 <= count; t += 8) {
        f8 some = *(const f8 *)(scores + t);
        i8 is_larger = (i8)(some > largest);
        largest = (f8)(((i8)some & is_larger) | ((i8)largest & ~is_larger));
    }
    for (int lane = 0; lane < 8; lane++) most = largest[lane] > most ? largest[lane] : most;
    for (; t < count; t++) most = scores[t] > most ? scores[t] : most;
    t = 0;
    for (; t + 8 <= count; t += 8) {
        f8 weights = exp8(*(const f8 *)(scores + t) - most);
        *(f8 *)(scores + t) = weights;
        sums += weights;
    }
    for (; t < count; t++) sum += scores[t] = exp8((f8){0} + (scores[t] - most))[0];
    return sum + sum8(sums);
}

/* Where a page's tokens from `token` on begin in a plane of the cache. */
static inline int64_t place(const Call *call, const int32_t *table, int kv_head, int token) {
    int64_t page = (int64_t)table[token / call->block_size] * call->kv_heads + kv_head;
    return (page * call->block_size + token % call->block_size) * call->dim;
}

/* Have a page's tokens from `token` on read from memory, as far as the second cache: pages lie anywhere, the processor
 * foresees none of them, and its first cache can wait for too few lines at a time. */
INLINE void fetch(const Call *call, int dtype, int weigh, const int32_t *table,
                                                        int kv_head, int token) {
    int size = dtype == FP32 ? 4 : 2, count = call->block_size - token % call->block_size;
    const char *from = (const char *)call->cache + size * (weigh * call->plane + place(call, table, kv_head, token));
    for (int byte = 0; byte < count * call->dim * size; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* One unit: the g query heads of one KV head of one sequence. */
INLINE void attend(const Call *call, int dtype, int sequence, int kv_head,
                                                         float *scratch) {
    int dim = call->dim, block_size = call->block_size, group = call->heads / call->kv_heads;
    int length = call->lengths[sequence], first = call->window && length > call->window ? length - call->window : 0;
    int count = length - first, padded = (count + 7) & ~7;
    const int32_t *table = call->tables + (int64_t)sequence * call->table_width;
    float *q = scratch, *out = q + group * dim, *scores = out + group * dim;

    int64_t head = (int64_t)call->rows[sequence] * call->query_stride + (int64_t)kv_head * group * dim;
    for (int k = 0; k < group * dim; k += 8) {
        *(f8 *)(q + k) = read8(call->queries, dtype, head + k) * call->scale;
        *(f8 *)(out + k) = (f8){0};
    }
    for (int weigh = 0; weigh < 2; weigh++) {
        for (int token = first; token < length;) {
            int offset = token % block_size, some = block_size - offset;
            if (some > length - token) some = length - token;
            if (token + some < length)
                fetch(call, dtype, weigh, table, kv_head, token + some);
            else if (!weigh)
                fetch(call, dtype, 1, table, kv_head, first);
            take(call, dtype, weigh, q, out, scores + (token - first), padded, place(call, table, kv_head, token), some);
            token += some;
        }
        if (!weigh)
            /* q has served: its first numbers become the sums of the weights. */
            for (int g = 0; g < group; g++) q[g] = soften(call, scores + g * padded, count);
    }
    int64_t to = (int64_t)call->rows[sequence] * call->out_stride + (int64_t)kv_head * group * dim;
    for (int k = 0; k < group * dim; k += 8) {
        f8 part = *(const f8 *)(out + k) / q[k / dim];
        if (dtype == FP32)
            *(f8 *)((float *)call->out + to + k) = part;
        else
            round8((uint16_t *)call->out + to + k, part);
    }
}

static void attend_fp32(const Call *call, int sequence, int kv_head, float *scratch) {
    attend(call, FP32, sequence, kv_head, scratch);
}

static void attend_bf16(const Call *call, int sequence, int kv_head, float *scratch) {
    attend(call, BF16, sequence, kv_head, scratch);
}

void lora_fleet_decode_attention(Call *call) {
    int units = call->count * call->kv_heads;
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *scratch = call->scratch + thread * call->scratch_size;
        /* Sequences differ in length: whoever is free takes the next unit. */
        for (int unit; (unit = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED)) < units;)
            (call->dtype == FP32 ? attend_fp32 : attend_bf16)(call, unit / call->kv_heads, unit % call->kv_heads, scratch);
    }
}
