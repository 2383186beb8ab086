// NaN everywhere: what remains of an output whose devices did not meet.

KERNEL fill_nan(PARAMETERS(FILL_NAN_ARGUMENTS)) {
  const real_t nan = sqrt(real_t(-1));
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
       i += static_cast<int64>(gridDim.x) * blockDim.x) {
    values[i] = narrow(nan);
  }
}
