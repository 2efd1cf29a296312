#!/usr/bin/env bash
# The paper's two headline figures, redrawn with the numbers beside them.
# Zhang et al., "Is Network the Bottleneck of Distributed Training?", NetAI 2020.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p demo

show() {
  printf '\n$ fullwire'
  printf ' %s' "$@"
  printf '\n\n'
  .venv/bin/fullwire "$@"
}

models=(vgg16@v100 resnet50@v100 resnet101@v100)

echo "1. If transport filled the wire: how would 64 V100 scale, link by link?"
show whatif "${models[@]}" --workers 64 --bandwidth 1Gbps,10Gbps,25Gbps,40Gbps,100Gbps \
  --buckets paper --plot demo/scaling-by-bandwidth.png

echo "2. And how much gradient compression would they need, at 10 and at 100 Gbps?"
show whatif "${models[@]}" --workers 64 --bandwidth 10Gbps,100Gbps \
  --compression 1,2,5,10,20,50,100 --buckets paper --target 0.95 \
  --plot demo/scaling-by-compression.png

echo "The figures: demo/scaling-by-bandwidth.png and demo/scaling-by-compression.png"
