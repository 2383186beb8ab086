// All `Processes` that Python has made, by their ids.
#pragma once

#include <cstdint>
#include <memory>

#include "processes/processes.h"

namespace gluon_syncbn {

std::shared_ptr<Processes> find_processes(int64_t id);

}  // namespace gluon_syncbn
