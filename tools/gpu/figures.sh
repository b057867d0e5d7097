#!/usr/bin/env bash
# All figures of docs/benchmarks for a CUDA device, one JSON file a command.
#
#   tools/gpu/figures.sh results                      everything, seven to eight minutes on an H200
#   PARTS=check,decode tools/gpu/figures.sh results   only some parts, in this order
#   WORKERS=4                                         processes of the tests (pytest-xdist)
#   SHORT=1                                           fewer repeats of what takes long
#
# Parts: check, oracle, decode, ttft, capsule, store. `check` runs side by side what is not timed:
# verify on three models, the tests that take --device, and one round of `bench decode` of each
# large model, in which transformers' kernels are tuned and compiled; that takes minutes the first
# time and is kept in the caches of Triton and Inductor. Figures come afterwards, one command at a
# time. `results/log` says how each command ended; rows that were measured before a command was cut
# short are in its .err.
set -u
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
PARTS=${PARTS:-check,oracle,decode,ttft,capsule,store}
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
SMALL=random:qwen3.5-0.8b LARGE=random:qwen3.5-9b
begun=$SECONDS

run() { # name, seconds, command...
  local name=$1 limit=$2 start=$SECONDS; shift 2
  timeout "$limit" "$@" > "$OUT/$name.json" 2> "$OUT/$name.err"
  echo "$name: exit $?, $((SECONDS - start)) s, $((SECONDS - begun)) s in all" | tee -a "$OUT/log"
}
cli() { # name, seconds, arguments...
  local name=$1 limit=$2; shift 2
  run "$name" "$limit" "$PYTHON" -m flashrt_ros.cli.main "$@" --device cuda --json
}
tests() {
  "$PYTHON" -m pytest -q "${@:2}" --device cuda test/test_cuda_device.py test/test_cuda_tiers.py \
    test/test_planted_faults*.py test/test_engine_*.py test/test_lineage.py \
    test/test_cases_files.py test/test_cases_state.py test/test_sampling.py \
    test/test_store_{accounts,disk,parked,ring,tiers}.py > "$OUT/$1.txt" 2>&1
  echo "$1: exit $?" | tee -a "$OUT/log"
}

few=${SHORT:+1}

for part in ${PARTS//,/ }; do
  case $part in
    check)
      cli h200-verify-9b 250 verify --model $LARGE --seconds "${STEADY:-10}" &
      cli h200-verify-0.8b 250 verify --model $SMALL --seconds "${STEADY:-10}" &
      cli h200-verify-embedded 250 verify --seconds "${STEADY:-10}" &
      cli warm-0.8b 250 bench decode --model $SMALL --position 1024,16384 --tokens 8 --repeats 1 &
      cli warm-9b 250 bench decode --model $LARGE --position 1024,16384 --tokens 8 --repeats 1 &
      cli h200-oracle-small-fp32 120 bench oracle --model random:small --dtype float32 &
      tests tests ${WORKERS:+-n $WORKERS} &
      wait ;;
    oracle)
      cli h200-oracle-0.8b 200 bench oracle --model $SMALL &
      cli h200-oracle-9b 200 bench oracle --model $LARGE &
      wait ;;
    decode)
      cli h200-decode-0.8b 200 bench decode --model $SMALL --position 1024,4096,16384 \
        --repeats "${few:-4}"
      cli h200-decode-9b 250 bench decode --model $LARGE --position 1024,4096,16384 \
        --repeats "${few:-2}" ;;
    ttft)
      cli h200-ttft-0.8b 150 bench ttft --model $SMALL --suffix 0,32 --repeats "${few:-4}" \
        --prefix 2048,3000,4096,8192,16384,32768,65536
      cli h200-ttft-9b 250 bench ttft --model $LARGE --suffix 0,32 --repeats "${few:-2}" \
        --prefix 2048,3000,4096,8192,16384,32768,65536 ;;
    capsule)
      cli h200-capsule-0.8b 100 bench capsule --model $SMALL --repeats 12 \
        --position 1024,4096,16384,32768,65536
      cli h200-capsule-9b 120 bench capsule --model $LARGE --repeats 10 \
        --position 1024,4096,16384,32768,65536 ;;
    store)
      cli h200-store-0.8b 150 bench store --model $SMALL --position 1024,4096,16384 --repeats 5
      cli h200-store-9b 150 bench store --model $LARGE --position 4096,16384 --repeats 2 ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
  esac
done
