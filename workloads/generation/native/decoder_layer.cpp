// A decoder layer over slots of keys and values, for one processor's cores: norm, queries, keys and
// values, rotary positions, attention, norm, gated unit. One call a layer.
//
// A row is one token of one text: of a text that is being written there is one, of a prompt there
// are all. Each row attends to its own slot up to its own position, so prompts and texts need no
// padding, no mask and no pass of their own.
//
// Products read weights in panels of 32 outputs, input by input, as native.py packs them. Their
// sums are in fp32 (int8: in 32 bits), and so is all that lies between products; what a product
// reads is rounded to its format once. int8 has a scale for each row.
//
// All threads run through a layer together; worksharing loops end with a barrier.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <omp.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

extern "C" {
struct Weights {
    const void *panels;
    const float *scales;     // int8: of each output
    const int32_t *offsets;  // int8: 128 times the sum of each output's weights
    const float *bias;       // or none
};

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

constexpr int PANEL = 32, HALF = 16;
constexpr int MOST_WIDTH = 256, MOST_SHARED = 16;  // numbers of a head; heads that share keys
constexpr size_t CACHED_BYTES = 1 << 20;           // of a product's inputs, worked on at a time

// ---- numbers -----------------------------------------------------------------------------------

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

inline float exponential(float of) {  // of what is not above 80; within two units in the last place
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
    return of != of ? of : p * power;
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
struct Int8 {
    using T = Bf16;
    using In = uint8_t;  // 128 more than the number
    using W = int8_t;
};

// What a product reads of one row; in int8 the row's scale, too.
void rounded(Fp32, const float *from, int count, float *to, float *) {
    if (from != to) std::memcpy(to, from, size_t(count) * 4);
}
void rounded(InBf16, const float *from, int count, float *to, float *) {
    for (int i = 0; i < count; i++) {
        Bf16 near;
        put(&near, from[i]);
        to[i] = number(near);
    }
}
void rounded(Int8, const float *from, int count, uint8_t *to, float *scale) {
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
    for (int i = 0; i < count; i++) to[i] = uint8_t(int32_t(std::rint(from[i] * inverse)) + 128);
}

// ---- memory ------------------------------------------------------------------------------------

// Memory of one thread that calls, kept from layer to layer; null where there is none.
class Kept {
  public:
    ~Kept() { std::free(at_); }
    char *of(size_t bytes) {
        if (bytes > size_) {
            std::free(at_);
            at_ = static_cast<char *>(std::aligned_alloc(64, bytes));
            size_ = at_ ? bytes : 0;
        }
        return at_;
    }

  private:
    char *at_ = nullptr;
    size_t size_ = 0;
};

size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// ---- products ----------------------------------------------------------------------------------

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int MOST_ROWS = 14;     // of a block: 28 sums of the 32 registers
constexpr size_t AHEAD = 4096;    // bytes of a panel, read ahead of their use
constexpr size_t KEYS_AHEAD = 1024;

// Both halves of a panel at one input. In bf16 they lie in turns: two numbers in 32 bits.
inline void halves(const float *at, Vector &left, Vector &right) {
    left = *reinterpret_cast<const Vector *>(at);
    right = *reinterpret_cast<const Vector *>(at + HALF);
}
inline void halves(const Bf16 *at, Vector &left, Vector &right) {
    const Bits both = *reinterpret_cast<const Bits *>(at);
    left = (Vector)(both << 16);
    right = (Vector)(both & 0xffff0000u);
}

// Sixteen numbers of a key or value.
inline Vector sixteen(const float *at) { return *reinterpret_cast<const Vector *>(at); }
inline Vector sixteen(const Bf16 *at) {
#ifdef __AVX512F__
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    Vector found;
    for (int i = 0; i < 16; i++) found[i] = number(at[i]);
    return found;
#endif
}

inline float total(Vector of) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)of);
#else
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += of[i];
    return sum;
#endif
}

