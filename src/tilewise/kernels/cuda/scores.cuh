// What happens to a score between the two products: it is scaled, and in the backward pass becomes a probability.
#pragma once
#include "call.cuh"

// Each product is rounded by itself: no difference that follows makes one instruction of both.
template <int M, int N>
TW_DEVICE void scale_scores(float (&scores)[M][N], float scale) {
#pragma unroll
  for (int r = 0; r < M; r++)
#pragma unroll
    for (int c = 0; c < N; c++) scores[r][c] = multiply(scores[r][c], scale);
}

// prob = exp(scale s - lse), of one pair (eq. 7). Above 1 by as much as lse was rounded: nothing here counts on less.
// The score is scaled and rounded by itself: of a row with one key that counts, lse is just that number.
TW_DEVICE float prob_of(float score, float lse) { return exp2_fast(multiply(score - lse, LOG2E)); }
