// Exact float32 attention, forward and backward, in one file without an include.
//
// Reads top to bottom: 1 what the compiler is told, 2 the hardware's own instructions, 3 a call, 4 tiles in shared
// memory, 5 the two tile products, by halves, by TF32 and on FMA pipes, 6 the kernels. Equation numbers are those of
// docs/maths.md; b, h, s, d name dims as everywhere in tilewise; i counts queries, j keys.
//
// Both products of attention, and all five of its gradient, have one of two forms, where R is a tile of rows:
//
//   scores[m][n] = sum_d A[m][d] B[n][d]       "rows by rows":       Q Kt, dO Vt and their transposes
//   sums[m][e]  += sum_n T[m][n] C[n][e]       "tile by columns":    P V, Pt dO, dSt Q, dS K
//
// T is what a thread made of its own scores, so it never leaves the registers where the two layouts agree. One sum has
// a third form, rows by columns, with T in shared memory: dS K where one kernel makes all three gradients.

// ---------------------------------------------------------------------------------------------------------------------
// 1. What the compiler is told
//
// TW_D, TW_DV      head dims of q and k and of v, padded: multiples of 32 (of 16 for TW_D in the forward pass)
// TW_PRODUCTS      0: FMA pipes; on tensor cores 1: one product of TF32, or 3: three of halves
// TW_BLOCKS        tensor cores: blocks of 16 rows a warp owns; FMA pipes: rows a thread owns
// TW_WARPS         warps a program; together they own TW_ROWS rows
// TW_OTHERS        rows of the other side a step: keys in forward and dq, queries in dkdv; halves take multiples of 16
// TW_CHUNK         FMA pipes, forward: dims of K, then rows of V, in each of the two chunks in shared memory
// TW_RESIDENT      programs that shall fit a multiprocessor; bounds the registers
// TW_VECTORS       whether rows of all tensors read can be copied 16 bytes at a time
// TW_SPLIT         whether the kernel of TW_SPLIT_ROWS has written tensors whose tiles come in steps already: halves,
//                  split; FMA pipes, forward, as the hardware can copy them
// TW_SPLIT_ROWS, TW_FORWARD, TW_DELTA, TW_DK, TW_DV_SUM, TW_DQ: what is to be made; dk and dv by one kernel, or (wide
//                  heads) a launch each
// TW_DQ_SUM        whether the kernel of dk and dv adds up dq too

#define TW_THREADS (TW_WARPS * 32)
#define TW_BOUNDS __launch_bounds__(TW_THREADS, TW_RESIDENT)

// ---------------------------------------------------------------------------------------------------------------------
// 2. The hardware's own instructions

#ifndef TW_HARDWARE  // the test suite puts functions of the CPU here
#define TW_KERNEL extern "C" __global__ void TW_BOUNDS
#define TW_DEVICE __device__ __forceinline__

TW_DEVICE float* shared_memory() {
  extern __shared__ float4 memory[];
  return reinterpret_cast<float*>(memory);
}

TW_DEVICE int thread_index() { return threadIdx.x; }
TW_DEVICE int program_index() { return blockIdx.x; }
TW_DEVICE int program_count() { return gridDim.x; }
TW_DEVICE void synchronize() { __syncthreads(); }
TW_DEVICE void synchronize_warp() { __syncwarp(); }
TW_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TW_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }  // never fused with an addition

// 2^x, to 2 units in the last place; 0 for -inf.
TW_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

TW_DEVICE float log2_exact(float x) { return log2f(x); }

// Add to 4 neighbours or to one number in global memory, each whole, in no order that is fixed.
#if __CUDA_ARCH__ >= 900
TW_DEVICE void add4(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}
#else
TW_DEVICE void add4(float* to, float x, float y, float z, float w) {
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
  atomicAdd(to + 2, z);
  atomicAdd(to + 3, w);
}
#endif
TW_DEVICE void add1(float* to, float x) { atomicAdd(to, x); }

// Copy 16 or 4 bytes from global to shared memory without passing through registers, or write zeros. A copy is seen
// after the thread has waited for its own copies, and all threads have synchronized.
#if __CUDA_ARCH__ >= 800
TW_DEVICE void copy16(float* to, const float* from, bool inside) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
TW_DEVICE void copy4(float* to, const float* from, bool inside) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}
TW_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else  // Turing has no such copies
TW_DEVICE void copy16(float* to, const float* from, bool inside) {
  *reinterpret_cast<float4*>(to) = inside ? *reinterpret_cast<const float4*>(from) : make_float4(0, 0, 0, 0);
}
TW_DEVICE void copy4(float* to, const float* from, bool inside) { *to = inside ? *from : 0.0f; }
TW_DEVICE void wait_for_copies() {}
#endif

// From Hopper on one thread can have the hardware copy what lies side by side, multiples of 16 bytes. A landing counts
// what has arrived: its first round is over when as many bytes are here as were announced, then the next begins. A
// round is waited for by its parity. Landings are ready once all threads have synchronized.
#if __CUDA_ARCH__ >= 900
#define TW_LANDINGS 1
TW_DEVICE unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }
TW_DEVICE void start_landing(float* landing) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(landing)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
TW_DEVICE void announce(float* landing, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(landing)), "r"(bytes)
               : "memory");
}
TW_DEVICE void copy_to_landing(float* landing, float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(landing))
               : "memory");
}
TW_DEVICE void wait_for_landing(const float* landing, int parity) {
  unsigned over = 0;
  while (!over)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(shared_address(landing)), "r"(parity)
        : "memory");
}
// How many warps have been here before this one, whose reads of shared memory are over; known to its first lane.
TW_DEVICE int count_warp(int* arrived) {
  __syncwarp();
  if (threadIdx.x % 32) return -1;
  __threadfence_block();
  int before = atomicAdd(arrived, 1);
  __threadfence_block();
  return before;
}
#endif

#if __CUDA_ARCH__ >= 800
// To the nearest TF32, with 10 bits behind the point instead of 23.
TW_DEVICE float nearest_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

// d += a b, for a of 16 x 8, b of 8 x 8, by a warp. Lane 4 g + c holds a[g][c], a[g + 8][c], a[g][c + 4],
// a[g + 8][c + 4]; b[c][g], b[c + 4][g]; d[g][2c], d[g][2c + 1], d[g + 8][2c], d[g + 8][2c + 1]. The 13 low bits of a
// and b are ignored, which rounds toward zero.
TW_DEVICE void multiply_tiles(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Two numbers rounded to halves, in one register; and each of them again.
TW_DEVICE unsigned pack_halves(float first, float second) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
TW_DEVICE float first_half(unsigned pair) {
  float x;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(x) : "r"(pair));
  return x;
}
TW_DEVICE float second_half(unsigned pair) {
  float x;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(x) : "r"(pair));
  return x;
}

// Four matrices of 8 x 8 halves out of shared memory: lane 8 i + r knows where row r of matrix i is, 8 halves on 16
// bytes. Lane 4 g + c gets row g, columns 2c and 2c + 1 of each; transposed: rows 2c and 2c + 1 of column g.
TW_DEVICE void load_matrices(unsigned (&x)[4], const float* row) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
TW_DEVICE void load_matrices_transposed(unsigned (&x)[4], const float* row) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// d += a b, for halves a of 16 x 16, b of 16 x 8, by a warp. Lane 4 g + c holds columns 2c and 2c + 1 of a[g],
// a[g + 8], and columns 2c + 8 and 2c + 9 of these; b[2c][g] and b[2c + 1][g], and 8 rows below; d as above.
TW_DEVICE void multiply_halves(float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4], unsigned b0,
                               unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
#endif  // TW_HARDWARE

// ---------------------------------------------------------------------------------------------------------------------
// 3. A call

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float FAR = 256.0f;  // from 0, in powers of 2: rounding there moves a score by 2^-16 and more
#define INFINITE __int_as_float(0x7f800000)

struct Tensor {  // (b, h, s, d) by strides, in elements
  float* data;
  long long b, h, s, d;
};

struct Call {
  Tensor q, k, v, out, dout, dq, dk, dv, dlse;  // dlse: (b, h, s)
  float *lse, *delta;                           // (b, hq, sq), dense
  const void *lengths_q, *lengths_k;            // (b,) or null
  int wide_q, wide_k;                           // whether these have 64 bits
  int hq, group, sq, sk, width, width_v;        // widths: head dims of q and k, and of v
  int lower, upper;                             // query i sees key j where lower <= j - i <= upper (eq. 12)
  int shifted;                                  // whether the band moves by (length of k) - (length of q)
  int tiles;                                    // of the program's own rows, a head
  float scale;
};

TW_DEVICE int least(int a, int b) { return a < b ? a : b; }
TW_DEVICE int most(int a, int b) { return a > b ? a : b; }

// The part of a call that one program works on: a tile of rows of one head.
struct Place {
  int batch, head, first;
  int length_q, length_k, lower, upper;

  // Keys that queries [from, to) see, and queries that see keys [from, to) (eq. 13 and 15).
  TW_DEVICE int first_key(int from) const { return most(0, from + lower); }
  TW_DEVICE int last_key(int to) const { return least(length_k, to + upper); }
  TW_DEVICE int first_query(int from) const { return most(0, from - upper); }
  TW_DEVICE int last_query(int to) const { return least(length_q, to - lower); }
  TW_DEVICE bool sees(int i, int j) const { return lower <= j - i && j - i <= upper; }
};

TW_DEVICE int length_of(const void* lengths, int wide, int batch, int size) {
  if (lengths == nullptr) return size;
  long long length = wide ? static_cast<const long long*>(lengths)[batch] : static_cast<const int*>(lengths)[batch];
  return length < size ? static_cast<int>(length) : size;
}

// Whether the band hides keys after, and before, what a query is at.
TW_DEVICE bool hides_right(const Call& call) { return call.upper < call.sk; }
TW_DEVICE bool hides_left(const Call& call) { return call.lower > -call.sq; }

