/* Causal attention on the CPU: keys and values are read where they lie in their pages.
 *
 * For a row at position p of its sequence, and query head h, of group g:
 *     s[t] = cap(scale * q[h] . K[t, h // g])           for t in [max(0, p + 1 - window), p + 1)
 *     out[h] = softmax(s) @ V[:, h // g]                (fp32, one rounding)
 *
 * A unit of work is a tile of rows of one sequence, and a KV head with its g query heads. Where a sequence has a single
 * row, its keys and values are read once, from memory, and that is what takes the time: `attend_one`. For several they are
 * packed in the processor's cache in fp32, a block of KEYS at a time, and multiplied as matrices: `attend_many`. What a row
 * gets depends neither on the number of threads, nor on other sequences, nor on how many rows its own has, if not one.
 * Compiled by `kernels.native`.
 */
#include "native_vectors.h"

#include <float.h>
#include <math.h>

/* One call, as `kernels.attention_native` packs it: no padding between the fields. */
typedef struct {
    const void *queries;    /* [T, heads, dim], rows query_stride values apart */
    const void *cache;      /* [2, pages, kv_heads, block_size, dim], keys first, `plane` values each */
    void *out;              /* [T, heads, dim], rows out_stride values apart */
    const int32_t *rows;    /* [count], first row of each sequence */
    const int32_t *counts;  /* [count], its rows */
    const int32_t *lengths; /* [count], its tokens, those of its rows last */
    const int32_t *tables;  /* [count, table_width], pages */
    int64_t query_stride, out_stride, plane;
    int32_t dtype, count, heads, kv_heads, dim, block_size, table_width, window, num_threads, next;
    float scale, softcap;
} Call;

enum { ROWS = 96 /* queries of a tile: fewer, and keys are packed more often than they are worth */, PRODUCT_ROWS = 6, PANEL = 2 * PART, KEYS = 128 };
enum { DEPTH = 64 /* products that are added up one by one */ };

/* Rows [row, row + count) of a sequence, of which the last one attends to `length` tokens; alone: all of its rows, one. */
typedef struct {
    const int32_t *table;
    int row, count, length, kv_head, is_alone;
} Tile;

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

/* Scores within the soft cap; as far as the next multiple of 8. */
static inline void cap(const Call *call, float *scores, int count) {
    if (call->softcap > 0)
        for (int t = 0; t < count; t += 8)
            *(f8 *)(scores + t) = tanh8(*(const f8 *)(scores + t) / call->softcap) * call->softcap;
}

