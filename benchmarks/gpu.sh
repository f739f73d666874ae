#!/usr/bin/env bash
# What a GPU is asked within minutes, on a machine that may have nothing but torch.
#
# usage: benchmarks/gpu.sh alive|measure|learn [--output-dir DIR] [--seconds N] [--data FOLDER] [--caches FOLDER]
#                                              [--only PART...] [--skip PART...] [--smoke]
#        benchmarks/gpu.sh prepare FOLDER [--source FOLDER] [--card CARD...]
#
# alive    whether everything works: the train commands in every mode, then numerics, out of memory (at most 120 s)
# measure  seconds a step, memory, launches and idle time beside predictions and peers (at most 400 s); SINGINGVOCODERS
#          names a checkout of openvpi/SingingVocoders; Piper's training code is found on PYTHONPATH
# learn    held-out figures by time, of real trainings (at most 300 s)
# prepare  on any machine: data for alive and learn, and predictions for measure with --card, to be carried to a GPU
#
# --only and --skip choose parts by what their names contain. --caches keeps what is compiled, in files of at most 14 MiB,
# for the next run, on another machine too if its card and versions are the same.
#
# Each prints one table last and writes JSON, a log and tracebacks to --output-dir, by default $OUT or gpu_results, while
# it runs. Parts that find no time or lack a package are listed; one that fails leaves the others be, and the exit code is
# 1. --smoke runs everything at a tiny size on the CPU. PYTHON names the interpreter; default: .venv's, else python3.
set -euo pipefail
called_from=$PWD
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    alive | measure | learn) module=gpu.$1 ;;
    prepare) module=gpu.data ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
shift
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
cd -- "$called_from"
exec "$python" -m "$module" "$@"
