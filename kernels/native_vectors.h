/* What the C sources of this folder share: vectors of eight fp32 numbers, bf16, fp16, and the threads of torch. The vector
 * extensions are those of gcc 9 and clang 5, and later ones.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef _OPENMP
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#endif

/* Memory of the calling thread for what a call computes in between, kept for its next calls; NULL where there is none. */
static inline float *scratch_of_thread(int64_t floats) {
    static _Thread_local float *kept;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(kept);
        kept = aligned_alloc(64, (sizeof *kept * (size_t)floats + 63) / 64 * 64);
        size = kept ? floats : 0;
    }
    return kept;
}

typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h4 __attribute__((vector_size(8), aligned(2), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

/* Keeps a vector that is used several times in a register: read from memory at each use, it is memory that limits. */
#if defined(__AVX__) && !defined(__AVX512F__)
#define HELD(vector) __asm__("" : "+x"(vector))
#else
#define HELD(vector) (void)(vector)
#endif

#define INLINE static inline __attribute__((always_inline))

enum { FP32 = 0, BF16 = 1, FP16 = 2 };

static inline float widened(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* To nearest, ties to even, as torch rounds; what is no number stays none. */
static inline uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline f4 widened4(const void *from) { return (f4)(__builtin_convertvector(*(const h4 *)from, u4) << 16); }

static inline f8 widened8(const void *from) {
#ifdef __AVX2__ /* gcc 12 takes five instructions for the first of these two */
    return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
#else
    return (f8)(__builtin_convertvector(*(const h8 *)from, u8) << 16);
#endif
}

static inline f16 widened16(const void *from) { return (f16)(__builtin_convertvector(*(const h16 *)from, u16) << 16); }

/* a * b + c, rounded once where the processor does that. Left the choice, gcc takes two roundings for some loops and one
 * for others (-mtune=znver3), and a sum would depend on which loop it is added up in.
 */
static inline f8 fused8(f8 a, f8 b, f8 c) {
#ifdef __FMA__
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline void round8(uint16_t *to, f8 values) {
    u8 bits = (u8)values;
    u8 none = (u8)((bits & 0x7fffffffu) > 0x7f800000u);
    u8 near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    near = (near & ~none) | (none & 0x7fc0u);
#ifdef __AVX2__
    __m128i low = _mm256_castsi256_si128((__m256i)near), high = _mm256_extracti128_si256((__m256i)near, 1);
    _mm_storeu_si128((void *)to, _mm_packus_epi32(low, high));
#else
    *(h8 *)to = __builtin_convertvector(near, h8);
#endif
}

/* The widest vector of fp32 numbers that the processor multiplies at once, and a sum of products in it. */
#ifdef __AVX512F__
typedef f16 Part;
enum { PART = 16 };
#define WIDENED_PART widened16
#define ADD_FP32(sum, row, weights) (sum += (row) * (weights))
static inline Part part_of(float v) { return (Part){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
#else
typedef f8 Part;
enum { PART = 8 };
#define WIDENED_PART widened8
#define ADD_FP32(sum, row, weights) (sum = fused8(row, weights, sum))
static inline Part part_of(float v) { return (Part){v, v, v, v, v, v, v, v}; }
#endif

#ifdef __F16C__
INLINE f8 widened_half8(const void *from) { return (f8)_mm256_cvtph_ps(_mm_loadu_si128(from)); }
INLINE float widened_half(uint16_t value) { return _cvtsh_ss(value); }
INLINE uint16_t rounded_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
INLINE void round_half8(uint16_t *to, f8 values) {
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
}
#else /* not served: the check of what was compiled finds zeros */
INLINE f8 widened_half8(const void *from) { return (void)from, (f8){0}; }
INLINE float widened_half(uint16_t value) { return (void)value, 0.0f; }
INLINE uint16_t rounded_half(float value) { return (void)value, 0; }
INLINE void round_half8(uint16_t *to, f8 values) { (void)values, memset(to, 0, 16); }
#endif

/* Values of a tensor in fp32, and what they are rounded to. The type is always a constant where these are called, and so
 * chosen by the compiler.
 */
INLINE f8 read8(const void *from, int dtype, int64_t at) {
    const uint16_t *halves = (const uint16_t *)from + at;
    return dtype == FP32 ? *(const f8 *)((const float *)from + at) : dtype == BF16 ? widened8(halves) : widened_half8(halves);
}

INLINE float read1(const void *from, int dtype, int64_t at) {
    uint16_t half = dtype == FP32 ? 0 : ((const uint16_t *)from)[at];
    return dtype == FP32 ? ((const float *)from)[at] : dtype == BF16 ? widened(half) : widened_half(half);
}

INLINE void write8(void *to, int dtype, int64_t at, f8 values) {
    if (dtype == FP32)
        *(f8 *)((float *)to + at) = values;
    else if (dtype == BF16)
        round8((uint16_t *)to + at, values);
    else
        round_half8((uint16_t *)to + at, values);
}

INLINE void write1(void *to, int dtype, int64_t at, float value) {
    if (dtype == FP32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = dtype == BF16 ? rounded(value) : rounded_half(value);
}

/* Lane i of the result is the sum of the lanes of p[i]. */
static inline f8 sums8(const f8 *p) {
    f8 t[4], u[2];
    for (int i = 0; i < 4; i++)
        t[i] = PICK(p[2 * i], p[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               PICK(p[2 * i], p[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        u[i] = PICK(t[2 * i], t[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               PICK(t[2 * i], t[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(u[0], u[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(u[0], u[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* exp within 2 units in the last place; below -87 it stays at what it is there, and above 88 likewise. What is no number
 * stays none. */
static inline f8 exp8(f8 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number */
    i8 is_low = (i8)(x < -87.0f), is_high = (i8)(x > 88.0f);
    f8 low = (f8)(((i8)x & ~is_low & ~is_high) | ((i8)((f8){0} - 87.0f) & is_low) | ((i8)((f8){0} + 88.0f) & is_high));
    f8 whole = low * 1.44269504f + magic;
    i8 power = (i8)whole - (i8)((f8){0} + magic);
    whole -= magic;
    f8 r = low - whole * 0.693359375f + whole * 2.12194440e-4f;
    f8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f8)((power + 127) << 23);
}

/* tanh within 9 units in the last place. What is no number stays none. */
static inline f8 tanh8(f8 x) {
    i8 is_small = (i8)((f8)((i8)x & 0x7fffffff) < 0.25f);
    f8 square = x * x, p = square * (-1382.0f / 155925) + 62.0f / 2835;
    p = p * square - 17.0f / 315;
    p = p * square + 2.0f / 15;
    p = p * square - 1.0f / 3;
    f8 small = x + x * square * p, large = 1.0f - 2.0f / (exp8(x + x) + 1.0f);
    return (f8)(((i8)small & is_small) | ((i8)large & ~is_small));
}
