// Marks the functions that Python calls; everything else stays within the library.
#pragma once

#define EXPORTED extern "C" __attribute__((visibility("default")))
