// Products of rows by weights in panels of 32 outputs, input by input, as products.py packs them.
// Sums are in fp32 (int8: in 32 bits), one input after the other.
//
// A product is bound by multiplication as long as numbers are near: a part of the rows stays in the
// second cache, a piece of a panel in the first, and while all rows of the part are multiplied by
// it, the next piece is read from memory. Pieces in bf16 are widened once for all rows.

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
constexpr int MOST_ROWS = 14;              // of a block: 28 sums of the 32 registers
constexpr size_t PART_BYTES = 1 << 20;     // of rows, in the second cache
constexpr size_t PIECE_BYTES = 24 << 10;   // of a panel, in the first

// What is read from memory during a block: from `at` on, `step` bytes at each input.
struct Ahead {
    const char *at;
    size_t step;
};

inline void read_ahead(Ahead &ahead) {  // into the second cache
    __builtin_prefetch(ahead.at, 0, 2);
    __builtin_prefetch(ahead.at + 64, 0, 2);
    ahead.at += ahead.step;
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

// Add to sums [M, 32] the product of rows [M, depth] by a panel [depth, 32]. Rows are `stride`
// numbers apart, sums `apart`.
template <int M, class W>
void block(const float *x, size_t stride, const W *panel, int depth, float *to, size_t apart,
           Ahead ahead) {
    Vector sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) halves(to + m * apart, sums[m][0], sums[m][1]);
    for (int k = 0; k < depth; k++, panel += PANEL) {
        Vector left, right;
        halves(panel, left, right);
        read_ahead(ahead);
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

// The same of bytes, four inputs of each output side by side; whole numbers in `to`'s place.
template <int M>
void block(const uint8_t *x, size_t stride, const int8_t *panel, int depth, float *to, size_t apart,
           Ahead ahead) {
#ifdef __AVX512VNNI__
    __m512i sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = _mm512_loadu_si512(to + m * apart);
        sums[m][1] = _mm512_loadu_si512(to + m * apart + HALF);
    }
    for (int k = 0; k < depth; k += 4, panel += 4 * PANEL) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        read_ahead(ahead);
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

inline int blocks_of(int rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

// Add to sums [rows, 32] the product of rows [rows, depth] by a piece of a panel [depth, 32], and
// read `bytes` from `next` on, which come after it.
template <class In, class W>
void piece(const In *x, size_t stride, int rows, const W *panel, int depth, float *sums,
           const char *next, size_t bytes) {
    const int blocks = blocks_of(rows);
    const size_t inputs = sizeof(In) == 1 ? depth / 4 : depth;
    const size_t step = (bytes / inputs + blocks - 1) / blocks;
    for (int b = 0; b < blocks; b++) {
        const int row = int(int64_t(rows) * b / blocks);
        const int here = int(int64_t(rows) * (b + 1) / blocks) - row;
        block_of_rows(here, x + size_t(row) * stride, stride, panel, depth,
                      sums + size_t(row) * PANEL, PANEL, {next + bytes * b / blocks, step});
    }
}

template <class In> constexpr int MOST_DEPTH = PIECE_BYTES / (PANEL * sizeof(In));

// A piece of a panel in bf16, in fp32.
inline void widen(const Bf16 *panel, int depth, float *to) {
    for (int k = 0; k < depth; k++, panel += PANEL, to += PANEL) {
        Vector left, right;
        halves(panel, left, right);
        put(to, left);
        put(to + HALF, right);
    }
}

// Bytes that `product` needs of each thread: sums of a part's rows, and a piece that is widened.
template <class In> size_t product_bytes(int rows, int depth) {
    const size_t most = PART_BYTES / (size_t(depth) * sizeof(In)) + 1;
    return (size_t(rows) < most ? size_t(rows) : most) * PANEL * 4 + PIECE_BYTES;
}

// Rows [rows, depth] by all panels. `then` gets, of each part and panel: first row, rows, panel, and
// sums [rows, 32], with scales and biases. A worksharing loop; `own` is the thread's.
template <class W, class In, class Then>
void product(const In *x, const float *row_scales, int rows, int depth, const Weights &weights,
             int panels, char *own, Then then) {
    const W *all = static_cast<const W *>(weights.panels);
    const size_t threads = omp_get_num_threads();
    size_t parts = (size_t(rows) * depth * sizeof(In) + PART_BYTES - 1) / PART_BYTES;
    const size_t for_all = (threads + panels - 1) / panels;
    parts = parts < for_all ? for_all : parts;
    parts = parts > size_t(rows) ? size_t(rows) : parts;
    float *wide = reinterpret_cast<float *>(own);
    float *sums = reinterpret_cast<float *>(own + PIECE_BYTES);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < int64_t(parts) * panels; task++) {
        const int part = int(task / panels), panel = int(task % panels);
        const int first = int(size_t(rows) * part / parts);
        const int count = int(size_t(rows) * (part + 1) / parts) - first;
        const W *weight = all + size_t(panel) * depth * PANEL;
        std::memset(sums, 0, size_t(count) * PANEL * 4);
        for (int from = 0; from < depth; from += MOST_DEPTH<In>) {
            const int here = depth - from < MOST_DEPTH<In> ? depth - from : MOST_DEPTH<In>;
            const In *inputs = x + size_t(first) * depth + from;
            const W *own_piece = weight + size_t(from) * PANEL;
            const char *next = reinterpret_cast<const char *>(own_piece + size_t(here) * PANEL);
            const size_t bytes = size_t(here) * PANEL * sizeof(W);
            if constexpr (std::is_same_v<W, Bf16>) {
                if (count > MOST_ROWS) {
                    widen(own_piece, here, wide);
                    piece(inputs, depth, count, wide, here, sums, next, bytes);
                    continue;
                }
            }
            piece(inputs, depth, count, own_piece, here, sums, next, bytes);
        }
        const int output = panel * PANEL;
        if (sizeof(In) == 1)
            for (int r = 0; r < count; r++)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) {
                    int32_t sum;
                    std::memcpy(&sum, sums + r * PANEL + i, 4);
                    sums[r * PANEL + i] = float(sum - weights.offsets[output + i]) *
                                          row_scales[first + r] * weights.scales[output + i];
                }
        if (weights.bias)
            for (int r = 0; r < count; r++)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) sums[r * PANEL + i] += weights.bias[output + i];
        then(first, count, panel, static_cast<const float *>(sums));
    }
}

}  // namespace
