#!/usr/bin/env bash
# Trains an image VAE, or the kind of model that the first word names (`vae`, `vocoder`, `tts`), with every optimisation
# for an RTX 5090 on except CUDA graphs, whose gain is not measured yet. Arguments are passed on and win over the settings
# here, because the last occurrence of an option counts:
#   ./train_rtx5090.sh --data-path DIR --batch-size 8
#   ./train_rtx5090.sh vocoder --data-path DIR
#   ./train_rtx5090.sh tts --data-path DIR
#   ./train_rtx5090.sh -c FILE            the folders and sizes of a configuration file instead of those here
# `voice` trains an Uzbek voice with the settings of the profile vits_rtx4090, in its own folders.
set -euo pipefail

gputrain=$(dirname -- "${BASH_SOURCE[0]}")/.venv/bin/gputrain
if [[ ! -x $gputrain ]]; then
    gputrain=$(command -v gputrain) || {
        echo "train_rtx5090: gputrain is not installed; run ./setup.sh first" >&2
        exit 2
    }
fi

model=vae
case ${1:-} in
    vae | vocoder | tts | voice)
        model=$1
        shift
        ;;
esac

case $model in
    vae)
        settings=(--precision bf16 --use-torch-compile --channels-last --persistent-workers)
        data=(--data-path ./data/train)
        sizes=(--output-dir ./outputs/rtx5090_training --config standard)
        ;;
    vocoder)
        settings=(--use-torch-compile --persistent-workers) # The precision is the configuration's.
        data=(--data-path ./data/vocoder)
        sizes=(--output-dir ./outputs/rtx5090_vocoder --config base_hifi_rtx5090_optimized.yaml)
        ;;
    tts)
        settings=(--precision mixed --use-torch-compile --channels-last --persistent-workers)
        data=(--data-path ./data/tts)
        sizes=(--output-dir ./outputs/rtx5090_tts --preset high --batch-size 64)
        ;;
    voice)
        model=tts
        settings=(--precision mixed --use-torch-compile --channels-last --persistent-workers)
        data=(--data-path ./data/voice)
        sizes=(--output-dir ./outputs/rtx5090_voice --config vits_rtx4090)
        ;;
esac
for argument in "$@"; do
    case $argument in
        # A flag beats the configuration file, so with a file, folders and sizes are left to it.
        --config | --config=* | -c*) data=() sizes=() ;;
        # Each `--data-path` or `--data-dir` adds a folder, so the script's own is left out.
        -[-]data[-_]path | -[-]data[-_]path=* | -[-]data[-_]dir | -[-]data[-_]dir=*) data=() ;;
    esac
done

exec "$gputrain" "train-$model" ${data[@]+"${data[@]}"} ${sizes[@]+"${sizes[@]}"} "${settings[@]}" "$@"