// Neighbouring programs share a head, hence what they read. But where the band hides one side alone, tiles at one end
// have more to do: these go first, of all heads, so that short ones fill the end.
TW_DEVICE Place locate(const Call& call, int heads, int rows, bool last_first) {
  int index = program_index(), all_heads = program_count() / call.tiles;
  bool uneven = hides_right(call) != hides_left(call);
  int tile = uneven ? index / all_heads : index % call.tiles, rest = uneven ? index % all_heads : index / call.tiles;
  if (last_first) tile = call.tiles - 1 - tile;
  Place place;
  place.first = tile * rows;
  place.head = rest % heads;
  place.batch = rest / heads;
  place.length_q = length_of(call.lengths_q, call.wide_q, place.batch, call.sq);
  place.length_k = length_of(call.lengths_k, call.wide_k, place.batch, call.sk);
  int shift = call.shifted ? place.length_k - place.length_q : 0;
  place.lower = call.lower + shift;
  place.upper = call.upper + shift;
  return place;
}

TW_DEVICE float* head_of(const Tensor& tensor, int batch, int head) {
  return tensor.data + batch * tensor.b + head * tensor.h;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Tiles in shared memory
//
// A tile is ROWS rows of WIDTH floats, STRIDE apart. Rows outside [from, to) are zeros and are not read: what nobody
// sees may hold NaN.

TW_DEVICE int warp_index() { return thread_index() / 32; }

// A warp copies 4 rows at a time, 8 threads a row; whoever copied a number may read it as soon as it has waited.
template <int ROWS, int WIDTH, int STRIDE, bool VECTORS = TW_VECTORS>
TW_DEVICE void load_tile(float* tile, const Tensor& tensor, const float* head, int first, int from, int to, int width) {
  int own = thread_index() / 8, column = thread_index() % 8 * 4;
  const float* source = head + (first + own) * tensor.s + column * tensor.d;
  float* target = tile + own * STRIDE + column;
#pragma unroll
  for (int row = 0; row < ROWS; row += TW_THREADS / 8) {
    int s = first + row + own;
    bool seen = from <= s && s < to;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 32) {
      if (row + own >= ROWS || column + i >= WIDTH) continue;
      if (VECTORS) {
        copy16(target + row * STRIDE + i, source + i, seen && column + i < width);
        continue;
      }
      for (int e = i; e < i + 4; e++)
        copy4(target + row * STRIDE + e, source + e * tensor.d, seen && column + e < width);
    }
    source += TW_THREADS / 8 * tensor.s;
  }
}

// The same for WIDTH dims from ``dim`` on, transposed: a row for each dim, STRIDE apart, of ROWS floats. A warp writes
// 8 dims of 4 neighbours at a time, to 32 banks where STRIDE is 4 more than a multiple of 32.
template <int ROWS, int WIDTH, int STRIDE>
TW_DEVICE void load_transposed(float* tile, const Tensor& tensor, const float* head, int first, int from, int to,
                               int dim, int width) {
  int own = thread_index() / 8, lane_dim = thread_index() % 8;
  const long long apart = TW_VECTORS ? 1 : tensor.d;
  const float* source = head + (first + own) * tensor.s + (dim + lane_dim) * apart;
  float* target = tile + lane_dim * STRIDE + own;
#pragma unroll
  for (int row = 0; row < ROWS; row += TW_THREADS / 8) {
    int s = first + row + own;
    bool seen = from <= s && s < to;
#pragma unroll
    for (int e = 0; e < WIDTH; e += 8) {
      if (row + own >= ROWS || lane_dim + e >= WIDTH) continue;
      copy4(target + e * STRIDE + row, source + e * apart, seen && dim + lane_dim + e < width);
    }
    source += TW_THREADS / 8 * tensor.s;
  }
}

// One number a row: lse or delta.
template <int ROWS>
TW_DEVICE void load_numbers(float* numbers, const float* source, int first, int from, int to) {
#pragma unroll
  for (int begin = 0; begin < ROWS; begin += TW_THREADS) {
    int row = begin + thread_index(), s = first + row;
    if (row >= ROWS) continue;
    bool inside = from <= s && s < to;
    copy4(numbers + row, inside ? source + s : source, inside);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. The two tile products
//
// A tensor core adds with truncation, which pulls a sum toward zero at each addition. So it sums up one tile, or a
// chunk of dims, at a time; ordinary additions do the rest.
//
// A warp owns OWN rows; a thread of it ROWS of these, row_of(r), and of N columns N / LANES, column_of(c); the LANES
// threads that share a row are neighbours by shuffle_xor. A row of sums of E numbers is held in quads of neighbouring
// columns that begin at quad_of(e).

// Each product is rounded by itself: no difference that follows makes one instruction of both.
template <int M, int N>
TW_DEVICE void scale_scores(float (&scores)[M][N], float scale) {
#pragma unroll
  for (int r = 0; r < M; r++)
#pragma unroll
    for (int c = 0; c < N; c++) scores[r][c] = multiply(scores[r][c], scale);
}

#if TW_PRODUCTS == 3

// On tensor cores, through three products of halves: a row times a power of two, which brings its largest number L
// between 2^14 and 2^15, is big + small, both halves, of 11 bits each. Then a b = small big + big small + big big, and
// only small small, below 2^-22 of a b, is left out. big + small errs by at most 2^-23 of the number or 2^-39 of L,
// whichever is more: numbers below 2^-16 of L have fewer bits.
//
// A tile is split where it was copied to: 16 columns become big and small of two blocks of 8, of which the first has
// columns 4c and 4c + 1, the second 4c + 2 and 4c + 3. The factor that leads back stands behind its row,
// NaN where the row holds an infinity: then all that the row is a factor of is NaN.
struct Product {
  static constexpr int LANES = 4, ROWS = 2 * TW_BLOCKS, OWN = 16 * TW_BLOCKS, PAD = 4;
  static constexpr int SUM_ROWS = 2, SUM_GROUP = 16;  // of rows by columns: rows a thread, columns a group
  static constexpr float UNIT = 0x1p-126f;  // of sums to begin with
  static constexpr int SCRATCH = 0;

  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int row_of(int r) { return r / 2 * 16 + r % 2 * 8 + lane() / 4; }
  static TW_DEVICE int column_of(int c) { return c / 2 * 8 + lane() % 4 * 2 + c % 2; }
  static TW_DEVICE int quad_of(int e) { return e / 4 * 16 + lane() % 4 * 4 + e % 4; }
  static TW_DEVICE int sum_row_of(int r) { return r * 8 + lane() / 4; }

  // The power of two that brings ``largest`` between 2^14 and 2^15, and what leads back.
  static TW_DEVICE void scale_to_halves(float largest, float& there, float& back) {
    int exponent = most(__float_as_int(largest) >> 23, 15);
    there = __int_as_float((268 - exponent) << 23);
    back = __int_as_float(exponent == 255 ? 0x7fffffff : (exponent - 14) << 23);
  }

  static TW_DEVICE void split(float x, float y, unsigned& big, unsigned& small) {
    big = pack_halves(x, y);
    small = pack_halves(x - first_half(big), y - second_half(big));
  }

  // Split what this thread has copied.
  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float* tile) {
#pragma unroll
    for (int first = 0; first < N; first += TW_THREADS / 8) {
      int row = first + thread_index() / 8;
      if (N % (TW_THREADS / 8) && row >= N) continue;  // all of a warp's rows
      float* group = tile + row * STRIDE;
      float4 x[(WIDTH + 31) / 32];
      float largest = 0.0f, there, back;
#pragma unroll
      for (int i = 0; i < (WIDTH + 31) / 32; i++) {
        int column = i * 32 + lane() % 8 * 4;
        x[i] = column < WIDTH ? *reinterpret_cast<float4*>(group + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y))), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
      }
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      scale_to_halves(largest, there, back);
      synchronize_warp();  // 8 threads have read the row
#pragma unroll
      for (int i = 0; i < (WIDTH + 31) / 32; i++) {
        if (i * 32 + lane() % 8 * 4 >= WIDTH) continue;
        unsigned* block = reinterpret_cast<unsigned*>(group) + i * 32 + lane() % 8 / 4 * 16 + lane() % 4;
        split(x[i].x * there, x[i].y * there, block[0], block[4]);
        split(x[i].z * there, x[i].w * there, block[8], block[12]);
      }
      if (lane() % 8 == 0) group[WIDTH] = back;
    }
  }

  static TW_DEVICE void add_product(float (&sums)[TW_BLOCKS][4], int m, const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
    multiply_halves(sums[m][0], sums[m][1], sums[m][2], sums[m][3], a, b0, b1);
  }

  // scores = scale a b^T over WIDTH dims, with a scale of 1 unless SCALED; the warp's rows of a begin at ``a``. big big
  // is summed apart from the others, whose truncated bits are 2^-11 times as large.
  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
    constexpr int CHUNK = WIDTH < 128 ? WIDTH : 128, UNROLL = WIDTH == 128 ? 4 : 2;
    float cross[N / 8][TW_BLOCKS][4];  // small big + big small
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
        for (int f = 0; f < 4; f++) cross[n][m][f] = 0.0f;
    const float* a_row = a + lane() % 16 * STRIDE + lane() / 16 * 8;                    // two of rows, of columns
    const float* b_row = b + lane() % 8 * STRIDE + lane() / 8 % 2 * 8 + lane() / 16 * 4;  // of columns, big and small
