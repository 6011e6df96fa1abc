// Causal attention of packed samples, each by itself, for training: forward and backward, in fp32.
//
// Queries are taken 32 at a time, and scores lie turned about: a row for each key, a lane for each
// query. So a query's greatest score and its sum are found lane by lane, every product is rows by a
// panel of 32 (blocks.h), and what lies beyond a panel's last query is not computed. Heads that
// share keys and values add up to the gradients of these.

#include <cstring>
#include <utility>

#include <omp.h>

#include "memory.h"
#include "turning.h"

extern "C" {
// Heads [heads, positions, width], wherever they lie; the numbers of a head are neighbours.
struct Heads {
    float *at;
    int64_t head, position;  // numbers from one to the next
};

struct Samples {
    const int64_t *firsts, *lengths;  // positions of each sample
    int32_t count, heads, kept, width, threads;
    float scaling;  // of the scores
};
}

namespace {

constexpr int VECTORS = PANEL / LANES;

inline int64_t longest_of(const Samples &samples) {
    int64_t longest = 0;
    for (int s = 0; s < samples.count; s++)
        longest = samples.lengths[s] > longest ? samples.lengths[s] : longest;
    return longest;
}

inline size_t in_lanes(size_t count) { return (count + LANES - 1) / LANES * LANES; }

inline float *of(const Heads &heads, int head, int64_t position) {
    return heads.at + head * heads.head + position * heads.position;
}

// Rows of any number by a panel.
template <bool ADDED = false>
void rows_by_panel(int64_t rows, const float *x, size_t stride, const float *panel, int depth,
                   float *to, size_t apart) {
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = rows * b / blocks, here = rows * (b + 1) / blocks - first;
        block_of_rows<ADDED>(int(here), x + first * stride, stride, panel, depth,
                             to + first * apart, apart, {reinterpret_cast<const char *>(panel), 0});
    }
}

// Leave out keys that lie behind their query; scores [keys, 32] begin with a panel's first key.
inline void leave_out(float *scores, int queries) {
    for (int key = 1; key < queries; key++)
        for (int query = 0; query < key; query++) scores[size_t(key) * PANEL + query] = -INFINITY;
}

// Queries [queries, width] of a panel, times a factor, turned about to [width, 32]; zeros beyond.
inline void queries_turned(const float *from, int64_t step, int queries, int width, float factor,
                           float *to) {
    turned_about(from, step, queries, width, to, PANEL, PANEL);
#pragma omp simd
    for (int i = 0; i < width * PANEL; i++) to[i] *= factor;
}

// Queries [queries, width], times a factor, in panels [32, 32] side by side; zeros beyond.
inline void queries_in_panels(const float *from, int64_t step, int queries, int width, float factor,
                              float *to) {
    for (int at = 0; at < width; at += PANEL, to += PANEL * PANEL) {
        const int here = width - at < PANEL ? width - at : PANEL;
        std::memset(to, 0, PANEL * PANEL * sizeof(float));
        for (int q = 0; q < queries; q++)
#pragma omp simd
            for (int i = 0; i < here; i++) to[q * PANEL + i] = from[q * step + at + i] * factor;
    }
}

// Scores [keys, 32] as exponentials, still to be divided by `sums`; the greatest to `most`.
inline void exponentials(float *scores, int64_t keys, float *most, float *sums) {
    Vector greatest[VECTORS];
    for (int v = 0; v < VECTORS; v++) greatest[v] = sixteen(scores + v * LANES);
    for (int64_t key = 1; key < keys; key++)
        for (int v = 0; v < VECTORS; v++) {
            const Vector one = sixteen(scores + key * PANEL + v * LANES);
            greatest[v] = one > greatest[v] ? one : greatest[v];
        }
    for (int v = 0; v < VECTORS; v++) put(most + v * LANES, greatest[v]);
    for (int q = 0; q < PANEL; q++) sums[q] = 0;
    for (int64_t key = 0; key < keys; key++)
#pragma omp simd
        for (int q = 0; q < PANEL; q++)
            sums[q] += scores[key * PANEL + q] = exponential(scores[key * PANEL + q] - most[q]);
}

