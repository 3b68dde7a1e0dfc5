/* What a decoder layer does to each row beside its products, on the CPU: one reading and one writing of it.
 *
 *     rms_norm:  out = x / sqrt(mean(x^2) + eps) * (offset + weight)
 *     join:      joined = x + scale * part; out = rms_norm(joined)
 *     gate:      out = silu(x[: width]) * x[width :]
 *     rotate:    x[h, i], x[h, i + n/2] = x[h, i] * cos[i] + x[h, i + n/2] * sin[i],
 *                                         x[h, i + n/2] * cos[i + n/2] + x[h, i] * sin[i + n/2]
 *
 * All in fp32, each result rounded once: what is normalised is what joined is rounded to. Compiled by `kernels.native`.
 */
#include "native_vectors.h"

#include <math.h>

/* One call, as `kernels.row_operations` packs it: no padding between the fields. What a function does not use is 0. */
typedef struct {
    void *x;                /* [rows, ...], rows x_stride values apart; rotate writes to it */
    void *out;              /* [rows, width], contiguous */
    const void *weight;     /* [width], of x's type */
    const void *part;       /* [rows, width], rows part_stride values apart */
    void *joined;           /* [rows, width], contiguous */
    const void *cos, *sin;  /* [rows, width], contiguous */
    int64_t x_stride, part_stride;
    int32_t dtype, rows, width, heads, dim, num_threads;
    float eps, offset, scale;
} Call;

/* Row `to` of the result, from x's values from `from` on. */
INLINE void norm(const Call *call, int dtype, const void *x, int64_t from, int64_t to) {
    int width = call->width, k = 0;
    f8 sums[4] = {{0}, {0}, {0}, {0}};
    for (; k + 32 <= width; k += 32)
        for (int i = 0; i < 4; i++) {
            f8 part = read8(x, dtype, from + k + 8 * i);
            sums[i] += part * part;
        }
    f8 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
    for (; k < width; k++) sum += read1(x, dtype, from + k) * read1(x, dtype, from + k);
    float factor = 1.0f / sqrtf(sum / (float)width + call->eps);
    for (k = 0; k + 8 <= width; k += 8)
        write8(call->out, dtype, to + k,
               read8(x, dtype, from + k) * factor * (read8(call->weight, dtype, k) + call->offset));
    for (; k < width; k++)
        write1(call->out, dtype, to + k,
               read1(x, dtype, from + k) * factor * (read1(call->weight, dtype, k) + call->offset));
}

INLINE void norm_row(const Call *call, int dtype, int64_t row) {
    norm(call, dtype, call->x, row * call->x_stride, row * call->width);
}

INLINE void join_row(const Call *call, int dtype, int64_t row) {
    int64_t from = row * call->x_stride, part = row * call->part_stride, to = row * call->width;
    int k = 0;
    for (; k + 8 <= call->width; k += 8)
        write8(call->joined, dtype, to + k,
               read8(call->x, dtype, from + k) + read8(call->part, dtype, part + k) * call->scale);
    for (; k < call->width; k++)
        write1(call->joined, dtype, to + k,
               read1(call->x, dtype, from + k) + read1(call->part, dtype, part + k) * call->scale);
    norm(call, dtype, call->joined, to, to);
}

/* A thread's share of the rows. The data type is a constant inside, so that no branch is left in the loops. */
#define SHARE(NAME, ROW, DTYPE)                                                                                     \
    static void NAME(const Call *call, int thread, int threads) {                                                   \
        int64_t first = (int64_t)call->rows * thread / threads, last = (int64_t)call->rows * (thread + 1) / threads; \
        for (int64_t row = first; row < last; row++) ROW(call, DTYPE, row);                                         \
    }
SHARE(norm_fp32, norm_row, FP32)
SHARE(norm_bf16, norm_row, BF16)
SHARE(norm_fp16, norm_row, FP16)
SHARE(join_fp32, join_row, FP32)
SHARE(join_bf16, join_row, BF16)
SHARE(join_fp16, join_row, FP16)

INLINE void gate_row(const Call *call, int dtype, int64_t row) {
    int64_t from = row * call->x_stride, to = row * call->width;
    int width = call->width, k = 0;
    for (; k + 8 <= width; k += 8) {
        f8 gate = read8(call->x, dtype, from + k), up = read8(call->x, dtype, from + width + k);
        write8(call->out, dtype, to + k, gate / (exp8(-gate) + 1.0f) * up);
    }
    for (; k < width; k++) {
        f8 gate = (f8){0} + read1(call->x, dtype, from + k);
        float up = read1(call->x, dtype, from + width + k);
        write1(call->out, dtype, to + k, (gate / (exp8(-gate) + 1.0f))[0] * up);
    }
}
SHARE(gate_fp32, gate_row, FP32)
SHARE(gate_bf16, gate_row, BF16)
SHARE(gate_fp16, gate_row, FP16)

/* Eight values of a head, and those that turn with them, `half` further on. */
INLINE void rotate8(const Call *call, int dtype, int64_t head, int64_t turn, int half) {
    f8 first = read8(call->x, dtype, head), second = read8(call->x, dtype, head + half);
    write8(call->x, dtype, head, first * read8(call->cos, dtype, turn) + second * read8(call->sin, dtype, turn));
    turn += half;
    write8(call->x, dtype, head + half, second * read8(call->cos, dtype, turn) + first * read8(call->sin, dtype, turn));
}

INLINE void rotate1(const Call *call, int dtype, int64_t head, int64_t turn, int half) {
    float first = read1(call->x, dtype, head), second = read1(call->x, dtype, head + half);
    write1(call->x, dtype, head, first * read1(call->cos, dtype, turn) + second * read1(call->sin, dtype, turn));
    turn += half;
    write1(call->x, dtype, head + half, second * read1(call->cos, dtype, turn) + first * read1(call->sin, dtype, turn));
}

INLINE void rotate_row(const Call *call, int dtype, int64_t row) {
    int half = call->width / 2;
    for (int h = 0; h < call->heads; h++) {
        int64_t head = row * call->x_stride + (int64_t)h * call->dim, turn = row * call->width;
        int i = 0;
        for (; i + 8 <= half; i += 8) rotate8(call, dtype, head + i, turn + i, half);
        for (; i < half; i++) rotate1(call, dtype, head + i, turn + i, half);
    }
}
SHARE(rotate_fp32, rotate_row, FP32)
SHARE(rotate_bf16, rotate_row, BF16)
SHARE(rotate_fp16, rotate_row, FP16)

typedef void Share(const Call *call, int thread, int threads);

/* Each row is a thread's. */
static int run(const Call *call, Share *const *shares) {
    Share *share = shares[call->dtype];
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        share(call, thread, threads);
    }
    return 0;
}

#define FUNCTION(NAME, ROW)                                                  \
    int NAME(const Call *call) {                                             \
        static Share *const shares[] = {ROW##_fp32, ROW##_bf16, ROW##_fp16}; \
        return run(call, shares);                                            \
    }
FUNCTION(lora_fleet_rms_norm, norm)
FUNCTION(lora_fleet_join, join)
FUNCTION(lora_fleet_gate, gate)
FUNCTION(lora_fleet_rotate, rotate)
