/* What a decoder layer does to each row beside its products, on the CPU: one reading and one writing of it.
 *
 *     rms_norm:  out = x / sqrt(mean(x^2) + eps) * (offset + weight)
 *     gate:      out = silu(x[: width]) * x[width :]
 *
 * All in fp32, rounded once. Compiled by `kernels.native`.
 */
#include "native_vectors.h"

#include <math.h>

/* One call, as `kernels.row_operations` packs it: no padding between the fields. */
typedef struct {
    const void *x;      /* [rows, ...], rows x_stride values apart */
    void *out;          /* [rows, width], contiguous */
    const void *weight; /* [width], of x's type; rms_norm only */
    int64_t x_stride;
    int32_t dtype, rows, width, num_threads;
    float eps, offset;
} Call;

static inline f8 read8(const void *from, int dtype, int64_t at) {
    return dtype == FP32 ? *(const f8 *)((const float *)from + at) : widened8((const uint16_t *)from + at);
}

static inline float read1(const void *from, int dtype, int64_t at) {
    return dtype == FP32 ? ((const float *)from)[at] : widened(((const uint16_t *)from)[at]);
}

static inline void write8(void *to, int dtype, int64_t at, f8 values) {
    if (dtype == FP32)
        *(f8 *)((float *)to + at) = values;
    else
        round8((uint16_t *)to + at, values);
}

static inline void write1(void *to, int dtype, int64_t at, float value) {
    if (dtype == FP32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = rounded(value);
}

INLINE void norm_row(const Call *call, int dtype, int64_t row) {
    int64_t from = row * call->x_stride, to = row * call->width;
    int width = call->width, k = 0;
    f8 sums[4] = {{0}, {0}, {0}, {0}};
    for (; k + 32 <= width; k += 32)
        for (int i = 0; i < 4; i++) {
            f8 part = read8(call->x, dtype, from + k + 8 * i);
            sums[i] += part * part;
        }
    f8 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
    for (; k < width; k++) sum += read1(call->x, dtype, from + k) * read1(call->x, dtype, from + k);
    float factor = 1.0f / sqrtf(sum / (float)width + call->eps);
    for (k = 0; k + 8 <= width; k += 8)
        write8(call->out, dtype, to + k,
               read8(call->x, dtype, from + k) * factor * (read8(call->weight, dtype, k) + call->offset));
    for (; k < width; k++)
        write1(call->out, dtype, to + k,
               read1(call->x, dtype, from + k) * factor * (read1(call->weight, dtype, k) + call->offset));
}

/* A thread's share of the rows. The data type is a constant inside, so that no branch is left in the loops. */
#define SHARE(NAME, ROW, DTYPE)                                                                                     \
    static void NAME(const Call *call, int thread, int threads) {                                                   \
        int64_t first = (int64_t)call->rows * thread / threads, last = (int64_t)call->rows * (thread + 1) / threads; \
        for (int64_t row = first; row < last; row++) ROW(call, DTYPE, row);                                         \
    }
SHARE(norm_fp32, norm_row, FP32)
SHARE(norm_bf16, norm_row, BF16)

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

static void run(const Call *call, void (*share)(const Call *, int, int)) {
#pragma omp parallel num_threads(call->num_threads) if (call->num_threads > 1)
    {
        int thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        share(call, thread, threads);
    }
}

void lora_fleet_rms_norm(const Call *call) { run(call, call->dtype == FP32 ? norm_fp32 : norm_bf16); }

void lora_fleet_gate(const Call *call) { run(call, call->dtype == FP32 ? gate_fp32 : gate_bf16); }
