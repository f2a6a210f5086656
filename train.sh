#!/usr/bin/env bash
# GRPO in one command. `./train.sh --help` lists the flags; `./train.sh` alone trains the embedded model on the CPU.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "$ROOT/scripts/env.sh"

use_checkout
for argument in "$@"; do
  if [[ "$argument" == --help || "$argument" == -h ]]; then # needs nothing installed
    find_python
    exec "$PYTHON_BIN" -m posttrain.cli train --train-sh="$ROOT" --help
  fi
done

prepare_python "$(wants_ray "$@")"
exec "$RUN_PYTHON" -m posttrain.cli train --train-sh="$ROOT" "$@"
