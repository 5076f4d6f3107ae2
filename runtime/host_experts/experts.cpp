// Experts computed on the host where they lie: rows of a bank, in the stored format.
//
// Shapes: T tokens, K experts a token, E experts, H hidden, I an expert's width. A matrix is [n, k]:
// n outputs, k inputs. Weights become fp32 in registers and products are summed in fp32.
//
// At decode this is bound by reading weights, so each is read once for all its tokens, in long
// runs. Work is dealt in items by an atomic counter, in three passes: the tokens' vectors are put in the order
// in which codes unpack; blocks of rows of gate_up give the activations; blocks of rows of down,
// each over all experts in ascending id, give y. One thread computes an output from start to end,
// so results do not depend on how many threads there are.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

using std::min;
using Clock = std::chrono::steady_clock;

struct Offsets {  // of a matrix's parts in a row, in bytes; -1 where absent
    int64_t elements, scale, outer, bias;
};

struct Job {  // mirrored in native.py
    const uint8_t* bank;
    int64_t row_bytes;
    const void* x;           // [T, H] of x_dtype
    const int32_t* ids;      // [T, K]; an id that no expert has is passed over
    const float* weights;    // [T, K]
    const uint8_t* chosen;   // [E]: compute this expert here
    float* y;                // [T, H]: sum of weight * expert(x) over the token's chosen experts
    int64_t* stats;          // added to: ns, distinct experts computed, calls
    void* pool;
    Offsets gate_up, down;
    int32_t T, K, E, H, I;
    int32_t format, x_dtype, bias_dtype;  // see Format
    int32_t activation, transposed, interleaved;
    float alpha, limit;
};

enum Format { FP32, BF16, FP16, FP8_BLOCK, NVFP4, MXFP4 };
enum Activation { SILU, CLAMPED_SWIGLU };

constexpr int BLOCK = 16;             // outputs in an item: a cache line of y
constexpr int TRANSPOSED_BLOCK = 64;  // there a block is a piece of each stored row
constexpr int GROUP = 32;             // tokens whose results wait together
#ifndef RESIDENCY_PREFETCH
#define RESIDENCY_PREFETCH 2048  // bytes ahead
#endif
#ifndef RESIDENCY_SPIN_US
#define RESIDENCY_SPIN_US 400  // how long an idle worker looks for work before it sleeps
#endif

float element(const uint8_t* p, int64_t index, int dtype) {
    if (dtype == FP32) return load<float>(p + 4 * index);
    int32_t bits = load<uint16_t>(p + 2 * index);
    return as_float(splat(bits << 16))[0] * (dtype == BF16) + (dtype == FP16 ? half_bits(splat(bits))[0] : 0);
}

// ---- formats ----------------------------------------------------------------------------------
// A chunk is 4 * LANES bytes of elements. `part(p, j)` is the j-th vector of a chunk at p; lane l of
// it is column l * STRIDE + j, or j * LANES + l where STRIDE is 1. `add` adds its products with a
// part of x. `scale` holds for a whole chunk. X: of the vectors' elements.

constexpr int CHUNK_BYTES = 4 * LANES;

