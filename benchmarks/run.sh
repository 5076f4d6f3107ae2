#!/usr/bin/env bash
# Reruns every benchmark on one GPU, one process after another, and fills the table.
#   benchmarks/run.sh [RESULTS]     default: benchmarks/results
# PYTHON and PEER_PYTHON name the interpreters, GPU the device's index.
set -u
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
python=${PYTHON:-.venv/bin/python}
peer_python=${PEER_PYTHON:-$python}
export CUDA_VISIBLE_DEVICES=${GPU:-0}
failed=0

# once NAME COMMAND...: run COMMAND --out FOLDER unless the folder is whole.
once() {
  local folder=$results/$1
  shift
  if [ -e "$folder/result.json" ]; then
    echo "have $folder"
  elif ! "$@" --out "$folder"; then
    echo "FAILED: $*" >&2
    failed=1
  fi
}
ours() {
  local name=$1
  shift
  once "$name" "$python" -c 'from residency.cli import main; main()' bench device=cuda "$@"
}
demand() { [ "$1" = demand ] && echo prefill.max_tokens=512; }
freetoken() {
  local name=$1
  shift
  once "$name" "$peer_python" benchmarks/peers/freetoken_bench.py "$@"
}

qwen="model=qwen3_30b_a3b model.layers=24"
flash="model=flash_next_moe model.layers=8 model.format=bf16"
nvfp4="model=flash_next_moe model.layers=24 model.routing=even workload.lengths=[512]"
gpt_oss="model=gpt_oss_20b"
models=benchmarks/peers/models
modes='workload.modes=[always_stream,in_place,"demand max_tokens=1048576",auto]'
twice="workload.repeats=2 workload.warmups=1"

once admission "$python" benchmarks/kernels/admission.py
once host_memory "$python" benchmarks/kernels/host_memory.py
once host_experts "$python" benchmarks/kernels/host_experts.py
once router_guess "$python" benchmarks/router_guess.py
for part in experts dense pieces qwen4_layers; do
  once kernels-$part "$python" benchmarks/kernels/$part.py
done
for routing in model even; do
  even=$([ $routing = even ] && echo --even-routing)
  freetoken qwen-freetoken-$routing $models/qwen3-30b-a3b-24l --slots 1024 $even
  for prefill in always_stream hit_d2d demand; do
    ours qwen-$prefill-$routing $qwen model.routing=$routing prefill=$prefill cache.slots=1024 \
      $(demand $prefill)
  done
  freetoken flash-freetoken-$routing $models/flash-next-moe-24l --layers 8 --bfloat16 \
    --slots 1024 $even
  for prefill in always_stream demand; do
    ours flash-$prefill-$routing $flash model.routing=$routing prefill=$prefill \
      cache.slots=1024 $(demand $prefill)
  done
done
freetoken flash-nvfp4-freetoken-even $models/flash-next-moe-24l --slots 1536 --even-routing
freetoken flash-nvfp4-freetoken-hybrid-even $models/flash-next-moe-24l --slots 1536 \
  --even-routing --strategy hybrid --max-fetch 4
for decode in gpu hybrid; do
  ours flash-nvfp4-$decode-even $nvfp4 decode=$decode cache.slots=1536
done
ours flash-nvfp4-cpu-even $nvfp4 decode=cpu workload.decode_tokens=24
ours flash-nvfp4-48-layers-even model=flash_next_moe model.routing=even cache.slots=1536 \
  prefill=always_stream 'workload.lengths=[512]' workload.decode_tokens=32
freetoken qwen4-freetoken-model $models/qwen3.8-flash-next-24l --slots 1536
ours qwen4-gpu-even model=qwen4_exp model.layers=24 model.routing=even cache.slots=1536 \
  'workload.lengths=[512]'
for cache in lru lrfu; do
  ours qwen-$cache-skewed $qwen model.routing=skewed cache=$cache cache.slots=1024
  ours qwen-$cache-skewed-warm $qwen model.routing=skewed cache=$cache cache.slots=1024 \
    workload.pool=warm
done
for routing in even skewed; do
  ours qwen-modes-$routing experiment=short_chunk_ttft $qwen model.routing=$routing \
    cache.slots=1024 "$modes" $twice
  ours flash-modes-$routing experiment=short_chunk_ttft model=flash_next_moe model.layers=24 \
    model.routing=$routing cache.slots=1536 "$modes" $twice
done
once prefill-groups "$python" benchmarks/prefill_groups.py
ours flash-next-turn-skewed experiment=next_turn_ttft model=flash_next_moe model.layers=24 \
  model.routing=skewed cache.slots=1536 "$modes" $twice
ours conversation-flash-skewed workload=conversation model=flash_next_moe model.layers=24 \
  model.routing=skewed model.context=8192 cache.slots=1536 prefill=auto \
  'workload.modes=[always_stream,demand]' $twice
talk=$results/conversation-flash-skewed
if [ -e "$talk/result.json" ]; then
  once conversation-flash-freetoken-skewed "$peer_python" \
    benchmarks/peers/freetoken_conversation.py $models/flash-next-moe-24l --slots 1536 \
    --like "$talk/result.json"
  "$python" benchmarks/conversation_chart.py "$talk/result.json" \
    "$results/conversation-flash-freetoken-skewed/result.json" --out "$talk/peer.png" || failed=1
fi
once conversation-demo "$python" -c 'from residency.cli import main; main()' bench \
  workload=conversation device=cpu device.threads=1 cache.slots=50% workload.sessions=7 \
  workload.max_turns=4 workload.max_new_tokens=4 workload.repeats=9 workload.warmups=1
ours gpt-oss-lrfu-trace $gpt_oss model.routing=trace:tests/data/gpt-oss-20b_decode.npz
once qwen-accelerate-model "$peer_python" benchmarks/peers/accelerate_bench.py \
  $models/qwen3-30b-a3b-24l --layers 4 --lengths 16,256

"$python" benchmarks/table.py "$results" || failed=1
exit $failed
