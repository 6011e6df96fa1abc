// Attention of rows over their own slots, up to their own positions.
//
// A row by itself, as in decoding, reads its keys and values once, for all heads that share them.
// Rows of one prompt read the same ones: blocks of their queries are multiplied by panels of keys,
// and shares of attention by panels of values, by the products of products.h.

#pragma once

#include "memory.h"
#include "slots.h"

namespace {

constexpr int MOST_RUN = 128;            // rows of a prompt that are attended to at a time
constexpr int LEAST_RUN = 2;             // for which panels are made
constexpr size_t KEYS_AHEAD = 1024;      // bytes, read ahead of their use

// Shares of attention from scores [rows, apart], of which each row's are finite up to a count and
// lead on to whole vectors by -inf. They become exponentials, still to be multiplied by `shares`.
inline void to_shares(float *scores, int apart, int rows, float *shares) {
    const int vectors = apart / LANES;
    for (int r = 0; r < rows; r++) {
        float *own = scores + size_t(r) * apart, most = own[0], sum = 0;
#pragma omp simd reduction(max : most)
        for (int p = 0; p < vectors * LANES; p++) most = own[p] > most ? own[p] : most;
#pragma omp simd reduction(+ : sum)
        for (int p = 0; p < vectors * LANES; p++) {
            own[p] = exponential(own[p] - most);
            sum += own[p];
        }
        shares[r] = 1.0f / sum;
    }
}

// The heads of one row that read the same keys and values [count, WIDTH], to [SHARED, WIDTH].
// Scores: room for [SHARED, count], in whole vectors.
template <class T, int WIDTH, int SHARED> struct Heads {
    static void of(const float *queries, const T *keys, const T *values, int count, int, int,
                   float *scores, float *to) {
        constexpr int VECTORS = WIDTH / LANES;
        const int apart = (count + LANES - 1) / LANES * LANES;
        Vector query[SHARED][VECTORS], found[SHARED][VECTORS] = {};
        float shares[SHARED];
        for (int h = 0; h < SHARED; h++)
            for (int v = 0; v < VECTORS; v++)
                query[h][v] = sixteen(queries + h * WIDTH + v * LANES);
        for (int p = 0; p < count; p++, keys += WIDTH) {
            Vector sums[SHARED] = {};
            for (size_t at = 0; at < WIDTH * sizeof(T); at += 64) {  // read before they are asked for
                __builtin_prefetch(reinterpret_cast<const char *>(keys) + KEYS_AHEAD + at);
                __builtin_prefetch(reinterpret_cast<const char *>(values + size_t(p) * WIDTH) + at);
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const Vector key = sixteen(keys + v * LANES);
#pragma GCC unroll 4
                for (int h = 0; h < SHARED; h++) sums[h] += query[h][v] * key;
            }
#pragma GCC unroll 4
            for (int h = 0; h < SHARED; h++) scores[size_t(h) * apart + p] = total(sums[h]);
        }
        for (int h = 0; h < SHARED; h++)
            for (int p = count; p < apart; p++) scores[size_t(h) * apart + p] = -INFINITY;
        to_shares(scores, apart, SHARED, shares);
        for (int p = 0; p < count; p++, values += WIDTH) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const Vector value = sixteen(values + v * LANES);
#pragma GCC unroll 4
                for (int h = 0; h < SHARED; h++) found[h][v] += scores[size_t(h) * apart + p] * value;
            }
        }
        for (int h = 0; h < SHARED; h++)
            for (int v = 0; v < VECTORS; v++)
                put(to + h * WIDTH + v * LANES, found[h][v] * shares[h]);
    }
};

