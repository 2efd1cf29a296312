#!/usr/bin/env bash
# measure -> explain -> predict -> fix -> verify, on a real training of two workers in a cluster that
# exists inside this machine; then the question of the paper, for 64 workers that do not.
# With SHORT=1 fewer steps are trained.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p demo
steps=20
[[ -n ${SHORT:-} ]] && steps=10

show() {
  printf '\n$ fullwire'
  printf ' %s' "$@"
  printf '\n\n'
  .venv/bin/fullwire "$@"
}

cluster=(--workers 2 --rate 500Mbps)
train=(.venv/bin/python examples/train.py --steps "$steps")

echo "1. Measure: train on two hosts with 500 Mbps links, and record it."
show lab run "${cluster[@]}" -o demo/before.run --force -- "${train[@]}"

printf '\n2. Explain: where does each step go, and what would help?\n'
show explain demo/before.run

printf '\n3. Fix one thing for real, gradients sent as float16, and hold it against the prediction.\n'
show lab run "${cluster[@]}" -o demo/after.run --force -- "${train[@]}" --half
show compare demo/before.run demo/after.run

printf '\n4. Predict what is not here: 64 V100 at 10 and 100 Gbps, if transport filled the wire.\n'
show whatif vgg16@v100 resnet50@v100 resnet101@v100 --workers 64 --bandwidth 10Gbps,100Gbps \
  --compression 1,2,5,10 --buckets paper --target 0.95 \
  --plot demo/scaling-by-compression.png

printf '\n5. And the same as a page that opens anywhere, offline.\n'
show report demo/before.run demo/after.run -o demo/report.html

printf '\nThe page: demo/report.html. The runs: demo/before.run and demo/after.run. '
printf 'The figure: demo/scaling-by-compression.png\n'
