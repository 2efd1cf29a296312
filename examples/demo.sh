#!/usr/bin/env bash
# measure -> explain -> predict -> fix -> verify, on a real training of two workers in a cluster that
# exists inside this machine; the same with another transport; then the question of the paper, for 64
# workers that do not; and at the end the training is cured by one command. With SHORT=1 fewer steps
# are trained, and the fixes of parts 3 and 7 are left out.
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

if [[ -z ${SHORT:-} ]]; then
  printf '\n3. Fix one thing for real, gradients sent as float16, and hold it against the prediction.\n'
  show lab run "${cluster[@]}" -o demo/after.run --force -- "${train[@]}" --half
  show compare demo/before.run demo/after.run
fi

printf '\n4. A link that Gloo cannot fill: two emulated V100 at 5 Gbps, buckets of 1 MiB. Then one word\n'
printf '   is another, init_process_group("fullwire") for "gloo", and the prediction is held against it.\n'
fast=(--workers 2 --rate 5Gbps --workload resnet50@v100 --buckets ddp:1MiB --steps "$steps")
show lab run "${fast[@]}" --backend gloo -o demo/gloo.run --force
show explain demo/gloo.run
show lab run "${fast[@]}" --backend fullwire -o demo/fullwire.run --force
show compare demo/gloo.run demo/fullwire.run
show explain demo/fullwire.run

printf '\n5. Predict what is not here: 64 V100 at 10 and 100 Gbps, if transport filled the wire.\n'
show whatif vgg16@v100 resnet50@v100 resnet101@v100 --workers 64 --bandwidth 10Gbps,100Gbps \
  --compression 1,2,5,10 --buckets paper --target 0.95 \
  --plot demo/scaling-by-compression.png --force

printf '\n6. And the same as a page that opens anywhere, offline.\n'
show report demo/gloo.run demo/fullwire.run -o demo/report.html --force

if [[ -z ${SHORT:-} ]]; then
  printf '\n7. Cure the training of part 1 without an edit: the fix that promises most is tried and verified.\n'
  rm -rf demo/tuned
  show tune --lab "${cluster[@]}" --allow numeric --trials 1 --steps "$steps" -o demo/tuned -- "${train[@]}"
fi

printf '\nThe page: demo/report.html. The figure: demo/scaling-by-compression.png. The runs: '
echo demo/*.run
