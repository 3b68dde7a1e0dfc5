/* A linear layer on the CPU whose weight is bf16 or fp16, for processors that store these and multiply fp32 alone.
 *
 *     y = x @ weight.T + bias          (fp32, one rounding)
 *
 * The weight is read once for every `ROWS` rows of x, in the order it lies in, and widened in the cache. Reads are asked
 * for one tile ahead: what limits a product of few rows is memory, and half of its rate is had without. What a row gets
 * depends neither on the rows beside it nor on the number of threads. Compiled by `kernels.native`.
 */
#include "native_vectors.h"

/* A tile is TILE_ROWS rows by TILE_OUTS outputs: as many sums as 16 registers hold beside what they are made of. */
enum { ROWS = 32 /* of x that are widened at a time */, TILE_ROWS = 4, TILE_OUTS = 3, SUMS = 16, FEW_SUMS = 8 };
enum { STEP = 8, LINE = 64 /* bytes */ };

/* One call, as `kernels.linear_native` packs it: no padding between the fields. */
typedef struct {
    const uint16_t *x;      /* [rows, width], rows x_stride values apart */
    const uint16_t *weight; /* [out, width] */
    const uint16_t *bias;   /* [out], or NULL */
    uint16_t *y;            /* [rows, out] */
    int64_t x_stride;
    int32_t dtype, rows, width, out, num_threads, unused;
} Call;

/* Widened rows of x, `stride` values apart; the first of them is row `first` of y. */
typedef struct {
    const float *x;
    int64_t stride;
    int first, count;
} Rows;

INLINE f8 part8(const uint16_t *from, int dtype) { return dtype == BF16 ? widened8(from) : widened_half8(from); }

/* The last few values of a row, and zeros. */
INLINE f8 rest8(const uint16_t *from, int dtype, int count) {
    uint16_t rest[STEP] = {0};
    memcpy(rest, from, sizeof *rest * (size_t)count);
    return part8(rest, dtype);
}

static int64_t padded(int width) { return (width + STEP - 1) / STEP * STEP; }

static void widen_row(const uint16_t *from, int dtype, int width, float *to) {
    int k = 0;
    for (; k + STEP <= width; k += STEP) *(f8 *)(to + k) = part8(from + k, dtype);
    if (k < width) *(f8 *)(to + k) = rest8(from + k, dtype, width - k);
}

INLINE void write_sum(const Call *call, int row, int out, float sum) {
    int is_bf16 = call->dtype == BF16;
    if (call->bias) sum += is_bf16 ? widened(call->bias[out]) : widened_half(call->bias[out]);
    call->y[(int64_t)row * call->out + out] = is_bf16 ? rounded(sum) : rounded_half(sum);
}

/* sums[r * TILE_OUTS + o] = x[r] . weight[o], of `rows` rows, which is a constant where this is called. */
INLINE void tile(int rows, const float *x, const float *weight, int64_t stride, float *sums) {
    f8 parts[SUMS];
    for (int i = 0; i < SUMS; i++) parts[i] = (f8){0};
#pragma GCC unroll 1
    for (int64_t k = 0; k < stride; k += STEP) {
        f8 weights[TILE_OUTS];
        for (int o = 0; o < TILE_OUTS; o++) {
            weights[o] = *(const f8 *)(weight + o * stride + k);
            HELD(weights[o]);
        }
        for (int r = 0; r < rows; r++) {
            f8 row = *(const f8 *)(x + r * stride + k);
            HELD(row);
            for (int o = 0; o < TILE_OUTS; o++) {
                int i = r * TILE_OUTS + o;
                parts[i] = fused8(row, weights[o], parts[i]);
            }
        }
    }
    for (int i = 0; i < rows * TILE_OUTS; i += 8) *(f8 *)(sums + i) = sums8(parts + i);
}

static void tile1(const float *x, const float *weight, int64_t stride, float *sums) { tile(1, x, weight, stride, sums); }
static void tile2(const float *x, const float *weight, int64_t stride, float *sums) { tile(2, x, weight, stride, sums); }
static void tile3(const float *x, const float *weight, int64_t stride, float *sums) { tile(3, x, weight, stride, sums); }
static void tile4(const float *x, const float *weight, int64_t stride, float *sums) { tile(4, x, weight, stride, sums); }

/* Outputs [out, out + outs) of rows, from their weights, widened. While they are multiplied, the `ahead` weights behind
 * them come in from memory.
 */