// Rows [M, depth] by a panel [depth, 32], to [M, 32].
template <int M, class W>
void block(const float *x, size_t stride, const W *panel, int depth, float *to) {
    Vector sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = Vector{};
    for (int k = 0; k < depth; k++, panel += PANEL) {
        Vector left, right;
        halves(panel, left, right);
        __builtin_prefetch(reinterpret_cast<const char *>(panel) + AHEAD);
        if (sizeof(W) == 4) __builtin_prefetch(reinterpret_cast<const char *>(panel) + AHEAD + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float one = x[m * stride + k];
            sums[m][0] += one * left;
            sums[m][1] += one * right;
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        *reinterpret_cast<Vector *>(to + m * PANEL) = sums[m][0];
        *reinterpret_cast<Vector *>(to + m * PANEL + HALF) = sums[m][1];
    }
}

// The same of bytes, four inputs of each output side by side; to whole numbers in `to`'s place.
template <int M>
void block(const uint8_t *x, size_t stride, const int8_t *panel, int depth, float *to) {
#ifdef __AVX512VNNI__
    __m512i sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_si512();
    for (int k = 0; k < depth; k += 4, panel += 4 * PANEL) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        __builtin_prefetch(panel + AHEAD);
        __builtin_prefetch(panel + AHEAD + 64);
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
        _mm512_storeu_si512(to + m * PANEL, sums[m][0]);
        _mm512_storeu_si512(to + m * PANEL + HALF, sums[m][1]);
    }
#else
    std::abort();  // `computes` has said so
#endif
}

template <int M> void block_of(const float *x, size_t s, const float *p, int d, float *to) {
    block<M, float>(x, s, p, d, to);
}
template <int M> void block_of(const float *x, size_t s, const Bf16 *p, int d, float *to) {
    block<M, Bf16>(x, s, p, d, to);
}
template <int M> void block_of(const uint8_t *x, size_t s, const int8_t *p, int d, float *to) {
    block<M>(x, s, p, d, to);
}

template <class In, class W>
void block_of_rows(int rows, const In *x, size_t stride, const W *panel, int depth, float *to) {
    using Block = void (*)(const In *, size_t, const W *, int, float *);
    static const Block blocks[] = {block_of<1>,  block_of<2>,  block_of<3>,  block_of<4>,
                                   block_of<5>,  block_of<6>,  block_of<7>,  block_of<8>,
                                   block_of<9>,  block_of<10>, block_of<11>, block_of<12>,
                                   block_of<13>, block_of<14>};
    blocks[rows - 1](x, stride, panel, depth, to);
}

// Rows [rows, depth] by all panels. `then` gets, of each block: first row, rows, panel, and sums
// [rows, 32], with scales and biases.
template <class In, class W, class Then>
void product(const In *x, const float *row_scales, int rows, int depth, const Weights &weights,
             const W *all, int panels, Then then) {
    const size_t threads = omp_get_num_threads();
    size_t parts = (size_t(rows) * depth * sizeof(In) + CACHED_BYTES - 1) / CACHED_BYTES;
    const size_t for_all = (threads + panels - 1) / panels;
    parts = parts < for_all ? for_all : parts;
    parts = parts > size_t(rows) ? size_t(rows) : parts;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < int64_t(parts) * panels; task++) {
        const int part = int(task / panels), panel = int(task % panels);
        const int first = int(size_t(rows) * part / parts);
        const int count = int(size_t(rows) * (part + 1) / parts) - first;
        const int blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
        const W *weight = all + size_t(panel) * depth * PANEL;
        alignas(64) float sums[MOST_ROWS * PANEL];
        for (int b = 0; b < blocks; b++) {
            const int row = first + count * b / blocks;
            const int here = first + count * (b + 1) / blocks - row;
            block_of_rows(here, x + size_t(row) * depth, depth, weight, depth, sums);
            if (sizeof(In) == 1)
                for (int r = 0; r < here; r++)
                    for (int i = 0; i < PANEL; i++) {
                        int32_t sum;
                        std::memcpy(&sum, sums + r * PANEL + i, 4);
                        sums[r * PANEL + i] = float(sum - weights.offsets[panel * PANEL + i]) *
                                              row_scales[row + r] *
                                              weights.scales[panel * PANEL + i];
                    }
            if (weights.bias)
                for (int r = 0; r < here; r++)
                    for (int i = 0; i < PANEL; i++)
                        sums[r * PANEL + i] += weights.bias[panel * PANEL + i];
            then(row, here, panel, sums);
        }
    }
}

// ---- norm and attention ------------------------------------------------------------------------

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
        for (int i = 0; i < count; i++) row[i] = number(x[i]) * scale * number(gain[i]);
        rounded(format, row, count, to + size_t(r) * count, scales + r);
    }
}