#pragma unroll 1
    for (int first = 0; first < WIDTH; first += CHUNK) {
      float sums[N / 8][TW_BLOCKS][4];
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
          for (int f = 0; f < 4; f++) sums[n][m][f] = 0.0f;
#pragma unroll UNROLL
      for (int d = first; d < first + CHUNK && d < WIDTH; d += 16) {
        unsigned big[TW_BLOCKS][4], small[TW_BLOCKS][4];
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++) {
          load_matrices(big[m], a_row + m * 16 * STRIDE + d);
          load_matrices(small[m], a_row + m * 16 * STRIDE + d + 4);
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          unsigned x[4];
          load_matrices(x, b_row + n * 8 * STRIDE + d);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(cross[n], m, small[m], x[0], x[1]);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(sums[n], m, big[m], x[0], x[1]);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(cross[n], m, big[m], x[2], x[3]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) {
          float sum = sums[c / 2][r / 2][r % 2 * 2 + c % 2];
          scores[r][c] = first == 0 ? sum : scores[r][c] + sum;
        }
    }
    float a_back[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) a_back[r] = a[row_of(r) * STRIDE + WIDTH];
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      float b_back = b[column_of(c) * STRIDE + WIDTH] * scale;
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float sum = scores[r][c] + cross[c / 2][r / 2][r % 2 * 2 + c % 2];
        scores[r][c] = SCALED ? multiply(sum, a_back[r] * b_back) : sum * (a_back[r] * b_back);
      }
    }
  }

  // sums = sums * decay + tile columns, a row of sums in a unit of its own. What a thread holds of a tile is just what
  // it has to hand to the tensor core as the left operand. The rows' factors of ``columns`` join the tile, and a row of
  // it is scaled to halves by its largest number so far: by that of ``columns`` alone where the tile's are at most 1.
  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns,
                                        float (&unit)[ROWS], float*) {
    static_assert(WIDTH % 32 == 0 && N % 16 == 0, "columns come in groups of 32, rows of 16");
    float back[N / LANES], scaled[ROWS][N / LANES], rescale[ROWS], largest_back = 0.0f, last_of_probs = unit[0];
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      back[c] = columns[column_of(c) * STRIDE + WIDTH];
      largest_back = fmaxf(largest_back, back[c]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float largest = largest_back, there;
#pragma unroll
      for (int c = 0; c < N / LANES; c++) {
        scaled[r][c] = ARE_PROBS ? tile[r][c] : tile[r][c] * back[c];
        if (!ARE_PROBS) largest = fmaxf(c == 0 ? 0.0f : largest, fabsf(scaled[r][c]));
      }
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      float last = ARE_PROBS ? last_of_probs : unit[r];  // the same for all rows
      scale_to_halves(fmaxf(largest, last * 0x1p14f), there, unit[r]);
      rescale[r] = decay[r] * (last * there);
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scaled[r][c] *= ARE_PROBS ? back[c] * there : there;
    }

    unsigned big[N / 16][TW_BLOCKS][4], small[N / 16][TW_BLOCKS][4];
#pragma unroll
    for (int n = 0; n < N / 16; n++)
#pragma unroll
      for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
          int r = 2 * m + f % 2, c = 4 * n + f / 2 * 2;
          split(scaled[r][c], scaled[r][c + 1], big[n][m][f], small[n][m][f]);
        }
    const float* row = columns + lane() % 16 * STRIDE + lane() / 16 * 4;  // two of rows, big and small
    // A product is added five products' time after it began: what is next to it belongs to another sum. So what is
    // small has sums of its own, which cuts it less, too; and where registers are few, and the compiler makes one block
    // of columns after the other, its two kinds have.
    constexpr int ABREAST = WIDTH > 64 ? 1 : 2, PARTS = WIDTH > 64 ? 3 : 2;
#pragma unroll
    for (int first = 0; first < WIDTH / 8; first += ABREAST) {
      float part[ABREAST][PARTS][TW_BLOCKS][4];
#pragma unroll
      for (int e = 0; e < ABREAST; e++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
            for (int f = 0; f < 4; f++) part[e][p][m][f] = 0.0f;
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        unsigned x[ABREAST][4];
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
          load_matrices_transposed(x[e], row + n * 16 * STRIDE + (first + e) * 8);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][0], m, small[n][m], x[e][0], x[e][1]);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][1], m, big[n][m], x[e][0], x[e][1]);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][2 % PARTS], m, big[n][m], x[e][2], x[e][3]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& sum = sums[r][2 * (first + e) + h];
            const int m = r / 2, f = r % 2 * 2 + h;
            float low = PARTS == 3 ? part[e][0][m][f] + part[e][2 % PARTS][m][f] : part[e][0][m][f];
            sum = sum * rescale[r] + (low + part[e][1][m][f]);
          }
    }
  }

  // What a thread holds of a tile, times its row's factor, to where ``to`` has it transposed: a tile of N rows in
  // shared memory, of which every warp fills columns of its own. Splitting deals 16 columns to two blocks of 8: they
  // stand so that the first block gets the first 8 rows.
  template <int N, int STRIDE>
  static TW_DEVICE void store_transposed(float* to, const float (&tile)[ROWS][N / LANES], const float* factors,
                                         int apart) {
    int own = lane() / 8 * 4 + lane() / 4 % 2;  // of row g; row g + 8 is 2 behind
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float factor = factors[row_of(r) * apart];
#pragma unroll
      for (int c = 0; c < N / LANES; c++)
        to[column_of(c) * STRIDE + r / 2 * 16 + r % 2 * 2 + own] = tile[r][c] * factor;
    }
  }

  // sums = a b for 16 rows of a, of its columns [from, to) by 16, and every APART-th group of 16 columns of b from
  // ``group`` on; for the last of all there are where there is none. A thread gets 4 neighbours of a group in row g,
  // then in row g + 8.
  template <int GROUPS, int APART, int WIDTH, int A_STRIDE, int B_STRIDE>
  static TW_DEVICE void rows_by_columns(float (&sums)[GROUPS][4 * SUM_ROWS], const float* a, const float* b, int from,
                                        int to, int group) {
    constexpr int PARTS = GROUPS == 1 ? 3 : 2;
    float part[2 * GROUPS][PARTS][4];
#pragma unroll
    for (int e = 0; e < 2 * GROUPS; e++)
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int f = 0; f < 4; f++) part[e][p][f] = 0.0f;
    const float* a_row = a + lane() % 16 * A_STRIDE + lane() / 16 * 8;  // two of rows, of columns
    const float* b_row[GROUPS];  // two of rows, big and small
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      b_row[i] = b + lane() % 16 * B_STRIDE + least(group + i * APART, WIDTH / 16 - 1) * 16 + lane() / 16 * 4;
#pragma unroll 4
    for (int n = from; n < to; n += 16) {
      unsigned big[4], small[4], x[2 * GROUPS][4];
      load_matrices(big, a_row + n);
      load_matrices(small, a_row + n + 4);
#pragma unroll
      for (int e = 0; e < 2 * GROUPS; e++)
        load_matrices_transposed(x[e], b_row[e / 2] + n * B_STRIDE + e % 2 * 8);
#pragma unroll
      for (int p = 0; p < 3; p++)
#pragma unroll
        for (int e = 0; e < 2 * GROUPS; e++) {
          float(&sum)[4] = part[e][p % PARTS];
          multiply_halves(sum[0], sum[1], sum[2], sum[3], p == 0 ? small : big, x[e][p / 2 * 2], x[e][p / 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2 * GROUPS; e++)
#pragma unroll
      for (int f = 0; f < 4; f++) {
        float low = PARTS == 3 ? part[e][0][f] + part[e][2 % PARTS][f] : part[e][0][f];
        sums[e / 2][f / 2 * 4 + e % 2 * 2 + f % 2] = low + part[e][1][f];
      }
  }
};

#elif TW_PRODUCTS

// On tensor cores, through one product of TF32, rounded to the nearest.
struct Product {
  static constexpr int LANES = 4, ROWS = 2 * TW_BLOCKS, OWN = 16 * TW_BLOCKS, PAD = 8;
  static constexpr float UNIT = 1.0f;
  static constexpr int SCRATCH = 0;

  // Rows and columns are numbered so that 16-byte loads of shared memory meet no bank twice, with one stride for both
  // products: place(2c) = c and place(2c + 1) = 4 + (c ^ 2), rows c (and place(2c + 1)) being 8 banks apart from one
  // another and two neighbours of a quarter warp 16.
  static TW_DEVICE int place(int g) { return g & 1 ? 4 + (g >> 1 ^ 2) : g >> 1; }
  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int row_of(int r) { return r / 2 * 16 + r % 2 * 8 + place(lane() / 4); }
  static TW_DEVICE int column_of(int c) { return c / 2 * 8 + place(lane() % 4 * 2 + c % 2); }
  static TW_DEVICE int quad_of(int e) { return e / 8 * 32 + lane() % 4 * 8 + e % 8; }

  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float*) {}  // used as they are

  // Add to the 16 x 8 sums of block m whose columns a thread holds as 2n and 2n + 1.
  template <int COLUMNS>
  static TW_DEVICE void add_product(float (&sums)[ROWS][COLUMNS], int m, int n, const float (&a)[4], float b0,
                                    float b1) {
    multiply_tiles(sums[2 * m][2 * n], sums[2 * m][2 * n + 1], sums[2 * m + 1][2 * n], sums[2 * m + 1][2 * n + 1], a,
                   b0, b1);
  }

  static TW_DEVICE void load_rounded(float (&x)[4], const float* quad) {
    float4 exact = *reinterpret_cast<const float4*>(quad);
    x[0] = nearest_tf32(exact.x);
    x[1] = nearest_tf32(exact.y);
    x[2] = nearest_tf32(exact.z);
    x[3] = nearest_tf32(exact.w);
  }

  // scores = scale a b^T over WIDTH dims, as above; the warp's rows of a begin at ``a``. Dims are numbered so that lane
  // c's share of two steps of 8 is 4 neighbours.
  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
    constexpr int CHUNK = WIDTH < 64 ? WIDTH : 64;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] = 0.0f;
    const float* a_lane = a + place(lane() / 4) * STRIDE + lane() % 4 * 4;
    const float* b_lane = b + place(lane() / 4) * STRIDE + lane() % 4 * 4;
#pragma unroll 1
    for (int first = 0; first < WIDTH; first += CHUNK) {
      float sums[ROWS][N / LANES];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) sums[r][c] = 0.0f;
#pragma unroll 2
      for (int d = first; d < first + CHUNK && d < WIDTH; d += 16) {
        float left[TW_BLOCKS][2][4];  // [block][step of 8 dims][fragment]
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float x[4];
            load_rounded(x, a_lane + (m * 16 + half * 8) * STRIDE + d);
#pragma unroll
            for (int i = 0; i < 4; i++) left[m][i / 2][half + i % 2 * 2] = x[i];
          }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          float x[4];
          load_rounded(x, b_lane + n * 8 * STRIDE + d);
