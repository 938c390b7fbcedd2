// hardware.cuh for a CPU: every thread of a program is a coroutine, and what a warp or a
// program does together is a meeting point. Exact about layouts, masks and barriers; of a tensor core it keeps what
// matters to the error: inputs cut to TF32 or made halves, sums cut toward zero to float32. Copies to shared memory
// happen as late as they may, when their thread waits for them, and a warp runs until it has to wait for another, so
// that one that does not wait meets what is not there yet, or overwrites what is still needed.
//
// What costs time is to compile, above all headers, so there are few, and to go from one coroutine to another: what a
// warp does together, the last of its lanes does for all.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define TW_HARDWARE
#define TW_KERNEL extern "C" void
#define TW_DEVICE inline
#define fabsf __builtin_fabsf
#define fmaf __builtin_fmaf
#define fmaxf __builtin_fmaxf

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "all bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }

inline void check(bool holds) {
  if (!holds) abort();
}

// Some of each, as many as were ever needed.
template <class T>
struct List {
  T* items = nullptr;
  int count = 0, room = 0;
  void add(const T& item) {
    if (count == room) items = static_cast<T*>(realloc(items, sizeof(T) * (room = 2 * room + 64)));
    items[count++] = item;
  }
};

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
  List<Copy> copies;
  ucontext_t start;
  jmp_buf at;
  const Meeting* meeting = nullptr;  // that it waits at, and for the end of which round
  int round = 0;
  bool begun = false, done = false;

  bool can_run() const { return !done && (meeting == nullptr || meeting->round != round); }
};

constexpr int MOST_THREADS = 256, STACK = 1 << 18, MOST_LOOKS = 1 << 20;

struct Machine {
  Thread threads[MOST_THREADS];
  void* operands[MOST_THREADS];  // of what the thread's warp does together
  Meeting warps[MOST_THREADS / 32], program;
  List<Flight> flights;
  float* memory = nullptr;
  char* stacks = nullptr;
  int thread = 0, index = 0, count = 0, size = 0, running = 0;  // size: threads a program
  int looks = 0;  // in vain, since threads last met or something landed
  jmp_buf back;
  void (*body)() = nullptr;
};
static Machine machine;

inline void begin_thread();

// Go on with the next thread that can: of the same warp if there is one, but of another first after no more than a look
// at whether something has come.
[[noreturn]] inline void run_another(bool has_looked = false) {
  int own = machine.thread, warp = own / 32 * 32;
  for (int i = has_looked ? 33 : 1; i <= 32 + machine.size; i++) {
    int t = i <= 32 ? warp + (own + i) % 32 : (warp + i - 1) % machine.size;
    Thread& thread = machine.threads[t];
    if (!thread.can_run()) continue;
    machine.thread = t;
    thread.meeting = nullptr;
    if (thread.begun) _longjmp(thread.at, 1);
    thread.begun = true;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = machine.stacks + static_cast<size_t>(t) * STACK;
    thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, begin_thread, 0);
    setcontext(&thread.start);
  }
  check(machine.running == 0);  // else all wait for one another
  _longjmp(machine.back, 1);
}

inline void begin_thread() {
  for (;;) {  // a program's thread, then the next's
    machine.body();
    Thread& thread = machine.threads[machine.thread];
    thread.done = true;
    machine.running--;
    if (_setjmp(thread.at) == 0) run_another();
  }
}

// Wait for the end of a meeting's round, or let others run once.
inline void pause_thread(const Meeting* meeting = nullptr) {
  Thread& thread = machine.threads[machine.thread];
  thread.meeting = meeting;
  if (meeting != nullptr) thread.round = meeting->round;
  check(meeting != nullptr || ++machine.looks < MOST_LOOKS);  // for what nobody has asked for
  if (_setjmp(thread.at) == 0) run_another(meeting == nullptr);
}

// Whether this thread is the last to come: then it ends the round, which the others wait for.
inline bool is_last(Meeting& meeting, int size) {
  if (++meeting.arrived < size) return false;
  meeting.arrived = machine.looks = 0;
  return true;
}
inline void meet(Meeting& meeting, int size) {
  if (is_last(meeting, size))
    meeting.round++;
  else
    pause_thread(&meeting);
}

// Have the last lane of the warp do something for all: with the operands of each, by lane.
template <class Operands>
inline void together(Operands& own, void (*for_all)(Operands* const*)) {
  Meeting& meeting = machine.warps[machine.thread / 32];
  machine.operands[machine.thread] = &own;
  if (is_last(meeting, 32)) {
    Operands* lanes[32];
    for (int lane = 0; lane < 32; lane++)
      lanes[lane] = static_cast<Operands*>(machine.operands[machine.thread / 32 * 32 + lane]);
    for_all(lanes);
    meeting.round++;
  } else {
    pause_thread(&meeting);
  }
}

