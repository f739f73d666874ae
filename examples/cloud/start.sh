#!/usr/bin/env bash
# From a rented machine with a driver (RunPod, Vast, Lambda; a fresh Ubuntu) to a training that goes on by itself:
#
#     git clone ADDRESS /workspace/gputrain
#     nohup /workspace/gputrain/examples/cloud/start.sh train-vae --data-path data --output-dir outputs/vae &
#
# The same line again, after a stop, a crash or on the next machine with the same volume, goes on from the newest
# checkpoint. It installs what is missing (setup.sh chooses torch's build by the driver) and ends with the training's exit
# code: 0 done, 2 wrong settings or data, 75 stopped and saved. Relative paths start at the volume.
#
# WORKSPACE names the volume, if it is not /workspace: on Lambda it is /lambda/nfs/NAME. Set HF_TOKEN if the start needs a
# model of the Hugging Face Hub that asks for it.
set -euo pipefail

say() { printf 'start: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

case ${1:-} in
    train-*) ;;
    *) fail "usage: $0 train-vae|train-vocoder|train-tts|train-asr OPTIONS" ;;
esac

workspace=${WORKSPACE:-/workspace}
[[ -d $workspace && -w $workspace ]] ||
    fail "$workspace is no folder that can be written to; name the machine's volume: WORKSPACE=/path $0 $1 ..."
workspace=$(cd -- "$workspace" && pwd -P)
checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
# A folder on the disk of the system is lost with the machine, although it may outlive a stop.
[[ $(stat -c %d "$workspace") != "$(stat -c %d /)" ]] ||
    say "$workspace is on the machine's own disk, not on a volume: copy the run away before the machine is given back"

# What can be made again lies on the volume too, so that the next machine need not load or compile it.
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$workspace/cache}
export HF_HOME=${HF_HOME:-$workspace/cache/huggingface}

# Images of Ubuntu have Python without venv, and neither the compiler nor the headers that torch.compile needs.
NEEDED='
import ensurepip, os, sysconfig, venv
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
'
lacks() {
    ! command -v cc >/dev/null || ! "${PYTHON:-python3}" -c "$NEEDED" 2>/dev/null
}
if lacks; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing Python's venv, its headers and a C compiler"
        export DEBIAN_FRONTEND=noninteractive
        if ! { apt-get update -qq && apt-get install -qq -y python3-venv python3-dev gcc libc6-dev >/dev/null; }; then
            say "apt-get failed; going on with what is there"
        fi
    else
        say "Python's venv or headers, or a C compiler, are missing, and only root can install them: going on without"
    fi
fi

command -v nvidia-smi >/dev/null || say "no NVIDIA driver was found: the training will run on the CPU"

# One installation at a time: a second start waits for it, and the run folder then refuses a second training.
exec 9<"$checkout/setup.sh"
if command -v flock >/dev/null; then
    flock 9
fi
"$checkout/setup.sh" </dev/null
exec 9<&-

resumes=""
for word in "$@"; do
    case $word in --resume-from | --resume-from=* | --resume_from | --resume_from=*) resumes=yes ;; esac
done
[[ -n $resumes ]] || set -- "$@" --resume-from auto
cd -- "$workspace"
exec "$checkout/.venv/bin/gputrain" "$@"