#pragma unroll
          for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < TW_BLOCKS; m++)
              add_product(sums, m, n, left[m][step], x[2 * step], x[2 * step + 1]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) scores[r][c] += sums[r][c];
    }
    if (SCALED) scale_scores(scores, scale);
  }

  // sums = sums * decay + tile columns. What a thread holds of a tile of scores is just what it has to hand to the
  // tensor core as the left operand.
  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns, float (&)[ROWS],
                                        float*) {
    static_assert(WIDTH % 32 == 0, "columns come in groups of 32");
    float rounded[ROWS][N / LANES];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) rounded[r][c] = nearest_tf32(tile[r][c]);
    const float* lane_row = columns + lane() / 4 * 4;
#pragma unroll
    for (int group = 0; group < WIDTH / 32; group++) {
      float part[ROWS][8];  // [2 i + h]: column i of quad h
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < 8; e++) part[r][e] = 0.0f;
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
          load_rounded(x[half], lane_row + (n * 8 + place(lane() % 4 * 2 + half)) * STRIDE + group * 32);
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++) {
          float left[4];  // rows g and g + 8 of column place(2c), then of place(2c + 1)
#pragma unroll
          for (int f = 0; f < 4; f++) left[f] = rounded[2 * m + f % 2][2 * n + f / 2];
#pragma unroll
          for (int i = 0; i < 4; i++) add_product(part, m, i, left, x[0][i], x[1][i]);  // i-th of each lane's quads
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < 8; e++)
          sums[r][group * 8 + e] = sums[r][group * 8 + e] * decay[r] + part[r][e % 4 * 2 + e / 4];
    }
  }
};

#else

// On FMA pipes: every product and sum rounded once, as IEEE 754 has it. A warp owns 4 TW_BLOCKS rows, each of LANES
// threads; a thread ROWS of them, so that each number loaded from shared memory serves several products. Lanes 1 apart
// share columns, those 2 apart rows: half a warp's 16-byte loads are one read of 128 bytes where either kind shares its
// address, else two.
//
// Registers lie in two banks, odd and even, each read once a cycle; what the instruction before has read in the same
// place costs nothing. So a product takes one cycle where row or column stays, and the sum is in the other bank than
// what changes. By counting, ptxas gets to 1.25 issue slots and cycles a product for 8 rows by 8 columns of numbers
// that lie side by side, 4 to a load; to 1.7 for 4 rows by 8 where 4 dims of a row do.
struct Product {
#if TW_FORWARD
  static constexpr int LANES = TW_DV % 64 ? 8 : 16;
#else
  static constexpr int LANES = 8;
#endif
  static constexpr int ROWS = TW_BLOCKS * LANES / 8, OWN = 4 * TW_BLOCKS, PAD = 4;
  static constexpr int SUM_ROWS = 4, SUM_GROUP = 32;  // of rows by columns: rows a thread, columns a group
  static constexpr float UNIT = 1.0f;
  static constexpr int SCRATCH_STRIDE = OWN + 4, SCRATCH = TW_OTHERS * SCRATCH_STRIDE;  // floats a warp

  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int lane_row() { return lane() / (2 * LANES) * 2 + lane() % 2; }
  static TW_DEVICE int lane_column() { return lane() / 2 % LANES; }
  static TW_DEVICE int row_of(int r) { return r / 4 * (128 / LANES) + lane_row() * 4 + r % 4; }
#if TW_FORWARD
  static TW_DEVICE int column_of(int c) { return quad_of(c); }
#else
  static TW_DEVICE int column_of(int c) { return c * LANES + lane_column(); }
#endif
  static TW_DEVICE int quad_of(int e) { return e / 4 * (4 * LANES) + lane_column() * 4 + e % 4; }
  static TW_DEVICE int sum_row_of(int r) { return lane_row() * 4 + r; }

  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float*) {}  // used as they are

  template <int COUNT>
  static TW_DEVICE void load_quads(float (&x)[COUNT], const float* from, int apart) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      float4 quad = *reinterpret_cast<const float4*>(from + i / 4 * apart);
      x[i] = quad.x;
      x[i + 1] = quad.y;
      x[i + 2] = quad.z;
      x[i + 3] = quad.w;
    }
  }

  // The first COLUMNS of sums += a^T b over ``depth`` rows of a and b, a multiple of 8: the warp's columns of a begin
  // at ``a``. SWAPPED: the columns of a have changed places with their neighbours. Loads are a row ahead of products
  // where registers allow it: two warps to a scheduler do not hide what a load takes.
  template <int COLUMNS, int A_STRIDE, int B_STRIDE, bool SWAPPED, int ALL>
  static TW_DEVICE void columns_by_columns(float (&sums)[ROWS][ALL], const float* a, const float* b, int depth) {
    const float* a_lane = a + row_of(0);
    const float* b_lane = b + quad_of(0);
    constexpr int AHEAD = TW_DV <= 128;
    float x[1 + AHEAD][ROWS], y[1 + AHEAD][COLUMNS];
    auto load = [&](int to) {
      load_quads(x[to], a_lane, 128 / LANES);
      load_quads(y[to], b_lane, 4 * LANES);
      a_lane += A_STRIDE;
      b_lane += B_STRIDE;
    };
    if (AHEAD) load(0);
#pragma unroll 1
    for (int n = 0; n < depth; n += 8) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (!AHEAD || i < 7 || n + 8 < depth) load((i + 1) % (1 + AHEAD));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) sums[r][c] += x[i % (1 + AHEAD)][SWAPPED ? r ^ 1 : r] * y[i % (1 + AHEAD)][c];
      }
    }
  }

  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] = 0.0f;
    const float* a_lane = a + row_of(0) * STRIDE;
    const float* b_lane = b + column_of(0) * STRIDE;
#pragma unroll 4
    for (int d = 0; d < WIDTH; d += 4, a_lane += 4, b_lane += 4) {
      float x[4 * ROWS];
      load_quads(x, a_lane, STRIDE);
#pragma unroll
      for (int c = 0; c < N / LANES; c++) {
        float y[4];
        load_quads(y, b_lane + c * LANES * STRIDE, 0);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) scores[r][c] += x[r * 4 + i] * y[i];
      }
    }
    if (SCALED) scale_scores(scores, scale);
  }

  // The tile to the warp's own shared memory, column by column, for every thread needs whole columns of it. Two rows
  // change places: a 16-byte store wants the first in an even register, and a product wants its sum in a register of
  // the other bank than row and column, whose first are even too.
  template <int COLUMNS>
  static TW_DEVICE void store_transposed(float* scratch, const float (&tile)[ROWS][COLUMNS]) {
    synchronize_warp();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int r = 0; r < ROWS; r += 4)
        *reinterpret_cast<float4*>(scratch + column_of(c) * SCRATCH_STRIDE + row_of(r)) =
            make_float4(tile[r + 1][c], tile[r][c], tile[r + 3][c], tile[r + 2][c]);
    synchronize_warp();
  }

  // sums = sums * decay + tile columns, for DEPTH columns of the tile, which are in the warp's shared memory, or the
  // first ``depth``, a multiple of 8. Their products are added to the others at the end: 4096 keys summed one after
  // another err by three times as much.
  template <int DEPTH, int WIDTH, int STRIDE>
  static TW_DEVICE void add_tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                            const float* tile, const float* columns, int depth = DEPTH) {
    static_assert(WIDTH % 32 == 0 && DEPTH % 8 == 0, "columns come in groups of 32, rows of 8");
    constexpr int ALL = WIDTH / LANES, MOST = 64 / ROWS;  // registers of a part are 64 at most
#pragma unroll
    for (int first = 0; first < ALL; first += MOST) {
      constexpr int COLUMNS = ALL < MOST ? ALL : MOST;
      float part[ROWS][COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) part[r][c] = 0.0f;
      columns_by_columns<COLUMNS, SCRATCH_STRIDE, STRIDE, true>(part, tile, columns + first * LANES, depth);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (first + c < ALL) sums[r][first + c] = sums[r][first + c] * decay[r] + part[r][c];
    }
  }

  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns, float (&)[ROWS],
                                        float* scratch) {
    store_transposed(scratch, tile);
    add_tile_by_columns<N, WIDTH, STRIDE>(sums, decay, scratch, columns);
  }

  // sums = a b for 16 rows of a, of its columns [from, to) by 16, each OWN of which are a tile of their own, and every
  // APART-th group of 32 columns of b from ``group`` on. A group behind b's last sums up what lies there, for nobody.
  template <int GROUPS, int APART, int WIDTH, int A_STRIDE, int B_STRIDE>
  static TW_DEVICE void rows_by_columns(float (&sums)[GROUPS][4 * SUM_ROWS], const float* a, const float* b, int from,
                                        int to, int group) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int e = 0; e < 4 * SUM_ROWS; e++) sums[g][e] = 0.0f;
    const float* b_lane = b + from * B_STRIDE + group * SUM_GROUP + quad_of(0);
#pragma unroll 1
    for (int own = from; own < to; own += OWN) {
      const float* a_lane = a + own / OWN * SCRATCH + sum_row_of(0) * A_STRIDE;
#pragma unroll 2
      for (int n = 0; n < OWN; n += 4, a_lane += 4) {
        float x[4 * SUM_ROWS];
        load_quads(x, a_lane, A_STRIDE);
#pragma unroll
        for (int i = 0; i < 4; i++, b_lane += B_STRIDE) {
          float y[4 * GROUPS];
          load_quads(y, b_lane, APART * SUM_GROUP);
#pragma unroll
          for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int r = 0; r < SUM_ROWS; r++)
#pragma unroll
              for (int e = 0; e < 4; e++) sums[g][r * 4 + e] += x[r * 4 + (i ^ 1)] * y[g * 4 + e];
        }
      }
    }
  }
};

#endif  // TW_PRODUCTS

#if TW_LANDINGS && TW_FORWARD && TW_SPLIT
#define TW_LANDS 1
#else
#define TW_LANDS 0
#endif
#if TW_SPLIT && !TW_PRODUCTS && !TW_LANDS
#error "on FMA pipes the forward pass alone reads what was written before, and where the hardware copies it"
#endif

