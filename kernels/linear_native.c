/* A linear layer on the CPU whose weight is bf16 or fp16, for processors that store these and multiply fp32 alone.
 *
 *     y = x @ weight.T + bias          (fp32, one rounding)
 *
 * The weight is read once for every `ROWS` rows of x, in the order it lies in, and widened in the cache. Reads are asked
 * for one tile ahead: what limits a product of few rows is memory, and half of its rate is had without. What a row gets
 * depends neither on the rows beside it nor on the number of threads. Compiled by `kernels.native`.
 */
#include "native_vectors.h"

#define INLINE static inline __attribute__((always_inline))

/* A tile is TILE_ROWS rows by TILE_OUTS outputs: as many sums as 16 registers hold beside what they are made of. */
enum { ROWS = 32 /* of x that are widened at a time */, TILE_ROWS = 4, TILE_OUTS = 3, SUMS = 16 };
enum { FEW = 8 /* sums of one or two rows */ };
enum { FP16 = 2, LINE = 64 /* bytes */ };

/* One call, as `kernels.linear_native` packs it: no padding between the fields. */
typedef struct {
    const uint16_t *x;      /* [rows, width], rows x_stride values apart */
    const uint16_t *weight; /* [out, width] */
    const uint16_t *bias;   /* [out], or NULL */
    uint16_t *y;            /* [rows, out] */
    float *scratch;         /* [num_threads, ROWS + TILE_OUTS, width rounded up to 8] */
    int64_t x_stride;
    int32_t dtype, rows, width, out, num_threads, unused;
} Call;

#ifdef __F16C__
static inline f8 widened_half8(const void *from) { return (f8)_mm256_cvtph_ps(_mm_loadu_si128(from)); }
static inline float widened_half(uint16_t value) { return _cvtsh_ss(value); }
static inline uint16_t rounded_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else /* not served: the check of what was compiled finds zeros */
static inline f8 widened_half8(const void *from) { return (void)from, (f8){0}; }
static inline float widened_half(uint16_t value) { return (void)value, 0.0f; }
static inline uint16_t rounded_half(float value) { return (void)value, 0; }
#endif

static inline float value(uint16_t bits, int dtype) { return dtype == BF16 ? widened(bits) : widened_half(bits); }

/* To multiples of 8, with zeros behind the last. */
static void widen_row(const uint16_t *from, int dtype, int width, float *to) {
    int k = 0;
    if (dtype == BF16)
        for (; k + 8 <= width; k += 8) *(f8 *)(to + k) = widened8(from + k);
    else
        for (; k + 8 <= width; k += 8) *(f8 *)(to + k) = widened_half8(from + k);
    if (k == width) return;
    *(f8 *)(to + k) = (f8){0};
    for (; k < width; k++) to[k] = value(from[k], dtype);
}