template <int BITS, int STRIDE_, class X_ = float> struct Codes {
    using X = X_;
    static constexpr int WIDTH = LANES * (int)sizeof(float) / (int)sizeof(X);  // elements in a part
    static constexpr int COLUMNS = CHUNK_BYTES * 8 / BITS, PARTS = COLUMNS / WIDTH;
    static constexpr int STRIDE = STRIDE_, SCALED = 0;  // SCALED: columns to a byte of scale
    static constexpr float UNIT = 1;  // by which vectors are multiplied, where parts are too large
    static float kept(float value) { return value; }
    static int64_t place(int64_t column) {
        int64_t in = column % COLUMNS;
        return column - in + in % STRIDE * WIDTH + in / STRIDE;
    }
    static int64_t padded(int64_t k) { return (k + COLUMNS - 1) / COLUMNS * COLUMNS; }
    static int64_t row_bytes(int64_t k) { return k * BITS / 8; }
};
struct Fp32 : Codes<32, 1> {
    static V part(const uint8_t* p, int) { return load<V>(p); }
};
struct Bf16 : Codes<16, 2> {
    static V part(const uint8_t* p, int j) {
        I pair = load<I>(p);
        return as_float(j ? pair & (int32_t)0xffff0000 : pair << 16);
    }
};
struct Fp16 : Codes<16, 1> {
    static V part(const uint8_t* p, int j) { return halves(p + 2 * LANES * j); }
};
struct Fp8 : Codes<8, 1> {
    static V part(const uint8_t* p, int j) { return e4m3(load_bytes(p + LANES * j)); }
};
struct Fp4 : Codes<4, 8> {
    static constexpr float UNIT = E2M1_UNIT;
    static V part(const uint8_t* p, int j) { return e2m1(load<I>(p), j); }
};
struct Nvfp4 : Fp4 {  // no scale is NaN: loading refuses those
    static constexpr int SCALED = 16;
    static V scale(const uint8_t* p) { return e4m3(repeat<2>(p)); }
};
struct Mxfp4 : Fp4 {
    static constexpr int SCALED = 32;
    static V scale(const uint8_t* p) {  // e8m0: an exponent; 0 is 2^-127, 255 NaN
        I bits = widen(repeat<4>(p)) << 23;
        I outermost = ((bits + (1 << 23)) & 0x7f000000) == 0;
        return as_float(bits | (outermost & 0x00400000));
    }
};

#ifdef RESIDENCY_PAIRS
// Of bf16 activations; those between the matrices are rounded to bf16, as on a GPU.
template <class Scaled> struct Pairs : Codes<4, 4, uint16_t> {
    static constexpr int SCALED = Scaled::SCALED;
    static H part(const uint8_t* p, int j) { return pair_codes(load<I>(p), j); }
    static uint16_t kept(float value) { return to_bf16(value); }
    static V scale(const uint8_t* p) { return Scaled::scale(p); }
};
#endif

template <class F> V add(V sums, const V& weight, const float* x) {
    return sums + weight * load<V>(x);
}
#ifdef RESIDENCY_PAIRS
template <class F> V add(V sums, const H& weight, const uint16_t* x) {
    return add_pairs(sums, weight, load_pairs(x));
}
#endif

// ---- a matrix times vectors -------------------------------------------------------------------

struct Matrix {
    const uint8_t *elements, *scale, *outer, *bias;
    int64_t n, k;
};

template <class F> struct Row {
    const uint8_t *elements, *scale;
    int64_t k;
    const float* block_scales;  // Fp8: one for 128 columns
};

template <class F> V chunk_scale(const Row<F>& row, const uint8_t* scale, int64_t column) {
    if constexpr (F::SCALED != 0) return F::scale(scale);
    if constexpr (std::is_same_v<F, Fp8>) return V{} + row.block_scales[column / 128];
    return V{} + 1.f;
}

// out[t] = row . x[t] for TOKENS vectors in the format's order, padded with zeros.
template <class F, int TOKENS>
void dot(const Row<F>& row, const typename F::X* const* x, float* out, bool first) {
    constexpr int SCALES = F::SCALED ? F::COLUMNS / F::SCALED : 0;
    constexpr int CHAINS = min(2, F::PARTS);  // one alone would wait for its additions
    V total[TOKENS] = {};
    auto add_chunk = [&](const uint8_t* p, const uint8_t* scale, int64_t column) {
        V sum[CHAINS][TOKENS] = {};
#pragma GCC unroll 8
        for (int j = 0; j < F::PARTS; j++) {
            auto weight = F::part(p, j);
            for (int t = 0; t < TOKENS; t++) {
                V& chain = sum[j % CHAINS][t];
                chain = add<F>(chain, weight, x[t] + column + j * F::WIDTH);
            }
        }
        V scaling = chunk_scale(row, scale, column);
        for (int t = 0; t < TOKENS; t++) {
            for (int c = 1; c < CHAINS; c++) sum[0][t] += sum[c][t];
            total[t] += sum[0][t] * scaling;
        }
    };
    const uint8_t *p = row.elements, *scale = row.scale;
    int64_t column = 0;
    for (; column + F::COLUMNS <= row.k; column += F::COLUMNS) {
        if (first) __builtin_prefetch(p + RESIDENCY_PREFETCH);
        add_chunk(p, scale, column);
        p += CHUNK_BYTES;
        scale += SCALES;
    }
    if (column < row.k) {  // zero codes are zeros, and the vectors are padded
        alignas(64) uint8_t rest[CHUNK_BYTES] = {}, scales[16] = {};
        memcpy(rest, p, F::row_bytes(row.k - column));
        if (F::SCALED) memcpy(scales, scale, (row.k - column) / std::max(F::SCALED, 1));
        add_chunk(rest, scales, column);
    }
    for (int t = 0; t < TOKENS; t++) out[t] = sum(total[t]);
}

