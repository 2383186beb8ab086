// Functions of libraries that are not linked.
#pragma once

#include <dlfcn.h>

namespace gluon_syncbn {

// Looks up `name` in `library`, a handle of dlopen, and in what it has loaded; false if it is not there.
template <typename Function>
bool find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace gluon_syncbn
