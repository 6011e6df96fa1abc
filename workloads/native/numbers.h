// Numbers of a model's formats, and what products read of them.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct Bf16 {
    uint16_t bits;
};

inline float number(float of) { return of; }
inline float number(Bf16 of) {
    const uint32_t bits = uint32_t(of.bits) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
inline void put(float *to, float value) { *to = value; }
inline void put(Bf16 *to, float value) {  // to the nearest, ties to even; no number stays none
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}

// A weight in bf16 where two inputs of each output lie side by side.
struct PairedBf16 {
    uint16_t bits;
};

// Sixteen numbers in fp32, which a register holds.
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int LANES = 16;

inline Vector sixteen(const float *at) { return *reinterpret_cast<const Vector *>(at); }
inline Vector sixteen(const Bf16 *at) {
#ifdef __AVX512F__
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    Vector found;
    for (int i = 0; i < LANES; i++) found[i] = number(at[i]);
    return found;
#endif
}
inline void put(float *to, Vector value) { *reinterpret_cast<Vector *>(to) = value; }

inline float total(Vector of) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)of);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += of[i];
    return sum;
#endif
}

// Of what is not above 80, within two units in the last place; 0 below -87, of -inf as well.
inline float exponential(float of) {
    const float x = of < -87.0f ? -87.0f : of;
    const float n = std::rint(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    const float found = of < -87.0f ? 0.0f : p * power;
    return of != of ? of : found;
}

inline float silu(float of) { return of / (1.0f + exponential(of < -80.0f ? 80.0f : -of)); }

// Of a model's numbers (T): what products read (In), and their weights (W).
struct Fp32 {
    using T = float;
    using In = float;
    using W = float;
};
struct InBf16 {
    using T = Bf16;
    using In = float;  // that bf16 has as well
    using W = Bf16;
};
struct InPairs {
    using T = Bf16;
    using In = Bf16;
    using W = PairedBf16;
};
struct Int8 {
    using T = Bf16;
    using In = uint8_t;  // 128 more than the number
    using W = int8_t;
};

// A number as a product reads it; as it is where a whole row is rounded at a time.
template <class Format> float as_read(Format, float value) { return value; }
inline float as_read(InBf16, float value) {
    Bf16 near;
    put(&near, value);
    return number(near);
}

// What a product reads of one row [count]; in int8 the row's scale, too.
template <class Format>
void rounded(Format format, const float *from, int count, typename Format::In *to, float *) {
#pragma omp simd
    for (int i = 0; i < count; i++) put(to + i, as_read(format, from[i]));
}
inline void rounded(Int8, const float *from, int count, uint8_t *to, float *scale) {
    uint32_t most = 0;  // as bits, among which what is no number is the greatest
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    std::memcpy(&largest, &most, 4);
    *scale = largest < 1e-30f ? 1e-30f : largest / 127.0f;
    const float inverse = 1.0f / *scale;
#pragma omp simd
    for (int i = 0; i < count; i++) to[i] = uint8_t(int32_t(std::rint(from[i] * inverse)) + 128);
}

}  // namespace
