// The kernel of dk and dv, which can add up dq too. In order: a step's share of dq (add_to_dq); probabilities and
// dscores of a step (make_probs, make_dscores); the kernel, which has a loop for tensor cores, with two steps in shared
// memory, and one for FMA pipes, with one step.
#pragma once
#include "program_tiles.cuh"
#include "scores.cuh"

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
