// The kernels themselves: each gathers its parameters in the struct of arguments.cuh, in registers, and runs its pass.

#define SET_ARGUMENT(type, name) arguments.name = name;

#define ENTRY_POINTS(kernel, Arguments, LIST, has_residual) \
  KERNEL kernel##_rows(PARAMETERS(LIST)) {                  \
    Arguments arguments = {};                               \
    LIST(SET_ARGUMENT, SET_ARGUMENT, SET_ARGUMENT)          \
    run<Rows, has_residual>(arguments);                     \
  }                                                         \
  KERNEL kernel##_columns(PARAMETERS(LIST)) {               \
    Arguments arguments = {};                               \
    LIST(SET_ARGUMENT, SET_ARGUMENT, SET_ARGUMENT)          \
    if (aligned) {                                          \
      run<Columns<kPack>, has_residual>(arguments);         \
    } else {                                                \
      run<Columns<1>, has_residual>(arguments);             \
    }                                                       \
  }

KERNELS(ENTRY_POINTS)