// Run the body for every thread of every program.
inline void run_programs(int programs, int threads, int shared_bytes, void (*body)()) {
  check(threads <= MOST_THREADS);
  machine.body = body;
  machine.count = programs;
  machine.size = threads;
  machine.stacks = static_cast<char*>(malloc(static_cast<size_t>(threads) * STACK));
  for (int t = 0; t < threads; t++) machine.threads[t].begun = false;
  int floats = shared_bytes / 4 + 64;  // an odd tail, so that a read past the end is one of NaN too
  void* memory = nullptr;
  check(posix_memalign(&memory, 16, 4 * floats) == 0);
  machine.memory = static_cast<float*>(memory);
  for (machine.index = 0; machine.index < programs; machine.index++) {
    machine.flights.count = 0;
    for (int i = 0; i < floats; i++) machine.memory[i] = __builtin_nanf("");  // what nobody has written
    for (int t = 0; t < threads; t++) {
      Thread& thread = machine.threads[t];
      thread.done = false;
      thread.meeting = nullptr;
      thread.copies.count = 0;
    }
    machine.running = threads;
    machine.thread = 31;  // the next is the first
    if (_setjmp(machine.back) == 0) run_another();
  }
  free(memory);
  free(machine.stacks);
}

inline float* shared_memory() { return machine.memory; }
inline int thread_index() { return machine.thread; }
inline int program_index() { return machine.index; }
inline int program_count() { return machine.count; }
inline void synchronize() { meet(machine.program, machine.size); }
inline void synchronize_warp() { meet(machine.warps[machine.thread / 32], 32); }
inline float multiply(float a, float b) {
  float y = a * b;
  asm("" : "+m"(y));  // never fused with an addition
  return y;
}
inline float exp2_fast(float x) { return __builtin_exp2f(x); }
inline float log2_exact(float x) { return __builtin_log2f(x); }
inline void add1(float* to, float x) { *to += x; }
inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }
inline void add4(float* to, float x, float y, float z, float w) {
  check(is_aligned(to));
  add1(to, x);
  add1(to + 1, y);
  add1(to + 2, z);
  add1(to + 3, w);
}

struct Shuffled {
  float x, y;
  int mask;
};
inline float shuffle_xor(float x, int mask) {
  Shuffled own{x, 0.0f, mask};
  together<Shuffled>(own, [](Shuffled* const* lanes) {
    for (int lane = 0; lane < 32; lane++) lanes[lane]->y = lanes[lane ^ lanes[lane]->mask]->x;
  });
  return own.y;
}

inline void copy16(float* to, const float* from, bool inside) {
  check(is_aligned(to) && (!inside || is_aligned(from)));
  machine.threads[machine.thread].copies.add({to, from, 4, inside});
}
inline void copy4(float* to, const float* from, bool inside) {
  machine.threads[machine.thread].copies.add({to, from, 1, inside});
}
inline void wait_for_copies() {
  List<Copy>& copies = machine.threads[machine.thread].copies;
  for (int i = 0; i < copies.count; i++) {
    const Copy& copy = copies.items[i];
    for (int e = 0; e < copy.count; e++) copy.to[e] = copy.inside ? copy.from[e] : 0.0f;
  }
  copies.count = 0;
}

// A landing is two integers here: rounds that are over, and bytes announced. What is under way is NaN until somebody
// waits for it.
#define TW_LANDINGS 1
inline int* of_landing(const float* landing) { return reinterpret_cast<int*>(const_cast<float*>(landing)); }
inline void start_landing(float* landing) { of_landing(landing)[0] = of_landing(landing)[1] = 0; }
inline void announce(float* landing, int bytes) { of_landing(landing)[1] += bytes; }
inline void copy_to_landing(float* landing, float* to, const float* from, int bytes) {
  check(is_aligned(to) && is_aligned(from) && bytes % 16 == 0);
  for (int i = 0; i < bytes / 4; i++) to[i] = __builtin_nanf("");
  machine.flights.add({landing, to, from, bytes});
}
inline void wait_for_landing(const float* landing, int parity) {
  int* state = of_landing(landing);
  while (state[0] % 2 == parity) {
    int landed = 0, others = 0;
    List<Flight>& flights = machine.flights;
    for (int i = 0; i < flights.count; i++) {
      const Flight flight = flights.items[i];
      if (flight.landing != landing) {
        flights.items[others++] = flight;
        continue;
      }
      memcpy(flight.to, flight.from, flight.bytes);
      landed += flight.bytes;
    }
    flights.count = others;
    if (!landed) {
      pause_thread();
      continue;
    }
    check(landed == state[1]);
    machine.looks = 0;
    state[0]++;
    state[1] = 0;
  }
}
inline int count_warp(int* arrived) {
  synchronize_warp();
  return machine.thread % 32 ? -1 : (*arrived)++;
}

