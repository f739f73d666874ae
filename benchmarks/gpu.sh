#!/usr/bin/env bash
# Everything that a GPU should be asked, in one call of about ten minutes, the most important first. Beside each
# measured time stands the one that the roofline predicts.
#
# usage: benchmarks/gpu.sh [--minutes 10] [--output-dir DIR] [--peer DIR] [--smoke]
#
# Each part has a share of the time, hands on what it does not need, and writes JSON of its own under
# benchmarks/results; a part that fails or runs late leaves the others be. First comes correctness; then the targets of
# the VAE (V), the vocoder (O) and the voice (T, beside Piper if piper-tts is installed); then the planner (P), the
# recogniser's step, inference, and what each switch gives. --output-dir gathers the results in DIR/gpu_results.tar as
# they come. --peer names a checkout of openvpi/SingingVocoders at 4d0889c, beside which the vocoder is then measured,
# in two fifths of the time: give it more; without it, steps of our vocoder alone are. --smoke runs every part on the
# CPU at a tiny size, to see that the script works; its results go to a temporary folder. PYTHON names the interpreter;
# without it .venv's, else python3.
# Exits with 1 when a part failed. A target that is missed is listed as MISSED, and is no failure.
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

# Shares are seconds of ten minutes without the peer; they add up to this.
SECONDS=0 share_left=$((${peer:+344 +} 600)) summary=()
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
    [[ -z $output ]] || gather_results
}
# skip SHARE NAME REASON: a part that cannot run here hands its share on.
skip() {
    ((share_left -= $1))
    summary+=("not run   $2: $3")
}
# The files that this call has written. A reader never finds half an archive.
gather_results() {
    find "$results" -maxdepth 1 -type f -newer "$started" \( -name '*.json' -o -name '*.png' \) -printf '%f\0' |
        tar --create --file="$output/gpu_results.tar.new" --directory="$results" --null --files-from=- &&
        mv -- "$output/gpu_results.tar.new" "$output/gpu_results.tar"
}

# Options of train commands, a file for each row that `gputrain bench` measures. The commands for trained vocoders and
# voices compute in fp32.
options() { printf '%s\n' "${@:2}" 'use_cuda_graphs: false' >"$scratch/$1.yaml"; }
compiled="use_torch_compile: $([[ $smoke ]] && echo false || echo true)"
options 16_bit 'mixed_precision: true' 'use_torch_compile: false'
options 16_bit_compiled 'mixed_precision: true' "$compiled"
options tf32 'mixed_precision: false' 'use_torch_compile: false'
options tf32_compiled 'mixed_precision: false' "$compiled"
sixteen_bit=(--config "$scratch/16_bit.yaml" --config "$scratch/16_bit_compiled.yaml")
tf32=(--config "$scratch/tf32.yaml" --config "$scratch/tf32_compiled.yaml")

to=(--output-dir "$results") bench=("$python" -m gputrain bench)
if [[ $smoke ]]; then
    check=(--device cpu) small=(--smoke) vocoder=(--smoke) piper=(--smoke --preset high)
    tiny=(--device cpu --preset fast --channels "32,32" --image-size 32 --batch-size 2)
    versus=("${tiny[@]}" --rounds 1) roofline=(--seconds 0.1)
    switches=("${tiny[@]}" --steps 2) pictures=("${tiny[@]}" --steps 2)
    speech=(--device cpu --preset tiny --batch-size 2 --clip-seconds 1 --steps 2)
    sound=(--device cpu --batch-size 1 --crop-mel-frames 16 --upsample-initial-channel 32 --steps 2)
    spoken=(--device cpu --batch-size 1 --preset fast --clip-seconds 1 --steps 2)
