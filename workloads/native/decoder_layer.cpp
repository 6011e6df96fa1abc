// A decoder layer over slots of keys and values, for one processor's cores: norm, queries, keys and
// values, rotary positions, attention, norm, gated unit. One call a layer.
//
// A row is one token of one text: of a text that is being written there is one, of a prompt there
// are all. Each row attends to its own slot up to its own position, so prompts and texts need no
// padding, no mask and no pass of their own.
//
// All that lies between products is in fp32; what a product reads is rounded to its format once.
// int8 has a scale for each row.
//
// All threads run through a layer together; worksharing loops end with a barrier.

#include "attention.h"
#include "memory.h"
#include "norms.h"
#include "pairs.h"
#include "products.h"
#include "slots.h"

namespace {

// One layer of rows [rows, hidden], to [rows, hidden].
template <class Format>
Outcome run(Format format, const Layer &layer, const Pass &pass, const void *hidden_from,
            void *hidden_to) {
    using T = typename Format::T;
    using In = typename Format::In;
    using W = typename Format::W;
    constexpr bool BY_ROWS = !std::is_same_v<In, float>;  // rounded when a row is whole
    static thread_local Kept memory_of_caller, runs_of_caller;
    const T *from = static_cast<const T *>(hidden_from);
    T *to = static_cast<T *>(hidden_to);
    const size_t rows = pass.rows;
    const int hidden = layer.hidden, inner = layer.inner, three = three_of(layer);
    const int attended = layer.heads * layer.width;
    int *starts = reinterpret_cast<int *>(runs_of_caller.of(whole_lines((rows + 1) * sizeof(int))));
    if (!starts) return NO_MEMORY;
    const int runs = runs_of(pass, starts);

    const size_t widest = BY_ROWS ? larger(larger(inner, attended), hidden) : hidden;
    const size_t read_bytes = whole_lines(rows * widest * sizeof(In));
    const size_t scale_bytes = whole_lines(rows * 4);
    const size_t made_bytes = whole_lines(rows * larger(three, inner) * 4);
    const size_t found_bytes = whole_lines(rows * attended * 4);
    size_t own_bytes = larger(size_t(hidden) * 4, attend_bytes(layer, pass, starts, runs));
    for (int depth : {hidden, attended, inner})
        own_bytes = larger(own_bytes, product_bytes<W>(depth));
    own_bytes = whole_lines(own_bytes);
    char *memory = memory_of_caller.of(read_bytes + scale_bytes + made_bytes + found_bytes +
                                       own_bytes * pass.threads);
    if (!memory) return NO_MEMORY;
    In *read = taken<In>(memory, read_bytes);             // what a product reads
    float *scales = taken<float>(memory, scale_bytes);    // its rows' scales
    float *made = taken<float>(memory, made_bytes);       // queries, keys, values; then the gated
    float *found = taken<float>(memory, found_bytes);     // by attention

#pragma omp parallel num_threads(pass.threads)
    {
        char *own = memory + own_bytes * omp_get_thread_num();
        float *own_numbers = reinterpret_cast<float *>(own);
        // Numbers [rows, count] that are as a product reads them, unless that takes whole rows.
        const auto to_read = [&](const float *numbers, int count) -> const In * {
            if constexpr (!BY_ROWS) return numbers;
            else {
#pragma omp for schedule(static)
                for (size_t r = 0; r < rows; r++)
                    rounded(format, numbers + r * count, count, read + r * count, scales + r);
                return read;
            }
        };
        const auto times = [&](const In *x, const Weights &weights, int depth, int outputs,
                               auto then) {
            product<W>(x, scales, int(rows), depth, weights, outputs / PANEL, own, then);
        };
        const auto plus = [&](const T *summands) {
            return [=](int first, int count, int panel, const float *sums) {
                for (int r = 0; r < count; r++) {
                    const size_t at = size_t(first + r) * hidden + panel * PANEL;
#pragma omp simd
                    for (int i = 0; i < PANEL; i++)
                        put(to + at + i, sums[r * PANEL + i] + number(summands[at + i]));
                }
            };
        };
        normed(format, from, layer.before, layer.before_eps, int(rows), hidden, read, scales,
               own_numbers);
        times(read, layer.qkv, hidden, three,
              [&](int first, int count, int panel, const float *sums) {
                  for (int r = 0; r < count; r++)
                      std::memcpy(made + size_t(first + r) * three + panel * PANEL,
                                  sums + r * PANEL, 4 * PANEL);
              });
        keep<T>(layer, pass, made);
        attend_by_size(format, layer, pass, starts, runs, made, own_numbers, found);
        times(to_read(found, attended), layer.out, attended, hidden, plus(from));
        normed(format, static_cast<const T *>(to), layer.between, layer.between_eps, int(rows),
               hidden, read, scales, own_numbers);
        times(read, layer.gates, hidden, 2 * inner,
              [&](int first, int count, int panel, const float *sums) {
                  for (int r = 0; r < count; r++) {
                      float *at = made + size_t(first + r) * inner + panel * HALF;
                      const float *gate = sums + r * PANEL, *up = gate + HALF;
#pragma omp simd
                      for (int i = 0; i < HALF; i++)
                          at[i] = as_read(format, silu(gate[i]) * up[i]);
                  }
              });
        times(to_read(made, inner), layer.down, inner, hidden, plus(to));
    }
    return DONE;
}

// One product of rows [rows, depth], to [rows, outputs].
template <class Format>
Outcome linear(Format format, const Weights &weights, int rows, int depth, int outputs, int threads,
               const void *from, void *to) {
    using T = typename Format::T;
    using In = typename Format::In;
    using W = typename Format::W;
    static thread_local Kept memory_of_caller;
    const size_t read_bytes = whole_lines(size_t(rows) * depth * sizeof(In));
    const size_t scale_bytes = whole_lines(size_t(rows) * 4);
    const size_t own_bytes = whole_lines(larger(size_t(depth) * 4, product_bytes<W>(depth)));
    char *memory = memory_of_caller.of(read_bytes + scale_bytes + own_bytes * threads);
    if (!memory) return NO_MEMORY;
    In *read = taken<In>(memory, read_bytes);
    float *scales = taken<float>(memory, scale_bytes);
    T *result = static_cast<T *>(to);
#pragma omp parallel num_threads(threads)
    {
        char *own = memory + own_bytes * omp_get_thread_num();
        float *row = reinterpret_cast<float *>(own);
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r++) {
            const T *numbers = static_cast<const T *>(from) + size_t(r) * depth;
#pragma omp simd
            for (int i = 0; i < depth; i++) row[i] = number(numbers[i]);
            rounded(format, row, depth, read + size_t(r) * depth, scales + r);
        }
        product<W>(read, scales, rows, depth, weights, outputs / PANEL, own,
                   [=](int first, int count, int panel, const float *sums) {
                       for (int r = 0; r < count; r++) {
                           T *at = result + size_t(first + r) * outputs + panel * PANEL;
#pragma omp simd
                           for (int i = 0; i < PANEL; i++) put(at + i, sums[r * PANEL + i]);
                       }
                   });
    }
    return DONE;
}

