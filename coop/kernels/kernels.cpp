// Decode kernels: the products of a layer's few rows with its experts, and what surrounds them.
//
// Plain C entry points for ctypes; no Python, no torch. Threads are those of torch's own OpenMP runtime, which is
// handed in by address: a second pool would spin against the first on the same cores.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

// One product: output [rows, outputs] = input [rows, columns] x weight. Mirrored by `Job` in __init__.py.
struct Job {
  const void* weight;
  const uint16_t* scales;   // bfloat16 [rows of weight, columns / 32 rounded up], of integer kinds
  const void* bias;         // of `type`, or null
  const void* source;       // inputs as they are, of `type`; rows `source_pitch` bytes apart
  const int64_t* tokens;    // which row of `source` each row is, or null: one after another
  void* output;             // of `type`; rows `output_pitch` bytes apart
  const void* input;        // set here: inputs as the kernel takes them, padded with zeros
  int64_t rows, columns, outputs;
  int64_t source_pitch, output_pitch;
  int64_t pitch;            // set here: numbers between rows of `input`
  int32_t kind, type;
  int32_t is_transposed;    // weight is [columns, outputs]
  int32_t is_gated;         // weight has 2 x outputs rows: silu(first half) * second half
};

constexpr int64_t MAX_HEAD = 512;

// One new token of each sequence against what came before; pitches in bytes: batch, head, token.
struct Attention {
  const void *query, *keys, *values;
  void* output;
  int64_t heads, key_heads, tokens, width;
  int64_t query_pitch;
  int64_t key_pitch[3], value_pitch[3];
  int64_t count;  // sequences x heads
  float scale;
  int type;
  std::atomic<int64_t> next;
};

// What stays of an attention step between calls; mirrored by `AttentionBlock` in __init__.py. Jobs without inputs and
// outputs; norms [width] or null; the heads' norms are of each head, or of all heads together.
struct AttentionBlock {
  Job query, key, value, output;
  const void *norm, *next_norm, *query_norm, *key_norm;
  int64_t head_width;
  float epsilon, next_epsilon, head_epsilon, scale;
  int32_t type, is_normed_whole;
};

static inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

