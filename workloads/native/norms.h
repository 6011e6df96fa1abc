// What happens to each row between products: norm, rotary positions, keeping keys and values.

#pragma once

#include "slots.h"

namespace {

// Rows [rows, count], normed and as a product reads them. `row` has room for one, of each thread.
template <class Format>
void normed(Format format, const typename Format::T *from, const void *gains, float eps, int rows,
            int count, typename Format::In *to, float *scales, float *row) {
    const typename Format::T *gain = static_cast<const typename Format::T *>(gains);
#pragma omp for schedule(static)
    for (int r = 0; r < rows; r++) {
        const typename Format::T *x = from + size_t(r) * count;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < count; i++) sum += number(x[i]) * number(x[i]);
        const float scale = 1.0f / std::sqrt(sum / float(count) + eps);
#pragma omp simd
        for (int i = 0; i < count; i++) row[i] = number(x[i]) * scale * number(gain[i]);
        rounded(format, row, count, to + size_t(r) * count, scales + r);
    }
}

// One head [width], turned by its position's angles.
template <class T>
void turned(const float *from, const T *cos, const T *sin, const Layer &layer, float *to) {
    const int rotary = layer.rotary, half = rotary / 2;
    if (layer.pairs)
#pragma omp simd
        for (int i = 0; i < half; i++) {
            const float c = number(cos[i]), s = number(sin[i]);
            to[2 * i] = from[2 * i] * c - from[2 * i + 1] * s;
            to[2 * i + 1] = from[2 * i + 1] * c + from[2 * i] * s;
        }
    else
#pragma omp simd
        for (int i = 0; i < half; i++) {
            to[i] = from[i] * number(cos[i]) - from[half + i] * number(sin[i]);
            to[half + i] = from[half + i] * number(cos[half + i]) + from[i] * number(sin[half + i]);
        }
    for (int i = rotary; i < layer.width; i++) to[i] = from[i];
}

// Put the rows' keys, turned, and values into their slots, and turn the queries where they are.
template <class T> void keep(const Layer &layer, const Pass &pass, float *qkv) {
    const int width = layer.width, heads = layer.heads, kept = layer.kept;
#pragma omp for schedule(static)
    for (int r = 0; r < pass.rows; r++) {
        float *row = qkv + size_t(r) * three_of(layer);
        const T *cos = static_cast<const T *>(pass.cos) + size_t(r) * layer.rotary;
        const T *sin = static_cast<const T *>(pass.sin) + size_t(r) * layer.rotary;
        float one[MOST_WIDTH];
        for (int h = 0; h < heads; h++) {
            turned(row + h * width, cos, sin, layer, one);
#pragma omp simd
            for (int i = 0; i < width; i++) row[h * width + i] = one[i] * layer.scaling;
        }
        for (int h = 0; h < kept; h++) {
            const size_t at = slot_of(layer, pass, r, h) + pass.positions[r] * width;
            T *keys = static_cast<T *>(layer.keys) + at, *values = static_cast<T *>(layer.values) + at;
            turned(row + (heads + h) * width, cos, sin, layer, one);
            const float *value = row + (heads + kept + h) * width;
#pragma omp simd
            for (int i = 0; i < width; i++) put(keys + i, one[i]);
#pragma omp simd
            for (int i = 0; i < width; i++) put(values + i, value[i]);
        }
    }
}

}  // namespace
