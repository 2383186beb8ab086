// Marks the functions that Python calls, without its interpreter lock (base/library.py); everything else stays within
// the library. A text that one returns is empty if there is nothing to say.
#pragma once

#include <exception>
#include <string>
#include <utility>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace gluon_syncbn {

// Returns a text that stays until the thread calls this again.
inline const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

// Returns the text of an exception in `call`, or an empty one.
template <typename Call>
const char* error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& problem) {
    return kept(problem.what());
  }
  return "";
}

}  // namespace gluon_syncbn
