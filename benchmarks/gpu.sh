#!/usr/bin/env bash
# What a GPU is asked within minutes, on a machine that may have nothing but torch.
#
# usage: benchmarks/gpu.sh alive|measure|learn [--output-dir DIR] [--seconds N] [--data FOLDER] [--caches FOLDER]
#                                              [--only PART...] [--skip PART...] [--smoke]
#        benchmarks/gpu.sh prepare FOLDER [--source FOLDER] [--card CARD...] [--few]
#
# For a rented card, such as an H100, of which no minute shall be lost:
#   benchmarks/gpu.sh prepare .gpu_data --card h100   at home, ten minutes of two cores
#   rsync -a --exclude .venv ./ HOST:gputrain/        the checkout, with .gpu_data in it
#   benchmarks/gpu.sh measure --caches gpu_caches     there, in gputrain, with a Python that has torch for CUDA
#   benchmarks/gpu.sh alive --caches gpu_caches
# Then gpu_results is what to bring back, and gpu_caches to keep for the next time on such a card.
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
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
called_from=$PWD
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    alive | measure | learn) module=gpu.$1 ;;
    prepare) module=gpu.data ;;
    -h | --help) usage; exit ;;
    *) usage >&2; exit 2 ;;
esac
shift
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
cd -- "$called_from"
exec "$python" -m "$module" "$@"
