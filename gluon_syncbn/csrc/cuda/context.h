// The CUDA context that a thread works in. MXNet loads compiled kernels with CUDA's driver interface, which wants a
// current context, on whatever thread launches them first; but cudaSetDevice, by which MXNet names the device, gives
// the thread one only from CUDA 12 on. On the threads that call custom operators there is none before.
#pragma once

namespace gluon_syncbn {

// While it lives, this thread works in the primary context of a GPU, which is the one that MXNet uses; then in the one
// that it had before. Throws MXNetFailure where there is no such GPU. Does nothing in a process without CUDA.
class GpuContext {
 public:
  explicit GpuContext(int device);
  ~GpuContext();
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

 private:
  void* before_ = nullptr;
};

}  // namespace gluon_syncbn
