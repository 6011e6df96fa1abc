// Blocks of rows times a panel of 32 outputs, in registers: what all products here are made of.

#pragma once

#include <cstdlib>
#include <type_traits>

#include "numbers.h"

namespace {

constexpr int PANEL = 32, HALF = 16;
constexpr int MOST_ROWS = 14;  // of a block: 28 sums of the 32 registers
constexpr size_t NEAR = 4096;  // bytes of a panel, read into the first cache before their use

inline size_t in_panels(size_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// Inputs of an output that lie side by side, as one instruction multiplies them.
template <class In> constexpr int together = std::is_same_v<In, float> ? 1 : 4 / sizeof(In);

// What is read into the second cache during a block: from `at` on, `step` bytes at each input.
struct Ahead {
    const char *at;
    size_t step;
};

inline void read_ahead(Ahead &ahead, const void *panel) {
    __builtin_prefetch(ahead.at, 0, 2);  // into the second cache
    ahead.at += ahead.step;
    __builtin_prefetch(static_cast<const char *>(panel) + NEAR);
}

// Both halves of a panel at one input. In bf16 they lie in turns: two numbers in 32 bits.
inline void halves(const float *at, Vector &left, Vector &right) {
    left = sixteen(at);
    right = sixteen(at + HALF);
}
inline void halves(const Bf16 *at, Vector &left, Vector &right) {
    const Bits both = *reinterpret_cast<const Bits *>(at);
    left = (Vector)(both << 16);
    right = (Vector)(both & 0xffff0000u);
}

// Rows [M, depth] by a panel [depth, 32], to sums [M, 32], or added to them. Rows are `stride`
// numbers apart, sums `apart`.
template <int M, bool ADDED, class W>
void block(const float *x, size_t stride, const W *panel, int depth, float *to, size_t apart,
           Ahead ahead) {
    Vector sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = ADDED ? sixteen(to + m * apart) : Vector{};
        sums[m][1] = ADDED ? sixteen(to + m * apart + HALF) : Vector{};
    }
    for (int k = 0; k < depth; k++, panel += PANEL) {
        Vector left, right;
        halves(panel, left, right);
        read_ahead(ahead, panel);
        if (sizeof(W) == 4) __builtin_prefetch(reinterpret_cast<const char *>(panel) + NEAR + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float one = x[m * stride + k];
            sums[m][0] += one * left;
            sums[m][1] += one * right;
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        put(to + m * apart, sums[m][0]);
        put(to + m * apart + HALF, sums[m][1]);
    }
}

#ifdef __AVX512F__
// Sums of sixteen outputs and the products of inputs that lie side by side, 32 bits of each.
inline __m512i plus_products(__m512i sums, __m512i inputs, __m512i weights, Bf16) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_dpbf16_ps((__m512)sums, (__m512bh)inputs, (__m512bh)weights);
#else
    std::abort();  // `HAS_PAIRS` has said so
#endif
}
inline __m512i plus_products(__m512i sums, __m512i inputs, __m512i weights, uint8_t) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sums, inputs, weights);
#else
    std::abort();  // `computes` has said so
#endif
}
#endif

// The same of two inputs in bf16, or four bytes, of each output side by side; of bytes whole
// numbers in `to`'s place.
template <int M, class In, class W>
void block_of_groups(const In *x, size_t stride, const W *panel, int depth, float *to, size_t apart,
                     Ahead ahead) {
#ifdef __AVX512F__
    __m512i sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_si512();
    for (int k = 0; k < depth; k += together<In>, panel += together<In> * PANEL) {
        const char *at = reinterpret_cast<const char *>(panel);
        const __m512i left = _mm512_loadu_si512(at), right = _mm512_loadu_si512(at + 64);
        read_ahead(ahead, at);
        __builtin_prefetch(at + NEAR + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            int32_t group;
            std::memcpy(&group, x + m * stride + k, 4);
            const __m512i one = _mm512_set1_epi32(group);
            sums[m][0] = plus_products(sums[m][0], one, left, In());
            sums[m][1] = plus_products(sums[m][1], one, right, In());
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        _mm512_storeu_si512(to + m * apart, sums[m][0]);
        _mm512_storeu_si512(to + m * apart + HALF, sums[m][1]);
    }
#else
    std::abort();  // nobody asks without AVX-512
#endif
}

// A block in any format; only in fp32 may it be added.
template <int M, bool ADDED, class In, class W>
void block_of(const In *x, size_t stride, const W *panel, int depth, float *to, size_t apart,
              Ahead ahead) {
    if constexpr (std::is_same_v<In, float>) block<M, ADDED>(x, stride, panel, depth, to, apart, ahead);
    else {
        static_assert(!ADDED);
        block_of_groups<M>(x, stride, panel, depth, to, apart, ahead);
    }
}

template <bool ADDED = false, class In, class W>
void block_of_rows(int rows, const In *x, size_t stride, const W *panel, int depth, float *to,
                   size_t apart, Ahead ahead) {
    using Block = void (*)(const In *, size_t, const W *, int, float *, size_t, Ahead);
    static const Block blocks[] = {
        block_of<1, ADDED>, block_of<2, ADDED>, block_of<3, ADDED>,
        block_of<4, ADDED>, block_of<5, ADDED>, block_of<6, ADDED>,
        block_of<7, ADDED>, block_of<8, ADDED>, block_of<9, ADDED>,
        block_of<10, ADDED>, block_of<11, ADDED>, block_of<12, ADDED>,
        block_of<13, ADDED>, block_of<14, ADDED>};
    blocks[rows - 1](x, stride, panel, depth, to, apart, ahead);
}

}  // namespace