/* sums[r * TILE_OUTS + o] = x[r] . weight[o], of `rows` rows, which is a constant where this is called. */
INLINE void tile(int rows, const float *x, const float *weight, int64_t stride, float *sums) {
    f8 parts[SUMS];
    for (int i = 0; i < SUMS; i++) parts[i] = (f8){0};
#pragma GCC unroll 1
    for (int64_t k = 0; k < stride; k += 8) {
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

INLINE void write_sum(const Call *call, int dtype, int row, int out, float sum) {
    if (call->bias) sum += value(call->bias[out], dtype);
    call->y[(int64_t)row * call->out + out] = dtype == BF16 ? rounded(sum) : rounded_half(sum);
}

/* Outputs [out, out + num_outs) of `rows` widened rows of x, at most `ROWS`. */
static void add_outs(const Call *call, int first_row, int rows, int out, int num_outs, const float *x,
                     const float *weight, int64_t stride, const char *next, int64_t next_bytes) {
    static void (*const tiles[])(const float *, const float *, int64_t, float *) = {tile1, tile2, tile3, tile4};
    for (int row = 0; row < rows; row += TILE_ROWS) {
        /* What is read next comes in from memory while this is multiplied. */
        for (int64_t at = next_bytes * row / rows; at < next_bytes * (row + TILE_ROWS) / rows; at += LINE)
            __builtin_prefetch(next + at, 0, 2);
        int num_rows = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        float sums[SUMS];
        tiles[num_rows - 1](x + row * stride, weight, stride, sums);
        for (int r = 0; r < num_rows; r++)
            for (int o = 0; o < num_outs; o++)
                write_sum(call, call->dtype, first_row + row + r, out + o, sums[r * TILE_OUTS + o]);
    }
}

INLINE f8 widened_part(const uint16_t *from, int dtype) {
    return dtype == BF16 ? widened8(from) : widened_half8(from);
}

/* Eight outputs of one row, or four of two, straight from the weight: a copy in the cache does not pay for them. They are
 * added up as in a tile.
 */
INLINE void few_sums(const Call *call, int dtype, int rows, int out, const float *x, int64_t stride) {
    int outs = FEW / rows, width = call->width, k = 0;
    const uint16_t *weight = call->weight + (int64_t)out * width;
    f8 parts[FEW], all;
    for (int i = 0; i < FEW; i++) parts[i] = (f8){0};
    for (; k + 8 <= width; k += 8) {
        /* A line has four such parts. */
        for (int o = k / 8 % 4; o < outs; o += 4) __builtin_prefetch(weight + (int64_t)(outs + o) * width + k, 0, 2);
        for (int o = 0; o < outs; o++) {
            f8 part = widened_part(weight + (int64_t)o * width + k, dtype);
            for (int r = 0; r < rows; r++)
                parts[r * outs + o] = fused8(*(const f8 *)(x + r * stride + k), part, parts[r * outs + o]);
        }
    }
    for (int o = 0; k < width && o < outs; o++) {
        uint16_t rest[8] = {0};
        memcpy(rest, weight + (int64_t)o * width + k, sizeof *rest * (size_t)(width - k));
        f8 part = widened_part(rest, dtype);
        for (int r = 0; r < rows; r++)
            parts[r * outs + o] = fused8(*(const f8 *)(x + r * stride + k), part, parts[r * outs + o]);
    }
    all = sums8(parts);
    for (int i = 0; i < FEW; i++) write_sum(call, dtype, call->rows - rows + i / outs, out + i % outs, all[i]);
}

#define FEW_SUMS(NAME, DTYPE, ROWS)                                                                                    \
    static void NAME(const Call *call, int out, const float *x, int64_t stride) {                                      \
        few_sums(call, DTYPE, ROWS, out, x, stride);                                                                   \
    }
FEW_SUMS(bf16_1, BF16, 1)
FEW_SUMS(bf16_2, BF16, 2)
FEW_SUMS(fp16_1, FP16, 1)
FEW_SUMS(fp16_2, FP16, 2)

/* A thread's share of the outputs, [first, last), of all rows. */
static void share(const Call *call, int first, int last, float *scratch) {
    static void (*const few[2][2])(const Call *, int, const float *, int64_t) = {{bf16_1, bf16_2}, {fp16_1, fp16_2}};
    int width = call->width;
    int64_t stride = (width + 7) / 8 * 8;
    float *weight = scratch + ROWS * stride;
    for (int row = 0; row < call->rows; row += ROWS) {
        int rows = call->rows - row < ROWS ? call->rows - row : ROWS;
        for (int r = 0; r < rows; r++)
            widen_row(call->x + (row + r) * call->x_stride, call->dtype, width, scratch + r * stride);
        int out = first;
        for (; rows <= 2 && out + FEW / rows <= last; out += FEW / rows)
            few[call->dtype == FP16][rows - 1](call, out, scratch, stride);
        for (; out < last; out += TILE_OUTS) {
            int outs = last - out < TILE_OUTS ? last - out : TILE_OUTS;
            /* Where the share ends within a tile, its last weights are what was there before, and their sums not used. */
            for (int o = 0; o < outs; o++)
                widen_row(call->weight + (int64_t)(out + o) * width, call->dtype, width, weight + o * stride);
            const uint16_t *next = call->weight + (int64_t)(out + TILE_OUTS) * width;
            int64_t next_bytes = out + 2 * TILE_OUTS <= last ? (int64_t)TILE_OUTS * width * 2 : 0;
            add_outs(call, row, rows, out, outs, scratch, weight, stride, (const char *)next, next_bytes);
        }
    }
}

void lora_fleet_linear(const Call *call) {
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int64_t thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        int64_t stride = (call->width + 7) / 8 * 8;
        share(call, (int)(call->out * thread / threads), (int)(call->out * (thread + 1) / threads),
              call->scratch + thread * (ROWS + TILE_OUTS) * stride);
    }
}
