#!/usr/bin/env bash
# Tests the GPU side of gluon_syncbn on this machine, from this folder alone: no network, nothing to install.
#
#   bash run.sh [OUT] [--part 1|2|3] [--short] [--steps kernels,speed,...]
#
# Needs a GPU with its driver and, as `python3` (or $PYTHON), the Python that CONTENTS.txt names. Steps that measure need
# CuPy in it, and PyTorch to compare with. Each part takes less than ten minutes and leaves OUT/results-PART.tar.gz
# (OUT: results), also if it is cut off; half of that with --short.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/steps.py" "$@"