// The same for any width and any number of heads.
template <class T> struct Heads<T, 0, 0> {
    static void of(const float *queries, const T *keys, const T *values, int count, int width,
                   int shared, float *scores, float *to) {
        alignas(64) float one[MOST_WIDTH], found[MOST_WIDTH * MOST_SHARED] = {};
        float shares[MOST_SHARED];
        const int apart = (count + LANES - 1) / LANES * LANES;
        for (int p = 0; p < count; p++) {
            for (int i = 0; i < width; i++) one[i] = number(keys[size_t(p) * width + i]);
            for (int h = 0; h < shared; h++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int i = 0; i < width; i++) sum += queries[h * width + i] * one[i];
                scores[size_t(h) * apart + p] = sum;
            }
        }
        for (int h = 0; h < shared; h++)
            for (int p = count; p < apart; p++) scores[size_t(h) * apart + p] = -INFINITY;
        to_shares(scores, apart, shared, shares);
        for (int p = 0; p < count; p++) {
            for (int i = 0; i < width; i++) one[i] = number(values[size_t(p) * width + i]);
            for (int h = 0; h < shared; h++) {
                const float share = scores[size_t(h) * apart + p];
                for (int i = 0; i < width; i++) found[h * width + i] += share * one[i];
            }
        }
        for (int h = 0; h < shared; h++)
            for (int i = 0; i < width; i++) to[h * width + i] = found[h * width + i] * shares[h];
    }
};

// Rows [first, first + count) of one prompt, and a head of its keys and values.
struct Run {
    int first, count, head;
};

// Numbers of what lies between the products of a run whose last row attends to `longest`.
struct RunSizes {
    size_t keys, values, queries, scores, found;
    RunSizes(const Layer &layer, int longest)
        : keys(size_t(in_panels(longest)) * layer.width),
          values(size_t(longest) * in_panels(layer.width)),
          queries(size_t(MOST_ROWS) * layer.width),
          scores(size_t(MOST_ROWS) * in_panels(longest)),
          found(size_t(MOST_ROWS) * in_panels(layer.width)) {}
    size_t bytes() const { return (keys + values + queries + scores + found) * 4; }
};

// Keys [longest, width] turned about in panels of 32 positions, values in panels of 32 numbers.
template <class T>
void in_panels_of(const T *keys, const T *values, int longest, int width, float *turned_keys,
                  float *panels) {
    for (int p = 0; p < int(in_panels(longest)); p++) {
        float *to = turned_keys + size_t(p / PANEL) * PANEL * width + p % PANEL;
        if (p < longest)
            for (int i = 0; i < width; i++) to[i * PANEL] = number(keys[size_t(p) * width + i]);
        else
            for (int i = 0; i < width; i++) to[i * PANEL] = 0;
    }
    for (int at = 0; at < width; at += PANEL, panels += size_t(longest) * PANEL) {
        const int here = width - at < PANEL ? width - at : PANEL;
        for (int p = 0; p < longest; p++) {
            const T *from = values + size_t(p) * width + at;
            float *to = panels + size_t(p) * PANEL;
            if (here == PANEL)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) to[i] = number(from[i]);
            else
                for (int i = 0; i < PANEL; i++) to[i] = i < here ? number(from[i]) : 0;
        }
    }
}

// Attention of a run's rows, block by block of their queries: one of each row and head.
template <class T>
void attend_together(const Layer &layer, const Pass &pass, Run run, const float *qkv, float *own,
                     float *to) {
    const int width = layer.width, shared = layer.heads / layer.kept, three = three_of(layer);
    const int past = int(pass.positions[run.first]), longest = past + run.count;
    const RunSizes sizes(layer, longest);
    float *keys = own, *values = keys + sizes.keys, *queries = values + sizes.values;
    float *scores = queries + sizes.queries, *found = scores + sizes.scores;
    const size_t at = slot_of(layer, pass, run.first, run.head);
    in_panels_of(static_cast<const T *>(layer.keys) + at, static_cast<const T *>(layer.values) + at,
                 longest, width, keys, values);
    const int all = run.count * shared, blocks = (all + MOST_ROWS - 1) / MOST_ROWS, wide = int(in_panels(width));
    const auto row_of = [=](int query) { return run.first + query / shared; };
    const auto head_of = [=](int query) { return run.head * shared + query % shared; };
    for (int b = 0; b < blocks; b++) {
        const int first = int(int64_t(all) * b / blocks);
        const int here = int(int64_t(all) * (b + 1) / blocks) - first;
        const int limit = past + (first + here - 1) / shared + 1, apart = int(in_panels(limit));
        for (int q = 0; q < here; q++)
            std::memcpy(queries + q * width,
                        qkv + size_t(row_of(first + q)) * three + head_of(first + q) * width,
                        size_t(width) * 4);
        for (int p = 0; p < limit; p += PANEL) {
            const float *panel = keys + size_t(p) * width;
            block_of_rows(here, queries, width, panel, width, scores + p, apart,
                          {reinterpret_cast<const char *>(panel), 0});
        }
        for (int q = 0; q < here; q++)
            for (int p = past + (first + q) / shared + 1; p < apart; p++)
                scores[size_t(q) * apart + p] = -INFINITY;
        float shares[MOST_ROWS];
        to_shares(scores, apart, here, shares);
        for (int i = 0; i < width; i += PANEL) {
            const float *panel = values + size_t(i) * longest;
            block_of_rows(here, scores, apart, panel, limit, found + i, wide,
                          {reinterpret_cast<const char *>(panel), 0});
        }
        for (int q = 0; q < here; q++) {
            const size_t head = size_t(row_of(first + q)) * layer.heads + head_of(first + q);
#pragma omp simd
            for (int i = 0; i < width; i++)
                to[head * width + i] = found[q * wide + i] * shares[q];
        }
    }
}

