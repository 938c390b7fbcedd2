// The hardware section of attention_fp32.cu for a CPU: every thread of a program is a coroutine, and what a warp or a
// program does together is a meeting point. Slow, and exact about layouts, masks and barriers; of a tensor core it
// keeps what matters to the error: inputs cut to TF32 or made halves, sums cut toward zero to float32. Copies to shared
// memory happen as late as they may, when their thread waits for them.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#define TW_HARDWARE
#define TW_KERNEL extern "C" void
#define TW_DEVICE inline

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __int_as_float(int x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}

inline int __float_as_int(float x) {
  int y;
  std::memcpy(&y, &x, 4);
  return y;
}

struct Meeting {
  int arrived = 0, round = 0;
};

struct Copy {
  float* to;
  const float* from;
  int count;
  bool inside;
};

struct Flight {
  float *landing, *to;
  const float* from;
  int bytes;
};

struct Thread {
  std::vector<Copy> copies;
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack;
  bool begun = false, done = false;
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<float> memory;
  std::vector<Meeting> warps;
  std::vector<Flight> flights;
  Meeting program;
  std::vector<float> exchange;  // 8 numbers a thread
  int thread = 0, index = 0, count = 0;
  ucontext_t scheduler;
  jmp_buf back;
  void (*body)() = nullptr;
};
inline Machine machine;

inline void pause_thread() {
  if (_setjmp(machine.threads[machine.thread].at) == 0) _longjmp(machine.back, 1);
}

inline void meet(Meeting& meeting, int size) {
  int round = meeting.round;
  if (++meeting.arrived == size) {
    meeting.arrived = 0;
    meeting.round++;
    return;
  }
  while (meeting.round == round) pause_thread();
}

inline void begin_thread() {
  machine.body();
  machine.threads[machine.thread].done = true;
  _longjmp(machine.back, 1);
}

// Run the body for every thread of every program.
inline void run_programs(int programs, int threads, int shared_bytes, void (*body)()) {
  machine.body = body;
  machine.count = programs;
  machine.threads = std::vector<Thread>(threads);
  machine.exchange.assign(threads * 8, 0.0f);
  machine.warps.assign(threads / 32, Meeting());
  for (auto& thread : machine.threads) thread.stack.resize(1 << 18);
  for (machine.index = 0; machine.index < programs; machine.index++) {
    // NaN in what nobody has written; an odd tail, so that a read past the end is one of NaN too.
    machine.flights.clear();
    machine.memory.assign(shared_bytes / 4 + 64, std::numeric_limits<float>::quiet_NaN());
    for (auto& thread : machine.threads) {
      thread.begun = thread.done = false;
      thread.copies.clear();
    }
    for (int left = threads; left;) {
      for (int t = 0; t < threads; t++) {
        Thread& thread = machine.threads[t];
        if (thread.done) continue;
        machine.thread = t;
        if (_setjmp(machine.back) == 0) {
          if (thread.begun) _longjmp(thread.at, 1);
          thread.begun = true;
          getcontext(&thread.start);
          thread.start.uc_stack.ss_sp = thread.stack.data();
          thread.start.uc_stack.ss_size = thread.stack.size();
          makecontext(&thread.start, begin_thread, 0);
          setcontext(&thread.start);
        }
        if (machine.threads[t].done) left--;
      }
    }
  }
}

inline float* shared_memory() {
  return machine.memory.data() + (16 - reinterpret_cast<uintptr_t>(machine.memory.data()) % 16) % 16 / 4;
}
inline int thread_index() { return machine.thread; }
inline int program_index() { return machine.index; }
inline int program_count() { return machine.count; }
inline void synchronize() { meet(machine.program, static_cast<int>(machine.threads.size())); }
inline void synchronize_warp() { meet(machine.warps[machine.thread / 32], 32); }
inline float multiply(float a, float b) {
  float y = a * b;
  asm("" : "+m"(y));  // never fused with an addition
  return y;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_exact(float x) { return std::log2(x); }
inline void add1(float* to, float x) { *to += x; }
inline void add4(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(to) % 16) std::abort();
  add1(to, x);
  add1(to + 1, y);
  add1(to + 2, z);
  add1(to + 3, w);
}

inline float shuffle_xor(float x, int mask) {
  machine.exchange[machine.thread * 8] = x;
  synchronize_warp();
  float y = machine.exchange[(machine.thread ^ mask) * 8];
  synchronize_warp();
  return y;
}

inline void copy16(float* to, const float* from, bool inside) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (inside && reinterpret_cast<uintptr_t>(from) % 16)) std::abort();
  machine.threads[machine.thread].copies.push_back({to, from, 4, inside});
}
inline void copy4(float* to, const float* from, bool inside) {
  machine.threads[machine.thread].copies.push_back({to, from, 1, inside});
}
inline void wait_for_copies() {
  for (const Copy& copy : machine.threads[machine.thread].copies)
    for (int e = 0; e < copy.count; e++) copy.to[e] = copy.inside ? copy.from[e] : 0.0f;
  machine.threads[machine.thread].copies.clear();
}

