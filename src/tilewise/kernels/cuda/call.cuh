// A call, as the host describes it to every kernel (call.py has the same fields in the same order), and which part of
// it a program works on: its tile of rows, the lengths of its sequence, and the band of keys that a query sees.
#pragma once
#include "hardware.cuh"

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
