#!/usr/bin/env bash
# Builds the wheel, installs it alone into a temporary folder and uses it from there. RUN_PYTHON: the interpreter.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
RUN_PYTHON="${RUN_PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# A copy of what the wheel is made from: an old build/ in the checkout must not get into it.
mkdir "$work/source"
cp -R "$ROOT/pyproject.toml" "$ROOT/README.md" "$ROOT/LICENSE" "$ROOT/posttrain" "$work/source/"
# Without build isolation: setuptools is there already (torch needs it), and nothing is fetched.
"$RUN_PYTHON" -m pip wheel --no-index --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$work/source"
"$RUN_PYTHON" -m pip install --no-index --no-deps --target "$work/site" "$work"/wheel/*.whl

cd "$work"
export PYTHONPATH="$work/site"
"$RUN_PYTHON" -c 'import os, posttrain, sys
assert os.path.realpath(posttrain.__file__).startswith(os.path.realpath(sys.argv[1])), posttrain.__file__' "$work/site"
"$RUN_PYTHON" "$work/site/bin/posttrain" --help >"$work/help.txt"
grep -q '^  train ' "$work/help.txt"
"$RUN_PYTHON" -m posttrain.trainer.main_ppo --cfg job algorithm.adv_estimator=grpo >"$work/job.txt"
grep -q 'adv_estimator: grpo' "$work/job.txt"
mkdir "$work/run" && echo '{"step": 1, "reward_mean": 0.5}' >"$work/run/metrics.jsonl"
"$RUN_PYTHON" "$work/site/bin/posttrain" view "$work/run" --export "$work/run.html"
grep -q 'reward_mean' "$work/run.html" && grep -q 'uPlot' "$work/run.html"
if [[ -e "$work/outputs" ]]; then echo "--cfg job wrote a run directory" >&2; exit 1; fi
echo "the wheel works from outside the checkout"