// The first of the greatest numbers of each row; what is no number is greater than all.
template <class T>
void greatest(const T *from, int rows, int64_t count, int threads, int64_t *to) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int r = 0; r < rows; r++) {
        const T *row = from + size_t(r) * count;
        float most = -INFINITY;
        int none = 0;
#pragma omp simd reduction(max : most) reduction(| : none)
        for (int64_t i = 0; i < count; i++) {
            const float one = number(row[i]);
            most = one > most ? one : most;
            none |= one != one;
        }
        int64_t at = 0;
        while (at < count && !(none ? number(row[at]) != number(row[at]) : number(row[at]) == most))
            at++;
        to[r] = at;
    }
}

}  // namespace

extern "C" {

// Tell if a format's products are here, and faster than oneDNN's: 0 fp32, 1 bf16, 2 int8. The
// tiles of AMX, which oneDNN has, are faster than vectors.
int computes(int format) {
#ifdef __AVX512F__
    if (format == 0) return 1;
#ifndef __AMX_TILE__
    if (format == 1) return 1;
#ifdef __AVX512VNNI__
    if (format == 2) return 1;
#endif
#endif
#endif
    return 0;
}

// Tell if products of pairs in bf16 are here, and if they are the faster ones.
int has_pairs() { return HAS_PAIRS; }
int pairs_are_fast() {
    static const bool fast = pairs_take_as_long_as_numbers();
    return fast;
}

int most_width() { return MOST_WIDTH; }
int most_shared() { return MOST_SHARED; }

// Of a layer and of a product: 0 when it is done, else `NO_MEMORY`, and nothing is.
int layer_fp32(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(Fp32(), *layer, *pass, from, to);
}
int layer_bf16(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(InBf16(), *layer, *pass, from, to);
}
int layer_bf16_pairs(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(InPairs(), *layer, *pass, from, to);
}
int layer_int8(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(Int8(), *layer, *pass, from, to);
}

int linear_fp32(const Weights *weights, int rows, int depth, int outputs, int threads,
                const void *from, void *to) {
    return linear(Fp32(), *weights, rows, depth, outputs, threads, from, to);
}
int linear_bf16(const Weights *weights, int rows, int depth, int outputs, int threads,
                const void *from, void *to) {
    return linear(InBf16(), *weights, rows, depth, outputs, threads, from, to);
}
int linear_bf16_pairs(const Weights *weights, int rows, int depth, int outputs, int threads,
                      const void *from, void *to) {
    return linear(InPairs(), *weights, rows, depth, outputs, threads, from, to);
}
int linear_int8(const Weights *weights, int rows, int depth, int outputs, int threads,
                const void *from, void *to) {
    return linear(Int8(), *weights, rows, depth, outputs, threads, from, to);
}

void greatest_fp32(const void *from, int rows, int64_t count, int threads, int64_t *to) {
    greatest(static_cast<const float *>(from), rows, count, threads, to);
}
void greatest_bf16(const void *from, int rows, int64_t count, int threads, int64_t *to) {
    greatest(static_cast<const Bf16 *>(from), rows, count, threads, to);
}
}
