#!/usr/bin/env bash
# Trains an image VAE with every optimisation for an RTX 5090 switched on. Arguments are passed on and win over the
# settings here, because the last occurrence of an option counts: ./train_rtx5090.sh --data-path DIR --batch-size 8
set -euo pipefail

gputrain=$(dirname -- "${BASH_SOURCE[0]}")/.venv/bin/gputrain
if [[ ! -x $gputrain ]]; then
    gputrain=$(command -v gputrain) || {
        echo "train_rtx5090: gputrain is not installed; run ./setup.sh first" >&2
        exit 2
    }
fi

settings=(--mixed-precision --use-bf16 --use-torch-compile --enable-tf32 --channels-last --persistent-workers)
sizes=(--data-path ./data/train --output-dir ./outputs/rtx5090_training --profile-name standard)
for argument in "$@"; do
    # A flag beats the configuration file, so data and sizes are left to the file where there is one.
    case $argument in --config | --config=*) sizes=() ;; esac
done

exec "$gputrain" train-vae ${sizes[@]+"${sizes[@]}"} "${settings[@]}" "$@"