constexpr int ROWS = Product::ROWS, LANES = Product::LANES;
constexpr int TW_ROWS = Product::OWN * TW_WARPS;
constexpr int STRIDE = TW_D + Product::PAD, STRIDE_V = TW_DV + Product::PAD;
constexpr int NEIGHBOUR = TW_PRODUCTS ? 1 : 2;  // what lanes of neighbours in a row differ by
// Steps of the other side in shared memory. On FMA pipes one will do, and may be longer: while one of its tiles is
// multiplied, the other is loaded.
constexpr int STEPS = TW_PRODUCTS ? 2 : 1;
constexpr int KEY_TILE = 128;  // keys that lie side by side, a row for each dim, where K was written transposed

// Write the warp's rows of sums, each times its factor and its unit; rows from ``rows`` on are left alone.
template <int WIDTH>
TW_DEVICE void store_rows(const Tensor& tensor, float* head, const float (&sums)[ROWS][WIDTH / LANES],
                          const float (&factor)[ROWS], const float (&unit)[ROWS], int first, int rows, int width) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int s = first + Product::row_of(r);
    if (s >= rows) continue;
    float* row = head + s * tensor.s;
#pragma unroll
    for (int e = 0; e < WIDTH / LANES; e += 4) {
      int column = Product::quad_of(e);
      if (column >= width) continue;
      // A factor of 0 stands for a row that is zero, whatever was summed.
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (factor[r] != 0.0f)
        x = make_float4(sums[r][e] * factor[r] * unit[r], sums[r][e + 1] * factor[r] * unit[r],
                        sums[r][e + 2] * factor[r] * unit[r], sums[r][e + 3] * factor[r] * unit[r]);
      if (width % 4 == 0) {  // our own tensors are dense: then every row begins at a multiple of 16 bytes
        *reinterpret_cast<float4*>(row + column) = x;
      } else {
        row[column] = x.x;
        if (column + 1 < width) row[column + 1] = x.y;
        if (column + 2 < width) row[column + 2] = x.z;
        if (column + 3 < width) row[column + 3] = x.w;
      }
    }
  }
}

// Tiles of the side that comes in steps: split as they come, rows with their factors, or by whoever copied them.
template <int N, int WIDTH, int STRIDE>
TW_DEVICE void load_step(float* tile, const Tensor& tensor, const float* head, int first, int from, int to, int width) {
#if TW_SPLIT
  load_tile<N, STRIDE, STRIDE, true>(tile, tensor, head, first, from, to, STRIDE);
#else
  load_tile<N, WIDTH, STRIDE>(tile, tensor, head, first, from, to, width);
#endif
}

template <int N, int WIDTH, int STRIDE>
TW_DEVICE void prepare_step(float* tile) {
#if !TW_SPLIT
  Product::prepare<N, WIDTH, STRIDE>(tile);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. The kernels

#if TW_SPLIT_ROWS

// Rows of k and v, or of q and dout, which go by their names here, to where dk and dv say. Halves: split, rows as they
// lie in shared memory, the factor behind each. FMA pipes: k transposed, tile after tile of KEY_TILE keys, and rows of
// v without gaps; zeros where nobody sees a key. Grid: tiles of rows, heads, batch.
TW_KERNEL attention_split_kernel(const Call call) {
  constexpr int N = TW_OTHERS;
  Place at = locate(call, call.hq, N, false);
  const float *k_head = head_of(call.k, at.batch, at.head), *v_head = head_of(call.v, at.batch, at.head);
  float *to_k = head_of(call.dk, at.batch, at.head), *to_v = head_of(call.dv, at.batch, at.head);
#if TW_PRODUCTS
  float *k = shared_memory(), *v = k + N * STRIDE;
  load_tile<N, TW_D, STRIDE>(k, call.k, k_head, at.first, at.first, call.sk, call.width);
  load_tile<N, TW_DV, STRIDE_V>(v, call.v, v_head, at.first, at.first, call.sk, call.width_v);
  wait_for_copies();
  Product::prepare<N, TW_D, STRIDE>(k);
  Product::prepare<N, TW_DV, STRIDE_V>(v);
  synchronize();
  int rows = least(N, call.sk - at.first);
  to_k += at.first * call.dk.s;
  to_v += at.first * call.dv.s;
  for (int i = thread_index() * 4; i < rows * STRIDE; i += TW_THREADS * 4)
    *reinterpret_cast<float4*>(to_k + i) = *reinterpret_cast<float4*>(k + i);
  for (int i = thread_index() * 4; i < rows * STRIDE_V; i += TW_THREADS * 4)
    *reinterpret_cast<float4*>(to_v + i) = *reinterpret_cast<float4*>(v + i);
#else
  static_assert(KEY_TILE % N == 0, "keys of a program are of one tile");
  constexpr int STRIDE_K = N + Product::PAD;
  float *k = shared_memory(), *v = k + TW_D * STRIDE_K;
  int seen_to = at.last_key(at.length_q);
  load_transposed<N, TW_D, STRIDE_K>(k, call.k, k_head, at.first, at.first, seen_to, 0, call.width);
  load_tile<N, TW_DV, TW_DV>(v, call.v, v_head, at.first, at.first, seen_to, call.width_v);
  wait_for_copies();
  synchronize();
  to_k += static_cast<long long>(at.first / KEY_TILE * KEY_TILE) * TW_D + at.first % KEY_TILE;
  to_v += static_cast<long long>(at.first) * TW_DV;
  for (int i = thread_index() * 4; i < TW_D * N; i += TW_THREADS * 4)
    *reinterpret_cast<float4*>(to_k + i / N * KEY_TILE + i % N) =
        *reinterpret_cast<float4*>(k + i / N * STRIDE_K + i % N);
  for (int i = thread_index() * 4; i < N * TW_DV; i += TW_THREADS * 4)
    *reinterpret_cast<float4*>(to_v + i) = *reinterpret_cast<float4*>(v + i);
#endif
}

#endif

#if TW_FORWARD || TW_DQ

// Put ``value`` wherever a query of the warp's does not see its key; keys n on, of which nobody sees ``to`` and later.
template <int N>
TW_DEVICE void hide(float (&tile)[ROWS][N / LANES], float value, const Place& at, int own, int n, int to) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      int j = n + Product::column_of(c);
      if (j >= to || !at.sees(own + Product::row_of(r), j)) tile[r][c] = value;
    }
}

#endif

#if TW_FORWARD

// The online softmax (eq. 4 and 7): scaled scores become probabilities, decay what the sums so far are multiplied by.
// Scores are scaled, and rounded, by themselves, as in the backward kernels: dS of a row sums to 0 where both passes
// give a key the same P, and a k that is large may magnify what is left of the sum.
template <int N>
TW_DEVICE void fold_scores(float (&scores)[ROWS][N / LANES], float (&decay)[ROWS], float (&row_max)[ROWS],
                           float (&row_sum)[ROWS]) {
  float last[ROWS], shift[ROWS];
  bool far = false;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float largest = row_max[r];
#pragma unroll
    for (int c = 0; c < N / LANES; c++) largest = fmaxf(largest, scores[r][c]);
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask * NEIGHBOUR));
    // A row that has seen nothing yet: -inf - (-inf) is NaN, so shift by 0 there.
    shift[r] = largest == -INFINITE ? 0.0f : multiply(largest, LOG2E);
    decay[r] = multiply(row_max[r], LOG2E) - shift[r];  // 0 where the maximum stays
    last[r] = row_max[r];
    row_max[r] = largest;
    far |= fabsf(shift[r]) > FAR;
  }
  if (far) {  // what rounding left of the shift would take the largest probability far from 1
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (!(fabsf(shift[r]) > FAR)) continue;
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] -= row_max[r];
      decay[r] = multiply(last[r] - row_max[r], LOG2E);
      shift[r] = 0.0f;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    decay[r] = exp2_fast(decay[r]);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      scores[r][c] = exp2_fast(fmaf(scores[r][c], LOG2E, -shift[r]));
      sum += scores[r][c];
    }
    row_sum[r] = row_sum[r] * decay[r] + sum;
  }
}

