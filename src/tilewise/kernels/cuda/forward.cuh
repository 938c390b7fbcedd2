// The forward kernel, and before it the online softmax that it folds each tile of scores into.
#pragma once
#include "program_tiles.cuh"
#include "scores.cuh"

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