// A landing is two integers here: rounds that are over, and bytes announced. What is under way is NaN until somebody
// waits for it.
#define TW_LANDINGS 1
inline int* of_landing(const float* landing) { return reinterpret_cast<int*>(const_cast<float*>(landing)); }
inline void start_landing(float* landing) { of_landing(landing)[0] = of_landing(landing)[1] = 0; }
inline void announce(float* landing, int bytes) { of_landing(landing)[1] += bytes; }
inline void copy_to_landing(float* landing, float* to, const float* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) std::abort();
  for (int i = 0; i < bytes / 4; i++) to[i] = std::numeric_limits<float>::quiet_NaN();
  machine.flights.push_back({landing, to, from, bytes});
}
inline void wait_for_landing(const float* landing, int parity) {
  int* state = of_landing(landing);
  while (state[0] % 2 == parity) {
    std::vector<Flight> others;
    int landed = 0;
    for (const Flight& flight : machine.flights) {
      if (flight.landing != landing) {
        others.push_back(flight);
        continue;
      }
      std::memcpy(flight.to, flight.from, flight.bytes);
      landed += flight.bytes;
    }
    machine.flights = others;
    if (!landed) {
      pause_thread();
      continue;
    }
    if (landed != state[1]) std::abort();
    state[0]++;
    state[1] = 0;
  }
}
inline int count_warp(int* arrived) {
  synchronize_warp();
  return machine.thread % 32 ? -1 : (*arrived)++;
}

inline float cut_to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float nearest_tf32(float x) {
  if (std::isnan(x)) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x1000u) & 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float toward_zero(double x) {
  float y = static_cast<float>(x);
  return std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

inline void multiply_tiles(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], float b0, float b1) {
  float* own = &machine.exchange[machine.thread * 8];
  for (int f = 0; f < 4; f++) own[f] = cut_to_tf32(a[f]);
  own[4] = cut_to_tf32(b0);
  own[5] = cut_to_tf32(b1);
  synchronize_warp();
  const float* warp = &machine.exchange[machine.thread / 32 * 256];
  int g = machine.thread % 32 / 4, c = machine.thread % 4;
  float* d[4] = {&d0, &d1, &d2, &d3};
  for (int f = 0; f < 4; f++) {
    double sum = *d[f];
    for (int k = 0; k < 8; k++)  // a[g + 8 (f / 2)][k] b[k][2c + f % 2]
      sum += static_cast<double>(warp[(g * 4 + k % 4) * 8 + k / 4 * 2 + f / 2]) *
             warp[((2 * c + f % 2) * 4 + k % 4) * 8 + 4 + k / 4];
    *d[f] = toward_zero(sum);
  }
  synchronize_warp();
}

inline unsigned pack_halves(float first, float second) {
  _Float16 halves[2] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};
  unsigned pair;
  std::memcpy(&pair, halves, 4);
  return pair;
}
inline float half_of(unsigned pair, int i) {
  _Float16 halves[2];
  std::memcpy(halves, &pair, 4);
  return static_cast<float>(halves[i]);
}
inline float first_half(unsigned pair) { return half_of(pair, 0); }
inline float second_half(unsigned pair) { return half_of(pair, 1); }

// Every lane hands in where a row is; row r of matrix i comes from lane 8 i + r.
inline void load_matrices(unsigned (&x)[4], const float* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) std::abort();
  std::memcpy(&machine.exchange[machine.thread * 8], &row, sizeof row);
  synchronize_warp();
  int first = machine.thread / 32 * 32, g = machine.thread % 32 / 4, c = machine.thread % 4;
  for (int i = 0; i < 4; i++) {
    uint16_t halves[2];
    for (int h = 0; h < 2; h++) {
      int r = transposed ? 2 * c + h : g, column = transposed ? g : 2 * c + h;
      const char* from;
      std::memcpy(&from, &machine.exchange[(first + 8 * i + r) * 8], sizeof from);
      std::memcpy(&halves[h], from + 2 * column, 2);
    }
    std::memcpy(&x[i], halves, 4);
  }
  synchronize_warp();
}
inline void load_matrices(unsigned (&x)[4], const float* row) { load_matrices(x, row, false); }
inline void load_matrices_transposed(unsigned (&x)[4], const float* row) { load_matrices(x, row, true); }

inline void multiply_halves(float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4], unsigned b0,
                            unsigned b1) {
  float* own = &machine.exchange[machine.thread * 8];
  std::memcpy(own, a, 16);
  std::memcpy(own + 4, &b0, 4);
  std::memcpy(own + 5, &b1, 4);
  synchronize_warp();
  const float* warp = &machine.exchange[machine.thread / 32 * 256];
  auto half = [&](int lane, int place, int i) {
    return half_of(static_cast<unsigned>(__float_as_int(warp[lane * 8 + place])), i);
  };
  int g = machine.thread % 32 / 4, c = machine.thread % 4;
  float* d[4] = {&d0, &d1, &d2, &d3};
  for (int f = 0; f < 4; f++) {
    double sum = *d[f];
    for (int k = 0; k < 16; k++)  // a[g + 8 (f / 2)][k] b[k][2c + f % 2]
      sum += static_cast<double>(half(g * 4 + k % 8 / 2, k / 8 * 2 + f / 2, k % 2)) *
             half((2 * c + f % 2) * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    *d[f] = toward_zero(sum);
  }
  synchronize_warp();
}
