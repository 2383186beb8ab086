#!/usr/bin/env bash
# Tests the GPU side of gluon_syncbn on this machine, from this folder alone: no network, nothing to install.
#
#   bash run.sh [OUT] [--short] [--steps kernels,speed,...]
#
# Needs a GPU with its driver and, as `python3` (or $PYTHON), the Python that CONTENTS.txt names. The first two steps need
# CuPy in it, and PyTorch to compare with. Text and JSON go to OUT (default: results). At most 15 minutes; 8 with --short.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/steps.py" "$@"