// out = softmax(scale q k^T + mask) v, and lse (eq. 4 to 6). Grid: tiles of queries, heads, batch.
//
// On FMA pipes Q and K lie transposed, and K and V come TW_CHUNK rows at a time: dims of all keys of the step, then
// keys; each while the one before is multiplied. With TW_SPLIT they lie in memory so that a chunk is one piece, and the
// first key that a program sees has to be the first of all.
TW_KERNEL attention_forward_kernel(const Call call) {
  constexpr int N = TW_OTHERS;
  float* q = shared_memory();
  Place at = locate(call, call.hq, TW_ROWS, hides_right(call));
  int stop_q = least(at.first + TW_ROWS, at.length_q);
  int from = at.first_key(at.first), to = at.last_key(stop_q);
  if (at.first >= at.length_q) to = from;  // nothing but padding
  int read_stop = from < to ? stop_q : 0;
  const float* q_head = head_of(call.q, at.batch, at.head);
  const float* k_head = head_of(call.k, at.batch, at.head / call.group);
  const float* v_head = head_of(call.v, at.batch, at.head / call.group);
#if TW_PRODUCTS
  constexpr int KEYS = N * STRIDE, STAGE = KEYS + N * STRIDE_V;
  float* stages = q + TW_ROWS * STRIDE;
  load_tile<TW_ROWS, TW_D, STRIDE>(q, call.q, q_head, at.first, at.first, read_stop, call.width);
#if TW_LANDS
  // For a tile that is not whole, behind which none comes, all wait and copy.
  float* landings = stages + 2 * STAGE;
  auto ask_for = [&](int step) {
    int n = from + step * N;
    if (n + N > to) return;
    float *tile = stages + step % 2 * STAGE, *landing = landings + step % 2 * 2;
    announce(landing, 4 * STAGE);
    copy_to_landing(landing, tile, k_head + n * call.k.s, 4 * KEYS);
    copy_to_landing(landing, tile + KEYS, v_head + n * call.v.s, 4 * N * STRIDE_V);
  };
#else
  load_step<N, TW_D, STRIDE>(stages, call.k, k_head, from, from, to, call.width);
  load_step<N, TW_DV, STRIDE_V>(stages + KEYS, call.v, v_head, from, from, to, call.width_v);
#endif
#else
  static_assert(N % TW_CHUNK == 0 && N % (4 * LANES) == 0, "keys come in chunks, and 4 to a thread");
  // Rows of chunks that land have no gaps between them, which those that are transposed on their way need.
  constexpr int GAP = TW_LANDS ? 0 : Product::PAD;
  constexpr int STRIDE_Q = TW_ROWS + Product::PAD, STRIDE_K = N + GAP, STRIDE_V = TW_DV + GAP;
  constexpr int CHUNK = TW_CHUNK * (STRIDE_K > STRIDE_V ? STRIDE_K : STRIDE_V);
  float *chunk = q + TW_D * STRIDE_Q, *next = chunk + CHUNK;
  float* scratch = next + CHUNK + warp_index() * Product::SCRATCH;
  load_transposed<TW_ROWS, TW_D, STRIDE_Q>(q, call.q, q_head, at.first, at.first, read_stop, 0, call.width);
#if TW_LANDS
  static_assert(N == KEY_TILE, "a step has a tile of keys");
  constexpr int CHUNKS_OF_K = (TW_D + TW_CHUNK - 1) / TW_CHUNK, CHUNKS = CHUNKS_OF_K + N / TW_CHUNK;  // of a step
  const int all_chunks = (to - from + N - 1) / N * CHUNKS;
  float *chunks = chunk, *landings = next + CHUNK + TW_WARPS * Product::SCRATCH;
  auto ask_for = [&](int index) {
    if (index >= all_chunks) return;
    int n = index / CHUNKS * N, part = index % CHUNKS, key = n + (part - CHUNKS_OF_K) * TW_CHUNK;
    bool of_k = part < CHUNKS_OF_K;
    const float* source = of_k ? k_head + static_cast<long long>(n) * TW_D + part * TW_CHUNK * N
                               : v_head + static_cast<long long>(key) * TW_DV;
    int bytes = 4 * (of_k ? least(TW_CHUNK, TW_D - part * TW_CHUNK) * N : TW_CHUNK * TW_DV);
    announce(landings + index % 2 * 2, bytes);
    copy_to_landing(landings + index % 2 * 2, chunks + index % 2 * CHUNK, source, bytes);
  };
#else
  load_transposed<N, TW_CHUNK, STRIDE_K>(next, call.k, k_head, from, from, to, 0, call.width);
#endif
#endif
#if TW_LANDS
  // What comes in steps is asked for by the last warp to be done with what is in its place: no warp waits for another,
  // and none copies.
  int* warps_done = reinterpret_cast<int*>(landings + 4);
  if (thread_index() == 0) {
#pragma unroll
    for (int index = 0; index < 2; index++) {
      warps_done[index] = 0;
      start_landing(landings + 2 * index);
      ask_for(index);
    }
  }
#endif
#if !TW_PRODUCTS
  int used = 0;  // chunks
  auto take = [&]() {  // the next chunk, as soon as it is here
#if TW_LANDS
    wait_for_landing(landings + used % 2 * 2, used / 2 % 2);
    chunk = chunks + used % 2 * CHUNK;
#else
    wait_for_copies();
    synchronize();  // everybody is done with the one before
    float* last = chunk;
    chunk = next;
    next = last;
#endif
  };
  auto give_back = [&]() {
#if TW_LANDS
    if (used + 2 < all_chunks && count_warp(warps_done + used % 2) % TW_WARPS == TW_WARPS - 1) ask_for(used + 2);
    synchronize_warp();
#endif
    used++;
  };
#endif

  // On FMA pipes the second half of the warps own queries in the opposite order: on a diagonal, warps of one scheduler
  // have about as much to do together as those of another.
  const bool opposite = !TW_PRODUCTS && warp_index() >= TW_WARPS / 2;
  const int own_row = (opposite ? TW_WARPS + TW_WARPS / 2 - 1 - warp_index() : warp_index()) * Product::OWN;
  int own = at.first + own_row;  // the warp's queries
  int own_stop = least(own + Product::OWN, stop_q);
  float sums[ROWS][TW_DV / LANES], row_max[ROWS], row_sum[ROWS], unit[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    row_max[r] = -INFINITE;
    row_sum[r] = 0.0f;
    unit[r] = Product::UNIT;
#pragma unroll
    for (int e = 0; e < TW_DV / LANES; e++) sums[r][e] = 0.0f;
  }

  if (TW_PRODUCTS || TW_LANDS) wait_for_copies();
#if TW_PRODUCTS
  Product::prepare<TW_ROWS, TW_D, STRIDE>(q);
#endif
#if TW_LANDS
  synchronize();  // landings are ready, and the queries
#endif
  for (int n = from, stage = 0; n < to; n += N, stage ^= 1) {
    bool any = own < own_stop && n < at.last_key(own_stop) && n + N > at.first_key(own);  // for this warp
    float scores[ROWS][N / LANES], decay[ROWS];
#if TW_PRODUCTS
    float* k = stages + stage * STAGE;
#if TW_LANDS
    if (n + N <= to) {
      wait_for_landing(landings + 2 * stage, (n - from) / N / 2 % 2);
    } else {
      synchronize();  // everybody is done with the tile before
      load_step<N, TW_D, STRIDE>(k, call.k, k_head, n, from, to, call.width);
      load_step<N, TW_DV, STRIDE_V>(k + KEYS, call.v, v_head, n, from, to, call.width_v);
      wait_for_copies();
      synchronize();
    }
#else
    wait_for_copies();
    prepare_step<N, TW_D, STRIDE>(k);
    prepare_step<N, TW_DV, STRIDE_V>(k + KEYS);
    synchronize();  // this step's tiles are here, and everybody is done with the last step's
    if (n + N < to) {
      float* next = stages + (stage ^ 1) * STAGE;
      load_step<N, TW_D, STRIDE>(next, call.k, k_head, n + N, from, to, call.width);
      load_step<N, TW_DV, STRIDE_V>(next + KEYS, call.v, v_head, n + N, from, to, call.width_v);
    }
#endif
    if (any)
      Product::rows_by_rows<N, TW_D, STRIDE, true>(scores, q + warp_index() * Product::OWN * STRIDE, k, call.scale);
#else
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] = 0.0f;
    // Where a warp sees none of the second half of the keys, as on a diagonal, it leaves their scores out, and below
    // chunks of V.
    constexpr int HALF = N % (8 * LANES) ? N / LANES : N / LANES / 2;
    const bool sees_half = HALF < N / LANES && at.last_key(own_stop) <= n + HALF * LANES;
#pragma unroll 1
    for (int dim = 0; dim < TW_D; dim += TW_CHUNK) {
      take();
#if !TW_LANDS
      if (dim + TW_CHUNK < TW_D)
        load_transposed<N, TW_CHUNK, STRIDE_K>(next, call.k, k_head, n, from, to, dim + TW_CHUNK, call.width);
      else
        load_tile<TW_CHUNK, TW_DV, STRIDE_V>(next, call.v, v_head, n, from, to, call.width_v);
#endif
      const float* own_q = q + dim * STRIDE_Q + own_row;
      int dims = least(TW_CHUNK, TW_D - dim);
      if (any && sees_half)
        Product::columns_by_columns<HALF, STRIDE_Q, STRIDE_K, false>(scores, own_q, chunk, dims);
      else if (any)
        Product::columns_by_columns<N / LANES, STRIDE_Q, STRIDE_K, false>(scores, own_q, chunk, dims);
      give_back();
    }
    if (any) scale_scores(scores, call.scale);
#endif
    if (any) {
      bool whole = n + N <= to && at.sees(own, n + N - 1) && at.sees(own_stop - 1, n);
      if (!whole) hide<N>(scores, -INFINITE, at, own, n, to);
      fold_scores<N>(scores, decay, row_max, row_sum);
    }
#if TW_PRODUCTS
    if (any) Product::tile_by_columns<N, TW_DV, STRIDE_V, true>(sums, decay, scores, k + KEYS, unit, nullptr);
#if TW_LANDS
    if (n + 2 * N < to && count_warp(warps_done + stage) % TW_WARPS == TW_WARPS - 1)
      ask_for((n - from) / N + 2);
#endif
#else
    if (any) Product::store_transposed(scratch, scores);
#pragma unroll 1
    for (int key = 0; key < N; key += TW_CHUNK) {
      take();
#if !TW_LANDS
      if (key + TW_CHUNK < N)
        load_tile<TW_CHUNK, TW_DV, STRIDE_V>(next, call.v, v_head, n + key + TW_CHUNK, from, to, call.width_v);
      else if (n + N < to)
        load_transposed<N, TW_CHUNK, STRIDE_K>(next, call.k, k_head, n + N, from, to, 0, call.width);
#endif
      int seen = at.last_key(own_stop) - n - key;  // rows of the chunk, at most
      if (any && seen > 0) {
        Product::add_tile_by_columns<TW_CHUNK, TW_DV, STRIDE_V>(sums, decay, scratch + key * Product::SCRATCH_STRIDE,
                                                                chunk, least(TW_CHUNK, (seen + 7) / 8 * 8));
#pragma unroll
        for (int r = 0; r < ROWS; r++) decay[r] = 1.0f;
      }
      give_back();
    }
#endif
  }

  float factor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float sum = row_sum[r];
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) sum += shuffle_xor(sum, mask * NEIGHBOUR);
    int i = own + Product::row_of(r);
    bool sees_none = sum == 0.0f || i >= at.length_q;  // where all that it sees is NaN, sum is too
    factor[r] = sees_none ? 0.0f : 1.0f / sum;  // eq. 6
    float shift = multiply(row_max[r], LOG2E);
    float rest = fabsf(shift) > FAR ? 0.0f : fmaf(row_max[r], LOG2E, -shift);
    if (i < call.sq && Product::column_of(0) == 0)
      call.lse[(static_cast<long long>(at.batch) * call.hq + at.head) * call.sq + i] =
          sees_none ? -INFINITE : row_max[r] + (log2_exact(sum) - rest) * LN2;
  }
  store_rows<TW_DV>(call.out, head_of(call.out, at.batch, at.head), sums, factor, unit, own, call.sq, call.width_v);
}

