// The hardware's own instructions, each as one small function: what a thread is, barriers, shuffles, exponentials,
// additions to global memory; copies from global to shared memory, by threads (from Ampere on asynchronous) and by the
// hardware (from Hopper on); tensor cores, for TF32 and for halves. The kernels reach the GPU through these alone, so
// the test suite can put functions of the CPU in their place: it defines TW_HARDWARE, and all that this file defines.
#pragma once

#ifndef TW_HARDWARE
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