// The rows' runs: of a prompt's rows, one after the other, no more than can be attended to at a
// time. To their first rows and, behind these, the number of rows; how many.
inline int runs_of(const Pass &pass, int *starts) {
    int runs = 0;
    for (int r = 0; r < pass.rows; r++) {
        const bool goes_on = r && pass.slots[r] == pass.slots[r - 1] &&
                             pass.positions[r] == pass.positions[r - 1] + 1 &&
                             r - starts[runs - 1] < MOST_RUN;
        if (!goes_on) starts[runs++] = r;
    }
    starts[runs] = pass.rows;
    return runs;
}

// Bytes that `attend` needs of each thread.
inline size_t attend_bytes(const Layer &layer, const Pass &pass, const int *starts, int runs) {
    size_t bytes = 0;
    for (int run = 0; run < runs; run++) {
        const int first = starts[run], count = starts[run + 1] - first;
        const int longest = int(pass.positions[first]) + count;
        bytes = larger(bytes, count < LEAST_RUN ? size_t(layer.heads / layer.kept) * in_panels(longest) * 4
                                                : RunSizes(layer, longest).bytes());
    }
    return bytes;
}

// Attention of every row, to [rows, heads * width] as a product reads them (int8: before that). A
// worksharing loop; `own` is the thread's.
template <class Format, int WIDTH, int SHARED>
void attend(Format format, const Layer &layer, const Pass &pass, const int *starts, int runs,
            const float *qkv, float *own, float *to) {
    using T = typename Format::T;
    const int width = layer.width, kept = layer.kept, shared = layer.heads / kept;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < int64_t(runs) * kept; task++) {
        const int first = starts[task / kept], head = int(task % kept);
        const int count = starts[task / kept + 1] - first;
        float *found = to + (size_t(first) * layer.heads + head * shared) * width;
        const size_t at = slot_of(layer, pass, first, head);
        if (count < LEAST_RUN)
            Heads<T, WIDTH, SHARED>::of(
                qkv + size_t(first) * three_of(layer) + head * shared * width,
                static_cast<const T *>(layer.keys) + at, static_cast<const T *>(layer.values) + at,
                int(pass.positions[first]) + 1, width, shared, own, found);
        else
            attend_together<T>(layer, pass, {first, count, head}, qkv, own, to);
        for (int r = 0; r < count; r++, found += layer.heads * width)
#pragma omp simd
            for (int i = 0; i < shared * width; i++) found[i] = as_read(format, found[i]);
    }
}

template <class Format>
void attend_by_size(Format format, const Layer &layer, const Pass &pass, const int *starts,
                    int runs, const float *qkv, float *own, float *to) {
    const int shared = layer.heads / layer.kept;
    const auto attend_as = layer.width == 64 && shared == 1    ? attend<Format, 64, 1>
                           : layer.width == 64 && shared == 3  ? attend<Format, 64, 3>
                           : layer.width == 64 && shared == 4  ? attend<Format, 64, 4>
                           : layer.width == 128 && shared == 1 ? attend<Format, 128, 1>
                           : layer.width == 128 && shared == 4 ? attend<Format, 128, 4>
                                                               : attend<Format, 0, 0>;
    attend_as(format, layer, pass, starts, runs, qkv, own, to);
}

}  // namespace