/* Scores to weights, not yet divided by their sum, which is returned. */
static inline float soften(const Call *call, float *scores, int count) {
    float most = -INFINITY, sum = 0;
    int t = 0;
    cap(call, scores, count);
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

/* One row: the g query heads of one KV head. */
INLINE int attend_one(const Call *call, int dtype, Tile tile) {
    int dim = call->dim, block_size = call->block_size, group = call->heads / call->kv_heads;
    int length = tile.length, first = call->window && length > call->window ? length - call->window : 0;
    int count = length - first, padded = (count + 7) & ~7;
    float *q = scratch_of_thread((int64_t)group * (2 * dim + padded)), *out = q + group * dim, *scores = out + group * dim;
    if (!q) return 1;

    int64_t head = tile.row * call->query_stride + (int64_t)tile.kv_head * group * dim;
    for (int k = 0; k < group * dim; k += 8) {
        *(f8 *)(q + k) = read8(call->queries, dtype, head + k) * call->scale;
        *(f8 *)(out + k) = (f8){0};
    }
    for (int weigh = 0; weigh < 2; weigh++) {
        for (int token = first; token < length;) {
            int offset = token % block_size, some = block_size - offset;
            if (some > length - token) some = length - token;
            if (token + some < length)
                fetch(call, dtype, weigh, tile.table, tile.kv_head, token + some);
            else if (!weigh)
                fetch(call, dtype, 1, tile.table, tile.kv_head, first);
            take(call, dtype, weigh, q, out, scores + (token - first), padded,
                 place(call, tile.table, tile.kv_head, token), some);
            token += some;
        }
        if (!weigh)
            /* q has served: its first numbers become the sums of the weights. */
            for (int g = 0; g < group; g++) q[g] = soften(call, scores + g * padded, count);
    }
    int64_t to = tile.row * call->out_stride + (int64_t)tile.kv_head * group * dim;
    for (int k = 0; k < group * dim; k += 8) write8(call->out, dtype, to + k, *(const f8 *)(out + k) / q[k / dim]);
    return 0;
}

/* Tokens of a sequence that are packed: [first, first + count), the tokens before `skipped` of them left out. Blocks begin
 * at multiples of KEYS, whatever the tile, so that a row adds up the same numbers in the same order in any.
 */
typedef struct {
    int first, count, skipped;
} Block;

/* c[r] = a[r] @ b, or that added to what it was, for PRODUCT_ROWS rows of `depth` values, and a panel: PANEL columns of b. */
static inline void product(const float *a, int a_stride, const float *b, int depth, float *c, int c_stride, int add) {
    Part sums[PRODUCT_ROWS][2];
    for (int r = 0; r < PRODUCT_ROWS; r++)
        for (int n = 0; n < 2; n++) sums[r][n] = (Part){0};
    for (int k = 0; k < depth; k++, b += PANEL) {
        Part left = *(const Part *)b, right = *(const Part *)(b + PART);
        HELD(left);
        HELD(right);
        for (int r = 0; r < PRODUCT_ROWS; r++) {
            Part value = part_of(a[r * a_stride + k]);
            ADD_FP32(sums[r][0], value, left);
            ADD_FP32(sums[r][1], value, right);
        }
    }
    for (int r = 0; r < PRODUCT_ROWS; r++)
        for (int n = 0; n < 2; n++) {
            Part *to = (Part *)(c + r * c_stride + n * PART);
            if (add) sums[r][n] += *to;
            *to = sums[r][n];
        }
}

static inline void transpose8(f8 *rows) {
    f8 pairs[8], fours[8];
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = PICK(rows[2 * i], rows[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[2 * i + 1] = PICK(rows[2 * i], rows[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i++) {
        f8 low = pairs[i / 4 * 4 + i % 2], high = pairs[i / 4 * 4 + i % 2 + 2];
        fours[i] = i % 4 < 2 ? PICK(low, high, 0, 1, 8, 9, 4, 5, 12, 13) : PICK(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = PICK(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = PICK(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Keys of a block as panels [dim, PANEL], zeros where there are none. */
INLINE void pack_keys(const Call *call, int dtype, Tile tile, Block block, float *panels) {
    int dim = call->dim, padded = (block.count + PANEL - 1) / PANEL * PANEL;
    for (int t = 0; t < padded; t += 8) {
        float *to = panels + t / PANEL * dim * PANEL + t % PANEL;
        int64_t from[8];
        for (int i = 0; i < 8; i++) {
            int exists = t + i >= block.skipped && t + i < block.count;
            from[i] = exists ? place(call, tile.table, tile.kv_head, block.first + t + i) : -1;
        }
        for (int d = 0; d < dim; d += 8) {
            f8 rows[8];
            for (int i = 0; i < 8; i++) rows[i] = from[i] < 0 ? (f8){0} : read8(call->cache, dtype, from[i] + d);
            transpose8(rows);
            for (int i = 0; i < 8; i++) *(f8 *)(to + (d + i) * PANEL) = rows[i];
        }
    }
}

/* Values of a block as panels [KEYS, PANEL]; columns past the width of a head are what was there before. Returns whether
 * all values are finite. */
INLINE int pack_values(const Call *call, int dtype, Tile tile, Block block, float *panels) {
    f8 zeros = {0};
    for (int t = block.skipped; t < block.count; t++) {
        int64_t from = call->plane + place(call, tile.table, tile.kv_head, block.first + t);
        float *to = panels + t * PANEL;
        for (int d = 0; d < call->dim; d += 8) {
            f8 some = read8(call->cache, dtype, from + d);
            *(f8 *)(to + d / PANEL * KEYS * PANEL + d % PANEL) = some;
            zeros += some * 0.0f;
        }
    }
    return sum8(zeros) == 0;
}

/* What is known of a row's softmax: the largest score, and the sum of the weights relative to it. */
typedef struct {
    float most, sum;
} Softmax;

/* Scores of tokens [from, to) of a block of `count` to weights, and 0 for its others; out is made relative to the new
 * largest score. */
static void soften_block(const Call *call, float *scores, int count, int from, int to, Softmax *row, float *out, int width) {
    const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    f8 largest = (f8){0} + row->most, sums = {0};
    cap(call, scores, count);
    for (int t = 0; t < count; t += 8) {
        f8 some = *(const f8 *)(scores + t);
        i8 is_larger = (i8)(some > largest) & (lanes + t >= from) & (lanes + t < to);
        largest = (f8)(((i8)some & is_larger) | ((i8)largest & ~is_larger));
    }
    float most = row->most;
    for (int lane = 0; lane < 8; lane++) most = largest[lane] > most ? largest[lane] : most;
    for (int t = 0; t < count; t += 8) {
        i8 is_in = (lanes + t >= from) & (lanes + t < to);
        f8 weights = (f8)((i8)exp8(*(const f8 *)(scores + t) - most) & is_in);
        *(f8 *)(scores + t) = weights;
        sums += weights;
    }
    if (most != row->most) {
        float factor = exp8((f8){0} + (row->most - most))[0];
        for (int d = 0; d < width; d += 8) *(f8 *)(out + d) *= factor;
        row->sum *= factor;
        row->most = most;
    }
    row->sum += sum8(sums);
}

/* out += weights @ values of tokens [from, to) of a block for one row, as `product` adds them up. That gives a token which
 * a row does not attend to a weight of 0, and 0 times what is not finite is no number: such blocks take this instead. */
static void weigh_alone(const float *weights, const float *values, int from, int to, int dim, float *out) {
    for (int d = 0; d < dim; d += 8) {
        const float *column = values + d / PANEL * KEYS * PANEL + d % PANEL;
        f8 sum = {0};
        for (int t = from; t < to; t++) sum = fused8((f8){0} + weights[t], *(const f8 *)(column + t * PANEL), sum);
        *(f8 *)(out + d) += sum;
    }
}

/* Several rows: the g query heads of one KV head for each, row by row. */
INLINE int attend_many(const Call *call, int dtype, Tile tile) {
    int dim = call->dim, group = call->heads / call->kv_heads, count = tile.count * group;
    int width = (dim + PANEL - 1) / PANEL * PANEL, padded = (count + PRODUCT_ROWS - 1) / PRODUCT_ROWS * PRODUCT_ROWS;
    int position = tile.length - tile.count, window = call->window ? call->window : tile.length;
    int first = position + 1 > window ? position + 1 - window : 0;
    float *q = scratch_of_thread((int64_t)(padded + KEYS) * (dim + width) + padded * (KEYS + 2));
    float *out = q + padded * dim, *scores = out + padded * width, *keys = scores + padded * KEYS;
    float *values = keys + KEYS * dim;
    Softmax *rows = (Softmax *)(values + KEYS * width);
    if (!q) return 1;

    memset(q, 0, sizeof *q * (size_t)(padded * (dim + width)));
    for (int r = 0; r < count; r++) {
        int64_t from = (tile.row + r / group) * call->query_stride + (tile.kv_head * group + r % group) * (int64_t)dim;
        for (int d = 0; d < dim; d += 8) *(f8 *)(q + r * dim + d) = read8(call->queries, dtype, from + d) * call->scale;
        rows[r] = (Softmax){-FLT_MAX, 0};
    }
    for (int start = first / KEYS * KEYS; start < tile.length; start += KEYS) {
        Block block = {start, tile.length - start < KEYS ? tile.length - start : KEYS, first > start ? first - start : 0};
        int depth = block.count - block.skipped;
        pack_keys(call, dtype, tile, block, keys);
        int is_finite = pack_values(call, dtype, tile, block, values);
        for (int t = 0; t < block.count; t += PANEL)
            for (int r = 0; r < padded; r += PRODUCT_ROWS)
                for (int d = 0; d < dim; d += DEPTH)
                    product(q + r * dim + d, dim, keys + t * dim + d * PANEL, dim - d < DEPTH ? dim - d : DEPTH,
                            scores + r * KEYS + t, KEYS, d > 0);
        for (int r = 0; r < count; r++) {
            int end = position + r / group + 1 - start, to = end < block.count ? end : block.count;
            int from = end - window > block.skipped ? end - window : block.skipped;
            soften_block(call, scores + r * KEYS, block.count, from, to, rows + r, out + r * width, width);
            if (!is_finite) weigh_alone(scores + r * KEYS, values, from, to, dim, out + r * width);
        }
        for (int d = 0; is_finite && d < width; d += PANEL)
            for (int r = 0; r < padded; r += PRODUCT_ROWS)
                product(scores + r * KEYS + block.skipped, KEYS, values + d * KEYS + block.skipped * PANEL, depth,
                        out + r * width + d, width, 1);
    }
    for (int r = 0; r < count; r++) {
        int64_t to = (tile.row + r / group) * call->out_stride + (tile.kv_head * group + r % group) * (int64_t)dim;
        for (int d = 0; d < dim; d += 8)
            write8(call->out, dtype, to + d, *(const f8 *)(out + r * width + d) / rows[r].sum);
    }
    return 0;
}

/* By the sequence's rows, not the tile's: the last tile of many may have one row, which gets what it would get in another. */
#define ATTEND(NAME, DTYPE)                                                                        \
    static int NAME(const Call *call, Tile tile) {                                                 \
        return tile.is_alone ? attend_one(call, DTYPE, tile) : attend_many(call, DTYPE, tile);      \
    }
ATTEND(attend_fp32, FP32)
ATTEND(attend_bf16, BF16)
ATTEND(attend_fp16, FP16)

/* Rows of a tile: as many as there are ROWS queries of, one at least. */
static int tile_rows(const Call *call) {
    int rows = ROWS / (call->heads / call->kv_heads);
    return rows < 1 ? 1 : rows;
}

/* Returns whether there was no memory for it. */
int lora_fleet_attention(Call *call) {
    static int (*const attend[])(const Call *, Tile) = {attend_fp32, attend_bf16, attend_fp16};
    int units = 0, failed = 0, step = tile_rows(call);
    for (int i = 0; i < call->count; i++) units += (call->counts[i] + step - 1) / step * call->kv_heads;
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int sequence = 0, begin = 0 /* of the sequence's units */;
        /* Tiles differ in length: whoever is free takes the next unit; a sequence's longest come first. */
        for (int unit; (unit = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED)) < units;) {
            int tiles;
            while (tiles = (call->counts[sequence] + step - 1) / step, unit >= begin + tiles * call->kv_heads)
                begin += tiles * call->kv_heads, sequence++;
            int start = (tiles - 1 - (unit - begin) / call->kv_heads) * step, left = call->counts[sequence] - start;
            Tile tile = {call->tables + (int64_t)sequence * call->table_width, call->rows[sequence] + start,
                         left < step ? left : step, 0, (unit - begin) % call->kv_heads, call->counts[sequence] == 1};
            tile.length = call->lengths[sequence] - left + tile.count;
            if (attend[call->dtype](call, tile)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        }
    }
    return failed;
}
