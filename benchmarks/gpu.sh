#!/usr/bin/env bash
# Everything that a GPU should be asked, in one call of about ten minutes, the most important first.
#
# usage: benchmarks/gpu.sh [--minutes 10] [--output-dir DIR] [--peer DIR] [--smoke]
#
# Each part has a share of the time, hands on what it does not need, and writes JSON of its own under
# benchmarks/results; a part that fails or runs late leaves the others be. --output-dir copies the results (at most
# eight files) to DIR as they come. --peer names a checkout of openvpi/SingingVocoders at 4d0889c, beside which the
# vocoder is then measured, in half of the time: give it more. --smoke runs every part on the CPU at a tiny size, to see
# that the script works; its results go to a temporary folder. PYTHON names the interpreter; without it .venv's, else
# python3.
# Exits with 1 when a part failed.
set -uo pipefail
called_from=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1

minutes=10 output='' peer='' smoke=''
while (($#)); do
    case $1 in
        --minutes) minutes=${2:?--minutes takes a number}; shift 2 ;;
        --output-dir) output=${2:?--output-dir takes a folder}; shift 2 ;;
        --peer) peer=${2:?--peer takes a folder}; shift 2 ;;
        --smoke) smoke=1; shift ;;
        *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
    esac
done
[[ ! $output || $output == /* ]] || output=$called_from/$output
[[ ! $peer || $peer == /* ]] || peer=$called_from/$peer
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "--minutes $minutes: expected a whole number" >&2; exit 2; }
python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Code that one part compiles serves the next.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/gputrain-compiled-$(id -u)}

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
log=$scratch/log started=$scratch/started results=benchmarks/results
touch "$started"
if [[ $smoke ]]; then
    results=$scratch/results
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that $python can use; --smoke tries the script on the CPU" >&2
    exit 1
fi
mkdir -p "$results" ${output:+"$output"} || exit 1

SECONDS=0 share_left=$((${peer:+120 +} 176)) summary=()
# part SHARE NAME COMMAND...: SHARE of all shares of the time, and its part of what earlier ones have left.
part() {
    local share=$1 name=$2 began=$SECONDS code
    shift 2
    local limit=$(((60 * minutes - SECONDS) * share / share_left))
    ((share_left -= share))
    if ((limit < 5)); then
        summary+=("not run   $name: no time was left")
        return
    fi
    printf '\n== %s (at most %d s)\n' "$name" "$limit"
    # In the foreground, so that Ctrl-C reaches it; its own children end with it.
    timeout --foreground --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    case $code in
        0) summary+=("done      $name, $((SECONDS - began)) s") ;;
        124 | 137) summary+=("cut off   $name after $limit s; what it had found is written") ;;
        *) summary+=("FAILED    $name, code $code") ;;
    esac
    [[ -z $output ]] || copy_results
}
# The files that this call has written, the oldest first, so that a ninth and later ones are left behind.
copy_results() {
    find "$results" -maxdepth 1 -type f -newer "$started" \( -name '*.json' -o -name '*.png' \) -printf '%T@ %p\n' |
        sort -n | head -n 8 | cut -d ' ' -f 2- | xargs -r -d '\n' cp -t "$output"
}

to=(--output-dir "$results")
if [[ $smoke ]]; then
    check=(--device cpu) small=(--smoke) vocoder=(--smoke)
    versus=(--device cpu --preset fast --channels "32,32" --image-size 32 --batch-size 2 --rounds 1)
    table=(--device cpu --preset fast --channels "32,32" --image-size 32 --batch-size 2 --steps 2)
else
    check=(--device cuda) small=() vocoder=(--device cuda --rounds 2)
    # Both without checkpointing, which is slower: compiling takes most of the time that there is.
    versus=(--device cuda --image-size 1024 512 --batch-size 8 --largest --sides stock ours --rounds 5 --minutes 0.5)
    table=(--device cuda --image-size 512 --batch-size 8 --steps 5)
fi
part 18 'correctness' "$python" benchmarks/gpu_check.py "${check[@]}" "${to[@]}"
part 12 'correctness of the vocoder' "$python" benchmarks/vocoder_check.py "${check[@]}" "${to[@]}"
part 12 'correctness of the voice' "$python" benchmarks/voice_check.py "${check[@]}" "${to[@]}"
part 17 'T1: a step of the voice' "$python" benchmarks/voice_check.py --targets "${small[@]}" "${to[@]}"
part 17 'V2: flux 1024 px x 16' "$python" benchmarks/vae_targets.py V2 "${small[@]}" "${to[@]}"
part 27 'V3: against diffusers' "$python" benchmarks/vae_vs_diffusers.py "${versus[@]}" "${to[@]}"
part 17 'V1: memory at five sizes' "$python" benchmarks/vae_targets.py V1 "${small[@]}" "${to[@]}"
part 8 'V5: fast 1024 px x 16' "$python" benchmarks/vae_targets.py V5 "${small[@]}" "${to[@]}"
[[ ! $peer ]] || part 120 'O1, O2: against SingingVocoders' "$python" benchmarks/vocoder_vs_openvpi.py --peer "$peer" \
    "${vocoder[@]}" "${to[@]}"
# Cells in the order of their importance: what the time does not suffice for, `planner_targets.py --minutes 10` measures.
part 20 'P1, P2: the planner' "$python" benchmarks/planner_targets.py "${small[@]}" "${to[@]}"
part 15 'P3: predicted and measured time of a step' "$python" benchmarks/roofline_check.py "${check[@]}" \
    ${smoke:+--seconds 0.1} "${to[@]}"
part 13 'what each switch gives' "$python" -m gputrain bench train-vae "${table[@]}" "${to[@]}"

printf '\n== summary, %d s\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
grep '^FAILED' "$log"
find "$results" -maxdepth 1 -type f -newer "$started" | sort
[[ ${summary[*]} != *FAILED* ]] && ! grep -q '^FAILED' "$log"