// Rows that lie elsewhere than the last ones read: what `dot` would have prefetched of them.
template <class F> void expect(const Matrix& m, int64_t begin, int number) {
    const uint8_t* p = m.elements + begin * F::row_bytes(m.k);
    int64_t bytes = min<int64_t>(RESIDENCY_PREFETCH, number * F::row_bytes(m.k));
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
    if (F::SCALED == 0) return;
    int64_t scales = m.k / std::max(F::SCALED, 1);
    for (int64_t i = 0; i < number * scales; i += 64) __builtin_prefetch(m.scale + begin * scales + i);
}

// out[t * stride + i] = row (begin + i) of the matrix . x[t], i < number.
template <class F>
void product(const Matrix& m, int64_t begin, int number, const typename F::X* const* x, int tokens,
             float* out, int stride) {
    constexpr int MOST = LANES == 16 ? 8 : 4;  // what the registers hold
    for (int i = 0; i < number; i++) {
        int64_t row = begin + i, scales = F::SCALED ? m.k / std::max(F::SCALED, 1) : 0;
        Row<F> at{m.elements + row * F::row_bytes(m.k), m.scale + row * scales, m.k, nullptr};
        float unit = 1;
        bool nan = false;
        if constexpr (std::is_same_v<F, Fp8>) {
            at.block_scales = (const float*)m.scale + row / 128 * ((m.k + 127) / 128);
            unit = E4M3_UNIT;
        }
        if constexpr (F::SCALED == Nvfp4::SCALED)
            unit = E4M3_UNIT * load<float>(m.outer + 4 * (row >= m.n / 2));
        float sums[MOST];
        for (int t = 0; t < tokens;) {
            int left = tokens - t, taken = left >= MOST ? MOST : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (taken == 1) dot<F, 1>(at, x + t, sums, t == 0);
            else if (taken == 2) dot<F, 2>(at, x + t, sums, t == 0);
            else if (taken == 4) dot<F, 4>(at, x + t, sums, t == 0);
            else dot<F, MOST>(at, x + t, sums, t == 0);
            for (int s = 0; s < taken; s++) out[(t + s) * stride + i] = sums[s] * unit;
            t += taken;
        }
        if constexpr (std::is_same_v<F, Fp8>) nan = any_e4m3_nan(at.elements, m.k);
        for (int t = 0; nan && t < tokens; t++) out[t * stride + i] = NAN;
    }
}

// The same of a matrix stored as [k, n], for vectors in plain order.
template <int DTYPE>
void product_transposed(const Matrix& m, int64_t begin, int number, const float* const* x,
                        int tokens, float* out, int stride) {
    constexpr int SIZE = DTYPE == FP32 ? 4 : 2;
    for (int t = 0; t < tokens; t++) std::fill_n(out + t * stride, number, 0.f);
    float weights[TRANSPOSED_BLOCK];
    for (int64_t k = 0; k < m.k; k++) {
        const uint8_t* p = m.elements + (k * m.n + begin) * SIZE;
        for (int i = 0; i < SIZE * number; i += 64) __builtin_prefetch(p + 16 * m.n * SIZE + i);
        for (int i = 0; i < number; i++) weights[i] = element(p, i, DTYPE);
        for (int t = 0; t < tokens; t++) {
            float* sums = out + t * stride;
            for (int i = 0; i < number; i++) sums[i] += weights[i] * x[t][k];
        }
    }
}

// ---- threads ----------------------------------------------------------------------------------

