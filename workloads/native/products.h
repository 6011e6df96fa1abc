// Products of rows by weights in panels of 32 outputs, input by input, as products.py packs them.
// Sums are in fp32 (int8: in 32 bits), one input after the other.
//
// Multiplication is the limit as long as numbers are near: a part of the rows and a panel stay in
// the second cache, and while the rows are multiplied, block by block, the next panel is read from
// memory. A panel in bf16 is widened once for all blocks, unless the processor multiplies pairs.

#pragma once

#include <omp.h>

#include "blocks.h"

extern "C" {
struct Weights {
    const void *panels;
    const float *scales;     // int8: of each output
    const int32_t *offsets;  // int8: 128 times the sum of each output's weights
    const float *bias;       // or none
};
}

namespace {

constexpr size_t PART_BYTES = 1 << 20;  // of rows, in the second cache

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
