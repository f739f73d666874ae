@echo off
rem Trains an image VAE, or with "vocoder" as the first word a vocoder, with every optimisation for an RTX 5090 switched
rem on. Arguments are passed on and win over the settings here, because the last occurrence of an option counts:
rem   train_rtx5090.bat --data-path DIR --batch-size 8
rem   train_rtx5090.bat vocoder --data-path DIR
setlocal EnableExtensions DisableDelayedExpansion

set "GPUTRAIN=%~dp0.venv\Scripts\gputrain.exe"
if exist "%GPUTRAIN%" goto found
set "GPUTRAIN=gputrain"
where gputrain >nul 2>&1 && goto found
>&2 echo train_rtx5090: gputrain is not installed; run setup_windows.bat first
exit /b 2

:found
set "WORD="
if "%~1"=="vae" set "WORD=vae"
if "%~1"=="vocoder" set "WORD=vocoder"
if "%WORD%"=="vocoder" goto vocoder

set "MODEL=vae"
set "SETTINGS=--mixed-precision --use-bf16 --use-torch-compile --enable-tf32 --channels-last --persistent-workers"
set "SIZES=--data-path ./data/train --output-dir ./outputs/rtx5090_training --profile-name standard"
goto words

:vocoder
set "MODEL=vocoder"
rem The precision is the configuration's.
set "SETTINGS=--use-torch-compile --enable-tf32 --persistent-workers"
set "SIZES=--data-path ./data/vocoder --output-dir ./outputs/rtx5090_vocoder"
set "SIZES=%SIZES% --config base_hifi_rtx5090_optimized.yaml"

rem %* keeps the first word whatever is shifted away, so it is cut off by hand: up to the word, then the word itself.
:words
set "ARGUMENTS=%*"
