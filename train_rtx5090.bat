@echo off
rem Trains an image VAE with every optimisation for an RTX 5090 switched on. Arguments are passed on and win over the
rem settings here, because the last occurrence of an option counts: train_rtx5090.bat --data-path DIR --batch-size 8
setlocal EnableExtensions DisableDelayedExpansion

set "GPUTRAIN=%~dp0.venv\Scripts\gputrain.exe"
if exist "%GPUTRAIN%" goto found
set "GPUTRAIN=gputrain"
where gputrain >nul 2>&1 && goto found
>&2 echo train_rtx5090: gputrain is not installed; run setup_windows.bat first
exit /b 2

:found
set "SETTINGS=--mixed-precision --use-bf16 --use-torch-compile --enable-tf32 --channels-last --persistent-workers"
set "SIZES=--data-path ./data/train --output-dir ./outputs/rtx5090_training --profile-name standard"

rem A flag beats the configuration file, so data and sizes are left to the file where there is one.
:scan
if "%~1"=="" goto run
if "%~1"=="--config" set "SIZES="
shift
goto scan

:run
"%GPUTRAIN%" train-vae %SIZES% %SETTINGS% %*
exit /b %ERRORLEVEL%
