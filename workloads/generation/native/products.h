// Products of rows by weights in panels of 32 outputs, input by input, as products.py packs them.
// Sums are in fp32 (int8: in 32 bits), one input after the other.
//
// Multiplication is the limit as long as numbers are near: a part of the rows and a panel stay in
// the second cache, and while the rows are multiplied, block by block, the next panel is read from
// memory. A panel in bf16 is widened once for all blocks, unless the processor multiplies pairs.

#pragma once

#include <cstdlib>
#include <type_traits>

#include <omp.h>

#include "numbers.h"

extern "C" {
struct Weights {
    const void *panels;
    const float *scales;     // int8: of each output
    const int32_t *offsets;  // int8: 128 times the sum of each output's weights
    const float *bias;       // or none
};
}

namespace {

constexpr int PANEL = 32, HALF = 16;
constexpr int MOST_ROWS = 14;           // of a block: 28 sums of the 32 registers
constexpr size_t PART_BYTES = 1 << 20;  // of rows, in the second cache
constexpr size_t NEAR = 4096;           // bytes of a panel, read into the first cache before their use

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

// Rows [M, depth] by a panel [depth, 32], to sums [M, 32]. Rows are `stride` numbers apart, sums
// `apart`.
template <int M, class W>
void block(const float *x, size_t stride, const W *panel, int depth, float *to, size_t apart,
           Ahead ahead) {
    Vector sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = Vector{};
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

// The same in bf16, two inputs of each output side by side.
template <int M>
void block(const Bf16 *x, size_t stride, const PairedBf16 *panel, int depth, float *to,
           size_t apart, Ahead ahead) {
#ifdef __AVX512BF16__
    __m512 sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    for (int k = 0; k < depth; k += 2, panel += 2 * PANEL) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(panel + PANEL);
        read_ahead(ahead, panel);
        __builtin_prefetch(reinterpret_cast<const char *>(panel) + NEAR + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            int32_t two;
            std::memcpy(&two, x + m * stride + k, 4);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(two);
            sums[m][0] = _mm512_dpbf16_ps(sums[m][0], one, left);
            sums[m][1] = _mm512_dpbf16_ps(sums[m][1], one, right);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        _mm512_storeu_ps(to + m * apart, sums[m][0]);
        _mm512_storeu_ps(to + m * apart + HALF, sums[m][1]);
    }
#else
    std::abort();  // `HAS_PAIRS` has said so
#endif
}

// The same of bytes, four inputs of each output side by side; whole numbers in `to`'s place.
template <int M>
void block(const uint8_t *x, size_t stride, const int8_t *panel, int depth, float *to, size_t apart,
           Ahead ahead) {
#ifdef __AVX512VNNI__
    __m512i sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_si512();
    for (int k = 0; k < depth; k += 4, panel += 4 * PANEL) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        read_ahead(ahead, panel);
        __builtin_prefetch(panel + NEAR + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            int32_t four;
            std::memcpy(&four, x + m * stride + k, 4);
            const __m512i one = _mm512_set1_epi32(four);
            sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], one, left);
            sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], one, right);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        _mm512_storeu_si512(to + m * apart, sums[m][0]);
        _mm512_storeu_si512(to + m * apart + HALF, sums[m][1]);
    }
#else
    std::abort();  // `computes` has said so
#endif
}

template <int M>
void block_of(const float *x, size_t s, const float *p, int d, float *to, size_t apart, Ahead a) {
    block<M, float>(x, s, p, d, to, apart, a);
}
template <int M>
void block_of(const float *x, size_t s, const Bf16 *p, int d, float *to, size_t apart, Ahead a) {
    block<M, Bf16>(x, s, p, d, to, apart, a);
}
template <int M>
void block_of(const Bf16 *x, size_t s, const PairedBf16 *p, int d, float *to, size_t apart,
              Ahead a) {
    block<M>(x, s, p, d, to, apart, a);
}
template <int M>
void block_of(const uint8_t *x, size_t s, const int8_t *p, int d, float *to, size_t apart,
              Ahead a) {
    block<M>(x, s, p, d, to, apart, a);
}