// One head, turned by its position's angles.
template <class T>
void turned(const float *from, const T *cos, const T *sin, const Layer &layer, float *to) {
    const int rotary = layer.rotary, half = rotary / 2;
    if (layer.pairs)
        for (int i = 0; i < half; i++) {
            const float c = number(cos[i]), s = number(sin[i]);
            to[2 * i] = from[2 * i] * c - from[2 * i + 1] * s;
            to[2 * i + 1] = from[2 * i + 1] * c + from[2 * i] * s;
        }
    else
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
        float *row = qkv + size_t(r) * (heads + 2 * kept) * width;
        const T *cos = static_cast<const T *>(pass.cos) + size_t(r) * layer.rotary;
        const T *sin = static_cast<const T *>(pass.sin) + size_t(r) * layer.rotary;
        float one[MOST_WIDTH];
        for (int h = 0; h < heads; h++) {
            turned(row + h * width, cos, sin, layer, one);
            for (int i = 0; i < width; i++) row[h * width + i] = one[i] * layer.scaling;
        }
        for (int h = 0; h < kept; h++) {
            const size_t cell = (size_t(pass.slots[r]) * kept + h) * layer.capacity;
            const size_t at = (cell + pass.positions[r]) * width;
            T *keys = static_cast<T *>(layer.keys) + at, *values = static_cast<T *>(layer.values) + at;
            turned(row + (heads + h) * width, cos, sin, layer, one);
            const float *value = row + (heads + kept + h) * width;
            for (int i = 0; i < width; i++) put(keys + i, one[i]);
            for (int i = 0; i < width; i++) put(values + i, value[i]);
        }
    }
}

// Shares of attention from scores [shared, count], which become their exponentials.
inline void to_shares(float *scores, int count, int shared, float *shares) {
    for (int h = 0; h < shared; h++) {
        float *own = scores + size_t(h) * count, most = own[0], sum = 0;
#pragma omp simd reduction(max : most)
        for (int p = 0; p < count; p++) most = own[p] > most ? own[p] : most;
#pragma omp simd reduction(+ : sum)
        for (int p = 0; p < count; p++) {
            own[p] = exponential(own[p] - most);
            sum += own[p];
        }
        shares[h] = 1.0f / sum;
    }
}

// The heads of one row that read the same keys and values [count, WIDTH]. Scores: room for
// [SHARED, count].
template <class T, int WIDTH, int SHARED> struct Heads {
    static void of(const float *queries, const T *keys, const T *values, int count, int, int,
                   float *scores, float *to) {
        constexpr int VECTORS = WIDTH / 16;
        Vector query[SHARED][VECTORS], found[SHARED][VECTORS] = {};
        float shares[SHARED];
        for (int h = 0; h < SHARED; h++)
            for (int v = 0; v < VECTORS; v++) query[h][v] = sixteen(queries + h * WIDTH + v * 16);
        for (int p = 0; p < count; p++, keys += WIDTH) {
            Vector sums[SHARED] = {};
            for (size_t at = 0; at < WIDTH * sizeof(T); at += 64) {  // read before they are asked for
                __builtin_prefetch(reinterpret_cast<const char *>(keys) + KEYS_AHEAD + at);
                __builtin_prefetch(reinterpret_cast<const char *>(values + size_t(p) * WIDTH) + at);
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const Vector key = sixteen(keys + v * 16);
#pragma GCC unroll 4
                for (int h = 0; h < SHARED; h++) sums[h] += query[h][v] * key;
            }
#pragma GCC unroll 4
            for (int h = 0; h < SHARED; h++) scores[size_t(h) * count + p] = total(sums[h]);
        }
        to_shares(scores, count, SHARED, shares);
        for (int p = 0; p < count; p++, values += WIDTH) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const Vector value = sixteen(values + v * 16);
#pragma GCC unroll 4
                for (int h = 0; h < SHARED; h++) found[h][v] += scores[size_t(h) * count + p] * value;
            }
        }
        for (int h = 0; h < SHARED; h++)
            for (int v = 0; v < VECTORS; v++)
                *reinterpret_cast<Vector *>(to + h * WIDTH + v * 16) = found[h][v] * shares[h];
    }
};

