"""What warps wait at and order their accesses with, as functions in CUDA. Addresses are those of shared memory, in
bytes.
"""

MBARRIERS = """// Barriers in shared memory. A phase ends when all arrivals are in and all bytes announced have come.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned phase) {
  asm volatile(
    "{\\n .reg .pred done;\\n again_%=:\\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
    " @!done bra again_%=;\\n}"
    :: "r"(barrier), "r"(phase) : "memory");
}
"""

CLUSTER = """// All threads of a cluster meet; what they wrote is then seen by all of them: a MEMBAR of the GPU.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\\n barrier.cluster.wait.aligned;" ::: "memory");
}
// At first there is nothing to see but barriers, which have a fence of their own.
__device__ __forceinline__ void cluster_begins() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\\n barrier.cluster.wait.aligned;" ::: "memory");
}
// A thread arrives at the barrier of another block of its cluster.
// That says nothing of what threads read and wrote plainly: `release.cluster` would, and is a MEMBAR at every arrival.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
  asm volatile(
    "{\\n .reg .b32 there;\\n mapa.shared::cluster.u32 there, %0, %1;\\n"
    " mbarrier.arrive.shared::cluster.b64 _, [there];\\n}"
    :: "r"(barrier), "r"(rank) : "memory");
}
"""

NAMED = """// Some warps of a block meet at one of its other barriers.
__device__ __forceinline__ void sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
"""

PROXY = """// What was written to shared memory is seen by asynchronous copies and products.
// For all memory it is a MEMBAR.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
"""

REGISTERS = """// A warpgroup takes more registers, or gives some back.
template <int count> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(count));
}
template <int count> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(count));
}
"""