else
    check=(--device cuda) small=() vocoder=(--device cuda --rounds $((${peer:+1 +} 1))) roofline=(--seconds 0.5)
    # The preset, the clips and the switches of T1, whose compiled code is there already.
    piper=(--device cuda --preset high --batch-size 64 --seconds 4.7 --rounds 1 --warmup 10 --steps 10
        --sides peer ours-compiled peer-bf16 ours)
    # Both without checkpointing, which is slower: compiling takes most of the time that there is.
    versus=(--device cuda --image-size 1024 512 --batch-size 8 --largest --sides stock ours --rounds 5 --minutes 0.5)
    switches=(--device cuda --image-size 512 --batch-size 8 --steps 5)
    speech=(--device cuda --preset xls-r-300m --batch-size 8 --clip-seconds 8)
    pictures=(--device cuda --image-size 512 --batch-size 8)
    # Ten seconds of sound, as many as `vocode` makes at once, and a sentence of five.
    sound=(--device cuda --batch-size 1 --crop-mel-frames 861)
    spoken=(--device cuda --batch-size 1 --preset high --clip-seconds 5)
fi
part 54 'correctness' "$python" benchmarks/gpu_check.py "${check[@]}" "${to[@]}"
part 34 'correctness of the vocoder' "$python" benchmarks/vocoder_check.py "${check[@]}" "${to[@]}"
part 34 'correctness of the voice' "$python" benchmarks/voice_check.py "${check[@]}" "${to[@]}"
part 46 'T1: a step of the voice' "$python" benchmarks/voice_check.py --targets "${small[@]}" "${to[@]}"
part 50 'V2: flux 1024 px x 16' "$python" benchmarks/vae_targets.py V2 "${small[@]}" "${to[@]}"
part 76 'V3: against diffusers' "$python" benchmarks/vae_vs_diffusers.py "${versus[@]}" "${to[@]}"
part 50 'V1: memory at five sizes' "$python" benchmarks/vae_targets.py V1 "${small[@]}" "${to[@]}"
part 22 'V5: fast 1024 px x 16' "$python" benchmarks/vae_targets.py V5 "${small[@]}" "${to[@]}"
part $((${peer:+344 +} 56)) "O1, O2: a step of the vocoder${peer:+ against SingingVocoders}" \
    "$python" benchmarks/vocoder_vs_openvpi.py ${peer:+--peer "$peer"} "${vocoder[@]}" "${to[@]}"
if "$python" -c 'import importlib.util as u, sys
sys.exit(not (u.find_spec("piper") and u.find_spec("monotonic_alignment_search")))'; then
    part 34 'T: against Piper' "$python" benchmarks/vits_vs_piper.py --no-check "${piper[@]}" "${to[@]}"
else
    skip 34 'T: against Piper' 'piper-tts and monotonic-alignment-search are not both installed'
fi
# Cells in the order of their importance: what the time does not suffice for, `planner_targets.py --minutes 10` measures.
part 36 'P1, P2: the planner' "$python" benchmarks/planner_targets.py "${small[@]}" "${to[@]}"
part 38 'P3: predicted and measured time of a step' "$python" benchmarks/roofline_check.py "${check[@]}" \
    "${roofline[@]}" "${to[@]}"
part 16 'a step of the recogniser' "${bench[@]}" train-asr "${sixteen_bit[@]}" "${speech[@]}" "${to[@]}"
part 12 'inference of the VAE' "${bench[@]}" train-vae --inference "${sixteen_bit[@]}" "${pictures[@]}" "${to[@]}"
part 12 'inference of the vocoder' "${bench[@]}" train-vocoder --inference "${tf32[@]}" "${sound[@]}" "${to[@]}"
part 12 'inference of the voice' "${bench[@]}" train-tts --inference "${tf32[@]}" "${spoken[@]}" "${to[@]}"
part 18 'what each switch gives' "${bench[@]}" train-vae "${switches[@]}" "${to[@]}"

printf '\n== summary, %d s\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
grep -E '^FAILED|MISSED' "$log"
find "$results" -maxdepth 1 -type f -newer "$started" | sort
[[ ${summary[*]} != *FAILED* ]] && ! grep -q '^FAILED' "$log"
