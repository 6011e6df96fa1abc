// A pass over slots of keys and values, and the weights of a layer: what the caller hands over.

#pragma once

#include "products.h"

extern "C" {
struct Layer {
    Weights qkv, out, gates, down;  // gates: 16 outputs of the gate, 16 of up, in turns
    const void *before, *between;   // gains of the norms
    void *keys, *values;            // [slots, kept heads, capacity, width]
    int64_t capacity;
    int32_t hidden, inner, heads, kept, width, rotary, pairs;
    float before_eps, between_eps, scaling;
};

struct Pass {
    const int64_t *slots, *positions;  // of each row
    const void *cos, *sin;             // [rows, rotary]
    int32_t rows, threads;
};
}

namespace {

constexpr int MOST_WIDTH = 256, MOST_SHARED = 16;  // numbers of a head; heads that share keys

// Numbers of a row of queries, keys and values.
inline int three_of(const Layer &layer) { return (layer.heads + 2 * layer.kept) * layer.width; }

// First number of a row's slot in the keys or values of a kept head.
inline size_t slot_of(const Layer &layer, const Pass &pass, int row, int head) {
    return (size_t(pass.slots[row]) * layer.kept + head) * layer.capacity * layer.width;
}

}  // namespace
