// Exact float32 attention, forward and backward: the file that NVRTC compiles, one kernel at a time. Macros say which.
//
// To read in this order, each file alone:
//
//   hardware.cuh          the hardware's own instructions
//   call.cuh              a call, and the part of it that a program works on
//   tiles.cuh             tiles in shared memory
//   scores.cuh            scores, scaled, and probabilities
//   product.cuh           the two tile products: product_halves.cuh, product_tf32.cuh, product_fma.cuh
//   program_tiles.cuh     what all kernels do with their tiles
//   split.cuh, forward.cuh, backward_delta.cuh, backward_dkdv.cuh, backward_dq.cuh    the kernels
//
// Equation numbers are those of docs/maths.md; b, h, s, d name dims as everywhere in tilewise; i counts queries,
// j keys.
//
// Both products of attention, and all five of its gradient, have one of two forms, where R is a tile of rows:
//
//   scores[m][n] = sum_d A[m][d] B[n][d]       "rows by rows":       Q Kt, dO Vt and their transposes
//   sums[m][e]  += sum_n T[m][n] C[n][e]       "tile by columns":    P V, Pt dO, dSt Q, dS K
//
// T is what a thread made of its own scores, so it never leaves the registers where the two layouts agree. One sum has
// a third form, rows by columns, with T in shared memory: dS K where one kernel makes all three gradients.

// The macros:
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

#if TW_SPLIT_ROWS
#include "split.cuh"
#endif
#if TW_FORWARD
#include "forward.cuh"
#endif
#if TW_DELTA
#include "backward_delta.cuh"
#endif
#if TW_DK || TW_DV_SUM
#include "backward_dkdv.cuh"
#endif
#if TW_DQ
#include "backward_dq.cuh"
#endif
