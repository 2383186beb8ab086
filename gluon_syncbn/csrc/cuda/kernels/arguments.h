// The arguments of each kernel: one struct, for the host, which fills it, and for the GPU; and numbers that both know.
// This file includes nothing, because NVRTC gets one text. value_t is the type of activations, and real_t the type of
// parameters and statistics; the host has void for both. A null array is absent, or not requested.
//
//   saved              from the forward pass for the backward pass: mean[C], invstd[C], r[C], d[C], and count, round_id
//                      and active_set of the call
//   message            numbers that the GPU and the host leave for each other (scratch.h)
//   partials, counters memory of blocks that share a tile (sums.cuh)
//   ..._request        MXNet's OpReqType of a gradient: 0 nothing, 3 add, else write

constexpr int kThreads = 512;      // in a block, at most
constexpr int kUnroll = 8;         // packs that a thread has under way, of all tensors that it reads together
constexpr int kPackBytes = 16;     // of neighbouring values
constexpr int kMostChannels = 64;  // of a tile
constexpr int kLeftTogether = 32;  // sums that blocks leave (sums.cuh): so many fill whole cache lines of 128 bytes

// A dense tensor (outer, channels, inner), and how threads lie over it (launch.h).
struct Shape {
  int64 outer, channels, inner;
  int aligned;  // whether packs of 16 bytes may be read and written
  int tile;     // channels of a block
  int width;    // columns: threads side by side
  int rows;     // columns: rows of threads
};

struct BlockMemory {
  real_t* partials;
  int* counters;
  double* message;
};

// The bits of a number that is not in the message yet: a NaN that no arithmetic makes.
constexpr unsigned long long kNotThere = 0xfff4c0dec0dec0deULL;

struct MomentsArguments {
  Shape shape;
  const value_t* x;
  const real_t* running_mean;  // these two only for Batch Renormalization
  const real_t* running_var;
  BlockMemory memory;
};

struct NormalizeArguments {
  Shape shape;
  const value_t* x;
  const value_t* residual;  // added before the activation
  value_t* y;
  const real_t* gamma;  // null: 1
  const real_t* beta;
  real_t* running_mean;
  real_t* running_var;
  double* saved;
  BlockMemory memory;
  double epsilon;
  double momentum;
  double slope;
  double count;
  double round_id;
  double active_set;
  int training;
  int renorm;
};

struct GradientSumsArguments {
  Shape shape;
  const value_t* x;  // or y, see FROM_OUTPUT
  const value_t* dy;
  const value_t* y;  // with a residual
  value_t* d_residual;
  const real_t* gamma;
  const real_t* beta;
  const double* saved;
  real_t* d_gamma;
  real_t* d_beta;
  BlockMemory memory;
  double slope;
  int residual_request;
  int gamma_request;
  int beta_request;
};

struct InputGradientArguments {
  Shape shape;
  const value_t* x;  // or y, see FROM_OUTPUT
  const value_t* dy;
  const value_t* y;  // with a residual, if dy has not passed the ReLU yet; else null
  value_t* dx;
  const real_t* gamma;
  const real_t* beta;
  const double* saved;
  BlockMemory memory;
  double slope;
  int add;
};