// Forward of one head of one sample.
inline void attend_head(const Samples &samples, int64_t start, int64_t length, int head,
                        const Heads &query, const Heads &key, const Heads &value, const Heads &to,
                        float *logarithms, float *own) {
    const int width = samples.width, kept = head / (samples.heads / samples.kept);
    const size_t step = in_lanes(length);
    float *values = taken(own, width * step);
    float *queries = taken(own, size_t(width) * PANEL);
    float *found = taken(own, size_t(width) * PANEL);
    float *scores = own;
    alignas(64) float most[PANEL], sums[PANEL];
    turned_about(of(value, kept, start), value.position, length, width, values, step, step);
    for (int64_t first = 0; first < length; first += PANEL) {
        const int here = int(length - first < PANEL ? length - first : PANEL);
        const int64_t keys = first + here;
        queries_turned(of(query, head, start + first), query.position, here, width, samples.scaling,
                       queries);
        rows_by_panel(keys, of(key, kept, start), key.position, queries, width, scores, PANEL);
        leave_out(scores + first * PANEL, here);
        exponentials(scores, keys, most, sums);
        rows_by_panel(width, values, step, scores, int(keys), found, PANEL);
        for (int d = 0; d < width; d++)
#pragma omp simd
            for (int q = 0; q < PANEL; q++) found[d * PANEL + q] /= sums[q];
        turned_about(found, PANEL, width, here, of(to, head, start + first), to.position, width);
        for (int q = 0; q < here; q++)
            logarithms[(start + first + q) * samples.heads + head] = most[q] + std::log(sums[q]);
    }
}

inline size_t forward_numbers(const Samples &samples) {
    const size_t longest = longest_of(samples), width = samples.width;
    return width * in_lanes(longest) + 2 * width * PANEL + in_panels(longest) * PANEL;
}

// Backward of one kept head of one sample, and of all heads that share it.
inline void attend_back(const Samples &samples, int64_t start, int64_t length, int kept,
                        const Heads &query, const Heads &key, const Heads &value,
                        const Heads &gradient, const Heads &attended, const float *logarithms,
                        const Heads &to_query, const Heads &to_key, const Heads &to_value,
                        float *own) {
    const int width = samples.width, shared = samples.heads / samples.kept;
    const size_t step = in_lanes(length), wide = in_panels(width);
    float *keys_turned = taken(own, width * step);
    float *of_keys = taken(own, length * wide), *of_values = taken(own, length * wide);
    float *queries = taken(own, size_t(width) * PANEL);
    float *gradients = taken(own, size_t(width) * PANEL);
    float *query_panels = taken(own, wide * PANEL);
    float *gradient_panels = taken(own, wide * PANEL);
    float *found = taken(own, size_t(width) * PANEL);
    float *shares = taken(own, in_panels(length) * PANEL), *changes = own;
    alignas(64) float of_sums[PANEL];  // logarithms
    alignas(64) float means[PANEL];    // of changes, by shares
    turned_about(of(key, kept, start), key.position, length, width, keys_turned, step, step);
    std::memset(of_keys, 0, length * wide * sizeof(float));
    std::memset(of_values, 0, length * wide * sizeof(float));
    for (int head = kept * shared; head < (kept + 1) * shared; head++)
        for (int64_t first = 0; first < length; first += PANEL) {
            const int here = int(length - first < PANEL ? length - first : PANEL);
            const int64_t keys = first + here;
            const float *own_query = of(query, head, start + first);
            const float *own_gradient = of(gradient, head, start + first);
            const float *own_attended = of(attended, head, start + first);
            queries_turned(own_query, query.position, here, width, samples.scaling, queries);
            queries_in_panels(own_query, query.position, here, width, samples.scaling, query_panels);
            turned_about(own_gradient, gradient.position, here, width, gradients, PANEL, PANEL);
            queries_in_panels(own_gradient, gradient.position, here, width, 1, gradient_panels);
            for (int q = 0; q < PANEL; q++) {
                float sum = 0;
                if (q < here)
#pragma omp simd reduction(+ : sum)
                    for (int i = 0; i < width; i++)
                        sum += own_gradient[q * gradient.position + i] *
                               own_attended[q * attended.position + i];
                means[q] = sum;
                of_sums[q] = q < here ? logarithms[(start + first + q) * samples.heads + head] : 0;
            }
            rows_by_panel(keys, of(key, kept, start), key.position, queries, width, shares, PANEL);
            rows_by_panel(keys, of(value, kept, start), value.position, gradients, width, changes,
                          PANEL);
            leave_out(shares + first * PANEL, here);
            for (int64_t k = 0; k < keys; k++)
#pragma omp simd
                for (int q = 0; q < PANEL; q++) {
                    const float share = exponential(shares[k * PANEL + q] - of_sums[q]);
                    shares[k * PANEL + q] = share;
                    changes[k * PANEL + q] = share * (changes[k * PANEL + q] - means[q]);
                }
            for (size_t at = 0; at < wide; at += PANEL) {
                rows_by_panel<true>(keys, shares, PANEL, gradient_panels + at * PANEL, PANEL,
                                    of_values + at, wide);
                rows_by_panel<true>(keys, changes, PANEL, query_panels + at * PANEL, PANEL,
                                    of_keys + at, wide);
            }
            rows_by_panel(width, keys_turned, step, changes, int(keys), found, PANEL);
#pragma omp simd
            for (int i = 0; i < width * PANEL; i++) found[i] *= samples.scaling;
            turned_about(found, PANEL, width, here, of(to_query, head, start + first),
                         to_query.position, width);
        }
    for (int64_t p = 0; p < length; p++) {
        std::memcpy(of(to_key, kept, start + p), of_keys + p * wide, width * sizeof(float));
        std::memcpy(of(to_value, kept, start + p), of_values + p * wide, width * sizeof(float));
    }
}