#endif

#if TW_DELTA

// delta = sum over e of out dout, less dlse (eq. 10): a warp a row. Grid: tiles of TW_WARPS queries, heads, batch.
TW_KERNEL attention_backward_delta_kernel(const Call call) {
  Place at = locate(call, call.hq, TW_WARPS, false);
  int i = at.first + warp_index(), lane = thread_index() % 32;
  if (i >= call.sq) return;
  float sum = 0.0f;
  if (i < at.length_q && at.first_key(i) < at.last_key(i + 1)) {
    const float* out = head_of(call.out, at.batch, at.head) + i * call.out.s;
    const float* dout = head_of(call.dout, at.batch, at.head) + i * call.dout.s;
    for (int e = lane; e < call.width_v; e += 32) sum += out[e * call.out.d] * dout[e * call.dout.d];
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    if (call.dlse.data != nullptr) sum -= head_of(call.dlse, at.batch, at.head)[i * call.dlse.s];
  }
  if (lane == 0) call.delta[(static_cast<long long>(at.batch) * call.hq + at.head) * call.sq + i] = sum;
}

#endif

#if TW_DK || TW_DV_SUM || TW_DQ

// prob = exp(scale s - lse), of one pair (eq. 7). Above 1 by as much as lse was rounded: nothing here counts on less.
// The score is scaled and rounded by itself: of a row with one key that counts, lse is just that number.
TW_DEVICE float prob_of(float score, float lse) { return exp2_fast(multiply(score - lse, LOG2E)); }

#endif

#if TW_DQ_SUM

// dq += scale dscores k for queries from n on, of ``to``, and the keys in shared memory. A warp takes a block of 16
// queries and every so many of dq's groups of columns; keys that no query of the step sees it leaves out.
template <int STRIDE_SUM>
TW_DEVICE void add_to_dq(const Call& call, const Place& at, int head, int n, int to, const float* dscores,
                         const float* k) {
  constexpr int BLOCKS = TW_OTHERS / 16, APART = TW_WARPS / BLOCKS, GROUP = Product::SUM_GROUP;
  constexpr int GROUPS = (TW_D / GROUP + APART - 1) / APART, ROWS_OF_SUM = Product::SUM_ROWS;
  static_assert(TW_WARPS % BLOCKS == 0, "blocks of queries have as many warps each");
  int block = warp_index() % BLOCKS, group = warp_index() / BLOCKS;
  int from_key = most(0, at.first_key(n) - at.first) / 16 * 16;
  int to_key = least(TW_ROWS, at.last_key(least(n + TW_OTHERS, to)) - at.first);
  const float* rows = dscores + block * 16 * STRIDE_SUM;
  float sums[GROUPS][4 * ROWS_OF_SUM];
  Product::rows_by_columns<GROUPS, APART, TW_D, STRIDE_SUM, STRIDE>(sums, rows, k, from_key, to_key, group);
  float* dq = head_of(call.dq, at.batch, head);
#pragma unroll
  for (int r = 0; r < ROWS_OF_SUM; r++) {
    int row = Product::sum_row_of(r), i = n + block * 16 + row;
    if (i >= to) continue;
    float factor = TW_PRODUCTS ? rows[row * STRIDE_SUM + TW_ROWS] * call.scale : call.scale;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int column = (group + g * APART) * GROUP + Product::quad_of(0);
      if (column >= call.width) continue;
      const float* x = sums[g] + r * 4;
      float* target = dq + i * call.dq.s + column;
      if (call.width % 4 == 0) {  // rows begin at a multiple of 16 bytes
        add4(target, x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (column + e < call.width) add1(target + e, x[e] * factor);
      }
    }
  }
}

#endif

#if TW_DK || TW_DV_SUM

// Scores become the probabilities of queries n on, of which the warp's keys see none from ``to`` on. Rows from own_stop
// on are past the last key: their scores of 0 can have an infinite probability, and dq sums over all rows.
template <int N>
TW_DEVICE void make_probs(float (&probs)[ROWS][N / LANES], const Place& at, int own, int own_stop, int n, int to,
                          const float* lse) {
#pragma unroll
  for (int c = 0; c < N / LANES; c++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) probs[r][c] = prob_of(probs[r][c], lse[Product::column_of(c)]);
  bool whole = n + N <= to && own + Product::OWN == own_stop;
  if (whole && at.sees(n, own_stop - 1) && at.sees(n + N - 1, own)) return;  // nothing is hidden
#pragma unroll
  for (int c = 0; c < N / LANES; c++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      int i = n + Product::column_of(c), j = own + Product::row_of(r);
      bool hidden = (i >= to) | (j >= own_stop) | !at.sees(i, j);  // no branch: registers are few here
      probs[r][c] = hidden ? 0.0f : probs[r][c];
    }
}

// dprobs become dscores = probs (dprobs - delta) (eq. 9).
template <int N>
TW_DEVICE void make_dscores(float (&dscores)[ROWS][N / LANES], const float (&probs)[ROWS][N / LANES],
                            const float* delta) {
#pragma unroll
  for (int c = 0; c < N / LANES; c++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float difference = dscores[r][c] - delta[Product::column_of(c)];
      dscores[r][c] = probs[r][c] == 0.0f ? 0.0f : probs[r][c] * difference;
    }
}

// dv = sum over queries of probs^T dout, dk = scale sum of dscores^T q (eq. 8 and 10), over the heads that share the
// keys, in a fixed order. Grid: tiles of keys, key heads, batch. Scores are transposed: a thread's rows are keys.
//
// With TW_DQ_SUM each step also adds scale dscores k, over the keys of the program, to dq, which holds zeros before.
// That takes two products and a reading of everything less than a kernel of its own, but has no fixed order. A warp has
// dscores of its own keys alone, so they meet in shared memory: halves as rows of queries, split like any other tile;
// for FMA pipes they stay as they were put there for dk.
TW_KERNEL attention_backward_dkdv_kernel(const Call call) {
  constexpr int N = TW_OTHERS, QUERIES = N * STRIDE, STAGE = QUERIES + N * STRIDE_V + 2 * N;
  float* k = shared_memory();
  float* v = k + TW_ROWS * STRIDE;
  float* stages = v + TW_ROWS * STRIDE_V;
  float *all_dscores = stages + STEPS * STAGE, *scratch = all_dscores + warp_index() * Product::SCRATCH;
  int heads = call.hq / call.group;
  Place at = locate(call, heads, TW_ROWS, hides_left(call));
  int stop_k = least(at.first + TW_ROWS, at.length_k);
  int from = at.first_query(at.first), to = at.first < at.length_k ? at.last_query(stop_k) : 0;
  int steps = to > from ? (to - from + N - 1) / N : 0;

  // Of these keys some may be seen by nobody: they are not read.
  int seen_from = most(at.first, at.first_key(0)), seen_to = steps ? least(stop_k, at.last_key(at.length_q)) : 0;
  load_tile<TW_ROWS, TW_D, STRIDE>(k, call.k, head_of(call.k, at.batch, at.head), at.first, seen_from, seen_to,
                                   call.width);
  load_tile<TW_ROWS, TW_DV, STRIDE_V>(v, call.v, head_of(call.v, at.batch, at.head), at.first, seen_from, seen_to,
                                      call.width_v);

  int own = at.first + warp_index() * Product::OWN;
  int own_stop = least(own + Product::OWN, stop_k);
  float ones[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) ones[r] = 1.0f;
#if TW_DK
  float dk[ROWS][TW_D / LANES], unit_k[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < TW_D / LANES; e++) dk[r][e] = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++) unit_k[r] = Product::UNIT;
#endif
#if TW_DV_SUM
  float dv[ROWS][TW_DV / LANES], unit_v[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < TW_DV / LANES; e++) dv[r][e] = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++) unit_v[r] = Product::UNIT;
#endif

  const float *own_k = k + warp_index() * Product::OWN * STRIDE, *own_v = v + warp_index() * Product::OWN * STRIDE_V;
#if TW_PRODUCTS
#if TW_DQ_SUM
  constexpr int STRIDE_SUM = TW_ROWS + Product::PAD;
  float* own_dscores = all_dscores + warp_index() * Product::OWN;
#endif
  int head = at.head * call.group, n = from;  // of the step
  for (int step = 0; step <= steps * call.group; step++) {  // step 0 loads only
    float *q = stages + (step + 1) % 2 * STAGE, *dout = q + QUERIES;
    const float *lse = q + STAGE - 2 * N, *delta = lse + N;
    int next_head = head, next_n = n;
    if (step > 0) {
      wait_for_copies();
      if (step == 1) {
        Product::prepare<TW_ROWS, TW_D, STRIDE>(k);
        Product::prepare<TW_ROWS, TW_DV, STRIDE_V>(v);
      }
      prepare_step<N, TW_D, STRIDE>(q);
      prepare_step<N, TW_DV, STRIDE_V>(dout);
      synchronize();
      next_n += N;
      if (next_n >= to) {
        next_n = from;
        next_head++;
      }
    }
    if (step < steps * call.group) {
      long long row = (static_cast<long long>(at.batch) * call.hq + next_head) * call.sq;
      float* next = stages + step % 2 * STAGE;
      load_step<N, TW_D, STRIDE>(next, call.q, head_of(call.q, at.batch, next_head), next_n, from, to, call.width);
      load_step<N, TW_DV, STRIDE_V>(next + QUERIES, call.dout, head_of(call.dout, at.batch, next_head), next_n, from,
                                    to, call.width_v);
      load_numbers<N>(next + STAGE - 2 * N, call.lse + row, next_n, from, to);
      load_numbers<N>(next + STAGE - N, call.delta + row, next_n, from, to);
    }
    if (step == 0) continue;

    const bool sees_some = own < own_stop && n < at.last_query(own_stop) && n + N > at.first_query(own);
#if TW_DK
    float dscores[ROWS][N / LANES];
#endif
    if (sees_some) {
      float probs[ROWS][N / LANES];
      Product::rows_by_rows<N, TW_D, STRIDE, true>(probs, own_k, q, call.scale);
      make_probs<N>(probs, at, own, own_stop, n, to, lse);
#if TW_DV_SUM
      Product::tile_by_columns<N, TW_DV, STRIDE_V, false>(dv, ones, probs, dout, unit_v, scratch);
#endif
#if TW_DK
      Product::rows_by_rows<N, TW_DV, STRIDE_V>(dscores, own_v, dout);
      make_dscores<N>(dscores, probs, delta);
#endif
#if TW_DQ_SUM
      Product::store_transposed<N, STRIDE_SUM>(own_dscores, dscores, own_k + TW_D, STRIDE);
    } else {
      for (int i = Product::lane(); i < N * Product::OWN; i += 32)
        own_dscores[i / Product::OWN * STRIDE_SUM + i % Product::OWN] = 0.0f;
#endif
    }
#if TW_DQ_SUM
    synchronize();
    Product::prepare<N, TW_ROWS, STRIDE_SUM>(all_dscores);
#endif
#if TW_DK
    if (sees_some) Product::tile_by_columns<N, TW_D, STRIDE, false>(dk, ones, dscores, q, unit_k, scratch);
#endif
#if TW_DQ_SUM
    synchronize();
    add_to_dq<STRIDE_SUM>(call, at, head, n, to, all_dscores, k);
#endif
    head = next_head;
    n = next_n;
  }