static inline uint16_t to_bf16(float value) {  // to nearest, ties to even, NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float rounded(float value, int type) { return type == BF16 ? from_bf16(to_bf16(value)) : value; }

static inline void put(const Job& job, int64_t row, int64_t column, float value) {
  char* at = static_cast<char*>(job.output) + row * job.output_pitch;
  if (job.type == BF16)
    reinterpret_cast<uint16_t*>(at)[column] = to_bf16(value);
  else
    reinterpret_cast<float*>(at)[column] = value;
}

static inline float with_bias(const Job& job, int64_t column, float value) {
  if (job.bias == nullptr) return value;
  // added to the rounded product and rounded again, as transformers' grouped path does
  const float bias = job.type == BF16 ? from_bf16(static_cast<const uint16_t*>(job.bias)[column])
                                      : static_cast<const float*>(job.bias)[column];
  return rounded(value, job.type) + bias;
}

// silu(gate) * up, rounded where transformers rounds.
static inline float gated(float gate, float up, int type) {
  gate = rounded(gate, type);
  return rounded(gate / (1.0f + std::exp(-gate)), type) * rounded(up, type);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define COOP_X86 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
using V16 = __m512;
static inline V16 zero() { return _mm512_setzero_ps(); }
static inline V16 broadcast(float v) { return _mm512_set1_ps(v); }
static inline V16 load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V16 v) { _mm512_storeu_ps(p, v); }
static inline V16 add(V16 a, V16 b) { return _mm512_add_ps(a, b); }
static inline V16 mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
static inline V16 fma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline float fma1(float a, float b, float c) { return std::fma(a, b, c); }
static inline float sum(V16 v) { return _mm512_reduce_add_ps(v); }
static inline V16 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static inline V16 load_int8(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}
static inline void load_int4(const uint8_t* p, V16& low, V16& high) {
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  low = _mm512_permutexvar_ps(wide, table);  // looks at the low four bits of each lane only
  high = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
}
#include "products.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

// AVX-512 with bfloat16 products: inputs that are bfloat16 already are taken as they are, two to a lane.
#if defined(COOP_X86)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
namespace pairs {
static inline bool takes(const Job& job) {
  return job.type == BF16 && !job.is_transposed && (job.kind == BF16 || job.kind == INT4);
}

// Inputs in the order in which the weights come out of their bytes, padded with zeros to 64 columns.
static inline void arrange(const Job& job, const uint16_t* from, uint16_t* into) {
  for (int64_t c = 0; c < job.columns; ++c) {
    const int64_t within = c & 63, base = c - within;
    // a pair of groups of 32: the low nibbles of both, then the high nibbles of both
    const int64_t at = job.kind == BF16 ? within : (within & 15) + (within & 32) / 2 + (within & 16) * 2;
    into[base + at] = from[c];
  }
}

static inline __m512bh as_pairs(__m512i bits) { return (__m512bh)bits; }

template <int ROWS>
static inline void dot_bf16(const uint16_t* row, const uint16_t* x, int64_t pitch, int64_t columns, float* out) {
  __m512 total[ROWS][4];
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < 4; ++i) total[r][i] = _mm512_setzero_ps();
  int64_t column = 0;
  for (; column + 128 <= columns; column += 128) {
    for (int i = 0; i < 4; ++i) {
      const __m512bh weight = as_pairs(_mm512_loadu_si512(row + column + 32 * i));
      for (int r = 0; r < ROWS; ++r)
        total[r][i] = _mm512_dpbf16_ps(total[r][i], weight, as_pairs(_mm512_loadu_si512(x + r * pitch + column + 32 * i)));
    }
  }
  for (int i = 0; column < columns; column += 32, ++i) {
    const __mmask32 inside = columns - column >= 32 ? ~0u : (1u << (columns - column)) - 1;
    const __m512bh weight = as_pairs(_mm512_maskz_loadu_epi16(inside, row + column));
    for (int r = 0; r < ROWS; ++r)
      total[r][i] = _mm512_dpbf16_ps(total[r][i], weight, as_pairs(_mm512_loadu_si512(x + r * pitch + column)));
  }
  for (int r = 0; r < ROWS; ++r) out[r] = avx512::reduce(total[r][0], total[r][1], total[r][2], total[r][3]);
}

template <int ROWS>
static inline void dot_int4(const uint8_t* row, const uint16_t* scales, const uint16_t* x, int64_t pitch,
                            int64_t groups, float* out) {
  alignas(64) static const uint16_t codes[32] = {  // -8 to 7 as bfloat16, twice: the fifth bit of an index is noise
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
      0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i table = _mm512_load_si512(codes);
  const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  __m512 total[ROWS][4];
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < 4; ++i) total[r][i] = _mm512_setzero_ps();
  auto two_groups = [&](__m256i bytes, __m512 scale, int64_t column, int i) {
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    const __m512bh low = as_pairs(_mm512_permutexvar_epi16(wide, table));
    const __m512bh high = as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), table));
    for (int r = 0; r < ROWS; ++r) {
      const uint16_t* at = x + r * pitch + column;
      __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), low, as_pairs(_mm512_loadu_si512(at)));
      sum = _mm512_dpbf16_ps(sum, high, as_pairs(_mm512_loadu_si512(at + 32)));
      total[r][i] = _mm512_fmadd_ps(sum, scale, total[r][i]);
    }
  };
  int64_t g = 0;
  for (; g + 16 <= groups; g += 16) {
    const __m512 scale = avx512::load_bf16(scales + g);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const __m512i which = _mm512_add_epi32(halves, _mm512_set1_epi32(2 * k));
      two_groups(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 16 * (g + 2 * k))),
                 _mm512_permutexvar_ps(which, scale), 32 * (g + 2 * k), k & 3);
    }
  }
  for (int i = 0; g < groups; g += 2, i = (i + 1) & 3) {
    const bool has_second = g + 1 < groups;
    const __m256i bytes = _mm256_maskz_loadu_epi8(has_second ? ~0u : 0xffffu, row + 16 * g);
    const __m512 first = _mm512_set1_ps(from_bf16(scales[g]));
    const __m512 second = _mm512_set1_ps(has_second ? from_bf16(scales[g + 1]) : 0.0f);
    two_groups(bytes, _mm512_mask_blend_ps(0xff00, first, second), 32 * g, i);
  }
  for (int r = 0; r < ROWS; ++r) out[r] = avx512::reduce(total[r][0], total[r][1], total[r][2], total[r][3]);
}