static void add_tiles(const Call *call, Rows rows, const float *weight, int out, int outs, int ahead) {
    static void (*const tiles[])(const float *, const float *, int64_t, float *) = {tile1, tile2, tile3, tile4};
    const char *next = (const char *)(call->weight + (int64_t)(out + outs) * call->width);
    int64_t bytes = sizeof *call->weight * (int64_t)ahead;
    for (int row = 0; row < rows.count; row += TILE_ROWS) {
        int count = rows.count - row < TILE_ROWS ? rows.count - row : TILE_ROWS;
        float sums[SUMS];
        for (int64_t at = bytes * row / rows.count; at < bytes * (row + count) / rows.count; at += LINE)
            __builtin_prefetch(next + at, 0, 2);
        tiles[count - 1](rows.x + row * rows.stride, weight, rows.stride, sums);
        for (int r = 0; r < count; r++)
            for (int o = 0; o < outs; o++) write_sum(call, rows.first + row + r, out + o, sums[r * TILE_OUTS + o]);
    }
}

/* Eight outputs of one row, or four of two, straight from the weight: a copy in the cache does not pay for them. They are
 * added up as in a tile. `count` is the number of rows, and a constant where this is called, as is dtype.
 */
INLINE void add_few(const Call *call, int dtype, int count, Rows rows, int out) {
    int outs = FEW_SUMS / count, width = call->width, k = 0;
    const uint16_t *weight = call->weight + (int64_t)out * width;
    f8 parts[FEW_SUMS], all;
    for (int i = 0; i < FEW_SUMS; i++) parts[i] = (f8){0};
    for (; k + STEP <= width; k += STEP) {
        /* A line has four steps: each asks for a fourth of the lines. */
        for (int o = k / STEP % 4; o < outs; o += 4) __builtin_prefetch(weight + (int64_t)(outs + o) * width + k, 0, 2);
        for (int o = 0; o < outs; o++) {
            f8 part = part8(weight + (int64_t)o * width + k, dtype);
            for (int r = 0; r < count; r++)
                parts[r * outs + o] = fused8(*(const f8 *)(rows.x + r * rows.stride + k), part, parts[r * outs + o]);
        }
    }
    for (int o = 0; k < width && o < outs; o++) {
        f8 part = rest8(weight + (int64_t)o * width + k, dtype, width - k);
        for (int r = 0; r < count; r++)
            parts[r * outs + o] = fused8(*(const f8 *)(rows.x + r * rows.stride + k), part, parts[r * outs + o]);
    }
    all = sums8(parts);
    for (int i = 0; i < FEW_SUMS; i++) write_sum(call, rows.first + i / outs, out + i % outs, all[i]);
}

static void add_few_bf16_1(const Call *call, Rows rows, int out) { add_few(call, BF16, 1, rows, out); }
static void add_few_bf16_2(const Call *call, Rows rows, int out) { add_few(call, BF16, 2, rows, out); }
static void add_few_fp16_1(const Call *call, Rows rows, int out) { add_few(call, FP16, 1, rows, out); }
static void add_few_fp16_2(const Call *call, Rows rows, int out) { add_few(call, FP16, 2, rows, out); }

/* Outputs [first, last) of rows; `weight` has room for the weights of a tile. */
static void add_outs(const Call *call, Rows rows, int first, int last, float *weight) {
    static void (*const few[2][2])(const Call *, Rows, int) = {{add_few_bf16_1, add_few_bf16_2},
                                                               {add_few_fp16_1, add_few_fp16_2}};
    int out = first, width = call->width;
    for (; rows.count <= 2 && out + FEW_SUMS / rows.count <= last; out += FEW_SUMS / rows.count)
        few[call->dtype == FP16][rows.count - 1](call, rows, out);
    for (; out < last; out += TILE_OUTS) {
        int outs = last - out < TILE_OUTS ? last - out : TILE_OUTS;
        /* Where the share ends within a tile, its last weights are what was there before, and their sums not used. */
        for (int o = 0; o < outs; o++)
            widen_row(call->weight + (int64_t)(out + o) * width, call->dtype, width, weight + o * rows.stride);
        add_tiles(call, rows, weight, out, outs, out + 2 * TILE_OUTS <= last ? TILE_OUTS * width : 0);
    }
}

/* Returns whether there was no memory for it. */
int lora_fleet_linear(const Call *call) {
    int failed = 0;
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int64_t thread = 0, threads = 1, stride = padded(call->width);
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        int first = (int)(call->out * thread / threads), last = (int)(call->out * (thread + 1) / threads);
        float *x = scratch_of_thread((ROWS + TILE_OUTS) * stride);
        if (!x) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        for (int row = 0; x && row < call->rows; row += ROWS) {
            Rows rows = {x, stride, row, call->rows - row < ROWS ? call->rows - row : ROWS};
            for (int r = 0; r < rows.count; r++)
                widen_row(call->x + (row + r) * call->x_stride, call->dtype, call->width, x + r * stride);
            add_outs(call, rows, first, last, x + ROWS * stride);
        }
    }
    return failed;
}
