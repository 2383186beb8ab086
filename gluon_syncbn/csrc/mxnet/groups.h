// The groups that graphs name, as Python makes them and connects them with other processes (backends/native.py).
//
// A graph names its group in one of two ways. A net's own graph gives the id of one that Python has made for the
// layer, with its devices. A graph that outlives its process, or that no layer owns (symbol.py), carries a description:
// the operator has Python make a group of it, which belongs to this node of the graph. That group is open: it knows how
// many devices there are, and takes in those that come.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "meeting/group.h"

namespace gluon_syncbn {

// Python's function that makes a group of a description; its id, or -1 after leaving the text of an error.
using MakeGroup = int64_t (*)(const char* description);
void set_group_maker(MakeGroup make);

// The group that the attribute of a graph's node names.
std::shared_ptr<Group> group_of(const std::string& reference);

}  // namespace gluon_syncbn