template <int KIND, int ROWS>
static inline void dot(const Job& job, int64_t index, const void* input, float* out) {
  const uint16_t* x = static_cast<const uint16_t*>(input);
  if (KIND == BF16) {
    dot_bf16<ROWS>(static_cast<const uint16_t*>(job.weight) + index * job.columns, x, job.pitch, job.columns, out);
  } else {
    const int64_t groups = (job.columns + 31) / 32;
    dot_int4<ROWS>(static_cast<const uint8_t*>(job.weight) + index * groups * 16, job.scales + index * groups, x,
                   job.pitch, groups, out);
  }
}
using Input = uint16_t;
#include "rows.inc"

static void run(const Job& job, int64_t from, int64_t to) {
  if (!takes(job)) return avx512::run(job, from, to);
  return job.kind == BF16 ? run_kind<BF16>(job, from, to) : run_kind<INT4>(job, from, to);
}
}  // namespace pairs
#pragma GCC pop_options
#endif

#if defined(COOP_X86)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
struct V16 {
  __m256 a, b;
};
static inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
static inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V16 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
static inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V16 fma(V16 x, V16 y, V16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline float fma1(float a, float b, float c) { return std::fma(a, b, c); }
static inline float sum(V16 v) {
  const __m256 eight = _mm256_add_ps(v.a, v.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline __m256 wide_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline V16 load_bf16(const uint16_t* p) {
  return {wide_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          wide_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256 wide_int8(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }
static inline V16 floats_of(__m128i codes) { return {wide_int8(codes), wide_int8(_mm_srli_si128(codes, 8))}; }
static inline V16 load_int8(const uint8_t* p) {
  return floats_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void load_int4(const uint8_t* p, V16& low, V16& high) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i table = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m128i mask = _mm_set1_epi8(15);
  low = floats_of(_mm_shuffle_epi8(table, _mm_and_si128(codes, mask)));
  high = floats_of(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(codes, 4), mask)));
}
#include "products.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif

namespace portable {
struct V16 {
  float v[16];
};
template <class F> static inline V16 each(F f) {
  V16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
static inline V16 broadcast(float value) { return each([&](int) { return value; }); }
static inline V16 zero() { return broadcast(0.0f); }
static inline V16 load(const float* p) { return each([&](int i) { return p[i]; }); }
static inline void store(float* p, V16 v) { std::memcpy(p, v.v, sizeof v.v); }
static inline V16 add(V16 a, V16 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
static inline V16 mul(V16 a, V16 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
static inline V16 fma(V16 a, V16 b, V16 c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
static inline float fma1(float a, float b, float c) { return a * b + c; }
static inline float sum(V16 v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) v.v[i] += v.v[i + n];
  return v.v[0];
}
static inline V16 load_bf16(const uint16_t* p) { return each([&](int i) { return from_bf16(p[i]); }); }
static inline V16 load_int8(const uint8_t* p) {
  return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
static inline void load_int4(const uint8_t* p, V16& low, V16& high) {
  low = each([&](int i) { return static_cast<float>((p[i] & 15) - 8); });
  high = each([&](int i) { return static_cast<float>((p[i] >> 4) - 8); });
}
#include "products.inc"
}  // namespace portable

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Run = void (*)(const Job&, int64_t, int64_t);
using Attend = void (*)(const Attention&, int64_t, float*);

Parallel parallel_region = nullptr;
Run run_block = portable::run;
Attend attend_head = portable::attend;
int simd_level = 0;

bool takes_pairs([[maybe_unused]] const Job& job) {
#if defined(COOP_X86)
  return simd_level == 3 && pairs::takes(job);
#else
  return false;
#endif
}

thread_local std::vector<float> scratch;

// Memory of at least `count` elements, kept for the next call.
template <class T> T* at_least(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// One parallel region of `threads`, or the caller alone where that is not worth starting them.
template <class T> void spread(void (*task)(void*), T& work, int threads, bool is_worth_it) {
  if (threads > 1 && is_worth_it)
    parallel_region(task, &work, static_cast<unsigned>(threads), 0);
  else
    task(&work);
}

// Work of one parallel region: blocks of outputs of every job, taken one after another by whoever is free.
struct Work {
  const Job* jobs;
  int64_t count;
  const int64_t* first_block;  // [count + 1], the number of blocks before each job
  std::atomic<int64_t> next;
};

constexpr int64_t BLOCK_BYTES = 1 << 16;  // long enough to stream, short enough that threads end together

int64_t bytes_of_output(const Job& job) {
  const int64_t groups = (job.columns + 31) / 32;
  const int64_t row = job.kind == F32    ? 4 * job.columns
                      : job.kind == BF16 ? 2 * job.columns
                      : job.kind == INT8 ? 34 * groups
                                         : 18 * groups;
  return job.is_gated ? 2 * row : row;
}

int64_t outputs_of_block(const Job& job) {
  const int64_t wanted = std::max<int64_t>(1, BLOCK_BYTES / std::max<int64_t>(1, bytes_of_output(job)));
  return job.is_transposed ? std::max<int64_t>(128, wanted / 128 * 128) : wanted;
}

void work_on(void* data) {
  Work& work = *static_cast<Work*>(data);
  int64_t job = 0;
  for (;;) {
    const int64_t block = work.next.fetch_add(1, std::memory_order_relaxed);
    if (block >= work.first_block[work.count]) return;
    while (block >= work.first_block[job + 1]) ++job;
    const int64_t size = outputs_of_block(work.jobs[job]);
    const int64_t from = (block - work.first_block[job]) * size;
    run_block(work.jobs[job], from, std::min(from + size, work.jobs[job].outputs));
  }
}

void prepare(const Job& job, void* into) {
  for (int64_t row = 0; row < job.rows; ++row) {
    const int64_t token = job.tokens != nullptr ? job.tokens[row] : row;
    const char* from = static_cast<const char*>(job.source) + token * job.source_pitch;
#if defined(COOP_X86)
    if (takes_pairs(job)) {
      uint16_t* at = static_cast<uint16_t*>(into) + row * job.pitch;
      std::fill(at + job.columns / 64 * 64, at + job.pitch, uint16_t{0});
      pairs::arrange(job, reinterpret_cast<const uint16_t*>(from), at);
      continue;
    }
#endif
    float* at = static_cast<float*>(into) + row * job.pitch;
    if (job.type == BF16) {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
      for (int64_t i = 0; i < job.columns; ++i) at[i] = from_bf16(values[i]);
    } else {
      std::memcpy(at, from, job.columns * sizeof(float));
    }
    std::fill(at + job.columns, at + job.pitch, 0.0f);
  }
}

struct Dequantise {
  const uint8_t* weight;
  const uint16_t* scales;
  int kind;
  int64_t outputs, columns;
  void* output;
  int type;
  std::atomic<int64_t> next;
};

constexpr int64_t DEQUANTISE_ROWS = 64;

template <class Put> void dequantise_row(const Dequantise& work, int64_t row, Put put) {
  const int64_t groups = (work.columns + 31) / 32;
  const uint8_t* codes = work.weight + row * groups * (work.kind == INT8 ? 32 : 16);
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = from_bf16(work.scales[row * groups + g]);
    float values[32];
    for (int j = 0; j < 16; ++j) {
      const int low = work.kind == INT8 ? static_cast<int8_t>(codes[32 * g + j]) : (codes[16 * g + j] & 15) - 8;
      const int high = work.kind == INT8 ? static_cast<int8_t>(codes[32 * g + 16 + j]) : (codes[16 * g + j] >> 4) - 8;
      values[j] = static_cast<float>(low) * scale;
      values[16 + j] = static_cast<float>(high) * scale;
    }
    const int64_t width = std::min<int64_t>(32, work.columns - 32 * g);
    for (int64_t j = 0; j < width; ++j) put(32 * g + j, values[j]);
  }
}

void dequantise_rows(void* data) {
  Dequantise& work = *static_cast<Dequantise*>(data);
  for (;;) {
    const int64_t from = work.next.fetch_add(DEQUANTISE_ROWS, std::memory_order_relaxed);
    if (from >= work.outputs) return;
    for (int64_t row = from; row < std::min(from + DEQUANTISE_ROWS, work.outputs); ++row) {
      if (work.type == BF16) {
        uint16_t* out = static_cast<uint16_t*>(work.output) + row * work.columns;
        dequantise_row(work, row, [&](int64_t c, float v) { out[c] = to_bf16(v); });
      } else {
        float* out = static_cast<float*>(work.output) + row * work.columns;
        dequantise_row(work, row, [&](int64_t c, float v) { out[c] = v; });
      }
    }
  }
}

constexpr int64_t SERIAL_NUMBERS = 1 << 15;  // keys of fewer numbers are done before a second thread has begun

void attend_heads(void* data) {
  Attention& work = *static_cast<Attention*>(data);
  static thread_local std::vector<float> scores;
  float* own = at_least(scores, work.tokens);
  for (;;) {
    const int64_t head = work.next.fetch_add(1, std::memory_order_relaxed);
    if (head >= work.count) return;
    attend_head(work, head, own);
  }
}

// x * cos + rotated(x) * sin over the width of a head, where rotated swaps the halves and negates the first of them;
// rounded where transformers rounds.
template <class Type, class Widen, class Narrow>
void rotate(Type* x, const Type* cosine, const Type* sine, int64_t width, Widen wide, Narrow narrow) {
  for (int64_t i = 0; i < width / 2; ++i) {
    const float low = wide(x[i]), high = wide(x[i + width / 2]);
    const float a = wide(narrow(low * wide(cosine[i]))), b = wide(narrow(-high * wide(sine[i])));
    const float c = wide(narrow(high * wide(cosine[i + width / 2]))), d = wide(narrow(low * wide(sine[i + width / 2])));
    x[i] = narrow(a + b);
    x[i + width / 2] = narrow(c + d);
  }
}

template <class Load, class Store>
void norm(Load load, Store put, int64_t width, float epsilon) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += load(i + j) * load(i + j);
  for (; i < width; ++i) lanes[i & 15] += load(i) * load(i);
  for (int n = 8; n; n /= 2)
    for (int j = 0; j < n; ++j) lanes[j] += lanes[j + n];
  const float factor = 1.0f / std::sqrt(lanes[0] / static_cast<float>(width) + epsilon);
  for (i = 0; i < width; ++i) put(i, load(i) * factor);
}

void norm_row(const void* source, const void* weight, void* output, int64_t at, int64_t width, float epsilon,
              int type) {
  if (type == BF16) {
    const uint16_t* x = static_cast<const uint16_t*>(source) + at;
    const uint16_t* w = static_cast<const uint16_t*>(weight);
    uint16_t* y = static_cast<uint16_t*>(output) + at;
    norm([&](int64_t i) { return from_bf16(x[i]); },
         [&](int64_t i, float v) { y[i] = to_bf16(from_bf16(to_bf16(v)) * from_bf16(w[i])); }, width, epsilon);
  } else {
    const float* x = static_cast<const float*>(source) + at;
    const float* w = static_cast<const float*>(weight);
    float* y = static_cast<float*>(output) + at;
    norm([&](int64_t i) { return x[i]; }, [&](int64_t i, float v) { y[i] = v * w[i]; }, width, epsilon);
  }
}

void rotate_head(void* x, const void* cosine, const void* sine, int64_t width, int type) {
  if (type == BF16)
    rotate(static_cast<uint16_t*>(x), static_cast<const uint16_t*>(cosine), static_cast<const uint16_t*>(sine), width,
           from_bf16, to_bf16);
  else
    rotate(static_cast<float*>(x), static_cast<const float*>(cosine), static_cast<const float*>(sine), width,
           [](float v) { return v; }, [](float v) { return v; });
}

void add_row(const void* from, void* into, int64_t at, int64_t width, int type) {
  if (type == BF16) {
    const uint16_t* a = static_cast<const uint16_t*>(from) + at;
    uint16_t* b = static_cast<uint16_t*>(into) + at;
    for (int64_t i = 0; i < width; ++i) b[i] = to_bf16(from_bf16(a[i]) + from_bf16(b[i]));
  } else {
    const float* a = static_cast<const float*>(from) + at;
    float* b = static_cast<float*>(into) + at;
    for (int64_t i = 0; i < width; ++i) b[i] += a[i];
  }
}

// One token's row goes to all of its experts.
bool shares_input(const Job& one, const Job& other) {
  const int64_t first = one.tokens != nullptr ? one.tokens[0] : 0, second = other.tokens != nullptr ? other.tokens[0] : 0;
  return one.source == other.source && first == second && one.rows == 1 && other.rows == 1 &&
         one.columns == other.columns && one.type == other.type && one.kind == other.kind &&
         one.is_transposed == other.is_transposed;
}

void run_all(Job* jobs, int64_t count, int threads) {
  int64_t floats = 0;
  for (int64_t i = 0; i < count; ++i) {
    jobs[i].pitch = (jobs[i].columns + 63) / 64 * 64;
    floats += jobs[i].rows * jobs[i].pitch;
  }
  float* at = at_least(scratch, floats);
  std::vector<int64_t> first_block(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (i && shares_input(jobs[i - 1], jobs[i])) {
      jobs[i].input = jobs[i - 1].input;
    } else {
      jobs[i].input = at;
      prepare(jobs[i], at);
      at += jobs[i].rows * jobs[i].pitch;
    }
    const int64_t size = outputs_of_block(jobs[i]);
    first_block[i + 1] = first_block[i] + (jobs[i].outputs + size - 1) / size;
  }
  Work work{jobs, count, first_block.data(), {0}};
  spread(work_on, work, threads, first_block[count] > 1);
}

}  // namespace

extern "C" {

// GOMP_parallel of the OpenMP runtime that torch uses. `most_simd` bounds the instruction set (3 AVX-512
// with bfloat16 products, 2 AVX-512, 1 AVX2, 0 none). Returns the level in use.
int coop_start(void* gomp_parallel, int most_simd) {
  parallel_region = reinterpret_cast<Parallel>(gomp_parallel);
  run_block = portable::run;
  attend_head = portable::attend;
  simd_level = 0;
#if defined(COOP_X86)
  if (most_simd >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    run_block = avx2::run;
    attend_head = avx2::attend;
    simd_level = 1;
  }
  if (most_simd >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    run_block = avx512::run;
    attend_head = avx512::attend;
    simd_level = 2;
    if (most_simd >= 3 && __builtin_cpu_supports("avx512bf16")) {
      run_block = pairs::run;
      simd_level = 3;
    }
  }
#endif
  return simd_level;
}

// output = round(x / sqrt(mean(x^2) + epsilon)) * weight, row by row; all of `type`, rows one after another.
void coop_rms_norm(const void* source, const void* weight, void* output, int64_t rows, int64_t width, float epsilon,
                   int type) {
  for (int64_t row = 0; row < rows; ++row) norm_row(source, weight, output, row * width, width, epsilon, type);
}

// The first half of an attention step: norm if there is one, query, key and value in one region, norm and rotation of
// each head. hidden [rows, width]; cosine and sine [head_width] for each row, `angle_pitch` bytes apart, 0 if all share
// one; heads receives query [rows, heads, head_width], then key and value [rows, key_heads, head_width].
void coop_attention_begin(const AttentionBlock* block, const void* hidden, int64_t rows, const void* cosine,
                          const void* sine, int64_t angle_pitch, void* heads, int threads) {
  static thread_local std::vector<char> normed;
  const int64_t itemsize = block->type == BF16 ? 2 : 4, width = block->query.columns;
  if (block->norm != nullptr) {
    char* into = at_least(normed, rows * width * itemsize);
    for (int64_t row = 0; row < rows; ++row)
      norm_row(hidden, block->norm, into, row * width, width, block->epsilon, block->type);
    hidden = into;
  }
  Job jobs[3] = {block->query, block->key, block->value};
  char* at = static_cast<char*>(heads);
  for (Job& job : jobs) {
    job.rows = rows;
    job.source = hidden;
    job.source_pitch = width * itemsize;
    job.output = at;
    job.output_pitch = job.outputs * itemsize;
    at += rows * job.output_pitch;
  }
  run_all(jobs, 3, threads);
  for (int64_t row = 0; row < rows; ++row) {
    const char* c = static_cast<const char*>(cosine) + row * angle_pitch;
    const char* s = static_cast<const char*>(sine) + row * angle_pitch;
    for (int i = 0; i < 2; ++i) {
      char* part = static_cast<char*>(jobs[i].output) + row * jobs[i].output_pitch;
      const void* norm = i ? block->key_norm : block->query_norm;
      if (norm != nullptr && block->is_normed_whole)
        norm_row(part, norm, part, 0, jobs[i].outputs, block->head_epsilon, block->type);
      for (int64_t head = 0; head < jobs[i].outputs / block->head_width; ++head) {
        char* x = part + head * block->head_width * itemsize;
        if (norm != nullptr && !block->is_normed_whole)
          norm_row(x, norm, x, 0, block->head_width, block->head_epsilon, block->type);
        rotate_head(x, c, s, block->head_width, block->type);
      }
    }
  }
}

// The second half: every head against the cache, the output product, and where `residual` is given the sum with it and
// the norm that comes next. query as above; keys and values [rows, key_heads, tokens, head_width], pitches in bytes of
// the first three dimensions; hidden and next [rows, width].
void coop_attention_end(const AttentionBlock* block, const void* query, const void* keys, const int64_t* key_pitch,
                        const void* values, const int64_t* value_pitch, int64_t rows, int64_t tokens,
                        const void* residual, void* hidden, void* next, int threads) {
  static thread_local std::vector<char> attended;
  const int64_t itemsize = block->type == BF16 ? 2 : 4, width = block->output.outputs;
  const int64_t heads = block->query.outputs / block->head_width, key_heads = block->key.outputs / block->head_width;
  const int64_t pitch = block->query.outputs * itemsize;
  char* into = at_least(attended, rows * pitch);
  Attention work{query, keys, values, into, heads, key_heads, tokens, block->head_width, pitch,
                 {key_pitch[0], key_pitch[1], key_pitch[2]}, {value_pitch[0], value_pitch[1], value_pitch[2]},
                 rows * heads, block->scale, block->type, {0}};
  spread(attend_heads, work, threads, work.count * tokens * block->head_width > SERIAL_NUMBERS);
  Job job = block->output;
  job.rows = rows;
  job.source = into;
  job.source_pitch = pitch;
  job.output = hidden;
  job.output_pitch = width * itemsize;
  run_all(&job, 1, threads);
  if (residual == nullptr) return;
  for (int64_t row = 0; row < rows; ++row) {
    add_row(residual, hidden, row * width, width, block->type);
    norm_row(hidden, block->next_norm, next, row * width, width, block->next_epsilon, block->type);
  }
}

// total[token] += rounded(output * weight), in the order of `rows`, in float32, then rounded: a layer's result.
// outputs [rows, width], `pitch` bytes apart; weights [rows]; tokens int64 [rows]; result [count, width].
void coop_combine(const void* outputs, int64_t pitch, const void* weights, const int64_t* order,
                  const int64_t* tokens, int64_t rows, int64_t count, int64_t width, void* result, int type) {
  float* total = at_least(scratch, count * width);
  std::fill(total, total + count * width, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const char* from = static_cast<const char*>(outputs) + row * pitch;
    float* into = total + tokens[row] * width;
    if (type == BF16) {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
      const float weight = from_bf16(static_cast<const uint16_t*>(weights)[order[row]]);
      for (int64_t i = 0; i < width; ++i) into[i] += from_bf16(to_bf16(from_bf16(values[i]) * weight));
    } else {
      const float* values = reinterpret_cast<const float*>(from);
      const float weight = static_cast<const float*>(weights)[order[row]];
      for (int64_t i = 0; i < width; ++i) {
        const volatile float product = values[i] * weight;  // rounded on its own, as elsewhere
        into[i] += product;
      }
    }
  }
  if (type == BF16)
    for (int64_t i = 0; i < count * width; ++i) static_cast<uint16_t*>(result)[i] = to_bf16(total[i]);
  else
    std::memcpy(result, total, count * width * sizeof(float));
}

// Every job's product, in one parallel region of `threads`. Jobs must not read what another one writes.
void coop_products(Job* jobs, int64_t count, int threads) { run_all(jobs, count, threads); }

// Integer codes as numbers: output [outputs, columns] of `type`, code * scale, rounded once.
void coop_dequantise(const void* weight, const uint16_t* scales, int kind, int64_t outputs, int64_t columns,
                     void* output, int type, int threads) {
  Dequantise work{static_cast<const uint8_t*>(weight), scales, kind, outputs, columns, output, type, {0}};
  spread(dequantise_rows, work, threads, outputs > DEQUANTISE_ROWS);
}

// Rows of a layer call through gated experts: outputs[r] = down(silu(gate(x)) * up(x)) of x = hidden[tokens[r]].
// Expert i, with products `ups[i]` (gated) and `downs[i]`, takes rows spans[2i] to spans[2i + 1].
void coop_experts(const Job* const* ups, const Job* const* downs, const int64_t* spans, int64_t count,
                  const void* hidden, int64_t hidden_pitch, int64_t width, const int64_t* tokens, void* outputs,
                  int64_t outputs_pitch, int threads) {
  static thread_local std::vector<Job> jobs;
  static thread_local std::vector<char> middle;
  const int64_t itemsize = ups[0]->type == BF16 ? 2 : 4;
  int64_t bytes = 0;
  jobs.resize(2 * count);
  for (int64_t i = 0; i < count; ++i) bytes += (spans[2 * i + 1] - spans[2 * i]) * ups[i]->outputs * itemsize;
  char* at = at_least(middle, bytes);
  for (int64_t i = 0; i < count; ++i) {
    Job& up = jobs[i] = *ups[i];
    Job& down = jobs[count + i] = *downs[i];
    up.rows = down.rows = spans[2 * i + 1] - spans[2 * i];
    up.source = hidden;
    up.source_pitch = hidden_pitch;
    up.tokens = tokens + spans[2 * i];
    up.columns = width;
    up.output = at;
    down.source = at;
    down.tokens = nullptr;
    up.output_pitch = down.source_pitch = up.outputs * itemsize;
    down.columns = up.outputs;
    down.output = static_cast<char*>(outputs) + spans[2 * i] * outputs_pitch;
    down.output_pitch = outputs_pitch;
    at += up.rows * up.output_pitch;
  }
  run_all(jobs.data(), count, threads);
  run_all(jobs.data() + count, count, threads);
}

// A whole layer call: `coop_experts`, then `coop_combine` of what it gave, which no one else sees.
void coop_layer(const Job* const* ups, const Job* const* downs, const int64_t* spans, int64_t count, const void* hidden,
                int64_t hidden_pitch, int64_t width, const int64_t* tokens, const void* weights, const int64_t* order,
                int64_t rows, int64_t token_count, void* result, int threads) {
  static thread_local std::vector<char> outputs;
  const int64_t pitch = (width * (ups[0]->type == BF16 ? 2 : 4) + 63) / 64 * 64;
  char* into = at_least(outputs, rows * pitch);
  coop_experts(ups, downs, spans, count, hidden, hidden_pitch, width, tokens, into, pitch, threads);
  coop_combine(into, pitch, weights, order, tokens, rows, token_count, width, result, ups[0]->type);
}

}  // extern "C"
