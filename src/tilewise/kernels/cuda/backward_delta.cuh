// The preprocess kernel of the backward pass: delta of each query, which the kernels of the gradients read.
#pragma once
#include "call.cuh"
#include "tiles.cuh"

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
