// The split kernel: it prepares the tensors that other programs read in steps, once for all of them.
#pragma once
#include "program_tiles.cuh"

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