inline float cut_to_tf32(float x) { return bits_as<float>(bits_as<uint32_t>(x) & 0xffffe000u); }
inline float nearest_tf32(float x) {
  return x != x ? x : bits_as<float>((bits_as<uint32_t>(x) + 0x1000u) & 0xffffe000u);
}
inline float toward_zero(double x) {
  float y = static_cast<float>(x);
  return __builtin_fabs(static_cast<double>(y)) > __builtin_fabs(x) ? bits_as<float>(bits_as<uint32_t>(y) - 1) : y;
}

// What each lane of a warp holds of d += a b, a of 16 x K, b of K x 8: see hardware.cuh.
template <class A, class B>
struct Multiplied {
  float* d[4];
  A a[4];
  B b[2];
};
typedef double Row __attribute__((vector_size(64)));  // of 8 columns

// d += a b, each sum in double, then cut.
template <int K, class Operands>
inline void add_products(Operands* const* lanes, const float (&a)[16][K], const float (&b)[K][8]) {
  Row rows[K];
  for (int k = 0; k < K; k++)
    for (int n = 0; n < 8; n++) rows[k][n] = b[k][n];
  for (int m = 0; m < 16; m++) {
    Row sums;
    auto of = [&](int n) -> float& { return *lanes[m % 8 * 4 + n / 2]->d[m / 8 * 2 + n % 2]; };
    for (int n = 0; n < 8; n++) sums[n] = of(n);
    for (int k = 0; k < K; k++) sums += static_cast<double>(a[m][k]) * rows[k];
    for (int n = 0; n < 8; n++) of(n) = toward_zero(sums[n]);
  }
}

inline void multiply_tiles(float& d0, float& d1, float& d2, float& d3, const float (&a)[4], float b0, float b1) {
  using Own = Multiplied<float, float>;
  Own own{{&d0, &d1, &d2, &d3}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  together<Own>(own, [](Own* const* lanes) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
      int g = lane / 4, c = lane % 4;
      for (int f = 0; f < 4; f++) a[g + f % 2 * 8][c + f / 2 * 4] = cut_to_tf32(lanes[lane]->a[f]);
      for (int f = 0; f < 2; f++) b[c + f * 4][g] = cut_to_tf32(lanes[lane]->b[f]);
    }
    add_products(lanes, a, b);
  });
}

struct Halves {
  _Float16 first, second;
};
inline unsigned pack_halves(float first, float second) {
  return bits_as<unsigned>(Halves{static_cast<_Float16>(first), static_cast<_Float16>(second)});
}
inline float first_half(unsigned pair) { return static_cast<float>(bits_as<Halves>(pair).first); }
inline float second_half(unsigned pair) { return static_cast<float>(bits_as<Halves>(pair).second); }

// Every lane hands in where a row is; row r of matrix i comes from lane 8 i + r.
struct Loaded {
  unsigned* x;
  const float* row;
};
template <bool TRANSPOSED>
inline void load_matrices_of_warp(Loaded* const* lanes) {
  for (int i = 0; i < 4; i++)
    for (int lane = 0; lane < 32; lane++) {
      uint16_t halves[2];
      for (int h = 0; h < 2; h++) {
        int g = lane / 4, pair = lane % 4 * 2 + h;
        const float* row = lanes[8 * i + (TRANSPOSED ? pair : g)]->row;
        memcpy(&halves[h], reinterpret_cast<const char*>(row) + 2 * (TRANSPOSED ? g : pair), 2);
      }
      memcpy(&lanes[lane]->x[i], halves, 4);
    }
}
inline void load_matrices(unsigned (&x)[4], const float* row) {
  check(is_aligned(row));
  Loaded own{x, row};
  together<Loaded>(own, load_matrices_of_warp<false>);
}
inline void load_matrices_transposed(unsigned (&x)[4], const float* row) {
  check(is_aligned(row));
  Loaded own{x, row};
  together<Loaded>(own, load_matrices_of_warp<true>);
}

inline void multiply_halves(float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4], unsigned b0,
                            unsigned b1) {
  using Own = Multiplied<unsigned, unsigned>;
  Own own{{&d0, &d1, &d2, &d3}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  together<Own>(own, [](Own* const* lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
      int g = lane / 4, c = lane % 4 * 2;
      for (int f = 0; f < 4; f++) {
        float* to = &a[g + f % 2 * 8][c + f / 2 * 8];
        to[0] = first_half(lanes[lane]->a[f]);
        to[1] = second_half(lanes[lane]->a[f]);
      }
      for (int f = 0; f < 2; f++) {
        b[c + f * 8][g] = first_half(lanes[lane]->b[f]);
        b[c + f * 8 + 1][g] = second_half(lanes[lane]->b[f]);
      }
    }
    add_products(lanes, a, b);
  });
}
