#!/usr/bin/env bash
# What a GPU is asked within minutes, on a machine that may have nothing but torch.
#
# usage: benchmarks/gpu.sh alive|measure|learn [--output-dir DIR] [--seconds N] [--data FOLDER] [--only PART...] [--smoke]
#        benchmarks/gpu.sh prepare FOLDER [--source FOLDER]
#
# alive    whether everything works: the train commands in every mode, numerics, out of memory (at most 150 s)
# measure  seconds a step, peak memory and launches beside their predictions (at most 580 s)
# learn    held-out figures by time, of real trainings (at most 300 s)
# prepare  data to carry to a machine without any, for alive and learn
#
# --only and --skip choose parts by what their names contain. Compiling keeps the processor busy and not the GPU, so that
# `alive --only default compiled` can run beside `alive --skip default compiled`, with another output folder.
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
