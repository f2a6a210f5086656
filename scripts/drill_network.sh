#!/usr/bin/env bash
# Trains over two machines that have a network between them: two network namespaces joined by a virtual cable, each with
# an address of its own. Both ways of giving a command on each machine, one worker each, must end with status 0 and have
# the same numbers. Needs Linux, root, `ip` and Ray; takes two minutes. PYTHON names the interpreter.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$ROOT" PYTHONUNBUFFERED=1
out="$(mktemp -d)"
first="posttrain$$a" second="posttrain$$b"
cleanup() {
  local status=$?
  for name in "$first" "$second"; do ip netns del "$name" 2>/dev/null || true; done
  if [[ "$status" != 0 ]]; then tail -n 20 "$out"/*.log; fi
  rm -rf "$out"
}
trap cleanup EXIT

ip netns add "$first"
ip netns add "$second"
ip link add cable netns "$first" type veth peer name cable netns "$second"
for each in "$first 10.9.0.1 10.9.0.2" "$second 10.9.0.2 10.9.0.1"; do
  read -r name own other <<<"$each"
  ip -n "$name" addr add "$own/24" dev cable
  ip -n "$name" link set cable up
  ip -n "$name" link set lo up
  ip -n "$name" route add default via "$other"
done

keys=(preset=embedded data.train_batch_size=24 actor_rollout_ref.actor.ppo_mini_batch_size=12 trainer.total_training_steps=3
  trainer.test_freq=-1 trainer.export_hf=none trainer.device=cpu trainer.val_before_train=False
  trainer.default_local_dir="$out" trainer.project_name=drill)
main=posttrain.trainer.main_ppo
by_torchrun() {
  ip netns exec "$1" "$PYTHON" -m torch.distributed.run --nproc_per_node=1 --nnodes=2 --node_rank="$2" \
    --master_addr=10.9.0.1 -m $main "${keys[@]}" trainer.experiment_name=torchrun >"$out/torchrun_$2.log" 2>&1
}
by_rank() {
  RAY_HEAD_ADDRESS="$3" ip netns exec "$1" "$PYTHON" -m $main "${keys[@]}" trainer.experiment_name=ranks \
    trainer.nnodes=2 trainer.node_rank="$2" >"$out/rank_$2.log" 2>&1
}

by_torchrun "$second" 1 &
by_torchrun "$first" 0
wait $!
echo "torchrun on both: 0, 0"
by_rank "$second" 1 10.9.0.1:6379 &
by_rank "$first" 0 auto
wait $!
echo "node ranks 0 and 1: 0, 0"
"$PYTHON" - "$out/drill" <<'X'
import json, pathlib, sys
clocks = ("time", "timing_", "perf/")
lines = {run: (pathlib.Path(sys.argv[1]) / run / "metrics.jsonl").read_text().splitlines() for run in ("torchrun", "ranks")}
a, b = ([{k: v for k, v in json.loads(line).items() if not k.startswith(clocks)} for line in of] for of in lines.values())
print(f"the numbers of {len(a)} steps are the same: {a == b}")
sys.exit(a != b or len(a) != 3)
X