inline size_t backward_numbers(const Samples &samples) {
    const size_t longest = longest_of(samples), width = samples.width, wide = in_panels(width);
    return width * in_lanes(longest) + 2 * longest * wide + 3 * width * PANEL + 2 * wide * PANEL +
           2 * in_panels(longest) * PANEL;
}

// Do something with each sample and each of some heads, by all threads, each of which has memory of
// its own.
template <class One>
Outcome for_each_head(const Samples &samples, int heads, size_t numbers, One one) {
    const size_t bytes = whole_lines(numbers * sizeof(float));
    static thread_local Kept memory_of_caller;
    char *memory = memory_of_caller.of(bytes * samples.threads);
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(samples.threads) schedule(dynamic)
    for (int64_t task = 0; task < int64_t(samples.count) * heads; task++) {
        const int sample = int(task / heads), head = int(task % heads);
        one(samples.firsts[sample], samples.lengths[sample], head,
            reinterpret_cast<float *>(memory + bytes * omp_get_thread_num()));
    }
    return DONE;
}

}  // namespace

extern "C" {

// Attend to each sample's own positions up to one's own; also the logarithms [positions, heads] of
// the scores' sums. 0 when it is done, else `NO_MEMORY`, and nothing is.
int attend(const Samples *samples, const Heads *query, const Heads *key, const Heads *value,
           float *logarithms, const Heads *to) {
    return for_each_head(*samples, samples->heads, forward_numbers(*samples),
                         [&](int64_t first, int64_t length, int head, float *own) {
                             attend_head(*samples, first, length, head, *query, *key, *value, *to,
                                         logarithms, own);
                         });
}

// The gradients of queries, keys and values from that of what was attended to.
int attend_backward(const Samples *samples, const Heads *query, const Heads *key,
                    const Heads *value, const Heads *gradient, const Heads *attended,
                    const float *logarithms, const Heads *to_query, const Heads *to_key,
                    const Heads *to_value) {
    return for_each_head(*samples, samples->kept, backward_numbers(*samples),
                         [&](int64_t first, int64_t length, int kept, float *own) {
                             attend_back(*samples, first, length, kept, *query, *key, *value,
                                         *gradient, *attended, logarithms, *to_query, *to_key,
                                         *to_value, own);
                         });
}
}
