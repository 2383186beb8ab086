#include "cuda/program.h"

#include <algorithm>
#include <memory>

#include "cuda/context.h"

namespace gluon_syncbn {
namespace {

// What kernels of kernels.cu take, a letter each. Arrays, in capitals if the kernel writes them: v of activations, r of
// parameters and statistics, d float64, i int32. Numbers behind the bar: l int64, n int32, f float64.
const std::map<std::string, std::string>& signatures() {
  static const std::map<std::string, std::string> all{
      {"moments", "vrrDID|lllnfn"},
      {"normalize", "vVrrRRDd|lllnffffffnnnnnnn"},
      {"normalize_skip", "vvVrrRRDd|lllnffffffnnnnnnn"},
      {"gradient_sums", "vvrrdDIDRR|lllnffnnnnn"},
      {"gradient_sums_skip", "vvvVrrdDIDRR|lllnfnnnn"},
      {"input_gradient", "vvVrrdd|lllnfnnnn"},
      {"input_gradient_skip", "vvvVrrdd|lllnnn"},
  };
  return all;
}

struct Signature {
  Signature(const std::string& letters, DType values) {
    bool arrays = true;
    for (const char letter : letters) {
      if (letter == '|') {
        arrays = false;
        continue;
      }
      const bool written = letter >= 'A' && letter <= 'Z';
      is_array.push_back(arrays);
      is_const.push_back(!written);
      dtypes.push_back(dtype_of_letter(written ? static_cast<char>(letter - 'A' + 'a') : letter, values));
    }
  }

  static int dtype_of_letter(char letter, DType values) {
    switch (letter) {
      case 'v':
        return static_cast<int>(values);
      case 'r':
        return static_cast<int>(values == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
      case 'i':
      case 'n':
        return kInt32;
      case 'l':
        return kInt64;
      default:
        return static_cast<int>(DType::kFloat64);
    }
  }

  std::vector<int> is_array, is_const, dtypes;
};

std::string& source() {
  static auto* text = new std::string;
  return *text;
}

}  // namespace

Arguments& Arguments::array(const Array& array) {
  pointers_.push_back(array.handle());
  return *this;
}
Arguments& Arguments::integer(int value) {
  numbers_.emplace_back().integer = value;
  pointers_.push_back(&numbers_.back());
  return *this;
}
Arguments& Arguments::integer64(int64_t value) {
  numbers_.emplace_back().integer64 = value;
  pointers_.push_back(&numbers_.back());
  return *this;
}
Arguments& Arguments::real(double value) {
  numbers_.emplace_back().real = value;
  pointers_.push_back(&numbers_.back());
  return *this;
}
Arguments& Arguments::layout(const Layout& layout) {
  return integer64(layout.outer).integer64(layout.channels).integer64(layout.inner);
}

void GpuProgram::set_source(const char* text) { source() = text; }

GpuProgram& GpuProgram::of(DType dtype) {
  // Never destroyed: CUDA may be gone when the process ends.
  static auto* mutex = new std::mutex;
  static auto* programs = new std::map<DType, std::unique_ptr<GpuProgram>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<GpuProgram>& program = (*programs)[dtype];
  if (!program) program.reset(new GpuProgram(dtype));
  return *program;
}

GpuProgram::GpuProgram(DType dtype) {
  const Tuning tuning;
  const std::string type = "-DVALUE_TYPE=" + std::to_string(static_cast<int>(dtype));
  const std::string threads = "-DTHREADS=" + std::to_string(tuning.threads);
  const std::string unroll = "-DUNROLL=" + std::to_string(tuning.unroll);
  const char* options[] = {"--std=c++11", type.c_str(), threads.c_str(), unroll.c_str()};
  void* program = nullptr;
  check_mxnet(mxnet().program_create(source().c_str(), 4, options, 0, nullptr, &program),
              "the CUDA kernels could not be compiled at run time");
  const auto create = [&](const std::string& name, const std::string& letters) {
    Signature signature(letters, dtype);
    void*& kernel = kernels_[name];
    check_mxnet(
        mxnet().kernel_create(program, name.c_str(), static_cast<int>(signature.dtypes.size()),
                              signature.is_array.data(), signature.is_const.data(), signature.dtypes.data(), &kernel),
        "CUDA kernel " + name + " was not made");
  };
  for (const auto& entry : signatures()) {
    create(entry.first + "_rows", entry.second);
    create(entry.first + "_columns", entry.second);
  }
  create("fill_nan", "V|l");
}

void GpuProgram::launch(const std::string& name, int device, const Launch& launch, const Arguments& arguments) {
  const unsigned grid[] = {launch.grid_x, launch.grid_y}, block[] = {launch.block_x, launch.block_y};
  call(name + (launch.rows ? "_rows" : "_columns"), device, grid, block, arguments);
}

void GpuProgram::fill_nan(int device, const Array& values, int64_t size) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(1024, (size + 1023) / 1024));
  const unsigned grid[] = {blocks, 1}, block[] = {256, 1};
  call("fill_nan", device, grid, block, Arguments().array(values).integer64(size));
}

void GpuProgram::call(const std::string& kernel, int device, const unsigned* grid, const unsigned* block,
                      const Arguments& arguments) {
  const GpuContext context(device);
  std::lock_guard<std::mutex> lock(mutex_);
  check_mxnet(mxnet().kernel_call(kernels_.at(kernel), device, const_cast<void**>(arguments.pointers_.data()), grid[0],
                                  grid[1], 1, block[0], block[1], 1, 0),
              "CUDA kernel " + kernel + " could not be launched on gpu(" + std::to_string(device) + ")");
}

const double* find_moments(GpuProgram& program, int device, const Launch& launch, const Layout& layout, const Array& x,
                           const Array& running_mean, const Array& running_var, bool wants_running,
                           const Scratch& scratch) {
  const double ticket = Scratch::next_ticket();
  Arguments arguments;
  arguments.array(x).array(running_mean).array(running_var);
  arguments.array(scratch.partials).array(scratch.counters).array(scratch.message);
  arguments.layout(layout).integer(launch.aligned).real(ticket).integer(wants_running);
  program.launch("moments", device, launch, arguments);
  return scratch.wait(ticket);
}

void check_gpu(int device) {
  GpuProgram& program = GpuProgram::of(DType::kFloat32);
  const float values[] = {1, 2, 3, 6};
  const Layout layout{1, 1, 4};
  const Array x(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 4));
  check_mxnet(mxnet().array_copy_from_cpu(x.handle(), values, 4), "numbers could not be copied to a GPU");
  const Launch launch = launch_for(DType::kFloat32, layout, {x.data()});
  const auto scratch = Scratch::lease(device, launch, layout);
  const Array unused(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 1));
  const Array unused_too(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 1));
  const double* numbers = find_moments(program, device, launch, layout, x, unused, unused_too, false, *scratch);
  if (numbers[0] != 3 || numbers[1] != 14) {
    throw MXNetFailure("the moments of 1, 2, 3, 6 came out as " + std::to_string(numbers[0]) + " and " +
                       std::to_string(numbers[1]) + ", not 3 and 14");
  }
  Scratch::give_back(scratch);
}

}  // namespace gluon_syncbn
