// The kernel of dq, where it is not the kernel of dk and dv that adds it up.
#pragma once
#include "program_tiles.cuh"
#include "scores.cuh"

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
