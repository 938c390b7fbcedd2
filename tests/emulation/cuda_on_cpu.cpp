// One kernel of attention_fp32.cu, made callable on a CPU; see cuda_on_cpu.h.
#include "cuda_on_cpu.h"
#include "attention_fp32.cu"
#include "product.cuh"

static Call current;
#define RUN(name) \
  extern "C" void run(const Call* call, int programs, int shared_bytes) { \
    current = *call; \
    run_programs(programs, TW_THREADS, shared_bytes, [] { name(current); }); \
  }
#if TW_FORWARD
RUN(attention_forward_kernel)
#elif TW_SPLIT_ROWS
RUN(attention_split_kernel)
#elif TW_DELTA
RUN(attention_backward_delta_kernel)
#elif TW_DQ
RUN(attention_backward_dq_kernel)
#else
RUN(attention_backward_dkdv_kernel)
#endif

extern "C" int pad() { return Product::PAD; }
#if TW_PRODUCTS == 1
extern "C" int place(int g) { return Product::place(g); }
#elif TW_PRODUCTS == 0
extern "C" int row_of(int lane) {
  machine.thread = lane;
  return Product::row_of(0);
}
extern "C" int column_of(int lane) {
  machine.thread = lane;
  return Product::column_of(0);
}
extern "C" int quad_of(int lane) {
  machine.thread = lane;
  return Product::quad_of(0);
}
#endif