// The same for any width and any number of heads.
template <class T> struct Heads<T, 0, 0> {
    static void of(const float *queries, const T *keys, const T *values, int count, int width,
                   int shared, float *scores, float *to) {
        alignas(64) float one[MOST_WIDTH], found[MOST_WIDTH * MOST_SHARED] = {};
        float shares[MOST_SHARED];
        for (int p = 0; p < count; p++) {
            for (int i = 0; i < width; i++) one[i] = number(keys[size_t(p) * width + i]);
            for (int h = 0; h < shared; h++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int i = 0; i < width; i++) sum += queries[h * width + i] * one[i];
                scores[size_t(h) * count + p] = sum;
            }
        }
        to_shares(scores, count, shared, shares);
        for (int p = 0; p < count; p++) {
            for (int i = 0; i < width; i++) one[i] = number(values[size_t(p) * width + i]);
            for (int h = 0; h < shared; h++) {
                const float share = scores[size_t(h) * count + p];
                for (int i = 0; i < width; i++) found[h * width + i] += share * one[i];
            }
        }
        for (int h = 0; h < shared; h++)
            for (int i = 0; i < width; i++) to[h * width + i] = found[h * width + i] * shares[h];
    }
};

// Attention of every row over its slot, to [rows, heads * width].
template <class T, int WIDTH, int SHARED>
void attend(const Layer &layer, const Pass &pass, const float *qkv, float *scores, float *to) {
    const int width = layer.width, kept = layer.kept, shared = layer.heads / kept;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < int64_t(pass.rows) * kept; task++) {
        const int row = int(task / kept), head = int(task % kept);
        const size_t at = (size_t(pass.slots[row]) * kept + head) * layer.capacity * width;
        Heads<T, WIDTH, SHARED>::of(
            qkv + (size_t(row) * (layer.heads + 2 * kept) + head * shared) * width,
            static_cast<const T *>(layer.keys) + at, static_cast<const T *>(layer.values) + at,
            int(pass.positions[row]) + 1, width, shared, scores,
            to + (size_t(row) * layer.heads + head * shared) * width);
    }
}

template <class T>
void attend_by_size(const Layer &layer, const Pass &pass, const float *qkv, float *scores,
                    float *to) {
    const int shared = layer.heads / layer.kept;
    if (layer.width == 64 && shared == 1)
        attend<T, 64, 1>(layer, pass, qkv, scores, to);
    else if (layer.width == 64 && shared == 3)
        attend<T, 64, 3>(layer, pass, qkv, scores, to);
    else if (layer.width == 64 && shared == 4)
        attend<T, 64, 4>(layer, pass, qkv, scores, to);
    else if (layer.width == 128 && shared == 1)
        attend<T, 128, 1>(layer, pass, qkv, scores, to);
    else if (layer.width == 128 && shared == 4)
        attend<T, 128, 4>(layer, pass, qkv, scores, to);
    else
        attend<T, 0, 0>(layer, pass, qkv, scores, to);
}

// ---- the layer ---------------------------------------------------------------------------------

enum Outcome { DONE, NO_MEMORY };

int larger(int one, int other) { return one > other ? one : other; }