inline void pause_a_little() {
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until done() holds: by spinning, later by giving way to other threads.
template <class Done> void wait_until(Done done) {
    for (int round = 0; !done(); round++)
        round < 4096 ? pause_a_little() : std::this_thread::yield();
}

// Runs items 0 .. n-1 of consecutive passes on its threads and the caller's. An item of a pass
// begins when all items of the passes before it are done.
class Pool {
  public:
    explicit Pool(int threads) : size(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
    }
    ~Pool() {
        stop_ = true;
        wake();
        for (auto& worker : workers_) worker.join();
    }
    // do_item(pass, index within the pass, for `counts[pass]` items)
    void run(const std::vector<int64_t>& counts, void (*do_item)(void*, int, int64_t), void* about) {
        counts_ = &counts;
        do_item_ = do_item;
        about_ = about;
        total_ = 0;
        for (int64_t count : counts) total_ += count;
        done_ = 0;
        left_.store(total_, std::memory_order_release);
        wake();
        take_items();
        wait_until([this] { return done_.load(std::memory_order_acquire) == total_; });
    }

    const int size;
    std::mutex in_use;             // one run at a time
    std::vector<float> x, hidden;  // scratch of a run

  private:
    void wake() {
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
    }
    // A worker that comes late finds nothing left of its run, or items of the next one, which it
    // may take as well: while an item is not done, its run cannot end, so its facts stay.
    void take_items() {
        for (int64_t left; (left = left_.fetch_sub(1, std::memory_order_acq_rel)) > 0;) {
            int64_t index = total_ - left, begin = 0;
            int pass = 0;
            while (index - begin >= (*counts_)[pass]) begin += (*counts_)[pass++];
            wait_until([&] { return done_.load(std::memory_order_acquire) >= begin; });
            do_item_(about_, pass, index - begin);
            done_.fetch_add(1, std::memory_order_acq_rel);
        }
    }
    void work() {
        for (int seen = 0;;) {
            auto until = Clock::now() + std::chrono::microseconds(RESIDENCY_SPIN_US);
            while (epoch_.load(std::memory_order_acquire) == seen && Clock::now() < until)
                for (int i = 0; i < 16; i++) pause_a_little();
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
            if (stop_) return;
            take_items();
        }
    }

    std::vector<std::thread> workers_;
    const std::vector<int64_t>* counts_ = nullptr;
    void (*do_item_)(void*, int, int64_t) = nullptr;
    void* about_ = nullptr;
    int64_t total_ = 0;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int64_t> left_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

// ---- a layer's experts ------------------------------------------------------------------------

struct Pair {
    int32_t token;
    float weight;
};

struct Expert {  // its pairs are [begin, end), tokens ascending
    int32_t id, begin, end;
};

float activate(float gate, float up, const Job& job) {
    if (job.activation == SILU) return gate / (1 + std::exp(-gate)) * up;
    gate = min(gate, job.limit);
    up = std::clamp(up, -job.limit, job.limit);
    return (up + 1) * (gate / (1 + std::exp(-gate * job.alpha)));
}

// From a cache line's beginning, so that no vector is read across two.
template <class X> X* zeros(std::vector<float>& scratch, int64_t number) {
    scratch.assign(number * sizeof(X) / sizeof(float) + 16, 0.f);
    return (X*)(((uintptr_t)scratch.data() + 63) / 64 * 64);
}

// `F` orders the vectors; PRODUCT multiplies by a block of rows; EXPECT prefetches one.
template <class F, auto PRODUCT, auto EXPECT, int STEP> struct Layer {
    using X = typename F::X;
    const Job& job;
    const std::vector<Expert>& experts;
    const std::vector<Pair>& pairs;
    X *x, *hidden;
    int64_t x_stride, hidden_stride;

    static void run(const Job& job, const std::vector<Expert>& experts,
                    const std::vector<Pair>& pairs, Pool& pool) {
        int64_t x_stride = F::padded(job.H), hidden_stride = F::padded(job.I);
        X* x = zeros<X>(pool.x, job.T * x_stride);
        X* hidden = zeros<X>(pool.hidden, pairs.size() * hidden_stride);
        Layer layer{job, experts, pairs, x, hidden, x_stride, hidden_stride};
        int64_t width_blocks = (job.I + STEP - 1) / STEP;
        pool.run({job.T, (int64_t)experts.size() * width_blocks, (job.H + STEP - 1) / STEP},
                 [](void* self, int pass, int64_t item) { ((Layer*)self)->item(pass, item); },
                 &layer);
    }

    void item(int pass, int64_t index) {
        int64_t width_blocks = (job.I + STEP - 1) / STEP;
        if (pass == 0) order(index);
        else if (pass == 1) gate_up(experts[index / width_blocks], index % width_blocks * STEP);
        else down(index * STEP);
    }

    void order(int64_t token) {
        for (int64_t h = 0; h < job.H; h++)
            x[token * x_stride + F::place(h)] = F::kept(
                F::UNIT * element((const uint8_t*)job.x, token * job.H + h, job.x_dtype));
    }

    Matrix matrix(const Expert& expert, const Offsets& at, int64_t n, int64_t k) const {
        const uint8_t* row = job.bank + expert.id * job.row_bytes;
        auto part = [&](int64_t offset) { return offset < 0 ? nullptr : row + offset; };
        return {part(at.elements), part(at.scale), part(at.outer), part(at.bias), n, k};
    }

    float bias(const Matrix& m, int64_t row) const {
        return m.bias ? element(m.bias, row, job.bias_dtype) : 0;
    }

    // hidden[pair, begin .. begin + STEP) of one expert.
    void gate_up(const Expert& expert, int64_t begin) {
        Matrix m = matrix(expert, job.gate_up, 2 * job.I, job.H);
        int number = min<int64_t>(STEP, job.I - begin);
        // Where the rows of gate and of up begin, and how far apart they lie in `out`.
        int64_t first = job.interleaved ? 2 * begin : begin;
        int64_t second = job.interleaved ? 2 * begin + number : job.I + begin;
        float out[GROUP * 2 * STEP];
        for (int from = expert.begin; from < expert.end; from += GROUP) {
            int tokens = min(GROUP, expert.end - from);
            const X* vectors[GROUP];
            for (int t = 0; t < tokens; t++) vectors[t] = x + pairs[from + t].token * x_stride;
            if (from == expert.begin) EXPECT(m, second, number);
            PRODUCT(m, first, number, vectors, tokens, out, 2 * STEP);
            PRODUCT(m, second, number, vectors, tokens, out + number, 2 * STEP);
            for (int t = 0; t < tokens; t++)
                for (int i = 0; i < number; i++) {
                    int g = job.interleaved ? 2 * i : i, u = job.interleaved ? g + 1 : number + i;
                    auto value = [&](int j) {
                        int64_t row = j < number ? first + j : second + j - number;
                        return out[t * 2 * STEP + j] + bias(m, row);
                    };
                    hidden[(from + t) * hidden_stride + F::place(begin + i)] =
                        F::kept(F::UNIT * activate(value(g), value(u), job));
                }
        }
    }

    // y[:, begin .. begin + STEP) of all tokens.
    void down(int64_t begin) {
        int number = min<int64_t>(STEP, job.H - begin);
        for (int t = 0; t < job.T; t++) std::fill_n(job.y + t * job.H + begin, number, 0.f);
        for (const Expert& expert : experts) {
            Matrix m = matrix(expert, job.down, job.H, job.I);
            if (&expert != &experts.back())
                EXPECT(matrix((&expert)[1], job.down, job.H, job.I), begin, number);
            float out[GROUP * STEP];
            for (int from = expert.begin; from < expert.end; from += GROUP) {
                int tokens = min(GROUP, expert.end - from);
                const X* vectors[GROUP];
                for (int t = 0; t < tokens; t++) vectors[t] = hidden + (from + t) * hidden_stride;
                PRODUCT(m, begin, number, vectors, tokens, out, STEP);
                for (int t = 0; t < tokens; t++) {
                    const Pair& pair = pairs[from + t];
                    for (int i = 0; i < number; i++)
                        job.y[pair.token * job.H + begin + i] +=
                            pair.weight * (out[t * STEP + i] + bias(m, begin + i));
                }
            }
        }
    }
};

// The pairs to compute, by expert and token, and the experts that have any.
void find_work(const Job& job, std::vector<Expert>& experts, std::vector<Pair>& pairs) {
    std::vector<int32_t> ends(job.E + 1, 0);
    auto wanted = [&](int i) {
        int32_t id = job.ids[i];
        return id >= 0 && id < job.E && job.chosen[id];
    };
    for (int i = 0; i < job.T * job.K; i++)
        if (wanted(i)) ends[job.ids[i] + 1]++;
    for (int e = 0; e < job.E; e++) {
        if (ends[e + 1]) experts.push_back({e, ends[e], ends[e] + ends[e + 1]});
        ends[e + 1] += ends[e];
    }
    pairs.resize(ends[job.E]);
    for (int i = 0; i < job.T * job.K; i++)
        if (wanted(i)) pairs[ends[job.ids[i]]++] = {i / job.K, job.weights[i]};
}

inline void expect_nothing(const Matrix&, int64_t, int) {}

template <class F> constexpr auto run_rows = &Layer<F, product<F>, expect<F>, BLOCK>::run;
template <int D> constexpr auto run_columns =
    &Layer<Codes<32, 1>, product_transposed<D>, expect_nothing, TRANSPOSED_BLOCK>::run;

}  // namespace

extern "C" {

// Of the type cudaHostFn_t: for cudaLaunchHostFunc, or to be called.
void residency_run(void* pointer) {
    const Job& job = *(const Job*)pointer;
    Pool& pool = *(Pool*)job.pool;
    auto begin = Clock::now();
    std::lock_guard<std::mutex> alone(pool.in_use);
    std::vector<Expert> experts;
    std::vector<Pair> pairs;
    find_work(job, experts, pairs);
    constexpr decltype(run_rows<Fp32>) rows[] = {run_rows<Fp32>, run_rows<Bf16>, run_rows<Fp16>,
                                                 run_rows<Fp8>, run_rows<Nvfp4>, run_rows<Mxfp4>};
    constexpr decltype(run_rows<Fp32>) columns[] = {run_columns<FP32>, run_columns<BF16>,
                                                    run_columns<FP16>};
    auto run = (job.transposed ? columns : rows)[job.format];
#ifdef RESIDENCY_PAIRS
    if (job.format == NVFP4 && job.x_dtype == BF16) run = run_rows<Pairs<Nvfp4>>;
    if (job.format == MXFP4 && job.x_dtype == BF16) run = run_rows<Pairs<Mxfp4>>;
#endif
    if (pairs.empty()) std::fill_n(job.y, (int64_t)job.T * job.H, 0.f);
    else run(job, experts, pairs, pool);
    job.stats[0] += std::chrono::nanoseconds(Clock::now() - begin).count();
    job.stats[1] += experts.size();
    job.stats[2] += 1;
}

void* residency_pool(int threads) { return new Pool(threads); }
void residency_pool_free(void* pool) { delete (Pool*)pool; }

// Bytes a second that all threads together read of [p, p + bytes), doing nothing else.
double residency_read_rate(void* pointer, const uint8_t* p, int64_t bytes) {
    constexpr int64_t PIECE = 256 << 10;
    struct Reading {
        const uint8_t* p;
        std::atomic<int64_t> sum{0};  // so that the reads are not left out
    } reading{p};
    Pool& pool = *(Pool*)pointer;
    std::lock_guard<std::mutex> alone(pool.in_use);
    auto begin = Clock::now();
    pool.run({bytes / PIECE}, [](void* about, int, int64_t item) {
        auto* reading = (Reading*)about;
        const uint8_t* piece = reading->p + item * PIECE;
        I sums[4] = {};
        for (int64_t i = 0; i < PIECE; i += 4 * sizeof(I)) {
            __builtin_prefetch(piece + i + RESIDENCY_PREFETCH);
            __builtin_prefetch(piece + i + RESIDENCY_PREFETCH + 64);
            for (int j = 0; j < 4; j++) sums[j] += load<I>(piece + i + j * sizeof(I));
        }
        reading->sum += (sums[0] + sums[1] + sums[2] + sums[3])[0];
    }, &reading);
    return bytes / PIECE * PIECE / std::chrono::duration<double>(Clock::now() - begin).count();
}
}