#else
  auto load_dout = [&](int step) {
    load_tile<N, TW_DV, STRIDE_V>(stages + QUERIES, call.dout,
                                  head_of(call.dout, at.batch, at.head * call.group + step / steps),
                                  from + step % steps * N, from, to, call.width_v);
  };
  float *q = stages, *dout = q + QUERIES, *lse = q + STAGE - 2 * N, *delta = lse + N;
  if (steps) load_dout(0);
  for (int step = 0; step < steps * call.group; step++) {
    int head = at.head * call.group + step / steps, n = from + step % steps * N;
    long long row = (static_cast<long long>(at.batch) * call.hq + head) * call.sq;
    wait_for_copies();
    synchronize();  // dO is here, and everybody is done with the last Q
    load_tile<N, TW_D, STRIDE>(q, call.q, head_of(call.q, at.batch, head), n, from, to, call.width);
    load_numbers<N>(lse, call.lse + row, n, from, to);
    load_numbers<N>(delta, call.delta + row, n, from, to);
    bool any = own < own_stop && n < at.last_query(own_stop) && n + N > at.first_query(own);  // for this warp

    float probs[ROWS][N / LANES], dscores[ROWS][N / LANES];
#if TW_DK
    if (any) Product::rows_by_rows<N, TW_DV, STRIDE_V>(dscores, own_v, dout);
#endif
    wait_for_copies();
    synchronize();  // Q is here
    if (any) {
      Product::rows_by_rows<N, TW_D, STRIDE, true>(probs, own_k, q, call.scale);
      make_probs<N>(probs, at, own, own_stop, n, to, lse);
#if TW_DK
      make_dscores<N>(dscores, probs, delta);
#endif
#if TW_DV_SUM
      Product::tile_by_columns<N, TW_DV, STRIDE_V, false>(dv, ones, probs, dout, unit_v, scratch);
#endif
    }
    synchronize();  // everybody is done with dO
    if (step + 1 < steps * call.group) load_dout(step + 1);
#if TW_DK
    if (any) Product::tile_by_columns<N, TW_D, STRIDE, false>(dk, ones, dscores, q, unit_k, scratch);
#endif
#if TW_DQ_SUM
    for (int i = Product::lane(); i < Product::SCRATCH && !any; i += 32) scratch[i] = 0.0f;
    synchronize();  // dscores of all keys are where each warp put its own for dk
    add_to_dq<Product::SCRATCH_STRIDE>(call, at, head, n, to, all_dscores, k);
#endif
  }
#endif  // TW_PRODUCTS

  float factor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) factor[r] = own + Product::row_of(r) < stop_k && steps ? 1.0f : 0.0f;
#if TW_DV_SUM
  store_rows<TW_DV>(call.dv, head_of(call.dv, at.batch, at.head), dv, factor, unit_v, own, call.sk, call.width_v);
#endif
#if TW_DK
#pragma unroll
  for (int r = 0; r < ROWS; r++) factor[r] *= call.scale;
  store_rows<TW_D>(call.dk, head_of(call.dk, at.batch, at.head), dk, factor, unit_k, own, call.sk, call.width);
#endif
}

#endif

#if TW_DQ

// dq = scale sum over keys of dscores k (eq. 10). Grid: tiles of queries, heads, batch.
TW_KERNEL attention_backward_dq_kernel(const Call call) {
  constexpr int N = TW_OTHERS, KEYS = N * STRIDE, STAGE = KEYS + N * STRIDE_V;
  float* q = shared_memory();
  float* dout = q + TW_ROWS * STRIDE;
  float* stages = dout + TW_ROWS * STRIDE_V;
  float* scratch = stages + STEPS * STAGE + warp_index() * Product::SCRATCH;
  Place at = locate(call, call.hq, TW_ROWS, hides_right(call));
  int stop_q = least(at.first + TW_ROWS, at.length_q);
  int from = at.first_key(at.first), to = at.last_key(stop_q);
  if (at.first >= at.length_q) to = from;
  int read_stop = from < to ? stop_q : 0;
  const float* k_head = head_of(call.k, at.batch, at.head / call.group);
  const float* v_head = head_of(call.v, at.batch, at.head / call.group);
  int own = at.first + warp_index() * Product::OWN;
  int own_stop = least(own + Product::OWN, stop_q);

  // Of these queries some may see nothing: they are not read either.
  int seen_from = most(at.first, at.first_query(0)), seen_to = least(read_stop, at.last_query(at.length_k));
  load_tile<TW_ROWS, TW_D, STRIDE>(q, call.q, head_of(call.q, at.batch, at.head), at.first, seen_from, seen_to,
                                   call.width);
  load_tile<TW_ROWS, TW_DV, STRIDE_V>(dout, call.dout, head_of(call.dout, at.batch, at.head), at.first, seen_from,
                                      seen_to, call.width_v);
  if (STEPS == 2) load_step<N, TW_D, STRIDE>(stages, call.k, k_head, from, from, to, call.width);
  load_step<N, TW_DV, STRIDE_V>(stages + KEYS, call.v, v_head, from, from, to, call.width_v);

  float sums[ROWS][TW_D / LANES], ones[ROWS], lse[ROWS], delta[ROWS], unit[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = own + Product::row_of(r);
    bool inside = i < call.sq;
    long long row = (static_cast<long long>(at.batch) * call.hq + at.head) * call.sq + (inside ? i : 0);
    lse[r] = inside ? call.lse[row] : INFINITE;
    delta[r] = inside ? call.delta[row] : 0.0f;
    ones[r] = 1.0f;
    unit[r] = Product::UNIT;
#pragma unroll
    for (int e = 0; e < TW_D / LANES; e++) sums[r][e] = 0.0f;
  }

  wait_for_copies();
  Product::prepare<TW_ROWS, TW_D, STRIDE>(q);
  Product::prepare<TW_ROWS, TW_DV, STRIDE_V>(dout);
  for (int n = from, stage = 0; n < to; n += N, stage = STEPS - 1 - stage) {
    float* k = stages + stage * STAGE;
    wait_for_copies();
    prepare_step<N, TW_D, STRIDE>(k);
    prepare_step<N, TW_DV, STRIDE_V>(k + KEYS);
    synchronize();
    if (STEPS == 1) load_tile<N, TW_D, STRIDE>(k, call.k, k_head, n, from, to, call.width);
    if (STEPS == 2 && n + N < to) {
      float* next = stages + (stage ^ 1) * STAGE;
      load_step<N, TW_D, STRIDE>(next, call.k, k_head, n + N, from, to, call.width);
      load_step<N, TW_DV, STRIDE_V>(next + KEYS, call.v, v_head, n + N, from, to, call.width_v);
    }
    bool any = own < own_stop && n < at.last_key(own_stop) && n + N > at.first_key(own);  // for this warp
    if (STEPS == 2 && !any) continue;

    float probs[ROWS][N / LANES], dscores[ROWS][N / LANES];
    const float* own_q = q + warp_index() * Product::OWN * STRIDE;
    const float* own_dout = dout + warp_index() * Product::OWN * STRIDE_V;
    if (STEPS == 1) {
      if (any) Product::rows_by_rows<N, TW_DV, STRIDE_V>(dscores, own_dout, k + KEYS);
      wait_for_copies();
      synchronize();  // keys are here, and everybody is done with the values
      if (n + N < to) load_tile<N, TW_DV, STRIDE_V>(k + KEYS, call.v, v_head, n + N, from, to, call.width_v);
      if (!any) continue;
    }
    Product::rows_by_rows<N, TW_D, STRIDE, true>(probs, own_q, k, call.scale);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) probs[r][c] = prob_of(probs[r][c], lse[r]);
    bool whole = n + N <= to && at.sees(own, n + N - 1) && at.sees(own_stop - 1, n);
    if (!whole) hide<N>(probs, 0.0f, at, own, n, to);
    if (STEPS == 2) Product::rows_by_rows<N, TW_DV, STRIDE_V>(dscores, own_dout, k + KEYS);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++)
        dscores[r][c] = probs[r][c] == 0.0f ? 0.0f : probs[r][c] * (dscores[r][c] - delta[r]);
    Product::tile_by_columns<N, TW_D, STRIDE, false>(sums, ones, dscores, k, unit, scratch);
  }

  float factor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int i = own + Product::row_of(r);
    factor[r] = seen_from <= i && i < seen_to ? call.scale : 0.0f;
  }
  store_rows<TW_D>(call.dq, head_of(call.dq, at.batch, at.head), sums, factor, unit, own, call.sq, call.width);
}

#endif
