#!/usr/bin/env bash
# A real vLLM on one GPU: the benchmark, then the proof. Each has a time limit of its own and writes as it goes, so what
# was measured is there when it is cut off. Where nothing can be installed, vLLM lies unpacked in VLLM_BUNDLE, and
# Headwater is this checkout.
#
#   bench/h200-vllm.sh bench     none, ours, offload, lmcache: about six minutes
#   bench/h200-vllm.sh mla       the same for latent attention, load_when=pays: about two and a half
#   bench/h200-vllm.sh verify    one model after another, VERIFY_KINDS: a minute or two each
#   bench/h200-vllm.sh all       bench, then verify
#
# BENCH_ARGS are appended to the benchmark's options (the last one wins), e.g. BENCH_ARGS="--contenders none,ours".
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=${VLLM_BUNDLE:-$HOME/v}
out=${OUT:-$PWD/build/h200-vllm}
models=${BENCH_MODELS:-/dev/shm/headwater-models}
seconds=${BENCH_SECONDS:-365}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$bundle/site${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-${TMPDIR:-/tmp}/headwater-vllm-cache} VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}

# Room for the weights (16 GB) and for a slab: 24 GiB hold a crowd of 64, 16 GiB nearly.
free_gib=$(($(df --output=avail -B1 /dev/shm | tail -1) >> 30))
have_gib=$(du -s -B1 "$models" 2> /dev/null | awk '{ print int($1 / 2^30) }')
room=24
[ $((free_gib + ${have_gib:-0})) -lt 44 ] && room=16

bench() {  # seconds, folder, options
  local limit=$1 where=$2
  shift 2
  # The limit of timeout is for what hangs: the benchmark itself ends by its own.
  timeout --kill-after 20 $((limit + 40)) python3 -c 'from headwater.cli import app; app()' bench vllm --device cuda \
    --lmcache "$bundle/peer" --models "$models" --room-gib "$room" --seconds "$limit" --out "$out/$where" --json "$@" \
    > "$out/$where.json" 2> "$out/$where.err"
  local code=$?
  echo "bench $where: exit $code, $SECONDS s"
  tail -n 3 "$out/$where.err"
  return $code
}

verify() {
  local kind worst=0
  for kind in ${VERIFY_KINDS:-gqa-bf16 gqa mla}; do
    timeout --kill-after 20 "${VERIFY_SECONDS:-150}" python3 -c 'from headwater.cli import app; app()' verify --vllm \
      --device cuda --only "$kind" --out "$out/verify-$kind.part.json" --json \
      > "$out/verify-$kind.json" 2> "$out/verify-$kind.err"
    local code=$?
    [ $code -ne 0 ] && worst=$code
    echo "verify $kind: exit $code, $SECONDS s"
    tail -n 2 "$out/verify-$kind.err"
  done
  return $worst
}

case ${1:-all} in
  # shellcheck disable=SC2086  # they are several words
  bench) bench "$seconds" vllm ${BENCH_ARGS:-} ;;
  # shellcheck disable=SC2086
  mla) bench "${BENCH_SECONDS:-150}" vllm-mla --shape mla --contenders none,ours --lengths 2048,8192,32768 --repeats 3 \
    --crowds 16 --running 0 --load-when pays ${BENCH_ARGS:-} ;;
  verify) verify ;;
  # shellcheck disable=SC2086
  all) bench "$seconds" vllm ${BENCH_ARGS:-}; first=$?; verify; second=$?; exit $((first > second ? first : second)) ;;
  *) echo "usage: $0 bench|mla|verify|all"; exit 2 ;;
esac
