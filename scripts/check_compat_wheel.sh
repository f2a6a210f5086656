#!/usr/bin/env bash
# Builds the wheel of compat/, installs it alone into a temporary folder and uses it from there. RUN_PYTHON: the interpreter.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
RUN_PYTHON="${RUN_PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

mkdir "$work/source"
cp -R "$ROOT/compat/pyproject.toml" "$ROOT/compat/README.md" "$ROOT/compat/verl" "$ROOT/compat/recipe" "$work/source/"
"$RUN_PYTHON" -m pip wheel --no-index --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$work/source"
"$RUN_PYTHON" -m pip install --no-index --no-deps --target "$work/site" "$work"/wheel/*.whl

cd "$work"
export PYTHONPATH="$work/site:$ROOT"
"$RUN_PYTHON" -c 'import os, sys, verl
assert os.path.realpath(verl.__file__).startswith(os.path.realpath(sys.argv[1])), verl.__file__' "$work/site"
missing="$(cd "$ROOT/compat" && find verl recipe -name '*.py' -o -name '*.yaml' | while read -r file; do
  [[ -e "$work/site/$file" ]] || echo "$file"; done)"
if [[ -n "$missing" ]]; then echo "not in the wheel: $missing" >&2; exit 1; fi
"$RUN_PYTHON" -m verl.trainer.main_ppo --cfg job algorithm.adv_estimator=grpo >"$work/job.txt"
grep -q 'adv_estimator: grpo' "$work/job.txt"
echo "the wheel of compat/ works from outside the checkout"