template <class Format>
Outcome run(Format format, const Layer &layer, const Pass &pass, const void *hidden_from,
         void *hidden_to) {
    using T = typename Format::T;
    using In = typename Format::In;
    using W = typename Format::W;
    static thread_local Kept memory_of_caller;
    const T *from = static_cast<const T *>(hidden_from);
    T *to = static_cast<T *>(hidden_to);
    const int rows = pass.rows, hidden = layer.hidden, inner = layer.inner;
    const int attended = layer.heads * layer.width, three = attended + 2 * layer.kept * layer.width;
    const size_t widest = larger(larger(inner, attended), hidden);
    int64_t longest = 0;
    for (int r = 0; r < rows; r++)
        longest = pass.positions[r] + 1 > longest ? pass.positions[r] + 1 : longest;
    const size_t own = whole_lines((size_t(layer.heads / layer.kept) * longest + hidden) * 4);
    const size_t sizes[] = {
        whole_lines(rows * widest * sizeof(In)),         // what a product reads
        whole_lines(size_t(rows) * 4),                   // its rows' scales
        whole_lines(size_t(rows) * larger(three, inner) * 4),  // what one has made
        whole_lines(size_t(rows) * attended * 4),        // what attention has found
        own * pass.threads,                              // of each thread: a row, and scores
    };
    size_t bytes = 0;
    for (size_t size : sizes) bytes += size;
    char *memory = memory_of_caller.of(bytes);
    if (!memory) return NO_MEMORY;
    In *read = reinterpret_cast<In *>(memory);
    float *scales = reinterpret_cast<float *>(memory += sizes[0]);
    float *made = reinterpret_cast<float *>(memory += sizes[1]);
    float *found = reinterpret_cast<float *>(memory += sizes[2]);
    char *of_threads = memory + sizes[3];

#pragma omp parallel num_threads(pass.threads)
    {
        float *row = reinterpret_cast<float *>(of_threads + own * omp_get_thread_num());
        const auto all_rounded = [&](const float *numbers, int count) {
#pragma omp for schedule(static)
            for (int r = 0; r < rows; r++)
                rounded(format, numbers + size_t(r) * count, count, read + size_t(r) * count,
                        scales + r);
        };
        const auto times = [&](const Weights &weights, int depth, int outputs, auto then) {
            product(read, scales, rows, depth, weights, static_cast<const W *>(weights.panels),
                    outputs / PANEL, then);
        };
        const auto plus = [&](const T *summands) {
            return [=](int first, int count, int panel, const float *sums) {
                for (int r = 0; r < count; r++) {
                    const size_t at = size_t(first + r) * hidden + panel * PANEL;
                    for (int i = 0; i < PANEL; i++)
                        put(to + at + i, sums[r * PANEL + i] + number(summands[at + i]));
                }
            };
        };
        normed(format, from, layer.before, layer.before_eps, rows, hidden, read, scales, row);
        times(layer.qkv, hidden, three, [&](int first, int count, int panel, const float *sums) {
            for (int r = 0; r < count; r++)
                std::memcpy(made + size_t(first + r) * three + panel * PANEL, sums + r * PANEL,
                            4 * PANEL);
        });
        keep<T>(layer, pass, made);
        attend_by_size<T>(layer, pass, made, row + hidden, found);
        all_rounded(found, attended);
        times(layer.out, attended, hidden, plus(from));
        normed(format, static_cast<const T *>(to), layer.between, layer.between_eps, rows, hidden,
               read, scales, row);
        times(layer.gates, hidden, 2 * inner,
              [&](int first, int count, int panel, const float *sums) {
                  for (int r = 0; r < count; r++) {
                      float *at = made + size_t(first + r) * inner + panel * HALF;
                      for (int i = 0; i < HALF; i++)
                          at[i] = silu(sums[r * PANEL + i]) * sums[r * PANEL + HALF + i];
                  }
              });
        all_rounded(made, inner);
        times(layer.down, inner, hidden, plus(to));
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
    const size_t own = whole_lines(size_t(depth) * 4), of_rows = whole_lines(size_t(rows) * 4);
    char *memory = memory_of_caller.of(whole_lines(size_t(rows) * depth * sizeof(In)) + of_rows +
                                       own * threads);
    if (!memory) return NO_MEMORY;
    float *scales = reinterpret_cast<float *>(memory), *made = scales + of_rows / 4;
    In *read = reinterpret_cast<In *>(memory + of_rows + own * threads);
    T *result = static_cast<T *>(to);
#pragma omp parallel num_threads(threads)
    {
        float *row = made + own / 4 * omp_get_thread_num();
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r++) {
            const T *numbers = static_cast<const T *>(from) + size_t(r) * depth;
            for (int i = 0; i < depth; i++) row[i] = number(numbers[i]);
            rounded(format, row, depth, read + size_t(r) * depth, scales + r);
        }
        product(read, scales, rows, depth, weights, static_cast<const W *>(weights.panels),
                outputs / PANEL, [=](int first, int count, int panel, const float *sums) {
                    for (int r = 0; r < count; r++) {
                        T *at = result + size_t(first + r) * outputs + panel * PANEL;
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

int most_width() { return MOST_WIDTH; }
int most_shared() { return MOST_SHARED; }

// Of a layer and of a product: 0 when it is done, else `NO_MEMORY`, and nothing is.
int layer_fp32(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(Fp32(), *layer, *pass, from, to);
}
int layer_bf16(const Layer *layer, const Pass *pass, const void *from, void *to) {
    return run(InBf16(), *layer, *pass, from, to);
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