template <class In, class W>
void block_of_rows(int rows, const In *x, size_t stride, const W *panel, int depth, float *to,
                   size_t apart, Ahead ahead) {
    using Block = void (*)(const In *, size_t, const W *, int, float *, size_t, Ahead);
    static const Block blocks[] = {block_of<1>,  block_of<2>,  block_of<3>,  block_of<4>,
                                   block_of<5>,  block_of<6>,  block_of<7>,  block_of<8>,
                                   block_of<9>,  block_of<10>, block_of<11>, block_of<12>,
                                   block_of<13>, block_of<14>};
    blocks[rows - 1](x, stride, panel, depth, to, apart, ahead);
}

// A panel [depth, 32] in bf16, in fp32.
inline void widen(const Bf16 *panel, int depth, float *to) {
    for (int k = 0; k < depth; k++, panel += PANEL, to += PANEL) {
        Vector left, right;
        halves(panel, left, right);
        put(to, left);
        put(to + HALF, right);
    }
}

// Bytes that `product` needs of each thread: a panel that is widened.
template <class W> size_t product_bytes(int depth) {
    return std::is_same_v<W, Bf16> ? size_t(depth) * PANEL * 4 : 0;
}

// Sums [rows, 32] with scales (int8) and biases, of a panel's outputs from `output` on.
template <class In>
void scale_and_shift(float *sums, const float *row_scales, int rows, const Weights &weights,
                     int output) {
    for (int r = 0; r < rows; r++, sums += PANEL)
        for (int at = 0; at < PANEL; at += LANES) {
            if (sizeof(In) == 1) {
                const Whole sum = *reinterpret_cast<const Whole *>(sums + at) -
                                  *reinterpret_cast<const Whole *>(weights.offsets + output + at);
                put(sums + at, __builtin_convertvector(sum, Vector) * row_scales[r] *
                                   sixteen(weights.scales + output + at));
            }
            if (weights.bias) put(sums + at, sixteen(sums + at) + sixteen(weights.bias + output + at));
        }
}

// Rows [rows, depth] by all panels. `then` gets, of each block of rows and each panel: first row,
// rows, panel, and sums [rows, 32], with scales and biases. A worksharing loop; `own` is the thread's.
template <class W, class In, class Then>
void product(const In *x, const float *row_scales, int rows, int depth, const Weights &weights,
             int panels, char *own, Then then) {
    const W *all = static_cast<const W *>(weights.panels);
    const size_t threads = omp_get_num_threads();
    size_t parts = (size_t(rows) * depth * sizeof(In) + PART_BYTES - 1) / PART_BYTES;
    const size_t for_all = (threads + panels - 1) / panels;
    parts = parts < for_all ? for_all : parts;
    parts = parts > size_t(rows) ? size_t(rows) : parts;
    const size_t bytes = size_t(depth) * PANEL * sizeof(W);  // of a panel
    float *wide = reinterpret_cast<float *>(own);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < int64_t(parts) * panels; task++) {
        const int part = int(task / panels), panel = int(task % panels);
        const int first = int(size_t(rows) * part / parts);
        const int count = int(size_t(rows) * (part + 1) / parts) - first;
        const int blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
        const W *weight = all + size_t(panel) * depth * PANEL;
        const char *own_bytes = reinterpret_cast<const char *>(weight);
        const bool alone = blocks == 1;  // then the panel itself comes from memory
        // In int8 panels are small, and reading them again and again costs more than waiting.
        const bool reads_ahead = !alone && sizeof(W) > 1;
        if constexpr (std::is_same_v<W, Bf16>)
            if (!alone) widen(weight, depth, wide);
        alignas(64) float sums[MOST_ROWS * PANEL];
        for (int b = 0; b < blocks; b++) {
            const int row = first + int(int64_t(count) * b / blocks);
            const int here = first + int(int64_t(count) * (b + 1) / blocks) - row;
            const Ahead ahead =
                reads_ahead ? Ahead{own_bytes + bytes + bytes * b / blocks,
                                    (PANEL * sizeof(W) * together<In> + blocks - 1) / blocks}
                            : Ahead{own_bytes, 0};
            const auto times = [&](const auto *numbers) {
                block_of_rows(here, x + size_t(row) * depth, depth, numbers, depth, sums, PANEL,
                              ahead);
            };
            if constexpr (std::is_same_v<W, Bf16>)
                alone ? times(weight) : times(wide);
            else
                times(weight);
            scale_and_shift<In>(sums, row_scales + row, here, weights, panel * PANEL);
            then(row, here, panel, static_cast<const float *>(sums));
        }
    }
}

}  // namespace
